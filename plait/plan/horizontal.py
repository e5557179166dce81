"""Horizontal fusion: independent kernels that follow each other become parts of one launch (ragged: sizes may differ)."""

from __future__ import annotations

from collections.abc import Iterator

from plait.ir.fuel import take_at
from plait.plan.plan import Group, Plan
from plait.plan.regions import why_apart

_MAX_PARTS = 64
_MAX_ARGUMENTS = 250


def launches(plan: Plan, *, fuse: bool) -> Iterator[tuple[Group, ...]]:
    """Groups in execution order, independent neighbouring kernels together when `fuse`."""
    batch: list[Group] = []
    inside: set[int] = set()
    for g in plan.groups:
        joins = fuse and g.kind == "kernel" and len(batch) < _MAX_PARTS and batch and batch[0].kind == "kernel"
        arguments = sum(_arguments(plan, b) for b in batch) + _arguments(plan, g)
        joins = joins and arguments <= _MAX_ARGUMENTS and not (_sources(plan, g) & inside)
        if joins and _may(plan, [*batch, g]) and _granted(plan, batch[0], g):
            batch.append(g)
            inside.add(g.number)
            continue
        if batch:
            yield tuple(batch)
        batch, inside = [g], {g.number}
    if batch:
        yield tuple(batch)


def _granted(plan: Plan, first: Group, g: Group) -> bool:
    nodes = (*first.stored, *g.stored)
    return take_at("launch", "horizontal", plan.graph, nodes)


def _may(plan: Plan, groups: list[Group]) -> bool:
    """Whether no edge of a region that the user keeps apart lies between these groups."""
    return not plan.reading.walled or why_apart(plan.graph, (n for g in groups for n in g.nodes)) is None


def _arguments(plan: Plan, g: Group) -> int:
    members = set(g.nodes)
    return len(g.stored) + len({r.source for n in g.nodes for r in plan.reading.reads(n) if r.source not in members})


def _sources(plan: Plan, g: Group) -> set[int]:
    """Numbers of the groups that this one reads from."""
    out: set[int] = set()
    for n in g.nodes:
        stack = [r.source for r in plan.reading.reads(n)]
        while stack:
            s = stack.pop()
            if s.kind == "project":
                stack.extend(r.source for r in s.reads)
            elif s in plan.group_of:
                out.add(plan.group_of[s].number)
    return out
