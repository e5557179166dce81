"""Separability: F(x, y) as a sum of G(x) * H(y) * exp(A(x) + B(y)), by the laws of products, powers and exponentials.

A sum over x of such terms is the sum over terms of H(y) times one accumulator each, because a product distributes over a
sum: y may come late. Where y is in the exponent the accumulator is kept relative to the y known so far and rescaled when y
moves: exp(B(new) - B(old)) is the correction of the online softmax. A maximum is distributed over by a sum in the same way,
and by a positive product.

Everything is structural; what no rule opens is refused, naming the operation in which stream and state meet. A false proof
would be a wrong answer, so each split is also evaluated at random points (see `check_split`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from plait.ir.graph import Node
from plait.plan.body import Refused
from plait.plan.formula import ONE, ZERO, Evaluator, Formula, apply, const, parts_of, product, render

Signs = Mapping[int, str]  # state -> "positive" or "nonnegative", where proven; or "boolean"
_MAX_TERMS = 16
_POINTS, _TRIES = 12, 400


@dataclass(frozen=True)
class Term:
    """coefficient * product(num) / product(den) * base^power where all masks hold, 0 elsewhere. Factors and masks are pure;
    `power`, a mix of both, splits by addition. `base` is "exp" or "exp2"."""

    coefficient: float = 1.0
    num: tuple[Formula, ...] = ()
    den: tuple[Formula, ...] = ()
    masks: tuple[Formula, ...] = ()
    power: Formula | None = None
    base: str = "exp"

    def part(self, keep: Callable[[Formula], bool], coefficient: float = 1.0) -> Formula:
        """The product of the factors to keep, as a formula, without masks and power."""
        size = const(abs(coefficient) if abs(coefficient) == 1.0 else coefficient)
        out = product([size, *filter(keep, self.num)])
        den = [f for f in self.den if keep(f)]
        out = apply("div", out, product(den)) if den else out
        return apply("neg", out) if coefficient == -1.0 else out

    @property
    def whole(self) -> Formula:
        """The term as a formula."""
        out = self.part(lambda f: True, self.coefficient)
        if self.power is not None:
            raised = apply(self.base, self.power)
            out = raised if out is ONE else apply("mul", out, raised)
        return masked(self.masks, out)

    @property
    def is_plain(self) -> bool:
        """Without stream and state mixed."""
        w = self.whole
        return w.is_pure


def masked(masks: tuple[Formula, ...], value: Formula) -> Formula:
    """value where all masks hold, 0 elsewhere."""
    for m in masks:
        value = apply("where", m, value, ZERO)
    return value


class Splitter:
    """Expands formulas into terms. `name` words a leaf, `node_of` finds a sub-expression's node for refusals."""

    def __init__(self, signs: Signs, name: Callable[[Formula], str], node_of: Callable[[Formula], Node | None]) -> None:
        self.signs, self.name, self._node_of = signs, name, node_of
        self._memo: dict[Formula, tuple[Term, ...]] = {}

    def refuse(self, f: Formula, why: str, law: str = "separable") -> Refused:
        """The exception for a sub-expression; `why` follows its text."""
        node = self._node_of(f)
        return Refused(law, why, *([] if node is None else [node]))

    def _mixed(self, f: Formula) -> Refused:
        who = ", ".join(dict.fromkeys(self.name(g) for g in sorted_states(f)))
        return self.refuse(f, f"{who} enters {render(f, self.name)} non-separably")

    # ---------------------------------------------------------------- expansion
    def terms(self, f: Formula) -> tuple[Term, ...]:
        """f as a sum of terms. Raises Refused."""
        found = self._memo.get(f)
        if found is None:
            found = (Term(num=(f,)),) if f.is_pure else self._expand(f)
            if len(found) > _MAX_TERMS:
                raise self.refuse(f, f"{render(f, self.name)} has more than {_MAX_TERMS} terms", "rank")
            self._memo[f] = found
        return found

    def _expand(self, f: Formula) -> tuple[Term, ...]:
        rule = {
            "add": self._sum,
            "sub": self._sum,
            "neg": self._neg,
            "mul": self._mul,
            "div": self._div,
            "reciprocal": self._div,
            "where": self._where,
            "exp": self._exponential,
            "exp2": self._exponential,
            "log": self._log,
            "pow": self._pow,
            "sqrt": self._root,
            "rsqrt": self._root,
            "abs": self._root,
            "maximum": self._clamp,
            "minimum": self._clamp,
        }.get(f.op)
        if f.op == "cast":
            raise self.refuse(f, f"{self._who(f)} is rounded to {f.value!r} together with the data")
        if rule is None:
            raise self._mixed(f)
        return rule(f)

    def _who(self, f: Formula) -> str:
        return ", ".join(dict.fromkeys(self.name(g) for g in sorted_states(f)))

    def _sum(self, f: Formula) -> tuple[Term, ...]:
        sign = -1.0 if f.op == "sub" else 1.0
        return self.terms(f.args[0]) + tuple(scaled(t, sign) for t in self.terms(f.args[1]))

    def _neg(self, f: Formula) -> tuple[Term, ...]:
        return tuple(scaled(t, -1.0) for t in self.terms(f.args[0]))

    def _mul(self, f: Formula) -> tuple[Term, ...]:
        left, right = self.terms(f.args[0]), self.terms(f.args[1])
        if len(left) > 1 and len(right) > 1:
            raise self.refuse(f, f"{render(f, self.name)} expands into terms that cancel", "range")
        return tuple(times(a, b) for a in left for b in right)

    def _div(self, f: Formula) -> tuple[Term, ...]:
        over = f.args[-1]
        below = self._single(over, f)
        above = self.terms(f.args[0]) if f.op == "div" else (Term(),)
        if below.masks:
            raise self._mixed(f)
        return tuple(times(a, inverse(below)) for a in above)

    def _single(self, f: Formula, inside: Formula) -> Term:
        found = self.terms(f)
        if len(found) != 1:
            raise self._mixed(inside)
        return found[0]

    def _where(self, f: Formula) -> tuple[Term, ...]:
        mask, yes, no = f.args
        if not mask.is_pure:
            raise self._mixed(mask)
        opposite = apply("bit_not", mask)
        return tuple(
            replace(t, masks=(*t.masks, m))
            for m, branch in ((mask, yes), (opposite, no))
            if not (branch.op == "const" and branch.value == 0)
            for t in self.terms(branch)
        )

    def _exponential(self, f: Formula) -> tuple[Term, ...]:
        arg = f.args[0]
        if arg.op == "where" and arg.args[0].is_pure:
            mask, yes, no = arg.args
            return self._where(apply("where", mask, apply(f.op, yes), apply(f.op, no)))
        if any(not t.is_plain for t in self.terms(arg)):
            raise self._mixed(f)
        return (Term(power=arg, base=f.op),)

    def _log(self, f: Formula) -> tuple[Term, ...]:
        t = self._single(f.args[0], f)
        if t.masks or t.coefficient <= 0 or not all(self.sign(x) == "positive" for x in (*t.num, *t.den)):
            raise self._mixed(f)
        parts = [Term(num=(apply("log", x),)) for x in t.num] + [
            scaled(Term(num=(apply("log", x),)), -1.0) for x in t.den
        ]
        if t.coefficient != 1.0:
            parts.append(Term(num=(const(math.log(t.coefficient)),)))
        if t.power is not None:
            parts += [scaled(p, 1.0 if t.base == "exp" else math.log(2.0)) for p in self.terms(t.power)]
        return tuple(parts)

    def _pow(self, f: Formula) -> tuple[Term, ...]:
        base, exponent = f.args
        if exponent.op != "const":
            raise self._mixed(f)
        n = float(exponent.value)
        if len(self.terms(base)) > 1:
            raise self.refuse(f, f"{render(f, self.name)} expands into terms that cancel", "range")
        t = self._single(base, f)
        whole = n == int(n) and n > 0
        if not whole and not self._all_positive(t):
            raise self._mixed(f)
        raised = tuple(apply("pow", x, exponent) for x in t.num), tuple(apply("pow", x, exponent) for x in t.den)
        power = None if t.power is None else apply("mul", const(n), t.power)
        return (Term(t.coefficient**n, *raised, t.masks if n > 0 else (), power, t.base),)

    def _root(self, f: Formula) -> tuple[Term, ...]:
        t = self._single(f.args[0], f)
        if f.op != "abs" and not self._all_positive(t):
            raise self._mixed(f)
        inner = "abs" if f.op == "abs" else "sqrt"
        num, den = tuple(apply(inner, x) for x in t.num), tuple(apply(inner, x) for x in t.den)
        size = abs(t.coefficient) if f.op == "abs" else math.sqrt(t.coefficient)
        half = t.power if t.power is None or f.op == "abs" else apply("mul", const(0.5), t.power)
        out = Term(size, num, den, t.masks, half, t.base)
        return (inverse(out) if f.op == "rsqrt" else out,)

    def _all_positive(self, t: Term) -> bool:
        """Then roots of the product are products of the roots."""
        mixed = [*t.num, *t.den]
        return t.coefficient > 0 and not t.masks and all(self.sign(x) == "positive" for x in mixed if x.has_state)

    def _clamp(self, f: Formula) -> tuple[Term, ...]:
        """max(h*g, 0) = h*max(g, 0) for h > 0."""
        side = next((k for k in (0, 1) if f.args[k].op == "const" and f.args[k].value == 0), None)
        if side is None:
            raise self._mixed(f)
        t = self._single(f.args[1 - side], f)
        above, below = [x for x in t.num if x.has_state], [x for x in t.den if x.has_state]
        if t.masks or t.power is not None or not all(self.sign(x) == "positive" for x in (*above, *below)):
            raise self._mixed(f)
        rest = apply(f.op, t.part(lambda x: not x.has_state, t.coefficient), ZERO)
        return (Term(1.0, (rest, *above), tuple(below)),)

    # ---------------------------------------------------------------- signs
    def sign(self, f: Formula) -> str:
        """ "positive", "nonnegative" (NaN apart), or "" when neither is proven."""
        args = (
            [self.sign(a) for a in f.args]
            if f.op in ("add", "mul", "div", "maximum", "minimum", "where", "sqrt")
            else []
        )
        if f.op == "const":
            return "" if f.value != f.value or f.value < 0 else "positive" if f.value > 0 else "nonnegative"
        if f.op == "state":
            found = self.signs.get(f.value, "")
            return "" if found == "boolean" else found
        if f.op in ("exp", "exp2", "sigmoid"):
            return "positive"
        if f.op == "rsqrt":
            return "positive"
        if f.op == "mul" and f.args[0] == f.args[1]:
            return args[0] or "nonnegative"
        if f.op in ("mul", "div", "minimum", "where"):
            pair = args[-2:]
            return "" if "" in pair else "positive" if pair == ["positive"] * 2 else "nonnegative"
        if f.op == "add":
            return "" if "" in args else "positive" if "positive" in args else "nonnegative"
        if f.op == "maximum":
            return "positive" if "positive" in args else "nonnegative" if "nonnegative" in args else ""
        if f.op == "sqrt":
            return "positive" if args[0] == "positive" else "nonnegative"
        if f.op == "pow" and f.args[1].op == "const" and f.args[1].value % 2 == 0:
            return self.sign(f.args[0]) or "nonnegative"
        return "nonnegative" if f.op == "abs" or (f.op == "cast" and f.args[0].op in ("eq", "ne", "lt")) else ""


