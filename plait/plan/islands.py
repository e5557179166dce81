"""Islands: what can be planned apart from everything else, and a key by which equal islands are planned once.

ATen calls cut a graph into levels: a node's level counts the calls that must have run before it; a node that only later
levels read sinks to the first of them, and a result of the graph goes where what it is made of goes. Nodes of one level
never wait for each other through a call, so fusing them can close no cycle through one. An island is a set of nodes of one
level connected by edges or by tensors that they share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from plait.ir.graph import Node
from plait.plan.align import FUSIBLE
from plait.plan.inline import Reading

_SHARED_ELEMS = 256.0  # tensors smaller than this make no siblings of their readers


def levels(reading: Reading, together: Sequence[Sequence[Node]] = ()) -> dict[Node, int]:
    """Level of every node. Nodes that are to be `together` (no path leads from one to another through others) have one level."""
    least: dict[Node, int] = {}
    most: dict[Node, int] = {}
    while True:
        early = _early(reading, least)
        raised = _common(together, early, max)
        late = early if raised else _late(reading, early, most)
        lowered = _common(together, late, min)
        if not raised and not lowered:
            return late
        least |= raised
        most |= {} if raised else lowered


def _common(
    together: Sequence[Sequence[Node]], level: dict[Node, int], choose: Callable[[Iterable[int]], int]
) -> dict[Node, int]:
    """The levels of those sets that have several yet."""
    wanted = {n: choose(level[m] for m in nodes) for nodes in together for n in nodes}
    return {n: x for n, x in wanted.items() if level[n] != x}


def _early(reading: Reading, least: dict[Node, int]) -> dict[Node, int]:
    out: dict[Node, int] = {}
    for n in reading.nodes:
        below = max((out[r.source] for r in reading.reads(n)), default=0)
        out[n] = max(below + (1 if n.kind == "extern" else 0), least.get(n, 0))
    return out


def _late(reading: Reading, early: dict[Node, int], most: dict[Node, int]) -> dict[Node, int]:
    nodes, users = reading.nodes, reading.users
    late: dict[Node, int] = {}
    free: set[Node] = set()  # only results of the graph hang on it: it may be later still
    for n in reversed(nodes):
        late[n] = early[n]
        if n.kind in FUSIBLE:
            wants = {u: late[u] - (1 if u.kind == "extern" else 0) for u in users[n] if u in late}
            bound = [x for u, x in wants.items() if u not in free]
            late[n] = max(early[n], min(bound) if bound else max(wants.values(), default=0))
            late[n] = min(late[n], most.get(n, late[n]))
            if not bound and n not in most:
                free.add(n)
    for n in nodes:
        if n in free:
            late[n] = max((late[n], *(late[r.source] for r in reading.reads(n))))
    return late


def islands(
    reading: Reading,
    fusible: Callable[[Node], bool],
    size: Callable[[Sequence[Any]], float],
    together: Sequence[Sequence[Node]] = (),
) -> list[list[Node]]:
    """Islands in order of their first node; every fusible node is in one. Nodes that are to be `together` are in one island."""
    nodes = reading.nodes
    level = levels(reading, together)
    parent: dict[Node, Node] = {}

    def find(n: Node) -> Node:
        while parent[n] is not n:
            parent[n] = parent[parent[n]]
            n = parent[n]
        return n

    members = [n for n in nodes if fusible(n)]
    for n in members:
        parent[n] = n
    first_reader: dict[tuple[Node, int], Node] = {}
    for n in members:
        for r in reading.reads(n):
            s = r.source
            if s in parent:
                if level[s] == level[n]:
                    parent[find(n)] = find(s)
            elif size(s.shape) >= _SHARED_ELEMS:
                other = first_reader.setdefault((s, level[n]), n)
                parent[find(n)] = find(other)
    for first, *rest in together:
        for n in rest:
            parent[find(n)] = find(first)
    out: dict[Node, list[Node]] = {}
    for n in members:
        out.setdefault(find(n), []).append(n)
    return sorted(out.values(), key=lambda ns: ns[0].serial)


class Keys:
    """Keys of islands: equal keys mean the same nodes over tensors of the same shapes and types, read and wanted alike."""

    def __init__(self, reading: Reading, demanded: set[Node]) -> None:
        self._inline, self._demanded, self._users = reading.inline, demanded, reading.users
        self._graph = reading.graph

    def key(self, island: Sequence[Node]) -> tuple[Any, ...]:
        """The key of an island."""
        local = {n: i for i, n in enumerate(island)}
        outside: dict[Node, int] = {}
        regions: dict[int, int] = {}
        rows: list[tuple[Any, ...]] = []
        for n in island:
            reads = tuple((self._source(r.source, local, outside), r.index, r.guard, repr(r.fill)) for r in n.reads)
            wanted = n in self._demanded, any(u not in local for u in self._users[n])
            own = tuple((r.kind, r.side, regions.setdefault(r.number, len(regions))) for r in self._graph.regions(n))
            rows.append((n.op, n.axes, n.reduce, n.dtype, _attrs(n), reads, wanted, own))
        return tuple(rows)

    def _source(self, s: Node, local: dict[Node, int], outside: dict[Node, int]) -> tuple[Any, ...]:
        if s in local:
            return ("in", local[s])
        if s in self._inline:
            return self._inlined(s, local, outside)
        return ("out", outside.setdefault(s, len(outside)), s.shape, s.dtype)

    def _inlined(self, s: Node, local: dict[Node, int], outside: dict[Node, int]) -> tuple[Any, ...]:
        reads = tuple((self._source(r.source, local, outside), r.index, r.guard, repr(r.fill)) for r in s.reads)
        return (s.op, s.axes, s.dtype, _attrs(s), reads)


def _attrs(n: Node) -> str:
    """Attributes as text; which draw of a graph a random node is, and which product a twin repeats, does not change how it
    is planned."""
    return repr(tuple((k, v[1] if k == "twin" else v) for k, v in n.attrs if k not in ("draw", "serial")))
