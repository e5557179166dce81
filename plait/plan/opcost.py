"""Work of one operation on one element, in additions."""

from __future__ import annotations

# where it is not 1: measured on generated code, rounded
_OP_COST: dict[str, float] = {
    **dict.fromkeys(("div", "sqrt", "rsqrt", "reciprocal"), 4.0),
    **dict.fromkeys(("exp", "exp2", "log", "log2", "sigmoid", "expm1", "log1p", "log10"), 10.0),
    **dict.fromkeys(("tanh", "erf", "sin", "cos", "erfc"), 14.0),
    **dict.fromkeys(("pow", "atan2", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh"), 30.0),
    **dict.fromkeys(("lgamma", "digamma", "erfinv", "hypot", "nextafter", "fmod_f", "remainder_f"), 60.0),
    **dict.fromkeys(("floordiv", "truncdiv", "remainder", "fmod", "ipow"), 10.0),
    **dict.fromkeys(("rand", "randbits"), 25.0),
    "randn": 50.0,
    **dict.fromkeys(("const", "copy", "index"), 0.0),
}


def op_cost(op: str) -> float:
    """Work of an operator, in additions."""
    return _OP_COST.get(op, 1.0)