# --------------------------------------------------------------------------------------------------- arithmetic of terms
def scaled(t: Term, by: float) -> Term:
    """by * t."""
    return replace(t, coefficient=t.coefficient * by)


def times(a: Term, b: Term) -> Term:
    """a * b."""
    power, base = a.power, a.base
    if power is None:
        power, base = b.power, b.base
    elif b.power is not None:
        x, y = (
            p if k == a.base else apply("mul", const(math.log(2.0)), p) for p, k in ((power, a.base), (b.power, b.base))
        )
        if a.base == "exp2" and b.base == "exp":
            x, y, base = apply("mul", const(math.log(2.0)), power), b.power, "exp"
        power = apply("add", x, y)
    return Term(a.coefficient * b.coefficient, a.num + b.num, a.den + b.den, a.masks + b.masks, power, base)


def inverse(t: Term) -> Term:
    """1 / t, for a term without masks."""
    power = None if t.power is None else apply("neg", t.power)
    return Term(1.0 / t.coefficient, t.den, t.num, (), power, t.base)


def sorted_states(f: Formula) -> list[Formula]:
    """The state leaves of f, by number."""
    return sorted({g for g in parts_of(f) if g.op == "state"}, key=lambda g: int(g.value))


# ------------------------------------------------------------------------------------------------------- numeric check
def draw_leaf(f: Formula, rng: random.Random, scale: float, signs: Signs) -> Any:
    """A random value for a leaf: of its type, negative and large ones included; states keep their proven signs."""
    sign = signs.get(f.value, "") if f.op == "state" else ""
    if sign == "boolean":
        return rng.random() < 0.5
    if f.op in ("stream", "row"):
        dtype = f.value.dtype
        if dtype.value == "bool":
            return rng.random() < 0.6
        if not dtype.is_float:
            return rng.randrange(-4, 9)
    return (1.0 if sign else rng.choice((1.0, 1.0, 1.0, -1.0))) * rng.uniform(0.05, 1.0) * scale


