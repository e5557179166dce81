"""Online softmax in Triton text: cheaper exponents.

    t = where(h, s*c, -inf);  m = max t;  p = exp(t - m)
 -> u = where(h, s, -inf);    m = c * max u;  p = exp2(u * (c*log2 e) - m*log2 e), one fused multiply-add and one exp2

Multiplication by c > 0 (and division) is monotonous, rounded or not, so that the maxima are the same to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from plait.emit.triton_accuracy import Accuracy
from plait.emit.triton_index import Axes, Indexer
from plait.ir.dtype import DType
from plait.tile.program import Dot, Let, Load, Reduce, Scan, Stmt, Sweep, TileProgram, walk

Defs = Mapping[int, Let | Load | Reduce | Scan]
_LOG2E = 1.4426950408889634
_NEAR = 2.0**28  # below it, the rounding of a product is less than what exp2 can take


@dataclass(frozen=True)
class Scale:
    """ "mul" or "div", and by which constant; and what a cap adds to that."""

    op: str
    constant: float
    shift: float = 0.0

    @property
    def factor(self) -> float:
        """As a factor."""
        return self.constant if self.op == "mul" else 1 / self.constant


def definitions(program: TileProgram) -> Defs:
    """What every local is."""
    return {s.out: s for s in program.walk() if isinstance(s, (Let, Load, Reduce, Scan))}


def constant(defs: Defs, k: int) -> float | None:
    """The value of a local that is a constant."""
    d = defs.get(k)
    if isinstance(d, Let) and d.op == "round":
        value = constant(defs, d.args[0])
        return value if value == 0 or value is not None and math.isinf(value) else None
    return float(d.attr("value")) if isinstance(d, Let) and d.op == "const" else None


def scaled(defs: Defs, k: int) -> tuple[int, Scale] | None:
    """(x, scale) when local k is x times, or by, a positive normal constant in f32."""
    d = defs.get(k)
    if isinstance(d, Let) and d.op in ("mul", "div") and d.dtype is DType.f32:
        for x, c in (d.args, d.args[::-1])[: 2 if d.op == "mul" else 1]:
            value = constant(defs, c)
            if value is not None and 1e-30 < value < 1e30:
                return x, Scale(d.op, value)
    return None


def linear(defs: Defs, k: int) -> tuple[int, Scale] | None:
    """(x, scale) likewise, through all that the parts of a cap (`_LateScale.capped`) are scaled and shifted by."""
    d = defs.get(k)
    is_cap = isinstance(d, Let) and bool(dict(d.attrs).get("cap"))
    found = scaled(defs, d.args[0] if isinstance(d, Let) and is_cap else k)
    if found is None:
        return None
    x, c = found
    if isinstance(d, Let) and is_cap:
        return x, Scale("mul", c.factor, constant(defs, d.args[1]) or 0.0)
    inner = linear(defs, x)
    if inner is None or not inner[1].shift:
        return found
    return inner[0], Scale("mul", inner[1].factor * c.factor, inner[1].shift * c.factor)


class _LateScale:
    """Moves multiplications by constants behind masks and maxima."""

    def __init__(self, program: TileProgram) -> None:
        self.program, self.defs, self.accuracy = program, dict(definitions(program)), Accuracy(program)
        self.next = max(self.defs, default=-1) + 1
        self.read = {s.args[0] for s in program.walk() if isinstance(s, Let) and s.op == "running"}
        self.moved: dict[int, tuple[Reduce, Scale]] = {}  # by the old maximum: the new one, and what it lacks

    def fresh(self) -> int:
        self.next += 1
        return self.next - 1

    def times(self, s: Let | Reduce, x: int, c: Scale) -> list[Stmt]:
        """s.out = x * c."""
        const = self.number(c.constant, s.dtype)
        if not c.shift:
            return [const, Let(s.out, c.op, (x, const.out), s.dtype, s.span)]
        shift, product = self.number(c.shift, s.dtype), Let(self.fresh(), c.op, (x, const.out), s.dtype, s.span)
        return [const, product, shift, Let(s.out, "add", (product.out, shift.out), s.dtype, s.span, (("cap", True),))]

    def number(self, value: float, dtype: DType) -> Let:
        """A constant."""
        return Let(self.fresh(), "const", (), dtype, (), (("dtype", dtype), ("value", value)))

    def capped(self, s: Let) -> list[Stmt]:
        """tanh(y) = 1 + 2 r with r = -1 / (exp(2 y) + 1): what scales and shifts r comes behind masks and maxima, and into the
        exponent, so that a point costs r alone."""
        rest = Let(self.fresh(), "tanh", s.args, s.dtype, s.span, (("rest", True),))
        return [rest, *self.times(s, rest.out, Scale("mul", 2.0, 1.0))]

    def visit(self, body: tuple[Stmt, ...], open_dims: frozenset[int] = frozenset()) -> tuple[Stmt, ...]:
        out: list[Stmt] = []
        for s in body:
            if isinstance(s, Sweep):
                out.append(replace(s, body=self.visit(s.body, open_dims | {s.dim})))
                for x in walk((s,)):
                    if (
                        isinstance(x, Reduce)
                        and x.out in self.moved
                        and s.dim in x.dims
                        and not open_dims & set(x.dims)
                    ):
                        new, c = self.moved[x.out]
                        out += self.times(x, new.out, c)
                continue
            for made in self.statement(s):
                out.append(made)
                if isinstance(made, (Let, Load, Reduce, Scan)):
                    self.defs[made.out] = made
        return tuple(out)

    def statement(self, s: Stmt) -> list[Stmt]:
        if isinstance(s, Let) and self.accuracy.shifts_exponents(s):
            return self.capped(s)
        if isinstance(s, Let) and s.op == "where" and s.dtype is DType.f32:
            factors, other = linear(self.defs, s.args[1]), constant(self.defs, s.args[2])
            if factors is not None and other is not None and math.isinf(other):
                u = Let(self.fresh(), "where", (s.args[0], factors[0], s.args[2]), s.dtype, s.span)
                return [u, *self.times(s, u.out, factors[1])]
        if (shifted := self.shifted(s)) is not None:
            return shifted
        if isinstance(s, Reduce) and s.monoid == "max" and s.out in self.read:
            factors = linear(self.defs, s.arg)
            if factors is not None:
                new = replace(s, out=self.fresh(), arg=factors[0])
                self.moved[s.out] = (new, factors[1])
                return [new]
        if isinstance(s, Let) and s.op in ("running", "before"):
            moved = self.moved.get(s.args[0])
            if moved is not None:
                now = replace(s, out=self.fresh(), args=(moved[0].out,))
                return [now, *self.times(s, now.out, moved[1])]
        return [s]

    def shifted(self, s: Stmt) -> list[Stmt] | None:
        """x c + y z as (x + (y / c) z) c, if x comes from a product of matrices and y varies over fewer dims."""
        if not isinstance(s, Let) or s.op not in ("add", "sub") or s.dtype is not DType.f32:
            return None
        if not self.accuracy.slack(s.out) > 0:
            return None
        for k, other in (s.args, s.args[::-1]):
            factors, d = scaled(self.defs, k), self.defs.get(other)
            if factors is None or not from_product(factors[0], self.defs) or not isinstance(d, Let) or d.op != "mul":
                continue
            y, z = sorted(d.args, key=lambda a: len(self.span(a)))
            if d.dtype is not DType.f32 or len(self.span(y)) >= len(s.span):
                continue
            c = factors[1]
            const = self.number(1 / c.factor, s.dtype)
            less = Let(self.fresh(), "mul", (y, const.out), s.dtype, self.span(y))
            product = Let(self.fresh(), "mul", (less.out, z), s.dtype, d.span)
            args = tuple(factors[0] if a == k else product.out for a in s.args)
            total = Let(self.fresh(), s.op, args, s.dtype, s.span)
            return [const, less, product, total, *self.times(s, total.out, c)]
        return None

    def span(self, k: int) -> tuple[int, ...]:
        """The dims that local k varies over."""
        return self.defs[k].span if k in self.defs else ()


def scale_late(program: TileProgram) -> TileProgram:
    """The program with scores masked, and their carried maxima taken, before they are multiplied by a constant."""
    pass_ = _LateScale(program)
    early = any(isinstance(s, Let) and s.op == "before" and _precedes(program, s) for s in program.walk())
    return program if early else replace(program, body=pass_.visit(program.body))


def _precedes(program: TileProgram, before: Let) -> bool:
    """A "before" that stands before its reduction."""
    return next(s for s in program.walk() if s is before or getattr(s, "out", -1) == before.args[0]) is before


def exp_of_difference(s: Let, defs: Defs, indexer: Indexer) -> tuple[list[str], str] | None:
    """(lines, text) of exp(x - b) as one exp2 of one fused multiply-add, or None. Only where x comes from a product of
    matrices, whose own rounding is as coarse as that of b * log2 e, and b varies over fewer axes.

    That rounding is a factor of the whole row, which the row's sum has too, until it is beyond what exp2 can give: then the
    greatest x must come to 0 exactly, and all others, which are steps of their own size away, far below. Both do
    where the row is multiplied with a power of two near the factor."""
    d = defs.get(s.args[0])
    if not isinstance(d, Let) or d.op != "sub" or s.dtype is not DType.f32:
        return None
    x, b = d.args
    axes, base = indexer.locals[s.args[0]].axes, indexer.locals[b]
    if base.axes == axes or not from_product(x, defs):
        return None
    factors, top = linear(defs, x), _maximum_under(b, defs)
    c = factors[1] if factors is not None else Scale("mul", 1.0)
    factor, shift = c.factor * _LOG2E, c.shift * _LOG2E
    bounded = bool(shift)  # by a cap
    name = f"v{s.out}_b"
    if top is not None and not bounded:
        if factors is not None and top[1] != c:
            return [], f"tl.exp2(({indexer.operand(x, axes)} - {indexer.operand(b, axes)}) * {_LOG2E!r})"
        raw, safe, whole = indexer.locals[top[0]].text, _where_lowest(b, defs), defs.get(b)
        power, lines = 2.0 ** math.floor(math.log2(factor)), []
        if isinstance(whole, Let) and safe is not None and safe[1] == 0:  # its test is made already
            test = indexer.locals[whole.args[0]].text
            raw, lines = f"{name}_m", [f"{name}_m = tl.where({test}, 0.0, {raw})"]
        lines += [
            f"{name}_k = tl.where(tl.abs({base.text}) < {_NEAR!r}, {factor!r}, {power!r})",
            f"{name} = {raw} * ({name}_k * -1.0)",
        ]
        times = indexer.widen(f"{name}_k", base.axes, axes)
    else:
        lines, times = [f"{name} = {base.text} * {-_LOG2E!r}" + (f" + {shift!r}" if shift else "")], repr(factor)
    x = factors[0] if factors is not None else x
    return lines, f"tl.exp2(tl.fma({indexer.operand(x, axes)}, {times}, {indexer.widen(name, base.axes, axes)}))"


def _maximum_under(b: int, defs: Defs) -> tuple[int, Scale] | None:
    """(m, c) when local b is m c, or finite where m is -inf, and m is a maximum, carried or not. None where b is none."""
    found = _where_lowest(b, defs)
    k = found[0] if found is not None and found[0] == found[2] else b
    factors = linear(defs, k)
    m, c = factors if factors is not None else (k, Scale("mul", 1.0))
    d = defs.get(m)
    r = defs.get(d.args[0]) if isinstance(d, Let) and d.op in ("running", "before") else d
    return (m, c) if isinstance(r, Reduce) and r.monoid == "max" else None


def tanh_absolutely(s: Let, defs: Defs, indexer: Indexer) -> str:
    """Text of tanh(x), or of what a cap leaves of it, with an absolute error of a few 2^-24; constants that x is multiplied with go into the exponent."""
    x, factor = s.args[0], 2 * _LOG2E
    axes = indexer.locals[x].axes
    while (found := scaled(defs, x)) is not None and indexer.locals[found[0]].axes == axes:
        x, factor = found[0], factor * found[1].factor
    name = "_tanh_rest" if dict(s.attrs).get("rest") else "_tanh_absolute"
    return f"{name}({indexer.operand(x, axes)}, {factor!r})"


def contracted(s: Let, axes: Axes, defs: Defs, indexer: Indexer) -> str | None:
    """Text of a sum or difference as one fused multiply-add, or None. Of two operands one is a product, the other comes from
    a product of matrices, whose rounding hides the one that is left out here."""
    if s.dtype is not DType.f32:
        return None
    for k, other in (s.args[::-1], s.args):
        d = defs.get(k)
        if isinstance(d, Let) and d.op == "mul" and d.dtype is DType.f32 and from_product(other, defs):
            x, y = (indexer.operand(a, axes) for a in sorted(d.args, key=lambda a: len(indexer.locals[a].axes)))
            z = indexer.operand(other, axes)
            if s.op == "sub":
                x, z = (f"({x} * -1.0)", z) if k == s.args[1] else (x, f"{z} * -1.0")
            return f"tl.fma({y}, {x}, {z})"
    return None


def complement(s: Let, defs: Defs, indexer: Indexer, axes: Axes) -> str | None:
    """Text of 1 + erf(y) as erfc(-y), which does not cancel, near enough for a tolerant value; or None."""
    for k, other in (s.args, s.args[::-1]):
        d = defs.get(k)
        if isinstance(d, Let) and d.op == "erf" and d.dtype is DType.f32 and constant(defs, other) == 1:
            return f"_erfc_near({indexer.operand(d.args[0], axes)} * -1.0)"
    return None


def from_product(k: int, defs: Defs) -> bool:
    """Local k is made of a product of matrices, and carries its rounding."""
    d = defs.get(k)
    if isinstance(d, Let) and d.op in ("mul", "div", "add", "sub", "where", "neg", "copy", "round", "tanh"):
        return any(from_product(a, defs) for a in d.args)
    return isinstance(d, Dot)


def _carried_maximum(k: int, defs: Defs, op: str) -> int | None:
    """The carried maximum of which local k is the value so far ("running") or before this step ("before")."""
    d = defs.get(k)
    factors = linear(defs, k)
    if factors is not None:
        return _carried_maximum(factors[0], defs, op)
    if isinstance(d, Let) and d.op == op:
        r = defs.get(d.args[0])
        return r.out if isinstance(r, Reduce) and r.monoid == "max" else None
    return None


def _where_lowest(k: int, defs: Defs) -> tuple[int, float, int] | None:
    """(m, c, x) when local k is where(m == -inf, c, x)."""
    d = defs.get(k)
    if not isinstance(d, Let) or d.op != "where":
        return None
    test, instead = defs.get(d.args[0]), constant(defs, d.args[1])
    if not isinstance(test, Let) or test.op != "eq" or instead is None:
        return None
    for m, lowest in (test.args, test.args[::-1]):
        if constant(defs, lowest) == -math.inf:
            return m, instead, d.args[2]
    return None


def base_of(k: int, defs: Defs) -> int | None:
    """The carried maximum m when local k is where(m == -inf, finite, m), m so far: never -inf."""
    found = _where_lowest(k, defs)
    if found is None or found[0] != found[2] or not math.isfinite(found[1]):
        return None
    return _carried_maximum(found[0], defs, "running")


def correction_of(k: int, defs: Defs) -> int | None:
    """The carried maximum m when local k is exp(m before - m now), which is 1 where m does not change; 0 below any m."""
    found = _where_lowest(k, defs)
    if found is not None and found[1] == 0 and _carried_maximum(found[0], defs, "before") is not None:
        k = found[2]
    d = defs.get(k)
    t = defs.get(d.args[0]) if isinstance(d, Let) and d.op == "exp" else None
    if not isinstance(t, Let) or t.op != "sub":
        return None
    top = base_of(t.args[1], defs)
    return top if top is not None and _carried_maximum(t.args[0], defs, "before") == top else None
