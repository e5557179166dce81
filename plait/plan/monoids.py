"""Verified tuple monoids: what an accumulator can be, as formulas that an emitter can write out.

Each has an identity, a lift of one element (variable `x`, and `n`, its index), an associative and commutative merge of two
accumulators (variables `a0, a1 …` and `b0, b1 …`), and `lower`: named results over the accumulator (variables `a0 …`).
The tests hold each to the laws, on values with infinities.

`moments` are count, mean and sum of squared deviations; two sets merge by the parallel variance update: the mean moves by
the share of the newcomers, and the sum of squares grows by delta^2 * na * nb / n. `logsumexp` is a maximum and the sum of
exponentials relative to it, each side rescaled to the common maximum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.plan.formula import MINUS_INFINITY, ONE, ZERO, Evaluator, Formula, apply, const, substitute, var


@dataclass(frozen=True)
class Monoid:
    """One kind of accumulator; see the module's docstring."""

    name: str
    identity: tuple[Formula, ...]
    lift: tuple[Formula, ...]
    merge: tuple[Formula, ...]
    lower: Mapping[str, Formula]

    @property
    def width(self) -> int:
        """How many numbers an accumulator is."""
        return len(self.identity)

    def lifted(self, x: Formula) -> tuple[Formula, ...]:
        """The lift of an expression."""
        return tuple(substitute(f, lambda v: x if v.value == "x" else None) for f in self.lift)

    def start(self) -> tuple[Any, ...]:
        """The identity as numbers."""
        return tuple(f.value for f in self.identity)

    def merged(self, a: Sequence[Any], b: Sequence[Any]) -> tuple[Any, ...]:
        """Two accumulators merged, in double precision."""
        env = {var(f"a{i}"): x for i, x in enumerate(a)} | {var(f"b{i}"): x for i, x in enumerate(b)}
        evaluate = Evaluator(env.__getitem__)
        return tuple(evaluate(f) for f in self.merge)

    def of(self, x: float, n: int = 0) -> tuple[Any, ...]:
        """One element's accumulator, in double precision."""
        evaluate = Evaluator({var("x"): x, var("n"): n}.__getitem__)
        return tuple(evaluate(f) for f in self.lift)

    def result(self, a: Sequence[Any], name: str) -> Any:
        """A named result, in double precision."""
        return Evaluator({var(f"a{i}"): x for i, x in enumerate(a)}.__getitem__)(self.lower[name])


A = tuple(var(f"a{i}") for i in range(3))
B = tuple(var(f"b{i}") for i in range(3))
X, N = var("x"), var("n")


def _simple(name: str, op: str, identity: Any) -> Monoid:
    return Monoid(name, (const(identity),), (X,), (apply(op, A[0], B[0]),), {"value": A[0]})


def _choose(condition: Formula, yes: Formula, no: Formula) -> Formula:
    return apply("where", condition, yes, no)


def _moments() -> Monoid:
    n = apply("add", A[0], B[0])
    share = apply("div", B[0], n)
    delta = apply("sub", B[1], A[1])
    mean = apply("add", A[1], apply("mul", delta, share))
    growth = apply("mul", apply("mul", delta, delta), apply("mul", A[0], share))
    squares = apply("add", apply("add", A[2], B[2]), growth)
    # an empty side is passed over: its mean means nothing, and 0 * infinity would be NaN
    a_empty, b_empty = apply("eq", A[0], ZERO), apply("eq", B[0], ZERO)
    merge = (n, *(_choose(a_empty, B[i], _choose(b_empty, A[i], f)) for i, f in ((1, mean), (2, squares))))
    lower = {
        "count": A[0],
        "mean": A[1],
        "squares": A[2],
        "sum": apply("mul", A[0], A[1]),
        "variance": apply("div", A[2], A[0]),
    }
    return Monoid("moments", (ZERO, ZERO, ZERO), (ONE, X, ZERO), merge, lower)


def rescale(before: Formula, after: Formula) -> Formula:
    """exp(before - after) for before <= after, 1 where both are one infinity: an empty side (-inf) weighs nothing."""
    return _choose(apply("eq", before, after), ONE, apply("exp", apply("sub", before, after)))


def _summed(top: Formula) -> Formula:
    return apply("add", apply("mul", A[1], rescale(A[0], top)), apply("mul", B[1], rescale(B[0], top)))


# an element of -inf adds nothing to a sum of exponentials
_WEIGHT = _choose(apply("eq", X, MINUS_INFINITY), ZERO, ONE)


def _logsumexp() -> Monoid:
    top = apply("maximum", A[0], B[0])
    lower = {"max": A[0], "sum": A[1], "value": apply("add", A[0], apply("log", A[1]))}
    return Monoid("logsumexp", (MINUS_INFINITY, ZERO), (X, _WEIGHT), (top, _summed(top)), lower)


def _b_wins(index_a: Formula, index_b: Formula) -> Formula:
    """Whether b's extreme is the one to keep: greater, or NaN, or equal and earlier."""
    earlier = apply("lt", index_b, index_a)
    nan_a, nan_b = apply("isnan", A[0]), apply("isnan", B[0])
    greater = apply("bit_or", apply("gt", B[0], A[0]), apply("bit_and", apply("eq", B[0], A[0]), earlier))
    return _choose(nan_b, _choose(nan_a, earlier, const(True)), _choose(nan_a, const(False), greater))


def _argmax() -> Monoid:
    wins = _b_wins(A[1], B[1])
    merge = (apply("maximum", A[0], B[0]), _choose(wins, B[1], A[1]))
    return Monoid("argmax", (MINUS_INFINITY, const(math.inf)), (X, N), merge, {"value": A[0], "index": A[1]})


def _logsumexp_argmax() -> Monoid:
    base = _logsumexp()
    wins = _b_wins(A[2], B[2])
    return Monoid(
        "logsumexp_argmax",
        (*base.identity, const(math.inf)),
        (*base.lift, N),
        (*base.merge, _choose(wins, B[2], A[2])),
        {**base.lower, "index": A[2]},
    )


MONOIDS: dict[str, Monoid] = {
    m.name: m
    for m in (
        _simple("sum", "add", 0.0),
        _simple("prod", "mul", 1.0),
        _simple("max", "maximum", -math.inf),
        _simple("min", "minimum", math.inf),
        _simple("any", "bit_or", False),
        _simple("all", "bit_and", True),
        _moments(),
        _logsumexp(),
        _argmax(),
        _logsumexp_argmax(),
    )
}
"""Every accumulator by name."""
