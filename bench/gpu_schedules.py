"""Time schedules of the memory-bound workloads on a GPU, each checked against torch first.

    python3 bench/gpu_schedules.py [workload …]        all candidates of SCHEDULES
    python3 bench/gpu_schedules.py rmsnorm "form=flat tile=r0:all warps=2 vector=r0"

A line a candidate: median time, bytes a second, share of the copy ceiling measured in the same run, registers, spills, error.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "tests")]

from gpu_programs import PROGRAMS  # noqa: E402
from tile_make import Make  # noqa: E402
from triton_module import load_module  # noqa: E402

from plait.emit.triton import TritonSource, emit_triton  # noqa: E402

Tensors = Sequence[torch.Tensor]


def _rows(warps: Sequence[int], more: Sequence[str] = ()) -> list[str]:
    return [f"form=flat tile=p0:1,r0:all warps={w} vector=r0" for w in warps] + list(more)


def _swept(*shapes: tuple[int, int, int]) -> list[str]:
    return [f"form=swept tile=p0:1,r0:{t} warps={w} stages={s} vector=r0" for t, w, s in shapes]


SCHEDULES: dict[str, list[str]] = {
    "l2norm": _rows((4, 8, 16)),
    "rmsnorm": _rows((2, 4, 8), ["form=flat tile=p0:2,r0:all warps=8 vector=r0"]),
    "add_layernorm_dropout": _rows((8, 16)),
    "swiglu_act": [
        f"form=flat tile=p0:{t} warps={w} vector=p0" for t, w in ((1024, 4), (2048, 4), (4096, 8), (2048, 8))
    ],
    "rmsnorm_fp8_quant": _rows((2, 4, 8)),
    "rmsnorm_block_quant": [f"form=flat tile=p0:1,j0:all,j1:all warps={w} vector=j1" for w in (2, 4, 8)],
    "qk_norm_rope": [f"form=flat tile=p0:1,p1:{t},r0:all warps={w} vector=r0" for t, w in ((32, 4), (32, 8), (8, 2))],
    "multi_reduce": _rows((2, 4, 8, 16)),
    "groupnorm_silu": _swept((4096, 8, 1), (8192, 16, 1), (8192, 8, 1), (4096, 8, 3)),
    "softmax_wide": _swept((4096, 8, 1), (8192, 16, 1), (16384, 32, 1), (8192, 16, 3), (4096, 8, 4)),
    "cross_entropy": _swept((4096, 8, 1), (8192, 16, 1), (4096, 8, 3), (8192, 16, 3)),
    "horizontal_small": ["form=flat tile=p0:1024 warps=4 vector=p0"],
}


def _rms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


def _fp8(x: torch.Tensor, w: torch.Tensor) -> Tensors:
    y = _rms(x, w).float()
    s = y.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 448.0
    return (y / s).to(torch.float8_e4m3fn), s[:, 0]


def _block_fp8(x: torch.Tensor, w: torch.Tensor) -> Tensors:
    y = _rms(x, w).float().unflatten(-1, (-1, 32))
    s = torch.exp2(torch.ceil(torch.log2(y.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 448.0)))
    return (y / s).flatten(-2).to(torch.float8_e4m3fn), s.squeeze(-1)


def _rope(q: torch.Tensor, w: torch.Tensor, *rest: torch.Tensor) -> Tensors:
    y, (cos, sin) = _rms(q, w), rest[-2:]
    a, b = y.chunk(2, -1)
    return (y.float() * cos[:, None] + torch.cat((-b, a), -1).float() * sin[:, None],)


def _reductions(x: torch.Tensor) -> Tensors:
    y = x.float()
    return y.mean(-1), y.var(-1), y.amax(-1), y.abs().sum(-1), (y**2).sum(-1), y.amin(-1)


def _groupnorm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Tensors:
    y = torch.nn.functional.group_norm(x.view(32, 320, 64, 64).float(), 32, w.float(), b.float())
    return (torch.nn.functional.silu(y).view(1024, -1),)


def _loss(x: torch.Tensor, t: torch.Tensor) -> Tensors:
    lse = torch.cat([c.float().logsumexp(-1) for c in x.split(1024)])
    return lse, lse - x.gather(1, t[:, None])[:, 0].float()


REFERENCES: dict[str, Callable[..., Tensors]] = {
    "l2norm": lambda x: (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-12),),
    "rmsnorm": lambda x, w: (_rms(x, w),),
    "swiglu_act": lambda a, b: (torch.nn.functional.silu(a.float()) * b.float(),),
    "rmsnorm_fp8_quant": _fp8,
    "rmsnorm_block_quant": _block_fp8,
    "qk_norm_rope": _rope,
    "multi_reduce": _reductions,
    "groupnorm_silu": _groupnorm,
    "softmax_wide": lambda x: (torch.softmax(x.float(), -1),),
    "cross_entropy": lambda x, t, *_: _loss(x, t),
    "horizontal_small": lambda x, y: (torch.tanh(x.float()) * y + x,),
}


def error(name: str, m: Make) -> float:
    """The largest ||out - reference|| / ||reference|| over the outputs of one part (-1: no reference)."""
    if name not in REFERENCES:
        return -1.0
    ins = list({id(t): t for t, b in zip(m.tensors, m.buffers) if b.role == "in"}.values())
    outs = [t for t, b in zip(m.tensors, m.buffers) if b.role == "out"]
    worst = 0.0
    for got, want in zip(outs, REFERENCES[name](*ins)):
        g, w = got.float(), want.float()
        worst = max(worst, float((g - w).norm() / w.norm()))
    return worst


def bytes_moved(makes: Sequence[Make]) -> int:
    """Each tensor once (tensors read in several places count once)."""
    return sum(t.numel() * t.element_size() for t in {id(t): t for m in makes for t in m.tensors}.values())


def runner(source: TritonSource, makes: Sequence[Make]) -> tuple[Callable[[], Any], Any]:
    """(a launch, the compiled kernel)."""
    function = getattr(load_module(source), source.name)
    args: list[Any] = []
    for a in source.args:
        args.append(
            makes[a.part].tensors[a.index] if a.kind == "buffer" else torch.zeros(1, dtype=torch.int32, device="cuda")
        )
    options = {"num_warps": source.num_warps, "num_stages": source.num_stages, **dict(source.options)}
    n = source.programs.const
    compiled = function[(n,)](*args, **options)
    return lambda: function[(n,)](*args, **options), compiled


def time_ms(go: Callable[[], Any]) -> float:
    """Median time of a launch; the cache is flushed before each."""
    return float(triton.testing.do_bench(go, warmup=20, rep=80, return_mode="median"))


def copy_rate() -> float:
    """TB/s, read and written, of a device-to-device copy."""
    a, b = (torch.randn(1 << 28, device="cuda").to(torch.bfloat16) for _ in range(2))
    return 2 * a.numel() * 2 / time_ms(lambda: b.copy_(a)) / 1e9


def main(names: Sequence[str], schedules: Sequence[str]) -> None:
    ceiling = copy_rate()
    print(f"copy {ceiling:.2f} TB/s", torch.cuda.get_device_name(), torch.__version__, triton.__version__, flush=True)
    for name in names or SCHEDULES:
        for schedule in schedules or SCHEDULES[name]:
            try:
                makes = PROGRAMS[name]("cuda", schedule)
                for m in makes:
                    for t, buffer in zip(m.tensors, m.buffers):
                        if buffer.role == "out":
                            t.view(torch.uint8).fill_(0x7F)  # poison: what is not written shows
                go, compiled = runner(emit_triton([m.program(name) for m in makes], name, f8_saturates=False), makes)
                torch.cuda.synchronize()
                wrong = max(error(name, m) for m in makes)
                ms = time_ms(go)
                rate = bytes_moved(makes) / ms / 1e9
                print(
                    f"{name:22s} {schedule:56s} {ms:.4f} ms {rate:.2f} TB/s {100 * rate / ceiling:5.1f} % "
                    f"reg {compiled.n_regs} spill {compiled.n_spills} err {wrong:.1e}",
                    flush=True,
                )
            except Exception as e:
                print(name, schedule, "FAILED", repr(e)[:300], flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main([x for x in sys.argv[1:] if "=" not in x], [x for x in sys.argv[1:] if "=" in x])
