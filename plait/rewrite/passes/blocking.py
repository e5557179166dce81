"""Which values can be there one block at a time: laws of blocks along an axis, by what each reader does with it.

From a product (the seed) and an axis of its result, follow the values that depend on it. Each reader either keeps the axis (a
block of its result is made of a block of what it reads) or sums it (its result is the sum of what the blocks give). Members
are the values on the way from the seed to others as large; results are what leaves them: kept ones lie block by block in a
larger value, summed ones are added up. A value that sums the axis and is needed by a member forbids it: no block could be
finished before all are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from plait.ir import index as ix
from plait.ir.graph import Graph, Node, Read
from plait.rewrite.passes.open_contractions import FORMS, can_open


class CannotBlock(Exception):
    """Why an axis has no blocks, in words."""


@dataclass(frozen=True)
class Blocking:
    """`axes`: of every member and result, which of its own axes is the blocked one (for a call: of its result), None where the
    axis is summed. `extent`: points of it."""

    seed: Node
    extent: int
    axes: Mapping[Node, int | None] = field(default_factory=dict)
    members: frozenset[Node] = frozenset()
    results: tuple[Node, ...] = ()
    dependents: frozenset[Node] = frozenset()

    @property
    def summed(self) -> tuple[Node, ...]:
        """Results that are added up."""
        return tuple(n for n in self.results if self.axes[n] is None)


def numel(n: Node) -> int:
    """Elements of a value of known size."""
    return math.prod(e.const or 0 for e in n.shape)


def blocking(graph: Graph, seed: Node, axis: int) -> Blocking:
    """The blocks of a product along an axis of its result. Raises CannotBlock."""
    users, size = graph.users(), numel(seed)
    dependents = _after(seed, users)
    outputs = {o.read.source for o in graph.outputs}
    members: set[Node] = set()
    for n in sorted(dependents, key=lambda n: -n.serial):
        if n is seed or numel(n) >= size or any(u in members for u in users[n]):
            members.add(n)
    results = [
        n
        for n in sorted(dependents, key=lambda n: n.serial)
        if (n in outputs if n in members else any(r.source in members for r in n.reads))
    ]
    extent = seed.shape[axis].const
    assert extent is not None
    axes: dict[Node, int | None] = {seed: axis}
    for n in sorted({*members, *results} - {seed}, key=lambda n: n.serial):
        if n in members and n in outputs and numel(n) >= size:
            raise CannotBlock(f"{_named(graph, n)} is returned whole")
        late = [r.source for r in n.reads if r.source in dependents and r.source not in members]
        if late:
            raise CannotBlock(f"{_named(graph, n)} needs all of {_named(graph, late[0])} at once")
        axes[n] = _axis_of(graph, n, axes, extent)
        if axes[n] is None and n in members:
            raise CannotBlock(f"{_named(graph, n)} sums it, and what follows needs the sum")
    if seed in outputs or not results:
        raise CannotBlock(f"{_named(graph, seed)} is returned whole")
    return Blocking(seed, extent, axes, frozenset(members), tuple(results), frozenset(dependents))


def _after(seed: Node, users: Mapping[Node, list[Node]]) -> set[Node]:
    out, stack = {seed}, [seed]
    while stack:
        new = [u for u in users[stack.pop()] if u not in out]
        out.update(new)
        stack += new
    return out


def _named(graph: Graph, n: Node) -> str:
    line = next((o.line or o.fx for o in graph.origins.get(n, ())), "")
    return f"{n!r} ({line})" if line else repr(n)


def _axis_of(graph: Graph, n: Node, axes: Mapping[Node, int | None], extent: int) -> int | None:
    """Which axis of a reader the blocks are along, None where it sums it."""
    found: set[int] = set()
    for k, r in enumerate(n.reads):
        if r.source in axes:
            place = axes[r.source]
            assert place is not None
            found.add(_followed(graph, n, r, place, extent, call_axes(n, k) if n.kind == "extern" else None))
    if len(found) != 1:
        raise CannotBlock(f"{_named(graph, n)} reads it along two of its axes")
    (j,) = found
    rank = len(n.shape)
    if n.kind == "extern":
        if j >= rank and n.attr("target") not in ("aten.mm.default", "aten.bmm.default"):
            raise CannotBlock(f"{_named(graph, n)} adds a term to the sum")
    elif n.kind == "scan" and j == len(n.axes) - 1:
        raise CannotBlock(f"{_named(graph, n)} runs along it")
    elif j >= rank and n.op not in ("sum", "dot"):
        raise CannotBlock(f"{_named(graph, n)} takes the {n.op} along it, which is no sum")
    return j if j < rank else None


def _followed(graph: Graph, n: Node, r: Read, place: int, extent: int, of_call: tuple[int, ...] | None) -> int:
    if n.kind not in ("map", "reduce", "contract", "scan", "random", "extern"):
        raise CannotBlock(f"{_named(graph, n)} takes it whole")
    j = r.index[place].as_axis()
    domain = n.axes if of_call is None else r.domain or ()
    if j is None or domain[j].const != extent or any(j in e.axes() for d, e in enumerate(r.index) if d != place):
        raise CannotBlock(f"{_named(graph, n)} reads it at other places than its own")
    return j if of_call is None else of_call[j]


def call_axes(n: Node, k: int) -> tuple[int, ...]:
    """Of each dimension of operand k of a product's call: the axis of the result that it runs along, or, for the summed one,
    the number after the last. Raises CannotBlock for other calls."""
    if not can_open(n):
        raise CannotBlock(f"{n.attr('target')} takes it whole")
    batch, adds = FORMS[n.attr("target")]
    outer, rank = tuple(range(batch)), len(n.shape)
    which = k - (1 if adds else 0)
    if which < 0:
        domain = n.reads[k].domain or ()
        return tuple(range(rank - len(domain), rank))
    return (*outer, batch, rank) if which == 0 else (*outer, rank, batch + 1)


def moved(e: ix.Expr, j: int, start: ix.Expr, facts: ix.Facts) -> ix.Expr:
    """An expression over whole axes in those of a block: axis j begins at `start`."""
    return e.substitute({ix.axis_atom(j): ix.axis(j) + start}, facts)
