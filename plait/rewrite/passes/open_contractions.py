"""Contractions from ATen calls to nodes, so that what is around them can share their kernel.

    extern(aten.addmm, %b, %x, %w)   ->   dot[m, n | k](x[m, k], w[k, n]) + b[n], rounded as the call rounds: once, at the end

A product whose call adds a term has the attribute `sums`.

The vendor's call is the closed form, the node the open one; which calls to open is plan/openings' decision. Calls with
integer operands, and those whose factors are not plain numbers, stay closed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plait.ir import index as ix
from plait.ir.graph import Builder, Graph, Node, Read, Shape, compose, identity
from plait.rewrite.engine import transform

# operator -> (number of batch axes, whether the first operand is added to the product)
FORMS = {
    "aten.mm.default": (0, False),
    "aten.bmm.default": (1, False),
    "aten.addmm.default": (0, True),
    "aten.baddbmm.default": (1, True),
}


def can_open(n: Node) -> bool:
    """Whether a node is a call that has an open form."""
    if n.kind != "extern" or n.attr("role") != "contract" or n.attr("target") not in FORMS:
        return False
    if not n.dtype.is_float or any(r.source.dtype is not n.dtype for r in n.reads):
        return False
    return all(isinstance(v, int | float) for v in _factors(n).values())


def open_contractions(graph: Graph, chosen: Callable[[Node], bool]) -> Graph:
    """The graph with the chosen calls (each must satisfy `can_open`) as contract nodes."""

    def visit(builder: Builder, n: Node, reads: tuple[Read, ...]) -> Node | None:
        return _opened(builder, n, reads) if can_open(n) and chosen(n) else None

    return transform(graph, visit)


def _factors(n: Node) -> dict[str, Any]:
    """`beta` and `alpha` of a call that has them."""
    found = dict(n.attr("template")[2][1])
    return {"beta": found.get("beta", 1), "alpha": found.get("alpha", 1)}


def _opened(builder: Builder, n: Node, reads: tuple[Read, ...]) -> Node:
    _, adds = FORMS[n.attr("target")]
    out = open_product(builder, n, reads)
    if adds:
        out = _added(builder, n, out, reads[0])
    if n.dtype is not out.dtype:
        out = builder.node("cast", n.axes, [Read(out, identity(n.axes))], dtype=n.dtype, implicit=True)
    return out


def open_product(builder: Builder, n: Node, reads: tuple[Read, ...]) -> Node:
    """The product of a call's two factors, which `reads` end with, in the type that it is added up in."""
    batch, adds = FORMS[n.attr("target")]
    a, b = reads[-2:]
    assert a.domain is not None
    axes = (*n.axes, a.domain[-1])
    m, col, k = (ix.axis(batch + i) for i in range(3))
    outer = tuple(ix.axis(i) for i in range(batch))
    factors = [_within(builder, a, (*outer, m, k), axes), _within(builder, b, (*outer, k, col), axes)]
    return builder.node("dot", axes, factors, reduce=1, **({"sums": True} if adds else {}))


def _added(builder: Builder, n: Node, product: Node, term: Read) -> Node:
    """beta * term + alpha * product; a beta of 0 means that the term is not looked at, NaN or not."""
    factors = _factors(n)
    out = _times(builder, product, factors["alpha"])
    if factors["beta"] == 0:
        return out
    domain = term.domain or ()
    right = [ix.axis(d) for d in range(len(n.axes))][len(n.axes) - len(domain) :]
    through = tuple(ix.ZERO if e is ix.ONE else x for e, x in zip(domain, right, strict=True))
    read = _within(builder, term, through, n.axes)
    wide = n.dtype.compute
    if n.dtype is not wide:
        read = Read(builder.node("cast", n.axes, [read], dtype=wide, implicit=False), identity(n.axes))
    if factors["beta"] != 1:
        copied = builder.node("copy", n.axes, [read])
        read = Read(_times(builder, copied, factors["beta"]), identity(n.axes))
    return builder.node("add", n.axes, [read, Read(out, identity(n.axes))])


def _times(builder: Builder, x: Node, factor: float) -> Node:
    if factor == 1:
        return x
    value = builder.node("const", (), dtype=x.dtype, value=float(factor))
    return builder.node("mul", x.shape, [Read(x, identity(x.shape)), Read(value, ())])


def _within(builder: Builder, r: Read, through: Shape, axes: Shape) -> Read:
    """A call's operand as a read at `through` (over `axes`) of the operand's own axes."""
    facts = ix.Facts(axes=axes, symbols=builder.facts.symbols)
    guard = tuple(g for g in compose(r.guard, through, facts) if not facts.is_nonneg(g))
    return Read(r.source, compose(r.index, through, facts), guard, r.fill if guard else 0)
