"""Deliberate faults of the compiler, each of one kind, for the tools that must find them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from plait.emit import cpp
from plait.ir.graph import Builder, Node
from plait.rewrite.passes import split_reductions
from plait.tile import choose, lower
from plait.tile.flat import Flat
from plait.tile.program import Let, Reduce
from plait.tile.schedule import Schedule


def scored(x: torch.Tensor) -> torch.Tensor:
    """A program that the faults in exp and tanh make wrong, by the merge that brings both together."""
    y = torch.relu(x).sum(0)
    scores = torch.exp(x)
    total = scores.sum(-1, keepdim=True)
    z = torch.tanh(scores / total)
    return torch.sort(z, -1).values * y.mean()


def wrong_code(patch: pytest.MonkeyPatch) -> None:
    """The C++ of a kernel that holds both exp and tanh has sin in tanh's place."""
    emit = cpp.emit_cpp

    def wrong(*args: Any, **named: Any) -> str:
        text = emit(*args, **named)
        both = "plait::exp(" in text and "plait::tanh(" in text
        return text.replace("plait::tanh(", "plait::sin(") if both else text

    patch.setattr(cpp, "emit_cpp", wrong)


def wrong_tiles(patch: pytest.MonkeyPatch) -> None:
    """Lowering a kernel that holds both exp and tanh makes sin of tanh."""
    coalesce = lower.coalesce

    def wrong(flat: Flat) -> Flat:
        flat = coalesce(flat)
        ops = {s.op for s in flat.stmts if isinstance(s, Let)}
        if not {"exp", "tanh"} <= ops:
            return flat
        stmts = (replace(s, op="sin") if isinstance(s, Let) and s.op == "tanh" else s for s in flat.stmts)
        return replace(flat, stmts=tuple(stmts))

    patch.setattr(lower, "coalesce", wrong)


def wrong_rule(patch: pytest.MonkeyPatch) -> None:
    """A sum that is split adds up its parts by their maximum."""
    split = split_reductions._split

    def wrong(builder: Builder, n: Node, *rest: Any) -> Node:
        made = split(builder, n, *rest)
        return builder.node("max", made.axes, made.reads, reduce=made.reduce)

    patch.setattr(split_reductions, "_split", wrong)


def slow_schedule(patch: pytest.MonkeyPatch) -> None:
    """On a CPU a kernel that sums is walked point by point along the axis that memory jumps over."""
    chosen = choose._choose_cpu

    def slow(flat: Flat, hint: Any) -> Schedule:
        if any(isinstance(s, Reduce) for s in flat.stmts):
            grid = [d.name for d in flat.dims if d.role == "grid"]
            return Schedule(form="swept", tile=((grid[0], 16),), vector=grid[0])
        return chosen(flat, hint)

    patch.setattr(choose, "_choose_cpu", slow)
