"""Formulas back to nodes: the maps between the reductions of a cascade, built anew over other axes.

A formula's value is a Read over the axes of a frame; every node made on the way has only the axes that it varies over, so
that a softmax's exponentials are not computed for each column of what they are multiplied with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.graph import Builder, Read, Shape
from plait.ir.index import Expr
from plait.plan.formula import Formula


class FormulaNodes:
    """Builds formulas over `axes`. `leaf` gives the value of a leaf (other than constants) over these axes; `real` is the
    type of numbers that have none of their own."""

    def __init__(self, builder: Builder, axes: Shape, real: DType, leaf: Callable[[Formula], Read]) -> None:
        self._builder, self.axes, self._real, self._leaf = builder, axes, real, leaf
        self._memo: dict[Formula, Read] = {}

    def value(self, f: Formula) -> Read:
        """A formula's value."""
        found = self._memo.get(f)
        if found is None:
            found = self._memo[f] = self._made(f)
        return found

    def typed(self, f: Formula, dtype: DType) -> Read:
        """A formula's value in a type; what has another is cast to it, and rounds."""
        return self._const(f, dtype) if f.op == "const" else self.cast(self.value(f), dtype)

    def cast(self, r: Read, dtype: DType) -> Read:
        """A value in a type."""
        return r if r.source.dtype is dtype else self.map("cast", [r], dtype=dtype, implicit=False)

    def product(self, a: Read, b: Read) -> Read:
        """a * b."""
        dtype = max((r.source.dtype.compute for r in (a, b)), key=lambda d: d.nbytes)
        return self.map("mul", [self.cast(a, dtype), self.cast(b, dtype)])

    def reduced(self, op: str, reads: Sequence[Read], axis: int) -> Read:
        """A reduction or contraction over one axis of the frame, the last that its operands vary over."""
        used = _used(reads)
        if used[-1:] != [axis]:
            raise ValueError(f"axis {axis} is not the last of {used}")
        node = self._builder.node(op, [self.axes[a] for a in used], self._renumbered(reads, used), reduce=1)
        return Read(node, tuple(ix.axis(a) for a in used[:-1]))

    def number(self, e: Expr) -> Read:
        """An integer expression over the axes."""
        used = sorted(e.axes())
        (here,) = _renumber((e,), used)
        return Read(self._builder.node("index", [self.axes[a] for a in used], expr=here), tuple(map(ix.axis, used)))

    # ---------------------------------------------------------------- nodes
    def _made(self, f: Formula) -> Read:
        if f.op == "const":
            return self._const(f, _natural(f, self._real))
        if not f.args:
            return self._leaf(f)
        if f.op == "cast":
            return self.cast(self.value(f.args[0]), f.value)
        args = list(f.args)
        condition = [self.typed(args.pop(0), DType.b1)] if f.op == "where" else []
        dtype = self._joined(args)
        return self.map(f.op, [*condition, *(self.typed(a, dtype) for a in args)])

    def _joined(self, args: Sequence[Formula]) -> DType:
        """The type in which operands meet: the widest, floats before integers; constants follow the others."""
        own = [self.value(a).source.dtype.compute for a in args if a.op != "const"]
        if any(a.op == "const" and isinstance(a.value, float) for a in args) and not any(d.is_float for d in own):
            own = [d for d in own if d is not DType.b1]
            return max([*own, self._real], key=lambda d: (d.is_float, d.nbytes))
        return max(own or [_natural(a, self._real) for a in args], key=lambda d: (d.is_float, d.nbytes))

    def _const(self, f: Formula, dtype: DType) -> Read:
        number = float(f.value) if dtype.is_float else bool(f.value) if dtype is DType.b1 else int(f.value)
        if dtype.is_float and dtype.compute is not dtype:
            return self.cast(self._const(f, dtype.compute), dtype)
        return Read(self._builder.node("const", (), dtype=dtype, value=number), ())

    def map(self, op: str, reads: Sequence[Read], **attrs: Any) -> Read:
        """An operator's value, over those axes that its operands vary over."""
        used = _used(reads)
        node = self._builder.node(op, [self.axes[a] for a in used], self._renumbered(reads, used), **attrs)
        return Read(node, tuple(ix.axis(a) for a in used))

    def _renumbered(self, reads: Sequence[Read], used: Sequence[int]) -> list[Read]:
        return [replace(r, index=_renumber(r.index, used), guard=_renumber(r.guard, used)) for r in reads]


def _natural(f: Formula, real: DType) -> DType:
    """The type of a constant by itself."""
    if isinstance(f.value, bool):
        return DType.b1
    return real if isinstance(f.value, float) else DType.i64


def _used(reads: Sequence[Read]) -> list[int]:
    return sorted({a for r in reads for e in (*r.index, *r.guard) for a in e.axes()})


def _renumber(exprs: Shape, used: Sequence[int]) -> Shape:
    env = {ix.axis_atom(a): ix.axis(k) for k, a in enumerate(used)}
    return tuple(e.substitute(env) for e in exprs)


# ------------------------------------------------------------------------------------------------------------ inversion
def inverse(place: Shape, own: Shape, space: Shape) -> Mapping[int, Expr] | None:
    """`place[d]` is axis d of `own` as a mixed-radix number of digits of the axes of `space`: those axes that it mentions in
    terms of `own`, or None where they do not follow from it. Constant extents only."""
    digits: dict[int, list[tuple[int, int, Expr]]] = {}  # axis -> (how much one counts, how many there are, value)
    for d, e in enumerate(place):
        coeffs, rest = e.linear()
        if rest is not ix.ZERO:
            return None
        for atom, c in coeffs.items():
            found = _digit(Expr.make({(atom,): 1}), space)
            size, count = own[d].const, c.const
            if found is None or size is None or count is None or count <= 0:
                return None
            a, one, many = found
            value = ix.floordiv(ix.axis(d), count)
            if count * many != size:
                value = ix.mod(value, many)
            digits.setdefault(a, []).append((one, many, value))
    out: dict[int, Expr] = {}
    for a, parts in digits.items():
        total, value = 1, ix.ZERO
        for one, many, x in sorted(parts, key=lambda p: p[0]):
            if one != total:
                return None
            total, value = total * many, value + one * x
        if total != space[a].const:
            return None
        out[a] = value
    return out


def _digit(e: Expr, space: Shape) -> tuple[int, int, int] | None:
    """(axis, step, count) of axis, axis // step, (axis // step) % count."""
    a = e.as_axis()
    if a is not None:
        size = space[a].const
        return None if size is None else (a, 1, size)
    (atom,) = e.atoms()
    if atom.kind not in ("div", "mod"):
        return None
    x, by = atom.args
    assert isinstance(x, Expr) and isinstance(by, Expr)
    inner = _digit(x, space) if len(x.terms) == 1 and len(x.atoms()) == 1 and x.terms[0][1] == 1 else None
    n = by.const
    if inner is None or not n or inner[2] % n:
        return None
    axis, step, count = inner
    return (axis, step * n, count // n) if atom.kind == "div" else (axis, step, n)
