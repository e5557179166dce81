"""What C++ kernels with contractions leave out where an axis fits in one tile, and whole vectors at its end."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from cpp_run import Prog, compile_programs
from tile_softmax import attention_program
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from plait.compiler import all_levels
from plait.emit.cpp import CppKernel, emit_cpp
from plait.frontend.externs import decompositions
from plait.frontend.fx_import import import_fx
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.options import Options
from plait.plan.device import SPECS
from plait.tile.check import check_program
from plait.tile.program import TileProgram


def attention(rows: int, keys: int) -> str:
    """The source of a softmax between two products, of 201 x 201 points, in tiles of rows x keys."""
    made = attention_program("kernel", (3, 201, 201, 24), DType.f32, None, (rows, keys))
    return emit_cpp([CppKernel("kernel", (made.done(),))])


def test_one_tile_of_keys_carries_nothing() -> None:
    """Accumulators are set, not cleared and added to; no correction of what was added up before is computed."""
    once, swept = attention(32, 0), attention(32, 64)
    assert once.count("plait::exp(") == 1 and swept.count("plait::exp(") == 2
    assert "plait::fill(" not in once and swept.count("plait::fill(") == 3
    assert once.count("plait::dot(false,") == 2 and "plait::dot(true," not in once
    assert swept.count("plait::dot(false,") == 1 and swept.count("plait::dot(true,") == 1
    assert "*=" not in once and "*=" in swept


def test_loops_over_arrays_run_on_to_whole_vectors() -> None:
    """Exponentials of 201 points are 26 vectors; what comes from memory, or goes there, ends where it must."""
    source = attention(32, 0)
    inner = re.search(r"< (\S+); \+\+r0_at\) \{[^}]*plait::exp", source)
    assert inner and inner[1] == "plait::whole_vectors(201)"
    store = re.search(r"< (\S+); \+\+p2_at\) \{[^}]*\] = div", source)
    assert store and store[1] == "24"


def planned(fn: Callable[..., Tensor], *shapes: tuple[int, ...]) -> TileProgram:
    """The program of a function that is one kernel."""
    with FakeTensorMode() as mode:
        args = [mode.from_tensor(torch.empty(s, device="meta").to("cpu")) for s in shapes]
        gm = make_fx(fn, decomposition_table=decompositions())(*args)
    compiled = all_levels(import_fx(gm, args), SPECS["cpu"], Options.make(None, {}))
    (program,) = [part.program for launch in compiled.launches for part in launch.parts]
    return program


def test_tiles_of_an_axis_are_about_as_large() -> None:
    """130 rows, of which 128 would leave two that take as long; 300 keys in three tiles."""
    program = planned(lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, (9, 130, 32), (9, 300, 32), (9, 300, 32))
    tiles = dict(program.schedule.tile)
    assert (tiles["p1"], tiles["r0"]) == (72, 104)


def test_a_product_over_two_axes_is_one_product_of_pieces() -> None:
    """Heads that are merged where they are read: 8 of 32 points are one step."""

    def merged(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(-1, 384) @ w.t() + r

    program = planned(merged, (60, 12, 21, 32), (384, 384), (1260, 384))
    tiles = dict(program.schedule.tile)
    assert (tiles["r0"], tiles["r1"]) == (8, 32)
    source = emit_cpp([CppKernel("kernel", (program,))])
    call = next(line for line in source.split("\n") if "plait::dot(" in line)
    assert "dot(r0_lo > 0, " in call and "plait::fill(" not in source  # the first step sets, the others add
    assert call.endswith(", 60, 192, 32, r0_to, room_float);") and "for (int64_t r0_at" not in source


def weighted(statistic: bool) -> TileProgram:
    """exp(q k' - a statistic) v, the statistic being loaded or a maximum, where a mask in memory and positions allow it."""
    n, d = 96, 32
    p = Prog("kernel", [("p0", n), ("p1", d), ("r0", n), ("r1", d)], vector="p1")
    p.tile = (("p0", 48), ("p1", 0), ("r0", 0), ("r1", 0))
    q, k, v = (p.buf(b, DType.f32, n * d) for b in "qkv")
    seen, row = p.buf("seen", DType.b1, n * n), p.buf("row", DType.f32, n)
    o = p.buf("o", DType.f32, n * d, "out")
    axis, zero = ix.axis, p.const(0.0)
    with p.sweep(2):
        with p.sweep(3):
            s = p.dot(p.load(q, axis(0) * d + axis(3)), p.load(k, axis(2) * d + axis(3)), [3], DType.f32)
        scaled = p.let("mul", s, p.const(0.5))
        known = p.load(seen, axis(0) * n + axis(2))
        late = p.let("holds", result=DType.b1, guard=(axis(0) - axis(2),))
        if statistic:
            top = p.load(row, axis(2))
        else:
            top = p.let("running", p.reduce("max", p.let("where", known, scaled, zero), [2]))
        e = p.let("where", p.let("bit_and", known, late), p.let("exp", p.let("sub", scaled, top)), zero)
        acc = p.dot(e, p.load(v, axis(2) * d + axis(1)), [2], DType.f32)
    p.store(o, axis(0) * d + axis(1), acc)
    check_program(p.done())
    return p.done()


def test_what_rows_and_columns_need_comes_before_the_tile() -> None:
    """A statistic is loaded before the run over the tile, which then keeps nothing but its result."""
    source = emit_cpp([CppKernel("kernel", (weighted(True),))])
    assert sorted(set(re.findall(r" (\w+?)_\d+_t\[[^\n]*\] =", source))) == ["row", "where"]


def test_masks_are_kept_as_wide_as_numbers() -> None:
    source = emit_cpp([CppKernel("kernel", (weighted(False),))])
    assert re.search(r"int32_t\* const __restrict bit_and_\d+_t = ", source)


def test_values_under_a_mask_in_memory(tmp_path: Path) -> None:
    programs = [replace(weighted(True), name="loaded"), replace(weighted(False), name="found")]
    library = compile_programs(programs, tmp_path)
    draw = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(96, 32, generator=draw) / 4 for _ in range(3))
    seen, row = torch.rand(96, 96, generator=draw) > 0.3, torch.randn(96, generator=draw)
    s = (q.double() @ k.double().t()) * 0.5
    allowed = seen & torch.ones(96, 96, dtype=torch.bool).tril()
    top = torch.where(seen, s, 0.0).amax(-1, keepdim=True)
    for name, statistic in (("loaded", row.double()), ("found", top)):
        want = torch.where(allowed, (s - statistic).exp(), 0.0) @ v.double()
        got = torch.empty(96, 32)
        assert library.run(name, [q, k, v, seen, row, got], (), 2) == 0
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
