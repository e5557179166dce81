"""Bounds of loops under masks that are made of values: what the mask can be in a block of the stream is found beforehand.

    s = where(seg[i] == seg[j], dot, -inf)          least[c], most[c] = min, max of seg over block c
                                               ->   first[i] = min over c of where(least[c] <= seg[i] <= most[c], start of c, n)
                                                    end[i]   = max over c of where(the same, end of c, 0)
                                                    s = where(between(j, first[i], end[i]), where(seg[i] == seg[j], dot, -inf), -inf)

Whatever a mask is made of, rewrite/passes/ranges says where it may let something through. A kernel that walks along j begins at
the least first and stops at the greatest end of its rows, and evaluates nothing more at a point, because `between` is implied.
Right for numbers in any order; as good as a loop over the row's own segment where they are sorted. In a backward the kernel that
walks along i has its own scores (twin_products), and gets bounds of i for each j.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.fuel import take_at
from plait.ir.graph import Builder, Graph, Node, Read, Shape, compose, identity
from plait.ir.index import Facts
from plait.plan.contract_cost import product_ns
from plait.plan.cost import size_at_hints
from plait.plan.device import DeviceSpec
from plait.plan.regions import is_forced
from plait.rewrite.engine import rebuilt, transform
from plait.rewrite.passes.ranges import Ranges

BLOCK = 64
"""Points of a block: no tile of a stream is shorter on a card, and few are longer than two."""
_FEWEST = 8  # blocks
_SHARE = 0.05  # of the time of the products is what the summary may take: where a mask leaves everything, it is lost
_OPS = 16  # operations that a row and block takes, about
_IDLE = {"max": -math.inf, "min": math.inf, "sum": 0.0}


@dataclass(frozen=True)
class _Stream:
    """An axis of a choice that loops walk along: `side` are those of the choice's axes along which a factor varies that varies
    along this, `products` what is walked for."""

    axis: int
    side: frozenset[int]
    products: frozenset[Node]


def block_bounds(graph: Graph, spec: DeviceSpec) -> Graph:
    """The graph with bounds of the streams under masks that are made of values, where finding them costs little beside the
    products."""
    found = {n: streams for n, streams in _found(graph).items() if not is_forced(graph, n)}
    if not found or not take_at("rewrite", "block_bounds", graph, sorted(found, key=lambda n: n.serial)):
        return graph

    def visit(builder: Builder, n: Node, reads: tuple[Read, ...]) -> Node | None:
        if n not in found:
            return None
        out = rebuilt(builder, n, reads)
        for stream in found[n]:
            out = _Bounds(graph, spec, builder, n, reads, stream).put_on(out) or out
        return out

    return transform(graph, visit)


class _Bounds:
    """Bounds of one stream of a choice between a value and a constant."""

    def __init__(
        self, graph: Graph, spec: DeviceSpec, builder: Builder, old: Node, reads: tuple[Read, ...], stream: _Stream
    ) -> None:
        self.graph, self.spec, self.old, self.reads, self.stream = graph, spec, old, reads, stream
        self.ranges = Ranges(builder, old.axes, stream.axis, stream.side, BLOCK)
        self.builder, self.nodes = builder, self.ranges.nodes

    def put_on(self, value: Node) -> Node | None:
        """The choice with bounds; None where nothing is known of its condition, or where it does not pay."""
        range_ = self.ranges.of(self.reads[0])
        if range_ is None or not self.ranges.leaves:
            return None
        constant = _constant_side(self.old)
        may = range_[1] if constant == 2 else self.nodes.map("bit_not", [range_[0]])
        c = self.ranges.blocks
        if all(c not in e.axes() for e in may.index) or not self._pays(may):
            return None
        n, at = self.ranges.extent, BLOCK * ix.axis(c)
        ends: list[Read] = []
        for monoid, inside, outside in (("min", at, n), ("max", at + BLOCK, 0)):
            chosen = self.nodes.map("where", [may, self.nodes.number(inside), self._number(outside)])
            ends.append(self.nodes.reduced(monoid, [chosen], c))
        near = self.nodes.map("between", [self.nodes.number(ix.axis(self.stream.axis)), *ends])
        return self.builder.node(
            "where", self.old.axes, [near, Read(value, identity(value.shape)), self.reads[constant]]
        )

    def _number(self, n: int) -> Read:
        return Read(self.builder.node("const", (), dtype=DType.i64, value=n), ())

    def _pays(self, may: Read) -> bool:
        """Two kernels, which read what the summary is of, and try every row on every block, against the products."""
        spec = self.spec
        nest = sum(product_ns(spec, n, size_at_hints(self.graph, n.axes)) for n in self.stream.products)
        ops = _OPS * size_at_hints(self.graph, (self.ranges.axes[a] for e in may.index for a in e.axes()))
        read = sum(r.source.dtype.nbytes * size_at_hints(self.graph, r.source.shape) for r in self.ranges.leaves)
        return 2 * spec.launch_ns + ops / spec.ops_per_ns + read / spec.bytes_per_ns <= _SHARE * nest


# ---------------------------------------------------------------- which choices, along which axes
def _found(graph: Graph) -> dict[Node, list[_Stream]]:
    """Choices between products' results and a constant that loops under them leave nothing of."""
    above: set[Node] = set()
    choices: list[Node] = []
    for n in graph.nodes():
        if n.kind == "contract" or (n.kind == "map" and any(r.source in above for r in n.reads)):
            above.add(n)
        if n in above and n.op == "where" and _constant_side(n) and n.reads[0].source not in above:
            choices.append(n)
    if not choices:
        return {}
    walked: dict[Node, dict[int, set[Node]]] = {n: {} for n in choices}
    busy: set[tuple[Node, int]] = set()
    facts = graph.facts()
    for sink in graph.nodes():
        if sink.reduces and any(r.source in above for r in sink.reads):
            for n, axes in _reached(sink, walked, facts).items():
                idle = _is_idle(sink, n)
                for a in axes:
                    walked[n].setdefault(a, set()).add(sink)
                    busy |= set() if idle else {(n, a)}
    out: dict[Node, list[_Stream]] = {}
    for n, streams in walked.items():
        for a, sinks in sorted(streams.items()):
            extent = n.axes[a].const
            if (n, a) not in busy and extent is not None and extent >= _FEWEST * BLOCK:
                side, products = _below(n, a, facts)
                if side:
                    products |= {s for s in sinks if s.kind == "contract"}
                    out.setdefault(n, []).append(_Stream(a, side, products))
    return out


