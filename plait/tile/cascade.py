"""Cascades of reductions over one axis, on flat statements: what lets several of them share one sweep.

Deferral. A factor that does not vary along the reduced dims leaves the sum: sum(x * r) = sum(x) * r. Done where the factor
hangs on a reduction over those dims itself, which the sum would have to wait for: softmax's division leaves the product
with V, a norm's scale leaves the product with its weights. A constant leaves a product's factor in any case.

Online correction. A sum of terms exp(t - m) * u, m being a maximum over the same dims, is taken relative to the running
maximum, and what was added up is multiplied by exp(m_before - m_now) whenever the maximum moves. A maximum of -inf
counts as 0 there, because no term below it is more than 0 and inf - inf is no number.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plait.ir.dtype import DType
from plait.tile.flat import Flat
from plait.tile.program import Check, Dot, Let, Load, Reduce, Scan, Stmt, Store, operands

Def = Let | Load | Reduce | Scan


class Values:
    """The locals of flat statements and what lies under them."""

    def __init__(self, stmts: Iterable[Stmt]) -> None:
        self.defs: dict[int, Def] = {s.out: s for s in stmts if isinstance(s, Let | Load | Reduce | Scan)}
        self._under: dict[int, frozenset[int]] = {}

    def under(self, v: int) -> frozenset[int]:
        """v and all locals it is made of."""
        found = self._under.get(v)
        if found is None:
            found = frozenset({v}).union(*(self.under(a) for a in operands(self.defs[v])))
            self._under[v] = found
        return found

    def forget(self) -> None:
        """After a definition has changed."""
        self._under.clear()

    def reductions_over(self, v: int, dims: frozenset[int]) -> bool:
        """Whether v hangs on a reduction over some of `dims`."""
        return any(isinstance(d := self.defs[x], Reduce) and dims & set(d.dims) for x in self.under(v))


# ------------------------------------------------------------------------------------------------------------ deferral
def defer(flat: Flat) -> Flat:
    """The same statements with such factors behind their sums."""
    return _Deferral(flat).run()


Factors = list[tuple[str, int]]  # ("mul" | "div", local), to be applied in order


class _Deferral:
    def __init__(self, flat: Flat) -> None:
        self.flat, self.values = flat, Values(flat.stmts)
        self.count = max(self.values.defs, default=-1) + 1
        self.uses = _uses(flat.stmts)
        self.out: list[Stmt] = []

    def run(self) -> Flat:
        for s in self.flat.stmts:
            if isinstance(s, Reduce) and s.monoid in ("sum", "dot") and s.dtype.is_float:
                self.sum(s)
            else:
                self.out.append(s)
        return replace(self.flat, stmts=tuple(self.out))

    def sum(self, s: Reduce) -> None:
        if not self.split(s):
            self.simple(s)

    def split(self, s: Reduce) -> bool:
        """A sum of terms with different factors as sums of the terms, each with its own: sum(a*r + b*t) for r and t that
        either have to be waited for."""
        d = self.values.defs[s.arg]
        dims = frozenset(s.dims)
        if not isinstance(d, Let) or d.op not in ("add", "sub") or not all(self.has_factors(a, dims) for a in d.args):
            return False
        parts = [replace(s, out=self.fresh(), arg=a) for a in d.args]
        for bare in parts:
            part = replace(bare, span=self.sum_span(bare))
            self.values.defs[part.out] = part
            self.sum(part)
        self.put(Let(s.out, d.op, (parts[0].out, parts[1].out), s.dtype, s.span))
        self.values.forget()
        return True

    def has_factors(self, v: int, dims: frozenset[int]) -> bool:
        """Whether `peel` would find something."""
        d = self.values.defs[v]
        if not isinstance(d, Let) or d.op not in ("mul", "div"):
            return False
        if self.waits(d.args[1], dims) or (d.op == "mul" and self.waits(d.args[0], dims)):
            return True
        return self.has_factors(d.args[0], dims) or (d.op == "mul" and self.has_factors(d.args[1], dims))

    def sum_span(self, s: Reduce) -> tuple[int, ...]:
        sides = [s.arg, *([s.other] if isinstance(s, Dot) else [])]
        return tuple(sorted({d for v in sides for d in self.span(v)} - set(s.dims)))

    def simple(self, s: Reduce) -> None:
        dims = frozenset(s.dims)
        mark, count = len(self.out), self.count
        arg, factors = self.peel(s.arg, dims)
        bare: Reduce = replace(s, arg=arg)
        if isinstance(bare, Dot):
            other, more = self.peel(bare.other, dims)
            (arg, c), (other, d) = (self.constants(v, s) for v in (bare.arg, other))
            bare, factors = replace(bare, arg=arg, other=other), [*factors, *more, *c, *d]
        sides = [bare.arg, *([bare.other] if isinstance(bare, Dot) else [])]
        left = {d for v in sides for d in self.values.defs[v].span}
        if not factors or not dims <= left or set(s.span) != (left - dims).union(*(self.span(v) for _, v in factors)):
            # nothing to take out, or nothing would be left that varies along the sum
            del self.out[mark:]
            self.count = count
            self.out.append(s)
            return
        result = self.put(replace(bare, out=self.fresh(), span=tuple(sorted(left - dims))))
        for number, (op, v) in enumerate(factors):
            out = s.out if number == len(factors) - 1 else self.fresh()
            span = tuple(sorted({*self.span(result), *self.span(v)}))
            result = self.put(Let(out, op, (result, v), s.dtype, span))
        self.values.forget()

    def peel(self, v: int, dims: frozenset[int]) -> tuple[int, Factors]:
        """(what is left of a product, factors to apply after a sum over `dims`)."""
        d = self.values.defs[v]
        if not isinstance(d, Let) or d.op not in ("mul", "div") or not d.dtype.is_float:
            return v, []
        a, b = d.args
        if self.waits(b, dims):
            rest, factors = self.peel(a, dims)
            return rest, [*factors, (d.op, b)]
        if d.op == "mul" and self.waits(a, dims):
            rest, factors = self.peel(b, dims)
            return rest, [*factors, ("mul", a)]
        left, factors = self.peel(a, dims)
        right, more = self.peel(b, dims) if d.op == "mul" else (b, [])
        if not factors and not more:
            return v, []
        span = tuple(sorted({*self.span(left), *self.span(right)}))
        return self.put(Let(self.fresh(), d.op, (left, right), d.dtype, span)), [*factors, *more]

    def constants(self, v: int, s: Reduce) -> tuple[int, Factors]:
        """(what is left, constants to apply after the sum) of a product's factor that nothing else needs: one operation for
        every point of the result, once, instead of one for every point of the factor in every step. The type of the operands
        must have room for what is not scaled yet."""
        d = self.values.defs[v]
        if not isinstance(d, Let) or d.op not in ("mul", "div") or d.dtype is not s.dtype:
            return v, []
        if self.narrow(s) or self.uses[v] > 1:
            return v, []
        for x, c in (d.args, d.args[::-1])[: 2 if d.op == "mul" else 1]:
            value = _constant(self.values, c)
            if value is not None and 2.0**-24 <= abs(value) <= 2.0**24:
                rest, factors = self.constants(x, s)
                return rest, [*factors, (d.op, c)]
        return v, []

    def narrow(self, s: Reduce) -> bool:
        """The operands' type has a smaller range than the sum's."""
        return isinstance(s, Dot) and s.operand not in (DType.bf16, DType.f32, DType.f64)

    def waits(self, v: int, dims: frozenset[int]) -> bool:
        """Steady along the dims, and known only after a reduction over them."""
        return not dims & set(self.span(v)) and self.values.reductions_over(v, dims)

    def span(self, v: int) -> tuple[int, ...]:
        return self.values.defs[v].span

    def fresh(self) -> int:
        self.count += 1
        return self.count - 1

    def put(self, s: Let | Reduce) -> int:
        self.out.append(s)
        self.values.defs[s.out] = s
        return s.out


def _uses(stmts: Sequence[Stmt]) -> collections.Counter[int]:
    """How many statements that lead to a store or a check read each local."""
    out = collections.Counter[int]()
    for s in reversed(stmts):
        if isinstance(s, Store | Check) or out[s.out]:  # type: ignore[union-attr]
            out.update(set(operands(s)))
    return out


# --------------------------------------------------------------------------------------------------- online correction
@dataclass(frozen=True)
class Follows:
    """A sum or dot whose terms have one factor op(t - anchor), `anchor` being the maximum or, where that is infinite,
    perhaps a constant: it may be taken relative to the running maximum."""

    op: str
    anchor: int


def follows(values: Values, s: Stmt, maximum: Stmt) -> Follows | None:
    """Whether, and how, `s` may share the pass of `maximum`."""
    if not (isinstance(s, Reduce) and isinstance(maximum, Reduce)):
        return None
    if s.monoid not in ("sum", "dot") or maximum.monoid != "max" or s.dims != maximum.dims:
        return None
    if s.dtype is not maximum.dtype or not s.dtype.is_float:
        return None
    sides = [s.arg, *([s.other] if isinstance(s, Dot) else [])]
    hanging = [v for v in sides if maximum.out in values.under(v)]
    return _factor(values, hanging[0], maximum) if len(hanging) == 1 else None


def _factor(values: Values, v: int, maximum: Reduce) -> Follows | None:
    """The factor by which v hangs on the maximum, when v is a product with one such factor."""
    d, m = values.defs[v], maximum.out
    if not isinstance(d, Let):
        return None
    hanging = [a for a in d.args if m in values.under(a)]
    if len(hanging) != 1:
        return None
    if d.op in ("exp", "exp2"):
        found = _anchor(values, d.args[0], maximum)
        return None if found is None or found[0] != -1 else Follows(d.op, found[1])
    if d.op == "mul" or (d.op == "div" and hanging[0] == d.args[0]):
        return _factor(values, hanging[0], maximum)
    if d.op == "where" and hanging[0] != d.args[0]:
        rest = d.args[2] if hanging[0] == d.args[1] else d.args[1]
        return _factor(values, hanging[0], maximum) if _constant(values, rest) == 0 else None
    return None


def _anchor(values: Values, v: int, maximum: Reduce) -> tuple[int, int] | None:
    """(sign, anchor) of an exponent that is a sum of one anchor and of what does not hang on the maximum."""
    d = values.defs[v]
    if not set(maximum.dims) & set(d.span):
        return (1, v) if _is_anchored(values, v, maximum.out) else None
    if not isinstance(d, Let) or d.op not in ("add", "sub", "neg"):
        return None
    hanging = [k for k, a in enumerate(d.args) if maximum.out in values.under(a)]
    if len(hanging) != 1:
        return None
    found = _anchor(values, d.args[hanging[0]], maximum)
    turned = d.op == "neg" or (d.op == "sub" and hanging[0] == 1)
    return None if found is None else (-found[0] if turned else found[0], found[1])


def _is_anchored(values: Values, v: int, m: int) -> bool:
    """The maximum itself, the greater of it and something steady, or a choice between it and constants."""
    d = values.defs[v]
    if v == m:
        return True
    if isinstance(d, Let) and d.op == "maximum":
        hanging = [a for a in d.args if m in values.under(a)]
        return len(hanging) == 1 and _is_anchored(values, hanging[0], m)
    if not isinstance(d, Let) or d.op != "where":
        return False
    branches = d.args[1:]
    return all(_constant(values, b) is not None or _is_anchored(values, b, m) for b in branches)


def _constant(values: Values, v: int) -> Any:
    d = values.defs[v]
    return d.attr("value") if isinstance(d, Let) and d.op == "const" else None


def running_base(maximum: Reduce, fresh: Sequence[int]) -> list[Let]:
    """After the step of a maximum that sums follow: its running value with -inf as 0 (the last of these statements).
    `fresh`: five new locals."""
    now, bottom, empty, zero, base = fresh
    span, d = maximum.span, maximum.dtype
    return [
        Let(now, "running", (maximum.out,), d, span),
        Let(bottom, "const", (), d, (), (("value", float("-inf")),)),
        Let(empty, "eq", (now, bottom), DType.b1, span),
        Let(zero, "const", (), d, (), (("value", 0.0),)),
        Let(base, "where", (empty, zero, now), d, span),
    ]


def correction(op: str, maximum: Reduce, before: int, anchors: tuple[int, int], fresh: Sequence[int]) -> list[Let]:
    """The factor (the last of these statements) for what was added up relative to anchors[0], now that the anchor is
    anchors[1]: 0 where the maximum `before` was -inf, for nothing was added up then. `fresh`: six new locals."""
    bottom, empty, zero, less, moved, factor = fresh
    span, d = maximum.span, maximum.dtype
    return [
        Let(bottom, "const", (), d, (), (("value", float("-inf")),)),
        Let(empty, "eq", (before, bottom), DType.b1, span),
        Let(zero, "const", (), d, (), (("value", 0.0),)),
        Let(less, "sub", anchors, d, span),
        Let(moved, op, (less,), d, span),
        Let(factor, "where", (empty, zero, moved), d, span),
    ]
