"""Is an exponent never above its value where a running extreme is attained? Answered by evaluation at random points.

exp(E(x, m)) with m = max over x of L(x) never overflows on the way when E(x, L(x)) is one constant c for every x and E
falls as m rises: an element's exponent is then c minus what m has risen above L(x), in every tile as in the end.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

from plait.plan.body import Body
from plait.plan.formula import Evaluator, Formula, parts_of
from plait.plan.separable import draw_leaf

_ROWS, _POINTS = 6, 10


def is_bounded(power: Formula, k: int, extreme: Body, signs: Mapping[int, str]) -> bool:
    """Whether `power`, which mentions state k, the extreme of `extreme`'s expression, is bounded by it."""
    rng = random.Random(1)
    leaves = sorted(
        (g for g in parts_of(power, extreme.expr) if g.op in ("stream", "row", "state") and not _is(g, k)),
        key=lambda g: (g.op, str(g.value)),
    )
    this = next(g for g in parts_of(power) if _is(g, k))
    away = 1.0 if extreme.monoid == "max" else -1.0
    seen = 0
    for attempt in range(_ROWS):
        scale = (1.0, 20.0, 0.2)[attempt % 3]
        row = {g: draw_leaf(g, rng, scale, signs) for g in leaves if g.op != "stream"}
        first: float | None = None
        for _ in range(_POINTS):
            env = row | {g: draw_leaf(g, rng, scale, signs) for g in leaves if g.op == "stream"}
            at = Evaluator(env.__getitem__)(extreme.expr)
            if not math.isfinite(at):
                continue  # a masked element
            here = Evaluator((env | {this: at}).__getitem__)(power)
            beyond = Evaluator((env | {this: at + away}).__getitem__)(power)
            first = here if first is None else first
            if not (math.isfinite(here) and abs(here - first) <= 1e-9 * (1.0 + abs(at)) and beyond < here):
                return False
            seen += 1
    return seen >= _POINTS


def _is(f: Formula, k: int) -> bool:
    return f.op == "state" and f.value == k
