"""Products that two kernels need are formed in both.

    s = dot(q, k); p = exp(s); dq = dot over keys (p, k); dk = dot over queries (p, q)

No one nest of loops forms dq and dk (each sums the axis along which the other's results lie), so p would go through memory
between them, as large as all pairs. The second gets a twin of s, and with it its own copy of the values point by point
between the two. Draws are twinned likewise. A node lives in one kernel; a twin is another node, told apart by its attribute:
(the number of the product, which all twins share, and the number of the nest it is for).
"""

from __future__ import annotations

from dataclasses import replace

from plait.ir.fuel import take_at
from plait.ir.graph import Builder, Graph, Node, Read, Shape, compose
from plait.ir.index import Facts
from plait.plan.openings import in_order
from plait.plan.regions import is_mixed
from plait.rewrite.engine import rebuilt, transform

Sums = dict[Node, frozenset[int]]


def twin_products(graph: Graph) -> Graph:
    """The graph with a twin of every product for each nest beyond the first that needs it."""
    number = {n: i for i, n in enumerate(in_order(graph.nodes()))}
    summed = {n: sums for n in number if (sums := _summed(n, graph.facts())) and not is_mixed(graph, [n, *sums])}
    nests = _nests(summed)
    repeated = {d for n, nest in nests.items() if nest for d in summed[n]}
    twins = sorted(repeated, key=lambda n: n.serial)
    if not repeated or not take_at("rewrite", "twin_products", graph, twins):
        return graph
    made: dict[Node, Node] = {}
    copies: dict[tuple[Node, int], Node] = {}

    def visit(builder: Builder, n: Node, reads: tuple[Read, ...]) -> Node:
        nest = nests.get(n, 0)
        if nest:
            reads = tuple(replace(r, source=copy(builder, r.source, nest)) for r in n.reads)
        made[n] = _twin(builder, n, reads, number[n], 0) if n in repeated else rebuilt(builder, n, reads)
        return made[n]

    def copy(builder: Builder, n: Node, nest: int) -> Node:
        """A node for a nest: products and draws below it are that nest's own."""
        if n not in number and n.kind not in ("map", "random"):
            return made[n]
        found = copies.get((n, nest))
        if found is None:
            reads = tuple(replace(r, source=copy(builder, r.source, nest)) for r in n.reads)
            if n.kind == "map":
                found = rebuilt(builder, n, reads)
            else:
                # a draw is as dear to keep as a product; its number is that of its place in the stream
                found = _twin(builder, n, reads, number[n] if n in number else -1 - n.attr("draw"), nest)
            copies[(n, nest)] = found
        return found

    return transform(graph, visit)


def _twin(builder: Builder, n: Node, reads: tuple[Read, ...], number: int, nest: int) -> Node:
    return builder.node(n.op, n.axes, reads, reduce=n.reduce, **{**dict(n.attrs), "twin": (number, nest)})


def _nests(summed: dict[Node, Sums]) -> dict[Node, int]:
    """The nest of each product that takes in others: the first whose members sum the same axes of all they share."""
    nests: list[list[Sums]] = []
    out: dict[Node, int] = {}
    for n, sums in summed.items():
        agrees = (
            k for k, members in enumerate(nests) if all(m[d] == sums[d] for m in members for d in m.keys() & sums)
        )
        out[n] = next(agrees, len(nests))
        if out[n] == len(nests):
            nests.append([])
        nests[out[n]].append(sums)
    return out


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
