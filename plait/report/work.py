"""Floating-point work of a node, by the unit that does it. Counted once a point, whatever a schedule does again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from plait.ir.graph import Node
from plait.plan.device import DeviceSpec
from plait.report.facts import Flops

_ARITHMETIC = dict.fromkeys(
    ["add", "sub", "mul", "div", "reciprocal", "maximum", "minimum", "fmax", "fmin", "fmod_f", "remainder_f"], 1.0
) | {"fma": 2.0}
_SPECIAL = frozenset(
    [
        "sqrt",
        "rsqrt",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log2",
        "log10",
        "log1p",
        "sin",
        "cos",
        "tan",
        "asin",
        "acos",
        "atan",
        "sinh",
        "cosh",
        "tanh",
        "asinh",
        "acosh",
        "atanh",
        "erf",
        "erfc",
        "erfinv",
        "lgamma",
        "digamma",
        "sigmoid",
        "pow",
        "atan2",
        "hypot",
    ]
)
_SUMS = frozenset(["sum", "prod", "max", "min", "cumsum", "cumprod", "cummax", "cummin"])


def flops_of(n: Node, spec: DeviceSpec, size: Callable[[Iterable[Any]], float]) -> Flops:
    """Work of one node. Casts, copies, selections, comparisons and integers count nothing."""
    if not n.dtype.is_float:
        return Flops()
    points = size(n.axes)
    if n.kind == "contract":
        return product_flops(2 * points, n.reads[0].source.dtype.nbytes <= 2, spec)
    if n.op in _SUMS:
        return Flops(arithmetic=points)
    if n.op == "logcumsumexp":
        return Flops(arithmetic=points, special=2 * points)
    return Flops(arithmetic=points * _ARITHMETIC.get(n.op, 0.0), special=points * (n.op in _SPECIAL))


def product_flops(count: float, half: bool, spec: DeviceSpec) -> Flops:
    """Of a library's product over 16-bit (`half`) or wider operands."""
    return Flops(tensor_core=count) if half and spec.kind == "cuda" else Flops(arithmetic=count)
