"""Cascades: several reductions over one axis, each using the earlier ones, computed in one pass over the data.

A Cascade keeps accumulators (slots) while the axis streams by in tiles of any size, and gives every reduction's value as a
formula over them (`lower`). In order of preference a reduction is

    plain     no earlier reduction enters it
    deferral  sum G(x)*H(y) = H(y) * sum G(x): y comes at the end (a norm's scale, the softmax denominator)
    rank      several such terms (layer norm before a linear layer)
    moments   sums of (u(x) - a(y)) and its square, from count, mean and squared deviations: n*(mean - a), M2 + n*(mean - a)^2
    online    y is in an exponent: the accumulator is relative to the running y and rescaled when y moves
    select    one element of the row; its leaves are kept and F is applied at the end

Online form: a tile first moves the extreme m, then multiplies the accumulator by exp(B(m_new) - B(m_old)), then adds its own
terms relative to m_new. Two partial results merge in the same way, each rescaled to the merged m, so a row may be split over
blocks in any shape of tree. While m is still the identity (-inf: nothing but masked elements) the exponent's base is 0 and
the correction 0; a row that ends so gets exp(B(m)) back at the end, and with it the NaN that eager gives.
Only exponents that are greatest where m is attained are taken: then no term is ever above its final size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from plait.ir.dtype import DType
from plait.ir.graph import Graph, Node
from plait.plan.body import Body, Refusal, Refused, Space, bodies_of
from plait.plan.bound import is_bounded
from plait.plan.formula import (
    COUNT,
    ONE,
    ZERO,
    Formula,
    apply,
    const,
    old,
    parts_of,
    product,
    render,
    slot,
    state,
    states_of,
    substitute,
    total,
)
from plait.plan.monoids import MONOIDS
from plait.plan.separable import Splitter, Term, check_split, masked

_MAX_SLOTS_A_STEP = 3
IDENTITY = {"max": -math.inf, "min": math.inf}


@dataclass(frozen=True)
class Slot:
    """One accumulator. `lift`: what an element contributes (a formula for each component of the monoid), in terms of its
    stream and row values and of `state k`, the running results. `correction`: the factor that carries the accumulator from
    `old k` to `state k`, None when it needs none. Belongs to step `step`; varies along the parallel axes `axes`."""

    monoid: str
    lift: tuple[Formula, ...]
    correction: Formula | None
    step: int
    axes: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Step:
    """One reduction. `lower`: its value, of slots, rows, COUNT and the results of earlier steps (`state k`). `split`: for
    sums and extremes, F with stream and state apart, as it was checked. `rank`: how many terms states enter. `may_cancel`:
    terms of one exponent were a sum in the user's program and are accumulated apart, so large ones may cancel late."""

    node: Node
    kind: str
    body: Body
    lower: Formula
    split: Formula | None = None
    rank: int = 0
    may_cancel: bool = False


@dataclass(frozen=True)
class Cascade:
    """Reductions in one pass over `space.stream`, for every point of `space.parallel`."""

    space: Space
    steps: tuple[Step, ...]
    slots: tuple[Slot, ...]

    @property
    def kind(self) -> str:
        """The strongest means that any reduction needs."""
        order = ("online", "rank", "moments", "deferral", "select", "plain")
        return min((s.kind for s in self.steps), key=order.index)

    def leaves(self) -> list[Formula]:
        """The stream and row values that one pass reads."""
        found = parts_of(*(f for s in self.slots for f in s.lift), *(s.lower for s in self.steps))
        return [f for f in found if f.op in ("stream", "row")]


def plan_cascade(graph: Graph, reductions: Sequence[Node], *, numerics: str = "fused") -> Cascade | Refusal:
    """The single pass for reductions (in topological order) over one axis, written over the axes of the one
    with the most (the last of those)."""
    bodies = bodies_of(graph, reductions, numerics)
    if isinstance(bodies, Refusal):
        return bodies
    builder = _Builder(bodies)
    for body in bodies:
        try:
            builder.add(body)
        except Refused as no:
            name = f"{body.monoid} of {_short(body.expr, builder.name)}: {no.refusal.text}"
            return replace(no.refusal, text=name, nodes=no.refusal.nodes or (body.node,), reduction=body.node)
    return builder.done()


