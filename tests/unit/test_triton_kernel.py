"""Triton kernels through build and launch: in Triton's interpreter here, compiled where there is a device."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from plait.emit.triton import emit_triton
from plait.errors import BuildFailed
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.runtime.build import build_triton
from plait.runtime.triton_kernel import TritonKernel
from plait.tile.program import Buffer, Check, Dim, Let, Load, Store, TileProgram
from plait.tile.schedule import Schedule

N = ix.sym("n")


def scale(name: str, op: str, symbol: str = "n") -> TileProgram:
    """out[i] = op(x[i], y[0]), for as many points as the symbol says."""
    extent = ix.sym(symbol)
    buffers = (
        Buffer("x", DType.f32, "in", extent),
        Buffer("y", DType.f32, "in", ix.ONE),
        Buffer("out", DType.f32, "out", extent),
    )
    body = (
        Load(0, 0, ix.axis(0), DType.f32, (0,)),
        Load(1, 1, ix.ZERO, DType.f32, ()),
        Let(2, op, (0, 1), DType.f32, (0,)),
        Store(2, ix.axis(0), 2, (0,)),
    )
    schedule = Schedule(tile=(("p0", 64),), vector="p0", warps=1)
    return TileProgram(name, (Dim("p0", extent, "grid"),), buffers, (symbol,), body, schedule)


def rows() -> TileProgram:
    """out[i] = x[i] where i < 100 is checked."""
    buffers = (Buffer("x", DType.i64, "in", N), Buffer("out", DType.i64, "out", N))
    body = (
        Load(0, 0, ix.axis(0), DType.i64, (0,)),
        Check(ix.value(0), ix.const(100), 1, (0,)),
        Store(1, ix.axis(0), 0, (0,)),
    )
    schedule = Schedule(tile=(("p0", 64),), vector="p0", warps=1)
    return TileProgram("rows", (Dim("p0", N, "grid"),), buffers, ("n",), body, schedule, ("row out of range",))


def exercise(device: str) -> None:
    parts = (scale("a", "mul"), scale("b", "add", "m"))
    sources = [emit_triton(parts, "two_parts"), emit_triton(rows(), "rows"), emit_triton((scale("c", "mul"),), "alone")]
    sources.append(emit_triton((scale("c", "mul"),), "alone_again"))
    built = build_triton(sources, device, lambda e: 1000)
    assert not [b for b in built if isinstance(b, BuildFailed)], built
    assert built[2] is built[3], "equal kernels are built once"
    x, out, z = (torch.randn(1001, device=device) for _ in range(3))
    y = torch.full((1,), 3.0, device=device)
    for n, m in ((1000, 16), (1, 0), (0, 0), (1000, 16), (0, 33)):
        launch = built[0].bind((0, 1, 2, 0, 1, 3), (n, m), ())
        for at in (0, 0, 1):  # aligned, then not
            out.zero_()
            z.zero_()
            launch([x[at:], y, out[at:], z[at:]])
            torch.testing.assert_close(out[at : at + n], (x * 3)[at : at + n][: len(out) - at])
            torch.testing.assert_close(z[at : at + m], (x + 3)[at : at + m])
            assert not out[at + n :].any()
            assert not z[at + m :].any()
    if device == "cuda":
        # a scalar that lives on the host is moved for the launch
        built[2].bind((0, 1, 2), (1000,), ())([x, torch.full((1,), 5.0), out])
        torch.testing.assert_close(out[:1000], (x * 5)[:1000])
    places, found = torch.arange(90, device=device), torch.zeros(90, dtype=torch.int64, device=device)
    launch = built[1].bind((0, 1), (90,), (("row out of range",),))
    launch([places, found])
    assert torch.equal(found, places)
    places[5] = 100
    with pytest.raises(IndexError, match="row out of range"):
        launch([places, found])
        if device == "cuda":
            torch.cuda.synchronize()  # a device tells of it at the next launch, if not at this one
        launch([places, found])
    places[5] = 5
    launch([places, found])


def test_kernels_run_in_the_interpreter() -> None:
    code = "from test_triton_kernel import exercise; exercise('cpu')"
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_kernels_run_on_the_device() -> None:
    exercise("cuda")


@pytest.mark.gpu
def test_profilers_see_launches() -> None:
    import triton

    kernel = build_triton([emit_triton(scale("a", "mul"), "watched")], "cuda", lambda e: 64)[0]
    x, y, out = torch.randn(64, device="cuda"), torch.ones(1, device="cuda"), torch.empty(64, device="cuda")
    launch = kernel.bind((0, 1, 2), (64,), ())
    seen: list[str] = []
    launch([x, y, out])
    triton.knobs.runtime.launch_enter_hook.add(lambda metadata: seen.append(metadata.get()["name"]))
    launch([x, y, out])
    assert seen == ["watched"]


def test_failed_checks_are_reported_into_real_memory() -> None:
    """Compiling may happen under a fake mode, and under a default device of the user's."""
    with FakeTensorMode(), torch.device("meta"):
        kernel = TritonKernel(emit_triton(rows(), "rows"), None, "cpu", lambda: False, lambda provided: provided())
    assert kernel.told is not None
    place, said = kernel.told
    assert place.device.type == "cpu" and place.data_ptr() and place.tolist() == [0]
    assert said == ("row out of range",)
