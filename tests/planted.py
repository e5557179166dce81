"""Deliberate faults of the compiler, each of one kind, for the tools that must find them: planted at the seam that the product's
own self-test uses (plait/ir/fault.py), on every thread."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import pytest
import torch

from plait.diagnose.faults.graphs import nodes
from plait.diagnose.faults.tiles import in_code, in_tiles
from plait.ir import fault
from plait.ir.graph import Builder, Graph, Node, Read
from plait.tile import choose
from plait.tile.flat import Flat
from plait.tile.program import Let, Reduce, Stmt, Sweep, TileProgram
from plait.tile.schedule import Schedule


def plant(patch: pytest.MonkeyPatch, site: str, change: Any) -> fault.Planted:
    """Plant a fault until the patch is undone."""
    made = fault.Planted(site, change)
    patch.setattr(fault, "_planted", ContextVar("planted", default=made))
    return made


def scored(x: torch.Tensor) -> torch.Tensor:
    """A program that the faults in exp and tanh make wrong, by the merge that brings both together."""
    y = torch.relu(x).sum(0)
    scores = torch.exp(x)
    total = scores.sum(-1, keepdim=True)
    z = torch.tanh(scores / total)
    return torch.sort(z, -1).values * y.mean()


def sin_for_tanh(program: TileProgram) -> TileProgram | None:
    """sin in tanh's place."""
    if all(not isinstance(s, Let) or s.op != "tanh" for s in program.walk()):
        return None

    def body(stmts: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        return tuple(
            replace(s, body=body(s.body))
            if isinstance(s, Sweep)
            else replace(s, op="sin")
            if isinstance(s, Let) and s.op == "tanh"
            else s
            for s in stmts
        )

    return replace(program, body=body(program.body))


def _beside_exp(program: TileProgram) -> TileProgram | None:
    return sin_for_tanh(program) if any(isinstance(s, Let) and s.op == "exp" for s in program.walk()) else None


def wrong_code(patch: pytest.MonkeyPatch) -> None:
    """The code of a kernel that holds both exp and tanh has sin in tanh's place."""
    plant(patch, "code", in_code(_beside_exp))


def wrong_tiles(patch: pytest.MonkeyPatch) -> None:
    """Lowering a kernel that holds both exp and tanh makes sin of tanh."""
    plant(patch, "tile", in_tiles(_beside_exp))


def wrong_tanh(patch: pytest.MonkeyPatch) -> None:
    """The code of every kernel has sin in tanh's place."""
    plant(patch, "code", in_code(sin_for_tanh))


def wrong_rule(patch: pytest.MonkeyPatch) -> None:
    """A sum that is split adds up its parts by their maximum."""

    def visit(builder: Builder, graph: Graph, n: Node, reads: Any) -> Node | None:
        split: list[Read] = [r for r in n.reads if r.source in graph.partials]
        return builder.node("max", n.axes, reads, reduce=n.reduce) if n.op == "sum" and split else None

    plant(patch, "rewrite", nodes(visit, after="split_reductions"))


def slow_schedule(patch: pytest.MonkeyPatch) -> None:
    """On a CPU a kernel that sums is walked point by point along the axis that memory jumps over."""
    chosen = choose._choose_cpu

    def slow(flat: Flat, hint: Any) -> Schedule:
        if any(isinstance(s, Reduce) for s in flat.stmts):
            grid = [d.name for d in flat.dims if d.role == "grid"]
            return Schedule(form="swept", tile=((grid[0], 16),), vector=grid[0])
        return chosen(flat, hint)

    patch.setattr(choose, "_choose_cpu", slow)