def _constant_side(n: Node) -> int:
    """Which read of a choice is a constant (1 or 2), or 0."""
    sides = [k for k in (1, 2) if n.reads[k].source.op == "const" and not n.reads[k].guard]
    return sides[0] if len(sides) == 1 else 0


def _reached(sink: Node, wanted: Iterable[Node], facts: Facts) -> dict[Node, set[int]]:
    """Choices that reach a reduction point by point -> those of their axes that it sums, each by itself."""
    facts = Facts(axes=sink.axes, symbols=facts.symbols)
    free = len(sink.axes) - sink.reduce
    wanted, out = set(wanted), dict[Node, set[int]]()
    stack: list[tuple[Node, Shape]] = [(r.source, r.index) for r in sink.reads]
    seen: set[tuple[Node, Shape]] = set()
    while stack:
        n, at = stack.pop()
        if (n, at) in seen or n.kind != "map":
            continue
        seen.add((n, at))
        if n in wanted:
            alone = [i for i, e in enumerate(at) if (a := e.as_axis()) is not None and a >= free]
            out.setdefault(n, set()).update(alone)
        stack += [(r.source, compose(r.index, at, facts)) for r in n.reads]
    return out


def _below(n: Node, axis: int, facts: Facts) -> tuple[frozenset[int], frozenset[Node]]:
    """Of the products that a choice is made of: those axes of the choice along which a factor varies that varies along `axis`,
    and the products."""
    facts = Facts(axes=n.axes, symbols=facts.symbols)
    side: set[int] = set()
    products: set[Node] = set()
    stack: list[tuple[Node, Shape]] = [(n, identity(n.shape))]
    seen: set[tuple[Node, Shape]] = set()
    while stack:
        m, at = stack.pop()
        if (m, at) in seen:
            continue
        seen.add((m, at))
        if m.kind == "map":
            stack += [(r.source, compose(r.index, at, facts)) for r in m.reads]
        if m.kind != "contract":
            continue
        inside = (*at, *(ix.ZERO for _ in range(m.reduce)))
        for r in m.reads:
            moving = {a for e in compose(r.index, inside, facts) for a in e.axes()}
            if axis in moving:
                side |= moving
                products.add(m)
    return frozenset(side), frozenset(products)


# ---------------------------------------------------------------- what a loop keeps where the condition fails
def _is_idle(sink: Node, choice: Node) -> bool:
    """Whether a reduction takes its neutral element in where the choice is its constant, as far as that is seen here; emitters
    find out by themselves."""
    known: dict[Node, float | None] = {choice: float(choice.reads[_constant_side(choice)].source.attr("value"))}

    def value(n: Node) -> float | None:
        if n not in known:
            known[n] = (
                _value(n, [value(r.source) if not r.guard else None for r in n.reads]) if n.kind == "map" else None
            )
        return known[n]

    found = [value(r.source) for r in sink.reads]
    return 0.0 in found if sink.kind == "contract" else sink.op in _IDLE and found == [_IDLE[sink.op]]


def _value(n: Node, x: list[float | None]) -> float | None:
    """A map's value where some operands are known."""
    if n.op == "const":
        return float(n.attr("value"))
    if n.op in ("cast", "copy", "neg"):
        return x[0] if x[0] is None or n.op != "neg" else -x[0]
    if n.op in ("exp", "exp2"):
        return 0.0 if x[0] == -math.inf else None
    if n.op == "where":
        return x[1] if x[1] == x[2] else None
    if n.op in ("mul", "div") and x[0] == 0 or n.op == "mul" and x[1] == 0:
        return 0.0
    if n.op in ("mul", "div") and x[0] is not None and x[1] is not None and math.isinf(x[0]) and x[1] > 0:
        return x[0]
    if n.op in ("add", "sub") and x[0] is not None and math.isinf(x[0]):
        return x[0]
    return x[1] if n.op == "add" and x[1] is not None and math.isinf(x[1]) else None
