"""Index algebra against brute force: A1 (bounds are sound) and A2 (simplification keeps the value at every point)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from plait.ir import index as ix
from plait.ir.graph import identity
from plait.ir.index import Atom, Expr, Facts
from plait.ir.parse import parse_expr
from plait.ir.text import print_expr

Env = dict[Atom, int]
Meaning = Callable[[Env], int]


@dataclass(frozen=True)
class World:
    """Axes with small extents (some of them symbolic), and symbols with small ranges."""

    facts: Facts
    symbols: dict[str, tuple[int, int]]

    def points(self) -> Iterator[Env]:
        names = sorted(self.symbols)
        for sizes in itertools.product(*(range(lo, hi + 1) for lo, hi in (self.symbols[n] for n in names))):
            env = {Atom.make("sym", n): v for n, v in zip(names, sizes, strict=True)}
            leaves = [ix.axis_atom(i) for i in range(len(self.facts.axes))]
            leaves += [Atom.make("value", k) for k in self.facts.values]
            extents = [*self.facts.axes, *self.facts.values.values()]
            for place in itertools.product(*(range(e.evaluate(env)) for e in extents)):
                yield {**env, **dict(zip(leaves, place, strict=True))}


@st.composite
def worlds(draw: st.DrawFn) -> World:
    names = draw(st.sampled_from([(), ("s0",), ("s0", "s1")]))
    symbols = {n: draw(st.sampled_from([(0, 2), (1, 3), (2, 4), (2, 2)])) for n in names}
    sizes = [ix.const(k) for k in (1, 2, 3, 4, 6)] + [ix.sym(n) for n in names] + [ix.sym(n) * 2 for n in names]
    axes = tuple(draw(st.sampled_from(sizes)) for _ in range(draw(st.integers(1, 3))))
    values = {5: draw(st.sampled_from(sizes))} if draw(st.booleans()) else {}
    # half of the time the upper bounds are unknown, as they mostly are in programs
    bounded = draw(st.booleans())
    known = {n: (lo, hi if bounded else None) for n, (lo, hi) in symbols.items()}
    return World(Facts(axes, known, values), symbols)


@st.composite
def exprs(draw: st.DrawFn, world: World, depth: int = 4) -> tuple[Expr, Meaning]:
    """An expression built by the library under the world's facts, and what it means."""
    kind = draw(st.sampled_from(["leaf", "leaf", "add", "sub", "scale", "times", "div", "mod", "div", "mod"]))
    if depth == 0 or kind == "leaf":
        leaves: list[Expr] = [ix.axis(i) for i in range(len(world.facts.axes))]
        leaves += [ix.sym(n) for n in world.symbols] + [ix.value(k) for k in world.facts.values]
        leaf = draw(st.sampled_from(leaves) | st.integers(-3, 7).map(ix.const))
        return leaf, leaf.evaluate
    a, fa = draw(exprs(world, depth - 1))
    if kind == "scale":
        k = draw(st.integers(-4, 6))
        return a * k, lambda env: fa(env) * k
    if kind in ("div", "mod"):
        d = draw(divisors(world))
        if kind == "div":
            return ix.floordiv(a, d, world.facts), lambda env: fa(env) // d.evaluate(env)
        return ix.mod(a, d, world.facts), lambda env: fa(env) % d.evaluate(env)
    b, fb = draw(exprs(world, depth - 1))
    if kind == "add":
        return a + b, lambda env: fa(env) + fb(env)
    if kind == "sub":
        return a - b, lambda env: fa(env) - fb(env)
    return a * b, lambda env: fa(env) * fb(env)


def divisors(world: World) -> st.SearchStrategy[Expr]:
    """Positive sizes: constants, symbols that are at least 1, and products of those."""
    plain = [ix.const(k) for k in (1, 2, 3, 4, 6, 8, 12)]
    positive = [ix.sym(n) for n, (lo, _) in world.symbols.items() if lo >= 1]
    return st.sampled_from(plain + [s * k for s in positive for k in (1, 2, 3)] + [s + 1 for s in positive])