def check_split(whole: Formula, split: Formula, signs: Signs, seed: int = 0) -> str | None:
    """None when both agree in float64 at enough random points, else what was wrong."""
    rng = random.Random(seed)
    good = 0
    leaves = [g for g in parts_of(whole, split) if g.op in ("stream", "row", "state", "count")]
    leaves.sort(key=lambda g: (g.op, str(g.value)))
    for attempt in range(_TRIES):
        scale = (1.0, 4.0, 0.1, 30.0, 1e4)[attempt % 5]
        env = {g: draw_leaf(g, rng, scale, signs) for g in leaves}
        value, other = Evaluator(env.__getitem__)(whole), Evaluator(env.__getitem__)(split)
        if isinstance(value, float) and not math.isfinite(value):
            continue
        # terms may cancel, so the yardstick is the largest intermediate
        size = max([abs(float(value)), *_sizes(split, env)])
        if math.isfinite(float(other)) and abs(float(other) - float(value)) <= 1e-9 * size + 1e-300:
            good += 1
        elif scale <= 4.0:
            return f"numeric check failed at scale {scale:g}: {value!r} against {other!r}"
        if good >= _POINTS:
            return None
    return "numeric check found too few finite points"


def _sizes(f: Formula, env: Mapping[Formula, Any]) -> list[float]:
    evaluate = Evaluator(env.__getitem__)
    out = [0.0]
    stack = [f]
    while stack:
        g = stack.pop()
        if g.op in ("add", "sub", "neg", "where"):
            v = evaluate(g)
            if isinstance(v, float) and math.isfinite(v):
                out.append(abs(v))
            stack.extend(g.args[-2:])
        elif g.op in ("mul", "div"):
            v = evaluate(g)
            if isinstance(v, float) and math.isfinite(v):
                out.append(abs(v))
    return out
