"""A sum of which one term counts is that term.

    sum over j of where(j == t and c[j], f[j], 0)   ->   where(0 <= t < n and c[t], f[t], 0)

Gradients of what picks one element of a row are such terms, summed over the row again; and it is how labels are found by
hand. What does not vary over j is read as it is, the rest is gathered at t. No other term matters: they are chosen against,
not multiplied by zero.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.fuel import take_at
from plait.ir.graph import Builder, Graph, Node, Read, Shape, compose, identity
from plait.plan.regions import is_mixed
from plait.rewrite.engine import rebuilt, transform


def single_points(graph: Graph) -> Graph:
    """The graph with such sums rewritten."""
    found = {n: s for n in graph.nodes() if (s := _single(graph, n)) is not None and not is_mixed(graph, [n])}
    if not found:
        return graph
    new: dict[Node, Node] = {}

    def visit(builder: Builder, n: Node, reads: tuple[Read, ...]) -> Node:
        allowed = n in found and take_at("rewrite", "single_points", graph, [n])
        made = _written(builder, n, found[n], new) if allowed else None
        new[n] = made if made is not None else rebuilt(builder, n, reads)
        return new[n]

    return transform(graph, visit)


@dataclass(frozen=True)
class _Single:
    """Reads over the axes of a sum: where its term counts (`place` is that point of the last axis), and the term."""

    place: Read
    conditions: tuple[Read, ...]
    term: Read


def _single(graph: Graph, n: Node) -> _Single | None:
    """How a sum has one term, if it does."""
    if n.op != "sum" or n.reduce != 1 or n.reads[0].guard:
        return None
    last = len(n.axes) - 1
    r = n.reads[0]
    while r.source.op == "cast" and r.source.dtype.is_float and r.source.reads[0].source.dtype is r.source.dtype:
        r = _under(graph, n, r, 0)
    if r.source.op != "where" or _constant(r.source.reads[2].source) != 0:
        return None
    condition, term = _under(graph, n, r, 0), _under(graph, n, r, 1)
    places: list[Read] = []
    conditions: list[Read] = []
    for c in _conjuncts(graph, n, condition):
        place = _equal(graph, n, c, last) if not places else None
        (conditions if place is None else places).append(c if place is None else place)
    if not places or any(x.guard for x in (term, *conditions)):
        return None
    return _Single(places[0], tuple(conditions), term)


def _under(graph: Graph, n: Node, r: Read, k: int) -> Read:
    """Operand k of what is read, as a read over n's axes."""
    facts = graph.facts(n.axes)
    inner = r.source.reads[k]
    return Read(inner.source, compose(inner.index, r.index, facts), compose(inner.guard, r.index, facts), inner.fill)


def _conjuncts(graph: Graph, n: Node, c: Read) -> list[Read]:
    if c.source.op != "bit_and" or c.source.dtype is not DType.b1 or c.guard:
        return [c]
    return [x for k in (0, 1) for x in _conjuncts(graph, n, _under(graph, n, c, k))]


def _equal(graph: Graph, n: Node, c: Read, axis: int) -> Read | None:
    """t where c is `axis == t` and t is the same for the whole sum."""
    if c.source.op != "eq" or c.guard:
        return None
    sides = [_under(graph, n, c, k) for k in (0, 1)]
    for j, t in (sides, sides[::-1]):
        steady = not any(axis in e.axes() for e in (*t.index, *t.guard)) and not t.guard
        if steady and t.source.dtype is DType.i64 and _position(graph, n, j) is ix.axis(axis):
            return t
    return None


def _position(graph: Graph, n: Node, j: Read) -> ix.Expr | None:
    if j.source.op != "index" or j.guard:
        return None
    return compose((j.source.attr("expr"),), j.index, graph.facts(n.axes))[0]


def _constant(n: Node) -> object:
    return n.attr("value") if n.op == "const" else None


def _written(builder: Builder, n: Node, s: _Single, new: dict[Node, Node]) -> Node:
    """The one term, over the axes of the sum's result."""
    shape, last = n.shape, len(n.axes) - 1

    def const(value: int | float, dtype: DType) -> Read:
        return Read(builder.node("const", (), dtype=dtype, value=value), ())

    def made(op: str, *reads: Read) -> Read:
        return Read(builder.node(op, shape, reads), identity(shape))

    def at_place(r: Read) -> Read:
        """The value at the one point."""
        if not any(last in e.axes() for e in r.index):
            return Read(new[r.source], r.index)
        facts = ix.Facts(axes=shape, symbols=builder.facts.symbols, values={1: n.axes[-1]})
        through: Shape = (*(ix.axis(d) for d in range(last)), ix.value(1))
        return Read(
            builder.node("gather", shape, [Read(new[r.source], compose(r.index, through, facts)), place]),
            identity(shape),
        )

    t = Read(new[s.place.source], s.place.index)
    size = Read(builder.node("index", (), expr=n.axes[-1]), ())
    ok = made("bit_and", made("ge", t, const(0, DType.i64)), made("lt", t, size))
    place = made("where", ok, t, const(0, DType.i64))
    for c in s.conditions:
        ok = made("bit_and", ok, at_place(c))
    term = at_place(s.term)
    zero = const(0.0 if n.dtype.is_float else 0, n.dtype)
    return made("where", ok, term, zero).source