def _short(f: Formula, name: Callable[[Formula], str]) -> str:
    return render(f, name, depth=6)


@dataclass
class _Group:
    """Terms with one accumulator: sum over x of `of_stream` * base^power, times `of_state`."""

    of_stream: Formula
    of_state: Formula
    state_masks: tuple[Formula, ...]
    power: Formula | None
    base: str
    extreme: int = -1

    @property
    def raised(self) -> Formula:
        """of_stream * base^power."""
        return self.of_stream if self.power is None else _around(self.of_stream, apply(self.base, self.power))

    @property
    def depends(self) -> bool:
        """Whether states enter at all."""
        return self.of_state.has_state or self.power is not None or any(m.has_state for m in self.state_masks)


class _Builder:
    """A cascade being made, step by step."""

    def __init__(self, bodies: Sequence[Body]) -> None:
        self.bodies, self.space = bodies, bodies[-1].space
        self.steps: list[Step] = []
        self.slots: list[Slot] = []
        self.signs: dict[int, str] = {}

    def name(self, f: Formula) -> str:
        """The word for a leaf."""
        if f.op == "state":
            n = self.bodies[f.value].node
            return f"{n.op}_{n.serial}"
        return str(f.value.name) if f.op in ("stream", "row") else f.op

    def add(self, body: Body) -> None:
        """Plan the next reduction. Raises Refused."""
        splitter = Splitter(self.signs, self.name, body.made.get)
        i = len(self.steps)
        if body.monoid == "select":
            step = self._selected(body)
        elif not body.expr.has_state:
            if body.monoid not in MONOIDS or MONOIDS[body.monoid].width != 1:
                raise Refused("opaque", f"{body.monoid} has no single-pass form here", body.node)
            step = Step(body.node, "plain", body, self._slot(body.monoid, (body.expr,)))
        elif body.monoid == "sum":
            step = self._moments(body, splitter) or self._sum(body, splitter)
        elif body.monoid in IDENTITY:
            step = self._extreme(body, splitter)
        else:
            who = ", ".join(self.name(state(k)) for k in states_of(body.expr))
            raise Refused("separable", f"{who} enters a reduction by {body.monoid}", body.node)
        if step.split is not None:
            wrong = check_split(body.expr, step.split, self.signs)
            if wrong:
                raise Refused("numeric", wrong, body.node)
        sign = "boolean" if body.node.dtype is DType.b1 else splitter.sign(body.expr)
        if sign and body.finish is None:
            self.signs[i] = sign
        if body.finish is not None:
            value = step.lower
            step = replace(step, lower=substitute(body.finish, lambda f: value if f.op == "slot" else None))
        self.steps.append(step)

    def done(self) -> Cascade:
        """The cascade, with a sum that moments hold anyway taken from them, and every slot's axes known."""
        self._share_moments()
        axes: list[frozenset[int]] = []
        of_step: list[frozenset[int]] = []
        for i, step in enumerate(self.steps):
            for s in self.slots:
                if s.step == i:
                    axes.append(self._axes(s.lift, of_step, axes))
            of_step.append(self._axes((step.lower,), of_step, axes))
        return Cascade(self.space, tuple(self.steps), tuple(replace(s, axes=a) for s, a in zip(self.slots, axes)))

    def _axes(
        self, formulas: Iterable[Formula], of_step: Sequence[frozenset[int]], of_slot: Sequence[frozenset[int]]
    ) -> frozenset[int]:
        out: set[int] = set()
        for f in parts_of(*formulas):
            if f.op in ("stream", "row"):
                out |= {a for e in f.value.index for a in e.axes() if a < len(self.space.parallel)}
            elif f.op == "state":
                out |= of_step[f.value]
            elif f.op == "slot":
                out |= of_slot[f.value[0]]
        return frozenset(out)

    # ---------------------------------------------------------------- slots
    def _slot(self, monoid: str, lift: tuple[Formula, ...], correction: Formula | None = None) -> Formula:
        """The (first component of the) slot with this content, made where there is none."""
        for k, s in enumerate(self.slots):
            if (s.monoid, s.lift, s.correction) == (monoid, lift, correction):
                return slot(k)
        self.slots.append(Slot(monoid, lift, correction, len(self.steps)))
        return slot(len(self.slots) - 1)

    def _share_moments(self) -> None:
        """A plain sum of what has moments is count * mean."""
        for k, s in enumerate(self.slots):
            if s.monoid != "sum" or s.correction is not None:
                continue
            twin = next((j for j, t in enumerate(self.slots) if t.monoid == "moments" and t.lift[1] == s.lift[0]), None)
            if twin is None:
                continue
            both = {k: apply("mul", slot(twin, 0), slot(twin, 1))}
            self.slots[twin] = replace(self.slots[twin], step=min(s.step, self.slots[twin].step))
            self._renumber([j for j in range(len(self.slots)) if j != k], both)
            return self._share_moments()
        return None

    def _renumber(self, kept: list[int], instead: Mapping[int, Formula]) -> None:
        kept = sorted(kept, key=lambda j: self.slots[j].step)
        new = {j: i for i, j in enumerate(kept)}

        def moved(f: Formula) -> Formula | None:
            return slot(new[f.value[0]], f.value[1]) if f.op == "slot" else None

        def change(f: Formula) -> Formula | None:
            if f.op == "slot" and f.value[0] in instead:
                return substitute(instead[f.value[0]], moved)
            return moved(f)

        self.slots = [self.slots[j] for j in kept]
        self.steps = [replace(s, lower=substitute(s.lower, change)) for s in self.steps]

    # ---------------------------------------------------------------- reductions that use earlier ones
    def _selected(self, body: Body) -> Step:
        """One element: its stream leaves are summed where it is chosen, and F is applied to them."""
        assert body.chosen is not None
        chosen = body.chosen
        kept = {f: self._slot("sum", (masked((chosen,), f),)) for f in parts_of(body.expr) if f.op == "stream"}
        return Step(body.node, "select", body, substitute(body.expr, kept.get))

    def _moments(self, body: Body, splitter: Splitter) -> Step | None:
        """sum of H(y) * (u(x) + b(y))^p for p = 1, 2, or None when F has no such form."""
        num, den = _factors(body.expr)
        mixed = [f for f in num if not f.is_pure]
        rest = [f for f in num if f.is_pure]
        if any(f.has_stream for f in (*rest, *den)) or not mixed:
            return None
        e, p = mixed[0], len(mixed)
        if p == 1 and e.op == "pow" and e.args[1].op == "const" and e.args[1].value == 2:
            e, p = e.args[0], 2
        if p > 2 or any(f != e for f in mixed[1:]) or e.op not in ("add", "sub"):
            return None
        terms = splitter.terms(e)
        # of products a plain sum will do: it loses no more to cancellation than their own rounding
        if not all(t.is_plain for t in terms) or (p == 1 and _has_products(e)):
            return None
        u = total(t.whole for t in terms if t.whole.has_stream)
        b = total(t.whole for t in terms if not t.whole.has_stream)
        at = self._slot("moments", MONOIDS["moments"].lifted(u)).value[0]
        gap = apply("add", slot(at, 1), b)
        inner = apply("mul", slot(at, 0), gap if p == 1 else apply("mul", gap, gap))
        if p == 2:
            inner = apply("add", slot(at, 2), inner)
        both = apply("add", u, b)
        split = product([*rest, both, *([both] if p == 2 else [])])
        value = apply("mul", product(rest), inner)
        for d in den:
            value, split = apply("div", value, d), apply("div", split, d)
        return Step(body.node, "moments", body, value, split)

    def _extreme(self, body: Body, splitter: Splitter) -> Step:
        """max(g(x) + h(y)) = max g + h; max(g(x) * h(y)) = h * max g for h > 0."""
        terms = splitter.terms(body.expr)
        if all(t.is_plain for t in terms):
            g = total(t.whole for t in terms if t.whole.has_stream)
            h = total(t.whole for t in terms if not t.whole.has_stream)
            return Step(
                body.node,
                "deferral",
                body,
                apply("add", self._slot(body.monoid, (g,)), h),
                apply("add", g, h),
            )
        t = terms[0]
        if len(terms) > 1 or t.masks or t.power is not None:
            raise splitter.refuse(body.expr, f"{_short(body.expr, self.name)} does not split by a sum or a product")
        stateful = [f for f in (*t.num, *t.den) if f.has_state]
        if not all(splitter.sign(f) == "positive" for f in stateful):
            who = ", ".join(_short(f, self.name) for f in stateful)
            raise splitter.refuse(body.expr, f"the factor {who} could be negative, which turns a {body.monoid} around")
        g = t.part(lambda f: not f.has_state, t.coefficient)
        h = t.part(lambda f: f.has_state)
        return Step(
            body.node,
            "deferral",
            body,
            _times(self._slot(body.monoid, (g,)), h),
            _times(g, h),
        )

    def _sum(self, body: Body, splitter: Splitter) -> Step:
        """The sum of separable terms, those with an exponent kept relative to their running extreme."""
        groups = _grouped([self._group(t, splitter) for t in splitter.terms(body.expr)])
        if len(groups) > _MAX_SLOTS_A_STEP:
            raise splitter.refuse(body.expr, f"it takes {len(groups)} accumulators", "rank")
        values: list[Formula] = []
        for g in groups:
            values.append(masked(g.state_masks, _times(self._accumulated(g), g.of_state)))
        rank = sum(g.depends for g in groups)
        online = any(g.power is not None for g in groups)
        kind = "online" if online else "rank" if len(groups) > 1 else "deferral"
        split = total(masked(g.state_masks, _times(g.raised, g.of_state)) for g in groups)
        exponents = [(g.power, g.base) for g in groups]
        may_cancel = rank > 0 and len(set(exponents)) < len(exponents)
        return Step(body.node, kind, body, total(values), split, rank, may_cancel)

    def _group(self, t: Term, splitter: Splitter) -> _Group:
        """One term, its exponent reduced to what must run along."""
        if any(not m.is_pure for m in t.masks):
            raise splitter.refuse(t.whole, f"a mask mixes data with {self.name(state(states_of(t.whole)[0]))}")
        inner = masked(tuple(m for m in t.masks if m.has_stream), t.part(lambda f: f.has_stream))
        outer = t.part(lambda f: not f.has_stream, t.coefficient)
        state_masks = tuple(m for m in t.masks if not m.has_stream)
        if t.power is None:
            self._check_range(t, splitter)
            return _Group(inner, outer, state_masks, None, "exp")
        extreme, power, moved = self._running(t.power, splitter)
        for m in moved:
            outer = _times(outer, _raised(t.base, m))
        # masks go around the power too, as an exponential that is masked out may be infinite
        return _Group(inner, outer, state_masks, power, t.base, extreme)

    def _running(self, power: Formula, splitter: Splitter) -> tuple[int, Formula, list[Term]]:
        """(the extreme that bounds an exponent, what of the exponent runs with it, terms that can wait). Raises Refused."""
        terms = splitter.terms(power)
        extremes = [k for k in states_of(power) if self.bodies[k].monoid in IDENTITY]
        for k in extremes:
            waiting = [t for t in terms if t.whole.has_state and k not in states_of(t.whole)]
            rest = power if not waiting else total(t.whole for t in terms if t not in waiting)
            if is_bounded(rest, k, self.bodies[k], self.signs):
                return k, rest, waiting
        base = f"the exponent {_short(power, self.name)} is bounded by no running maximum"
        raise splitter.refuse(power, base, "range")

    def _check_range(self, t: Term, splitter: Splitter) -> None:
        """A square whose scale by an extreme would be put off may overflow where the scaled one does not."""
        streams = [f for f in t.num if f.has_stream]
        squared = len(set(streams)) < len(streams) or any(f.op == "pow" for f in streams)
        scale = [f for f in t.den if any(self.bodies[k].monoid in IDENTITY for k in states_of(f))]
        if squared and scale:
            who = _short(scale[0], self.name)
            raise splitter.refuse(t.whole, f"without its division by {who} a square may overflow", "range")

    def _accumulated(self, g: _Group) -> Formula:
        """The slot of a group (after what a row of nothing but the identity needs), as a formula."""
        if g.power is None:
            if not g.of_stream.has_stream:
                return _times(COUNT, g.of_stream)
            return self._slot("sum", (g.of_stream,))
        k = g.extreme
        identity = const(IDENTITY[self.bodies[k].monoid])

        def guard(f: Formula) -> Formula | None:
            return apply("where", apply("eq", f, identity), ZERO, f) if f.op == "state" and f.value == k else None

        def before(f: Formula) -> Formula | None:
            return old(f.value) if f.op == "state" else None

        def shifted(to: Formula, back: Formula) -> Formula:
            return apply(g.base, apply("sub", to, back))

        shift = self._state_part(g.power)
        lift = _around(g.of_stream, apply(g.base, substitute(g.power, guard)))
        correction = apply("where", apply("eq", old(k), identity), ZERO, shifted(shift, substitute(shift, before)))
        at = self._slot("sum", (lift,), correction)
        unguarded = apply("mul", at, shifted(shift, substitute(shift, guard)))
        return apply("where", apply("eq", state(k), identity), unguarded, at)

    def _state_part(self, power: Formula) -> Formula:
        splitter = Splitter(self.signs, self.name, lambda f: None)
        return total(t.whole for t in splitter.terms(power) if t.whole.has_state)


