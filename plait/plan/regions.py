"""The user's regions in a plan: which nodes may share a kernel, and which must.

An edge of a `no_fuse` region is a wall, and so is what `forbid` parts: no kernel reaches across, neither by holding nodes of both
sides nor by evaluating a value of the other side where it is read, and no rewrite mixes them. A `fuse` region is a set of nodes that
are merged before all else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from plait.ir.graph import Graph, Node, Region
from plait.plan.reasons import Reason, Why


def walls(graph: Graph, n: Node) -> frozenset[Region]:
    """The regions whose edge parts a node from others."""
    return frozenset(r for r in graph.regions(n) if r.kind != "fuse")


def is_forced(graph: Graph, n: Node) -> bool:
    """Whether a node belongs to a kernel that the user wants."""
    return any(r.kind == "fuse" for r in graph.regions(n))


def has_walls(graph: Graph) -> bool:
    """Whether any node lies behind one."""
    return any(r.kind != "fuse" for origins in graph.origins.values() for o in origins for r in o.regions)


def why_apart(graph: Graph, nodes: Iterable[Node]) -> Reason | None:
    """Why the user's regions forbid that a kernel evaluates these nodes."""
    first: frozenset[Region] | None = None
    sides: dict[int, Region] = {}
    for n in nodes:
        if not graph.origins.get(n) or n.op in ("const", "index"):
            continue
        own = walls(graph, n)
        for r in sorted(own, key=lambda r: (r.number, r.side)):
            if r.kind == "forbid" and sides.setdefault(r.number, r) != r:
                return Reason(Why.FORBIDDEN, str(r.label))
        closed = frozenset(r for r in own if r.kind == "no_fuse")
        if first is None:
            first = closed
        elif closed != first:
            return Reason(Why.FORBIDDEN, str(min(closed ^ first, key=lambda r: r.number)))
    return None


def is_mixed(graph: Graph, nodes: Iterable[Node]) -> bool:
    """Whether these nodes and the values that they are made of point by point lie on several sides of a wall: nothing is then
    rewritten across them."""
    stack = list(nodes)
    seen = set(stack)
    sides: set[frozenset[Region]] = set()
    while stack:
        n = stack.pop()
        if n.kind == "source" or n.op in ("const", "index"):
            continue
        sides.add(walls(graph, n))
        new = {r.source for r in n.reads if r.source.kind == "map"} - seen
        seen |= new
        stack += new
    return len(sides) > 1


def forced_sets(graph: Graph, nodes: Sequence[Node], wanted: Callable[[Node], bool]) -> list[tuple[Region, list[Node]]]:
    """The nodes of every region that is to be one kernel, outer regions first. `wanted`: not the values that are evaluated where
    they are read."""
    found: dict[Region, list[Node]] = {}
    for n in nodes:
        if wanted(n):
            for r in graph.regions(n):
                if r.kind == "fuse":
                    found.setdefault(r, []).append(n)
    return sorted(found.items(), key=lambda item: item[0].number)
