"""Recomputed values: nodes that are evaluated wherever they are read, and what their readers then read in their place.

A map node is inline when reading what it is made of costs no more memory traffic than reading its stored value would,
and doing its few operations again is cheap: a mask of positions, a cast, a normalised row from its statistics. The
planner never sees inline nodes: `reads(n)` are n's reads with every inline source replaced by its own reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from plait.ir.fuel import take_at
from plait.ir.graph import Graph, Node, Read, compose
from plait.plan.contract_cost import WIDE
from plait.plan.device import DeviceSpec
from plait.plan.opcost import op_cost
from plait.plan.regions import has_walls, walls

_MAX_OPS = 24.0  # additions' worth of work that may be done again
_FREE_BYTES = 4096.0  # small operands (scalars, short rows of weights) count for nothing


class Reading:
    """Which nodes of a graph are inline, and what everybody effectively reads."""

    def __init__(
        self,
        graph: Graph,
        size: Callable[[Sequence[Any]], float],
        spec: DeviceSpec,
        known: frozenset[Node] | None = None,
    ) -> None:
        """`known`: the inline nodes, where that was decided before."""
        self.graph, self._size, self._spec = graph, size, spec
        self._reads: dict[Node, tuple[Read, ...]] = {}
        self._work: dict[Node, float] = {}
        self.nodes = graph.nodes()
        users = graph.users()
        # values that must be in memory whatever the plan: outputs and operands of ATen calls
        self.demanded = {o.read.source for o in graph.outputs}
        for n in self.nodes:
            if n.kind == "extern":
                self.demanded.update(r.source for r in n.reads)
        self.walled = has_walls(graph)
        self._marked = any(o.regions for origins in graph.origins.values() for o in origins)
        self.leafless: set[Node] = set()  # inline, and made of nothing but numbers and positions
        inline: set[Node] = set()
        self.inline: frozenset[Node] = frozenset()
        for n in self.nodes if known is None else ():
            if self._is_inline(n, users[n], inline):
                inline.add(n)
        self.inline = frozenset(inline) if known is None else known
        self._reads.clear()
        self.users: dict[Node, list[Node]] = {n: [] for n in self.nodes}
        for n in self.nodes:
            if n not in self.inline:
                self._add_reader(n)

    def _add_reader(self, n: Node) -> None:
        for s in dict.fromkeys(r.source for r in self.reads(n)):
            self.users[s].append(n)

    def reads(self, n: Node) -> tuple[Read, ...]:
        """Reads of n that memory or members of its kernel serve."""
        found = self._reads.get(n)
        if found is None:
            found = self._reads[n] = self._expand(n, self.inline)
        return found

    def with_inline(self, nodes: Iterable[Node]) -> list[Node]:
        """The nodes, and the inline ones that they are made of."""
        out = dict.fromkeys(nodes)
        todo = list(out)
        while todo:
            new = [r.source for r in todo.pop().reads if r.source in self.inline and r.source not in out]
            out |= dict.fromkeys(new)
            todo += new
        return list(out)

    def _expand(self, n: Node, inline: frozenset[Node] | set[Node]) -> tuple[Read, ...]:
        if n.kind == "extern":
            return n.reads
        facts = self.graph.facts(n.axes)
        out: dict[Read, None] = {}
        for r in n.reads:
            if r.source not in inline:
                out.setdefault(r)
                continue
            for q in self._reads_under(r.source, inline):
                out.setdefault(replace(q, index=compose(q.index, r.index, facts), guard=(), fill=0))
        return tuple(out)

    def _reads_under(self, n: Node, inline: frozenset[Node] | set[Node]) -> tuple[Read, ...]:
        found = self._reads.get(n)
        if found is None:
            found = self._reads[n] = self._expand(n, inline)
        return found

    def _is_inline(self, n: Node, users: list[Node], inline: set[Node]) -> bool:
        if n.kind != "map" or n.op == "gather":
            return False
        work = op_cost(n.op) + sum(self._work.get(r.source, 0.0) for r in n.reads if r.source in inline)
        self._work[n] = work
        leaves = self._expand(n, inline)
        if work > _MAX_OPS:
            return False
        if not leaves:
            self.leafless.add(n)
            return True
        if n in self.demanded or n.op in ("pieces", "copy") or self._is_compared(n, users):
            return False
        if self._marked and self._is_read_across(n, users):
            return False
        points = self._size(n.axes)
        own = points * n.dtype.nbytes
        sources = {r.source: None for r in leaves}
        read = sum(min(points, self._size(s.shape)) * s.dtype.nbytes for s in sources)
        small = sum(b for s in sources if (b := self._size(s.shape) * s.dtype.nbytes) <= _FREE_BYTES)
        if read - small > 1.01 * own or self._is_dear_factor(n, users, work):
            return False
        return take_at("merge", "recompute", self.graph, [n])

    def _is_read_across(self, n: Node, users: list[Node]) -> bool:
        """A value is not evaluated on the other side of a wall, nor, where the user wants one kernel, in another; one that may not
        meet another's readers, nowhere but here."""
        own = set(self.graph.regions(n))
        forced = {r for r in own if r.kind == "fuse"}
        return any(r.kind == "forbid" for r in own) or any(
            walls(self.graph, u) != own - forced or not forced <= set(self.graph.regions(u)) for u in users
        )

    def _is_dear_factor(self, n: Node, users: list[Node], work: float) -> bool:
        """n is a factor of products whose tiles would evaluate it again for longer than it takes to write and read it. Only where
        tiles of factors come through descriptors: those that are computed do not, and stall the products."""
        spec = self._spec
        if not spec.descriptors or n.dtype.nbytes > 2:
            return False
        again = 0.0
        for u in users:
            for r in u.reads if u.kind == "contract" else ():
                if r.source is n:
                    others = [i for i in range(len(u.shape)) if i not in {a for e in r.index for a in e.axes()}]
                    again = max(again, math.ceil(self._size([u.axes[i] for i in others]) / WIDE) - 1)
        points = self._size(n.axes)
        apart_ns = spec.launch_ns + 2 * points * n.dtype.nbytes / spec.bytes_per_ns
        return again * points * work / spec.ops_per_ns > apart_ns

    def _is_compared(self, n: Node, users: list[Node]) -> bool:
        """Floats that are tested for equality must be the very bits that were reduced or stored: never evaluated twice."""
        return n.dtype.is_float and any(u.op in ("eq", "ne") for u in users)
