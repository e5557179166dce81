"""What a user says about fusion, on a card: regions, forbid and force, pins, edited stages, profiler ranges."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import plait
from plait.oracle.compare import check
from plait.report.report import Report
from plait.runtime import report as reports

pytestmark = pytest.mark.gpu


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def step(
    fn: Callable[..., torch.Tensor], args: tuple[torch.Tensor, ...], dtype: torch.dtype | None
) -> list[torch.Tensor]:
    """The result and the gradients, of the arguments in a type."""
    given = [a.detach().to(dtype or a.dtype).requires_grad_() for a in args]
    out = fn(*given)
    out.square().mean().backward()
    return [out.detach(), *[a.grad for a in given if a.grad is not None]]


def agrees(fn: Callable[..., torch.Tensor], *args: torch.Tensor, **options: Any) -> None:
    """Compiled whole, results and gradients keep to the verdict rule."""
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="plait", fullgraph=True, options={"strict": True, **options})
    check(step(compiled, args, None), step(fn, args, None), step(fn, args, torch.float64))


def members(r: Report) -> list[tuple[str, ...]]:
    """Operators of every step."""
    return [tuple(m.name for m in k.members) for g in r.graphs for k in g.kernels]


def explained(fn: Any, *args: Any, **settings: Any) -> Report:
    torch._dynamo.reset()
    return plait.explain(fn, *args, **settings)


def test_a_region_is_kept_apart_forward_and_backward() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        a = x * 2
        with plait.no_fuse("norm"):
            b = torch.softmax(a, -1)
            c = b * torch.sigmoid(b)
        return c.cos()

    x = random(512, 768)
    assert members(explained(fn, x)) == [("mul",), ("softmax", "sigmoid", "mul"), ("cos",)]
    agrees(fn, x)


def test_regions_are_one_kernel() -> None:
    def sums(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with plait.fuse("sums"):
            return x.sum(0), x.sum(1)

    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with plait.fuse("mlp", backward=False):
            return torch.nn.functional.gelu(x @ w, approximate="tanh")

    assert len(members(explained(sums, random(512, 512)))) == 1
    assert members(explained(layer, random(512, 256), random(256, 384))) == [("matmul", "gelu")]
    agrees(lambda x: sum(sums(x)), random(512, 512))
    for dtype in (torch.float32, torch.bfloat16):
        agrees(layer, random(512, 256, dtype=dtype), random(256, 384, dtype=dtype))


def test_names_from_outside() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.softmax(x.exp(), -1) @ w)

    args = random(256, 512), random(512, 128)
    free = members(explained(fn, *args))
    apart = members(explained(fn, *args, options={"forbid": [("exp", "softmax")]}))
    assert ("exp", "softmax") in {m[:2] for m in free} and ("exp",) in apart
    together = members(explained(fn, *args, options={"force": [("matmul", "relu")]}))
    assert ("matmul", "relu") in {m[-2:] for m in together}
    agrees(fn, *args, forbid=[("exp", "softmax")], force=[("forward/matmul", "forward/relu")])


def test_a_pinned_schedule_is_the_one_that_runs() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1)

    x = random(4096, 2048)
    (kernel,) = explained(fn, x).graphs[0].kernels
    for mine in (
        "form=flat tile=p0:2,r0:all warps=8 stages=1 vector=r0",
        "form=swept tile=p0:1,r0:512 warps=4 stages=2 vector=r0",
    ):
        (pinned,) = explained(fn, x, options={"pin": {kernel.name: mine}}).graphs[0].kernels
        assert pinned.schedule == (mine,) and len(pinned.variants) <= 1
        agrees(fn, x, pin={kernel.name: mine})


def test_edited_source_runs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "_numbers", iter([0] * 1000))
    os.chmod(tmp_path, 0o700)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * 5

    x = random(1000)
    for stage in ("graph", "plan", "tile", "source"):
        folder = tmp_path / stage
        folder.mkdir(mode=0o700)
        torch._dynamo.reset()
        torch.compile(fn, backend="plait", options={"dump": f"{stage}@{folder}"})(x)
        (path,) = folder.iterdir()
        if stage == "source":
            text = path.read_text()
            path.write_text(re.sub(r"\b5\.0\b", "7.0", text))
            assert path.read_text() != text and "# kernel " in text
        torch._dynamo.reset()
        with pytest.warns(UserWarning, match="source of k0_mul") if stage == "source" else nullcontext():
            got = torch.compile(fn, backend="plait", options={"override": str(folder), "strict": True})(x)
        torch.testing.assert_close(got, x * (7 if stage == "source" else 5))


def test_profilers_see_ranges_and_readable_kernels() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(torch.softmax(x, -1) + torch.eye(64, device="cuda"))

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="plait", fullgraph=True)
    x = random(64, 64)
    compiled(x)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        compiled(x)
        torch.cuda.synchronize()
    names = [e.name for e in seen.events()]
    line = fn.__code__.co_firstlineno + 1
    (launch,) = {n for n in names if n.startswith("plait::k0_")}
    assert launch.endswith(f" test_control.py:{line}")
    assert f"plait::aten.linalg_inv_ex test_control.py:{line}" in names
    assert launch.split(" ")[0].removeprefix("plait::") in names  # the kernel on the card has the name of its range


def test_what_is_timed_is_reported() -> None:
    """A kernel that was tried in several schedules lists them with their times; one is chosen."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (8192,))

    (kernel,) = explained(fn, random(8192, 8192, dtype=torch.bfloat16)).graphs[0].kernels
    assert len(kernel.variants) > 1 and sum(v.chosen for v in kernel.variants) == 1
    assert kernel.measured_us is not None and kernel.resources is not None