@st.composite
def cases(draw: st.DrawFn) -> tuple[World, Expr, Meaning]:
    world = draw(worlds())
    e, meaning = draw(exprs(world))
    return world, e, meaning


@given(cases())
def test_building_keeps_the_value(case: tuple[World, Expr, Meaning]) -> None:
    world, e, meaning = case
    for env in world.points():
        assert e.evaluate(env) == meaning(env), (e, env, world)


@given(cases())
def test_bounds_are_sound(case: tuple[World, Expr, Meaning]) -> None:
    world, e, _ = case
    low, high = world.facts.lower(e), world.facts.upper(e)
    nonneg, in_range = world.facts.is_nonneg(e), world.facts.in_range(e, ix.const(5))
    for bound in (low, high):
        assert bound is None or not (bound.axes() or bound.values())
    for env in world.points():
        v = e.evaluate(env)
        assert low is None or low.evaluate(env) <= v, (e, low, env, world)
        assert high is None or v <= high.evaluate(env), (e, high, env, world)
        assert not nonneg or v >= 0, (e, env, world)
        assert not in_range or 0 <= v < 5, (e, env, world)


@given(cases(), st.data())
def test_substitution_commutes_with_evaluation(case: tuple[World, Expr, Meaning], data: st.DataObject) -> None:
    """The old axes become expressions in the axes of a new world, whose facts simplify the result."""
    world, e, _ = case
    new = World(Facts(data.draw(worlds()).facts.axes, world.facts.symbols), world.symbols)
    if not all(x.symbols() <= world.symbols.keys() for x in new.facts.axes):
        return
    env_exprs: dict[Atom, Expr] = {}
    for a in sorted(e.leaves(), key=lambda a: a.key):
        if a.kind in ("axis", "value"):
            inner, _ = data.draw(exprs(World(Facts(new.facts.axes, new.facts.symbols), new.symbols), 2))
            env_exprs[a] = inner
    out = e.substitute(env_exprs, new.facts)
    for env in new.points():
        inner_env = {**env, **{a: x.evaluate(env) for a, x in env_exprs.items()}}
        assert out.evaluate(env) == e.evaluate(inner_env), (e, env_exprs, out, env, new)


@given(cases())
def test_canonical_form_survives_text(case: tuple[World, Expr, Meaning]) -> None:
    _, e, _ = case
    assert parse_expr(print_expr(e)) is e


@given(worlds(), st.data())
def test_unflatten_inverts_flatten(world: World, data: st.DataObject) -> None:
    shape = world.facts.axes
    index = identity(shape)
    linear = ix.flatten(index, shape)
    back = ix.unflatten(linear, shape, world.facts)
    for i, e in zip(index, back, strict=True):
        for env in world.points():
            assert e.evaluate(env) == i.evaluate(env), (shape, back)
        if not any(x.symbols() for x in shape):
            # with known sizes the round trip is seen through completely
            assert e is i


@given(worlds(), worlds())
def test_reshape_maps_are_inverse(old: World, new: World) -> None:
    """Walking one shape row by row and reading the other visits the same linear positions."""
    shape, other = old.facts.axes, new.facts.axes
    if any(x.symbols() for x in (*shape, *other)) or ix.product(shape) is not ix.product(other):
        return
    linear = ix.flatten([ix.axis(i) for i in range(len(shape))], shape)
    places = ix.unflatten(linear, other, Facts(axes=shape))
    again = ix.flatten(places, other)
    for env in World(Facts(axes=shape), {}).points():
        assert again.evaluate(env) == linear.evaluate(env)
        assert all(0 <= p.evaluate(env) < n.evaluate(env) for p, n in zip(places, other, strict=True))


@given(cases(), cases())
def test_interning_makes_equality_identity(a: tuple[World, Expr, Meaning], b: tuple[World, Expr, Meaning]) -> None:
    x, y = a[1], b[1]
    assert (x + y) is (y + x) and (x * y) is (y * x) and (x - x) is ix.ZERO
    assert (x.terms == y.terms) == (x is y)
