"""What C++ kernels with contractions leave out where an axis fits in one tile, and whole vectors at its end."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from tile_softmax import attention_program
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from plait.compiler import all_levels
from plait.emit.cpp import CppKernel, emit_cpp
from plait.frontend.externs import decompositions
from plait.frontend.fx_import import import_fx
from plait.ir.dtype import DType
from plait.options import Options
from plait.plan.device import SPECS
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
    assert call.endswith(", 60, 192, 32, r0_to, room_float);") and "for (int64_t r0_at" not in source
