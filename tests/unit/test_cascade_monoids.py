"""The tuple monoids keep their laws on random data, infinities included, and give what the plain formulas give."""

from __future__ import annotations

import math
import random

import pytest

from plait.plan.monoids import MONOIDS, Monoid

BOOL = ("any", "all")


def _elements(m: Monoid, rng: random.Random, wild: bool, n: int) -> list[float]:
    if m.name in BOOL:
        return [rng.random() < 0.5 for _ in range(n)]
    xs = [rng.uniform(-3, 3) * rng.choice((1.0, 1.0, 50.0)) for _ in range(n)]
    if wild and m.name not in ("moments", "sum", "prod"):
        xs = [-math.inf if rng.random() < 0.4 else x for x in xs]
    return xs


def _close(a: object, b: object) -> bool:
    return all(
        x == y or (x != x and y != y) or math.isclose(x, y, rel_tol=1e-9, abs_tol=1e-9)
        for x, y in zip(a, b, strict=True)  # type: ignore[call-overload]
    )


def _fold(m: Monoid, xs: list[float]) -> tuple[float, ...]:
    out = m.start()
    for i, x in enumerate(xs):
        out = m.merged(out, m.of(x, i))
    return out


@pytest.mark.parametrize("name", MONOIDS)
@pytest.mark.parametrize("wild", [False, True])
def test_laws(name: str, wild: bool) -> None:
    m, rng = MONOIDS[name], random.Random(7)
    for _ in range(60):
        xs = _elements(m, rng, wild, 9)
        parts = [xs[0:2], xs[2:5], xs[5:9]]
        offsets = (0, 2, 5)
        a, b, c = (_reduce(m, [m.of(x, o + i) for i, x in enumerate(p)]) for p, o in zip(parts, offsets, strict=True))
        assert _close(m.merged(m.merged(a, b), c), m.merged(a, m.merged(b, c))), "associative"
        assert _close(m.merged(a, b), m.merged(b, a)), "commutative"
        for x in (a, b, c, m.of(xs[0], 0)):
            assert _close(m.merged(m.start(), x), x) and _close(m.merged(x, m.start()), x), "identity"


def _reduce(m: Monoid, accumulators: list[tuple[float, ...]]) -> tuple[float, ...]:
    out = accumulators[0]
    for x in accumulators[1:]:
        out = m.merged(out, x)
    return out


def test_moments_far_from_zero() -> None:
    m, rng = MONOIDS["moments"], random.Random(1)
    xs = [1e8 + rng.uniform(-1, 1) for _ in range(500)]
    got = _fold(m, xs)
    mean = math.fsum(xs) / len(xs)
    var = math.fsum((x - mean) ** 2 for x in xs) / len(xs)
    assert math.isclose(m.result(got, "mean"), mean, rel_tol=1e-14)
    assert math.isclose(m.result(got, "variance"), var, rel_tol=1e-6)
    # the sum of squares minus the square of the sum has lost all digits here
    assert abs(sum(x * x for x in xs) / len(xs) - mean * mean - var) > 0.1 * var


@pytest.mark.parametrize(
    "xs", [[3.0], [-math.inf, -math.inf], [-math.inf, 2.0], [900.0, -900.0, 899.0], [math.inf, 1.0]]
)
def test_logsumexp(xs: list[float]) -> None:
    m = MONOIDS["logsumexp"]
    top = max(xs)
    want = top if math.isinf(top) else top + math.log(math.fsum(math.exp(x - top) for x in xs))
    assert m.result(_fold(m, xs), "value") == pytest.approx(want)


@pytest.mark.parametrize("name", ["argmax", "logsumexp_argmax"])
@pytest.mark.parametrize(
    ("xs", "first"),
    [([1.0, 3.0, 3.0, 2.0], 1), ([-math.inf, -math.inf], 0), ([1.0, math.nan, 5.0, math.nan], 1), ([2.0], 0)],
)
def test_argmax_takes_the_first_extreme(name: str, xs: list[float], first: int) -> None:
    m = MONOIDS[name]
    assert m.result(_fold(m, xs), "index") == first
    backwards = m.start()
    for i in reversed(range(len(xs))):
        backwards = m.merged(m.of(xs[i], i), backwards)
    assert m.result(backwards, "index") == first
