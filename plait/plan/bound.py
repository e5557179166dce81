"""Is an exponent never above its value where a running extreme is attained? Answered by evaluation at random points.

exp(E(x, m)) with m = max over x of L(x) never overflows on the way when E(x, L(x)) is at most a constant c for every x and
E does not rise with m: an element's exponent is then at most c in every tile as in the end.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

from plait.plan.body import Body
from plait.plan.formula import Evaluator, Formula, parts_of
from plait.plan.separable import draw_leaf

_ROWS, _POINTS, _TRIES = 8, 12, 60


def is_bounded(power: Formula, k: int, extreme: Body, signs: Mapping[int, str]) -> bool:
    """Whether `power`, which mentions state k, the extreme of `extreme`'s expression, is bounded by it."""
    rng = random.Random(1)
    leaves = sorted(
        (g for g in parts_of(power, extreme.expr) if g.op in ("stream", "row", "state") and not _is(g, k)),
        key=lambda g: (g.op, str(g.value)),
    )
    this = next(g for g in parts_of(power) if _is(g, k))
    away = 1.0 if extreme.monoid == "max" else -1.0
    good = 0
    for attempt in range(_ROWS):
        scale = (1.0, 20.0, 0.2)[attempt % 3]
        env = {g: draw_leaf(g, rng, scale, signs) for g in leaves if g.op != "stream"}
        seen: list[tuple[float, float]] = []
        for point in range(_TRIES):
            size = scale * (1.0, 30.0, 0.3, 5.0)[point % 4]
            env |= {g: draw_leaf(g, rng, size, signs) for g in leaves if g.op == "stream"}
            at = Evaluator(env.__getitem__)(extreme.expr)
            if not math.isfinite(at):
                continue  # a masked element
            here = Evaluator((env | {this: at}).__getitem__)(power)
            beyond = Evaluator((env | {this: at + away}).__getitem__)(power)
            if not math.isfinite(here) or not beyond <= here:
                return False
            seen.append((here, at))
            if len(seen) == _POINTS:
                break
        # a row may be masked as a whole, or nearly
        if seen and len(seen) < _POINTS:
            continue
        if seen and not _has_ceiling(seen):
            return False
        good += bool(seen)
    return good >= 3


def _has_ceiling(seen: list[tuple[float, float]]) -> bool:
    """Whether the greatest exponent is met at several different extremes: it is a constant, or one that a floor under the
    extreme (`maximum(m, sink)`) cuts from below. One that grows somewhere is greatest at one point alone."""
    top = max(here for here, _ in seen)
    return len({at for here, at in seen if top - here <= 1e-9 * (1.0 + abs(at))}) >= 3


def _is(f: Formula, k: int) -> bool:
    return f.op == "state" and f.value == k