def _around(factor: Formula, raised: Formula) -> Formula:
    """factor * raised, with the masks of the factor around both."""
    if factor.op == "where" and factor.args[2] == ZERO:
        return apply("where", factor.args[0], _around(factor.args[1], raised), ZERO)
    return raised if factor is ONE else apply("mul", raised, factor)


def _has_products(f: Formula) -> bool:
    """Whether results of a contraction stream by in it."""
    return any(
        g.op == "stream" and g.value.source is not None and g.value.source.kind == "contract" for g in parts_of(f)
    )


def _times(value: Formula, factor: Formula) -> Formula:
    """value * factor; a quotient's divisor divides the product, as the user's division did."""
    if factor.op == "div":
        return apply("div", apply("mul", value, factor.args[0]), factor.args[1])
    return apply("mul", value, factor)


def _raised(base: str, t: Term) -> Formula:
    """base^t, with exp(log a) = a."""
    if base == "exp" and len(t.num) == 1 and not t.den and not t.masks and t.num[0].op == "log":
        if t.coefficient in (1.0, -1.0):
            a = t.num[0].args[0]
            return a if t.coefficient > 0 else apply("div", ONE, a)
    return apply(base, t.whole)


def _factors(f: Formula) -> tuple[list[Formula], list[Formula]]:
    """(numerator, denominator) of a product, opened as far as stream and state are mixed."""
    if f.is_pure or f.op not in ("mul", "div", "neg"):
        return [f], []
    num, den = _factors(f.args[0])
    if f.op == "neg":
        return [const(-1.0), *num], den
    other = _factors(f.args[1])
    if f.op == "div":
        other = other[1], other[0]
    return num + other[0], den + other[1]


def _grouped(groups: list[_Group]) -> list[_Group]:
    """Terms with one state factor add their stream factors; then those with one stream factor add their state factors."""
    by_state: dict[tuple[object, ...], _Group] = {}
    for g in groups:
        key = (g.of_state, g.state_masks, g.power, g.base)
        found = by_state.get(key)
        if found is None:
            by_state[key] = g
        else:
            found.of_stream = apply("add", found.of_stream, g.of_stream)
    by_stream: dict[tuple[object, ...], _Group] = {}
    for g in by_state.values():
        key = (g.of_stream, g.state_masks, g.power, g.base)
        found = by_stream.get(key)
        if found is None:
            by_stream[key] = g
        else:
            found.of_state = apply("add", found.of_state, g.of_state)
    return list(by_stream.values())
