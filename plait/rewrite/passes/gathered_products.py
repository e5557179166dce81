"""Reads of a product at few points become products of what its operands are there, so that the rest need not be in memory.

    gather(f(dot[m, n | k](x[m, k], w[n, k])))[i, t(i)]   ->   f(sum over k of x[i, k] * w[t(i), k])

The logit of a label, a diagonal, a column: what lies point by point between the product and the reader is computed again
at these points, with statistics of rows read as they are. Both ends are the same numbers but for the order of a sum: the
operands of a product are rounded to their type, their products are exact in the compute type, and casts on the way stay.
An index that is out of range is still found: by the gather of the operand that has that axis.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from plait.ir import index as ix
from plait.ir.fuel import take_at
from plait.ir.graph import Builder, Graph, Node, Read, Shape, compose, identity
from plait.plan.cost import size_at_hints
from plait.plan.regions import walls
from plait.rewrite.engine import rebuilt, transform


def gathered_products(graph: Graph) -> Graph:
    """The graph with reads of open products at few points rewritten, where nothing else needs the product in memory."""
    above = _above(graph)
    if not above:
        return graph
    new: dict[Node, Node] = {}

    def visit(builder: Builder, n: Node, reads: tuple[Read, ...]) -> Node:
        new[n] = _visited(graph, builder, n, reads, above, new)
        return new[n]

    return transform(graph, visit)


def _visited(
    graph: Graph,
    builder: Builder,
    n: Node,
    reads: tuple[Read, ...],
    above: dict[Node, frozenset[Node]],
    new: dict[Node, Node],
) -> Node:
    """A node with its reads of products at few points, or itself if it is nothing but such a read, as products of few points."""
    if n.kind not in ("map", "reduce") or not any(_few(graph, n, r, above) for r in n.reads):
        return rebuilt(builder, n, reads)
    if not take_at("rewrite", "gathered_products", graph, [n]):
        return rebuilt(builder, n, reads)
    if n.op == "gather":
        dims = zip(n.reads[0].index, n.reads[0].source.shape, strict=True)
        extents = {v: extent for e, extent in dims for v in e.values() if e is ix.value(v)}
        points = _Points(graph, builder, n.axes, above, new, reads[1:], extents)
        r = points.read(n.reads[0])
        return (
            builder.node("copy", n.axes, [r]) if r.index != identity(n.axes) or r.source.shape != n.shape else r.source
        )
    points = _Points(graph, builder, n.axes, above, new)
    moved = [points.read(old) if _few(graph, n, old, above) else r for old, r in zip(n.reads, reads, strict=True)]
    return rebuilt(builder, n, tuple(moved))


def _above(graph: Graph) -> dict[Node, frozenset[Node]]:
    """Values that follow point by point from products of which none is needed in memory -> these products."""
    demanded = {o.read.source for o in graph.outputs}
    demanded |= {r.source for n in graph.nodes() if n.kind not in ("map", "reduce") for r in n.reads}
    out: dict[Node, frozenset[Node]] = {}
    needed: set[Node] = set()
    for n in graph.nodes():
        if n.kind == "contract":
            out[n] = frozenset({n})
        elif n.kind == "map" and n.op not in ("gather", "pieces"):
            out[n] = frozenset().union(*(out.get(r.source, frozenset()) for r in n.reads if not r.guard))
        if n in demanded:
            needed |= {p for p in out.get(n, ()) if _size(graph, n.axes) >= _size(graph, p.shape)}
    return {n: products for n, products in out.items() if products and not products & needed}


def _few(graph: Graph, n: Node, r: Read, above: dict[Node, frozenset[Node]]) -> bool:
    """Whether n reads of products so few points that forming these again moves less than the products have points."""
    products = above.get(r.source, ())
    points = _size(graph, n.axes)
    return (
        bool(products)
        and not r.guard
        and all(walls(graph, p) == walls(graph, n) for p in products)
        and all(points * _size(graph, p.axes[-p.reduce :]) <= _size(graph, p.shape) for p in products)
    )


def _size(graph: Graph, extents: Shape) -> float:
    return size_at_hints(graph, extents)


@dataclass
class _Points:
    """Values at given points: over the axes `axes`, at places that may hang on the integers that `values` give."""

    graph: Graph
    builder: Builder
    axes: Shape
    above: dict[Node, frozenset[Node]]
    new: dict[Node, Node]
    values: tuple[Read, ...] = ()
    extents: dict[int, ix.Expr] = field(default_factory=dict)
    memo: dict[tuple[Node, Shape], Read] = field(default_factory=dict)

    def read(self, r: Read, through: Shape | None = None, axes: Shape | None = None) -> Read:
        """A read of an old node, whose reader's axes are at the places `through`, as a read over the new axes."""
        axes = self.axes if axes is None else axes
        facts = ix.Facts(axes=axes, symbols=self.builder.facts.symbols, values=self.extents)
        index = r.index if through is None else compose(r.index, through, facts)
        guard = () if through is None else tuple(g for g in compose(r.guard, through, facts) if not facts.is_nonneg(g))
        if r.source not in self.above or guard:
            return self._leaf(r, index, guard, axes)
        found = self.memo.get((r.source, index))
        if found is None:
            found = self.memo[(r.source, index)] = self._again(r.source, index)
        return found

    def _leaf(self, r: Read, index: Shape, guard: Shape, axes: Shape) -> Read:
        used = sorted({v for e in (*index, *guard) for v in e.values()})
        source = self.new[r.source]
        if not used:
            return Read(source, index, guard, r.fill if guard else 0)
        env = {ix.Atom.make("value", v): ix.value(k + 1) for k, v in enumerate(used)}
        facts = ix.Facts(axes=axes, symbols=self.builder.facts.symbols)
        index, guard = (tuple(e.substitute(env, facts) for e in es) for es in (index, guard))
        data = Read(source, index, guard, r.fill if guard else 0)
        node = self.builder.node("gather", axes, [data, *(self.values[v - 1] for v in used)])
        return Read(node, identity(axes))

    def _again(self, n: Node, at: Shape) -> Read:
        if n.kind != "contract":
            reads = [self.read(r, at) for r in n.reads]
            return Read(rebuilt(self.builder, replace(n, axes=self.axes), tuple(reads)), identity(self.axes))
        axes = (*self.axes, *n.axes[-n.reduce :])
        summed = tuple(ix.ZERO if axes[d] is ix.ONE else ix.axis(d) for d in range(len(self.axes), len(axes)))
        wide = [self._cast(self.read(r, (*at, *summed), axes), n, axes) for r in n.reads]
        product = self.builder.node("mul", axes, wide)
        total = self.builder.node("sum", axes, [Read(product, identity(axes))], reduce=n.reduce)
        return Read(total, identity(self.axes))

    def _cast(self, r: Read, n: Node, axes: Shape) -> Read:
        if r.source.dtype is n.dtype:
            return r
        return Read(self.builder.node("cast", axes, [r], dtype=n.dtype, implicit=False), identity(axes))
