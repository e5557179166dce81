"""What C++ kernels with contractions leave out where an axis fits in one tile, and whole vectors at its end."""

from __future__ import annotations

import re

from tile_softmax import attention_program

from plait.emit.cpp import CppKernel, emit_cpp
from plait.ir.dtype import DType


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
