"""Lower bounds of float values, as far as their definitions give them: what a divisor cannot be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from plait.tile.program import Let, Reduce

_NOTHING = float("-inf")
# growing functions of one argument
_GROWING: dict[str, Callable[[float], float]] = {
    "sqrt": lambda a: math.sqrt(max(a, 0.0)),
    "exp2": lambda a: 0.0 if a < -140 else 2.0 ** min(a, 120.0) * 0.99,
    "exp": lambda a: 0.0 if a < -100 else math.exp(min(a, 80.0)) * 0.99,
    "log2": lambda a: math.log2(a) - 0.01 if a > 0 else _NOTHING,
    "ceil": lambda a: float(math.ceil(a)) if math.isfinite(a) else a,
    "floor": lambda a: float(math.floor(a)) if math.isfinite(a) else a,
    "round": lambda a: a - abs(a) / 8,
    "copy": lambda a: a,
    "abs": lambda a: max(a, 0.0),
    "sigmoid": lambda a: 0.0,
}


def least(v: int, defs: Mapping[int, Let | Reduce], below_maximum: Callable[[int], bool]) -> float:
    """A number that v is never less than (where it is no NaN); -inf when nothing is known. `below_maximum` tells values
    x - max x."""

    known: dict[int, float] = {}

    def visit(k: int) -> float:
        if k not in known:
            known[k] = _of(k)
        return known[k]

    def _of(k: int) -> float:
        d = defs.get(k)
        if isinstance(d, Reduce):
            return _of_reduction(d)
        if not isinstance(d, Let) or not d.dtype.is_float:
            return _NOTHING
        if d.op == "const":
            return float(d.attr("value"))
        if d.op in _GROWING:
            return _GROWING[d.op](visit(d.args[0]))
        return _of_two(d) if len(d.args) == 2 else min(map(visit, d.args[1:])) if d.op == "where" else _NOTHING

    def _of_reduction(d: Reduce) -> float:
        if d.monoid in ("max", "min"):
            return visit(d.arg)
        e = defs.get(d.arg)
        if d.monoid == "sum" and isinstance(e, Let) and e.op == "exp" and below_maximum(e.args[0]):
            return 0.5  # one term is exp(0)
        return 0.0 if d.monoid == "sum" and visit(d.arg) >= 0 else _NOTHING

    def _of_two(d: Let) -> float:
        a, b = d.args
        if d.op == "mul" and a == b:
            return 0.0
        x, y = visit(a), visit(b)
        if d.op == "add":
            return (x + y) * 0.99 if x >= 0 and y >= 0 else _NOTHING
        if d.op in ("maximum", "minimum"):
            return max(x, y) if d.op == "maximum" else min(x, y)
        if d.op == "mul" and x >= 0 and y >= 0:
            return x * y * 0.99
        divisor = defs.get(b)
        if d.op == "div" and x >= 0 and isinstance(divisor, Let) and divisor.op == "const" and y > 0:
            return x / y * 0.99
        return _NOTHING

    return visit(v)
