"""The C++ emitter on hand-built programs, compiled into one shared object and compared with torch in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cpp_run import Library, Prog, compile_programs

from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.tile.program import TileProgram

A = ix.axis
ROWS, COLS = 37, 301


def rmsnorm(name: str, dtype: DType) -> TileProgram:
    p = Prog(name, [("p0", ROWS), ("r0", COLS)], vector="r0")
    x, w = p.buf("x", dtype, ROWS * COLS), p.buf("w", dtype, COLS)
    o = p.buf("o", dtype, ROWS * COLS, "out")
    at = A(0) * COLS + A(1)
    with p.sweep(1):
        v = p.load(x, at)
        total = p.reduce("sum", p.let("mul", v, v), [1])
    scale = p.let("rsqrt", p.let("add", p.let("mul", total, p.const(1 / COLS)), p.const(1e-6)))
    with p.sweep(1):
        p.store(o, at, p.let("mul", p.let("mul", p.load(x, at), scale), p.load(w, A(1))))
    return p.done()


def softmax() -> TileProgram:
    p = Prog("softmax", [("p0", ROWS), ("r0", COLS)], vector="r0")
    x, o = p.buf("x", DType.f32, ROWS * COLS), p.buf("o", DType.f32, ROWS * COLS, "out")
    at = A(0) * COLS + A(1)
    with p.sweep(1):
        top = p.reduce("max", p.load(x, at), [1])
    with p.sweep(1):
        total = p.reduce("sum", p.let("exp", p.let("sub", p.load(x, at), top)), [1])
    with p.sweep(1):
        p.store(o, at, p.let("div", p.let("exp", p.let("sub", p.load(x, at), top)), total))
    return p.done()


def column_sum() -> TileProgram:
    p = Prog("column_sum", [("p0", COLS), ("r0", ROWS)], vector="p0")
    p.tile = (("p0", 64),)
    x, o = p.buf("x", DType.f32, ROWS * COLS), p.buf("o", DType.f32, COLS, "out")
    with p.sweep(1):
        total = p.reduce("sum", p.load(x, A(1) * COLS + A(0)), [1])
    p.store(o, A(0), total)
    return p.done()


PROGRAMS: list[Callable[[], TileProgram]] = [
    lambda: rmsnorm("rmsnorm_f32", DType.f32),
    lambda: rmsnorm("rmsnorm_bf16", DType.bf16),
    softmax,
    column_sum,
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    folder: Path = tmp_path_factory.mktemp("cpp")
    return compile_programs([make() for make in PROGRAMS], folder)


def ulps(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest error in units of the last place of the result's type, `want` in float64."""
    unit = torch.finfo(got.dtype).eps * want.abs().clamp_min(torch.finfo(got.dtype).tiny)
    return float(((got.double() - want).abs() / unit).max())


def test_rmsnorm(library: Library) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, w = torch.randn(ROWS, COLS).to(dtype), torch.randn(COLS).to(dtype)
        o = torch.empty_like(x)
        assert library.run(f"rmsnorm_{'f32' if dtype is torch.float32 else 'bf16'}", [x, w, o]) == 0
        xd = x.double()
        assert ulps(o, xd * torch.rsqrt((xd * xd).mean(1, keepdim=True) + 1e-6) * w.double()) < 4


def test_softmax(library: Library) -> None:
    x = torch.randn(ROWS, COLS)
    o = torch.empty_like(x)
    assert library.run("softmax", [x, o]) == 0
    assert ulps(o, x.double().softmax(1)) < 6
    x[3, 5] = float("nan")
    assert library.run("softmax", [x, o]) == 0
    assert o[3].isnan().all() and not o[4].isnan().any()


def test_column_sum(library: Library) -> None:
    x = torch.rand(ROWS, COLS)
    o = torch.empty(COLS)
    assert library.run("column_sum", [x, o]) == 0
    assert ulps(o, x.double().sum(0)) < 2
