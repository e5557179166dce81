"""Products that two kernels need are formed in both.

    s = dot(q, k); p = exp(s); dq = dot over keys (p, k); dk = dot over queries (p, q)

No one nest of loops forms dq and dk (each sums the axis along which the other's results lie), so p would go through memory
between them, as large as all pairs. The second gets a twin of s, and with it its own copy of the values point by point
between the two. Draws are twinned likewise. A node lives in one kernel; a twin is another node, told apart by its attribute: (the number of the
product, which all twins share, and the number of the nest it is for).
"""

from __future__ import annotations

from plait.ir.graph import Builder, Graph, Node, Read, Shape, compose
from plait.ir.index import Facts
from plait.plan.openings import in_order
from plait.rewrite.engine import transform

Sums = dict[Node, frozenset[int]]


def twin_products(graph: Graph) -> Graph:
    """The graph with a twin of every product for each nest beyond the first that needs it."""
    order = in_order(graph.nodes())
    nests = _nests(order, graph.facts())
    if not any(nests.values()):
        return graph
    number = {n: i for i, n in enumerate(order)}
    repeated = _repeated(nests, graph.facts())
    made: dict[Node, Node] = {}
    copies: dict[tuple[Node, int], Node] = {}

    def visit(builder: Builder, n: Node, reads: tuple[Read, ...]) -> Node:
        nest = nests.get(n, 0)
        if nest:
            reads = tuple(Read(copy(builder, r.source, nest), r.index, r.guard, r.fill) for r in n.reads)
        attrs = {**dict(n.attrs), **({"twin": (number[n], 0)} if n in repeated else {})}
        made[n] = builder.node(n.op, n.axes, reads, reduce=n.reduce, **attrs)
        return made[n]

    def copy(builder: Builder, n: Node, nest: int) -> Node:
        """A node for a nest: products below it are that nest's own."""
        found = copies.get((n, nest))
        if found is not None:
            return found
        out = made[n]
        if n in number or n.kind in ("map", "random"):
            sources = [copy(builder, r.source, nest) for r in n.reads]
            # a draw is as dear to keep as a product, and nothing but its place in the stream makes it what it is
            twins = number[n] if n in number else -1 - n.attr("draw") if n.kind == "random" else None
            if twins is not None or any(s is not made[r.source] for s, r in zip(sources, n.reads, strict=True)):
                fresh = [Read(s, r.index, r.guard, r.fill) for s, r in zip(sources, n.reads, strict=True)]
                attrs = {**dict(n.attrs), **({"twin": (twins, nest)} if twins is not None else {})}
                out = builder.node(n.op, n.axes, fresh, reduce=n.reduce, **attrs)
        copies[(n, nest)] = out
        return out

    return transform(graph, visit)


def _nests(order: list[Node], facts: Facts) -> dict[Node, int]:
    """The nest of each product that takes in others: the first whose members sum the same axes of all they share."""
    nests: list[list[Sums]] = []
    out: dict[Node, int] = {}
    for n in order:
        sums = _summed(n, facts)
        if not sums:
            continue
        agrees = (
            k for k, members in enumerate(nests) if all(m[d] == sums[d] for m in members for d in m.keys() & sums)
        )
        out[n] = next(agrees, len(nests))
        if out[n] == len(nests):
            nests.append([])
        nests[out[n]].append(sums)
    return out


def _repeated(nests: dict[Node, int], facts: Facts) -> set[Node]:
    """Products that a nest beyond the first takes in."""
    return {d for n, nest in nests.items() if nest for d in _summed(n, facts)}


def _summed(sink: Node, facts: Facts) -> Sums:
    """Products that reach a product point by point -> their axes that it sums."""
    facts = Facts(axes=sink.axes, symbols=facts.symbols)
    free = len(sink.axes) - sink.reduce
    out: dict[Node, frozenset[int]] = {}
    stack: list[tuple[Node, Shape]] = [(r.source, r.index) for r in sink.reads]
    seen: set[tuple[Node, Shape]] = set()
    while stack:
        n, at = stack.pop()
        if (n, at) in seen:
            continue
        seen.add((n, at))
        if n.kind == "contract":
            over = frozenset(i for i, e in enumerate(at) if any(a >= free for a in e.axes()))
            out[n] = out.get(n, frozenset()) | over
        elif n.kind == "map":
            stack += [(r.source, compose(r.index, at, facts)) for r in n.reads]
    return out
