"""Ranges of values over blocks of an axis: the least and the greatest that an expression may have there, as nodes.

    seg[i] == seg[j], j in block c        ->   it may be true where not (seg[i] < min seg | seg[i] > max seg), over the block
    pos_q[i] - pos_k[j] < w               ->   where not (pos_q[i] - max pos_k >= w)
    keep[j]                               ->   where any keep

Leaves are what varies along the axis no more than the stream's own operand does: those are reduced block by block, whatever
is in them. All else is monotone in each operand, rounding included. Where an extreme is NaN, or where integers might have
wrapped around, nothing is known. Of a bool, the least is that it is true all over the block, the greatest that it is true
somewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.graph import Builder, Node, Read, Scalar, Shape, compose
from plait.ir.index import Expr, Facts
from plait.plan.formula import Formula
from plait.rewrite.passes.formula_nodes import FormulaNodes

Range = tuple[Read, Read]  # one Read twice where the value does not vary along the axis
_SWAPPED = {"gt": "lt", "ge": "le"}
_NO_EXTREMES = (DType.f8e4m3, DType.f8e5m2, DType.other)
_SIGNED = (DType.i64, DType.i32)


class Ranges:
    """Ranges over the blocks of one axis of a node. `axes` are the node's, `stream` is the axis, `side` are those along which
    a leaf may vary; ranges are values over (*axes, blocks), the last of which stands in the stream's place."""

    def __init__(
        self, builder: Builder, axes: Shape, stream: int, side: frozenset[int], block: int, real: DType = DType.f32
    ) -> None:
        extent = axes[stream].const
        if extent is None:
            raise ValueError("blocks of an axis whose extent is not known")
        self.builder, self.stream, self.side, self.block, self.extent = builder, stream, side, block, extent
        self.axes = (*axes, ix.const(-(-extent // block)), ix.const(block))
        self.blocks = len(axes)  # the axis of blocks, behind which lies the one inside of a block
        self.facts = Facts(axes=self.axes, symbols=builder.facts.symbols)
        self.nodes = FormulaNodes(builder, self.axes, real, _no_leaf)
        self.leaves: list[Read] = []  # what was reduced, in order
        self._loaded: dict[tuple[Node, Shape], bool] = {}
        self._memo: dict[tuple[Node, Shape, Shape, str], Range | None] = {}

    def of(self, r: Read) -> Range | None:
        """The range of a value that is read over the node's axes; None when nothing is known."""
        key = (r.source, r.index, r.guard, repr(r.fill))
        if key not in self._memo:
            self._memo[key] = self._range(r)
        return self._memo[key]

    def _range(self, r: Read) -> Range | None:
        moving = frozenset(a for e in (*r.index, *r.guard) for a in e.axes())
        if self.stream not in moving:
            return r, r
        if r.source.op == "index" and not r.guard:
            return self._of_position(compose((r.source.attr("expr"),), r.index, self.facts)[0])
        if moving <= self.side and self._is_loaded(r.source, r.index):
            return None if r.source.dtype in _NO_EXTREMES else self._reduced(r)
        return None if r.guard else self._opened(r.source, r.index)

    def _is_loaded(self, n: Node, index: Shape) -> bool:
        """Whether a value that is read there varies along the stream by more than positions: a loop finds the ends of such
        comparisons with numbers of its rows by itself."""
        key = (n, index)
        if key not in self._loaded:
            if n.kind == "map":
                found = any(self._is_loaded(r.source, compose(r.index, index, self.facts)) for r in n.reads)
            else:
                found = any(self.stream in e.axes() for e in index)
            self._loaded[key] = found
        return self._loaded[key]

    # ---------------------------------------------------------------- leaves
    def _of_position(self, e: Expr) -> Range | None:
        coefficients, _ = e.linear()
        step = coefficients.get(ix.axis_atom(self.stream))
        others = [a for a in coefficients if a != ix.axis_atom(self.stream)]
        if step is None or step.const is None or any(self.stream in x.axes() for x in map(_atom, others)):
            return None
        first = self.block * ix.axis(self.blocks)
        ends = [e.substitute({ix.axis_atom(self.stream): x}) for x in (first, first + (self.block - 1))]
        low, high = (self.nodes.number(x) for x in (ends if step.const > 0 else ends[::-1]))
        return low, high

    def _reduced(self, r: Read) -> Range:
        self.leaves.append(r)
        if r.guard:
            r = self.nodes.map("copy", [r])
        at = self.block * ix.axis(self.blocks) + ix.axis(self.blocks + 1)
        index = tuple(e.substitute({ix.axis_atom(self.stream): at}, self.facts) for e in r.index)
        guard = (self.extent - 1 - at,) if self.extent % self.block else ()
        dtype = r.source.dtype
        out: list[Read] = []
        for monoid in ("all", "any") if dtype is DType.b1 else ("min", "max"):
            value = Read(r.source, index, guard, _neutral(monoid, dtype))
            out.append(self.nodes.reduced(monoid, [self.nodes.cast(value, dtype.compute)], self.blocks + 1))
        return out[0], out[1]

    # ---------------------------------------------------------------- operators
    def _opened(self, n: Node, at: Shape) -> Range | None:
        if n.kind != "map" or n.op in ("gather", "pieces"):
            return None
        found = [self.of(Read(r.source, compose(r.index, at, self.facts), r.guard, r.fill)) for r in n.reads]
        if any(r.guard for r in n.reads):
            return None
        if n.op == "copy":
            return found[0]
        if n.dtype is DType.b1:
            return self._bool(n, found)
        known = [f for f in found if f is not None]
        if len(known) < len(found):
            return None
        if n.op == "cast":
            return self._cast(n, known[0])
        return self._number(n, known) if n.dtype in _SIGNED or n.dtype in (DType.f32, DType.f64) else None

    def _cast(self, n: Node, x: Range) -> Range | None:
        source, target = n.reads[0].source.dtype, n.dtype
        if source is DType.other or not (target.is_float or (target is DType.i64 and not source.is_float)):
            return None  # whole numbers may wrap around
        return _each(lambda r: self.nodes.map("cast", [r], dtype=target, implicit=n.attr("implicit")), x)

    def _number(self, n: Node, x: list[Range]) -> Range | None:
        m = self.nodes.map
        if n.op in ("maximum", "minimum"):
            return m(n.op, [x[0][0], x[1][0]]), m(n.op, [x[0][1], x[1][1]])
        if n.op not in ("add", "sub", "neg", "abs"):
            return None
        (a, b), (c, d) = x[0], x[-1]
        if n.dtype.is_float and len(x) == 2 and a is not b and c is not d:
            return None  # inf - inf may be hidden between the ends
        if n.op == "neg":
            low, high = m("neg", [b]), m("neg", [a])
        elif n.op == "abs":
            zero, less = self._const(0, n.dtype), m("neg", [b])
            low, high = m("maximum", [m("maximum", [a, less]), zero]), m("maximum", [b, m("neg", [a])])
        else:
            low, high = (m("add", [a, c]), m("add", [b, d])) if n.op == "add" else (m("sub", [a, d]), m("sub", [b, c]))
        return (low, high) if n.dtype.is_float else self._where_small([a, b, c, d], low, high, n.dtype)

    def _where_small(self, ends: list[Read], low: Read, high: Read, dtype: DType) -> Range:
        """A range of whole numbers, or all that there are where operands are so large that the result may have wrapped."""
        m, most = self.nodes.map, 2 ** (8 * dtype.nbytes - 3)
        small: Read | None = None
        for r in dict.fromkeys(ends):
            if r.source.op in ("const", "index"):
                continue
            fits = self._and(m("ge", [r, self._const(-most, dtype)]), m("le", [r, self._const(most, dtype)]))
            small = fits if small is None else self._and(small, fits)
        if small is None:
            return low, high
        return (
            m("where", [small, low, self._const(_least(dtype), dtype)]),
            m("where", [small, high, self._const(_greatest(dtype), dtype)]),
        )

    def _bool(self, n: Node, x: list[Range | None]) -> Range | None:
        if all(f is None for f in x):
            return None
        if n.op in ("eq", "ne", "lt", "le", "gt", "ge"):
            return None if x[0] is None or x[1] is None else self._comparison(n, x[0], x[1])
        if n.op == "bit_xor":
            return None if x[0] is None or x[1] is None else self._equality("ne", x[0], x[1])
        unknown = (self._const(False, DType.b1), self._const(True, DType.b1))
        known = [unknown if f is None else f for f in x]
        if n.op == "bit_not":
            return self._not(known[0])
        if n.reads[0].source.dtype is not DType.b1:
            return None
        if n.op in ("bit_and", "mul", "minimum"):
            return self._and(known[0][0], known[1][0]), self._and(known[0][1], known[1][1])
        if n.op in ("bit_or", "add", "maximum"):
            return self._or(known[0][0], known[1][0]), self._or(known[0][1], known[1][1])
        if n.op == "where":
            c, yes, no = known
            other = self._not(c)
            low = self._or(self._and(c[0], yes[0]), self._and(other[0], no[0]))
            return low, self._or(self._and(c[1], yes[1]), self._and(other[1], no[1]))
        return None

    def _comparison(self, n: Node, x: Range, y: Range) -> Range | None:
        dtype = n.reads[0].source.dtype
        if dtype is DType.b1:
            return self._equality(n.op, x, y) if n.op in ("eq", "ne") else None
        if n.op in ("eq", "ne"):
            return self._equality(n.op, x, y)
        if n.op in _SWAPPED:
            return self._order(_SWAPPED[n.op], y, x)
        return self._order(n.op, x, y)

    def _order(self, op: str, x: Range, y: Range) -> Range:
        m = self.nodes.map
        return m(op, [x[1], y[0]]), self._no(m({"lt": "ge", "le": "gt"}[op], [x[0], y[1]]))

    def _equality(self, op: str, x: Range, y: Range) -> Range:
        m = self.nodes.map
        if x[0].source.dtype is DType.b1:
            x, y = (_each(lambda r: m("cast", [r], dtype=DType.i64, implicit=False), z) for z in (x, y))
        same = self._and(m("eq", [x[0], y[1]]), m("eq", [x[1], y[0]]))
        apart = self._or(m("lt", [x[1], y[0]]), m("gt", [x[0], y[1]]))
        found = same, self._no(apart)
        return found if op == "eq" else self._not(found)

    def _not(self, x: Range) -> Range:
        return self._no(x[1]), self._no(x[0])

    def _no(self, r: Read) -> Read:
        return self.nodes.map("bit_not", [r])

    def _and(self, x: Read, y: Read) -> Read:
        return self._joined("bit_and", x, y, True)

    def _or(self, x: Read, y: Read) -> Read:
        return self._joined("bit_or", x, y, False)

    def _joined(self, op: str, x: Read, y: Read, neutral: bool) -> Read:
        for a, b in ((x, y), (y, x)):
            if a.source.op == "const" and not a.guard:
                return b if a.source.attr("value") is neutral else a
        return x if x == y else self.nodes.map(op, [x, y])

    def _const(self, value: Scalar, dtype: DType) -> Read:
        return Read(self.builder.node("const", (), dtype=dtype, value=float(value) if dtype.is_float else value), ())


def _no_leaf(f: Formula) -> Read:
    raise ValueError(f"{f} is no formula of nodes")


def _atom(a: ix.Atom) -> Expr:
    return Expr.make({(a,): 1})


def _each(f: Callable[[Read], Read], x: Range) -> Range:
    low = f(x[0])
    return low, low if x[0] is x[1] else f(x[1])


def _least(dtype: DType) -> int:
    return 0 if dtype is DType.u8 else -(2 ** (8 * dtype.nbytes - 1))


def _greatest(dtype: DType) -> int:
    return 255 if dtype is DType.u8 else 2 ** (8 * dtype.nbytes - 1) - 1


def _neutral(monoid: str, dtype: DType) -> Scalar:
    if dtype is DType.b1:
        return monoid == "all"
    if dtype.is_float:
        return math.inf if monoid == "min" else -math.inf
    return _greatest(dtype) if monoid == "min" else _least(dtype)
