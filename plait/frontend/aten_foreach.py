"""torch's foreach operators: each is its single operator's lowering applied list element by list element."""

from __future__ import annotations

from typing import Any

import torch

from plait.frontend.context import LOWERINGS, Context, lowers

_UNARY = """abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal
round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc"""
# foreach overload → the single operator, and the keyword its last positional argument takes there (None: positional)
_SINGLE: dict[str, dict[str, tuple[str, str | None]]] = {
    **{name: {"default": (f"{name}.default", None)} for name in _UNARY.split()},
    **{
        name: {
            "List": (f"{name}.Tensor", None),
            "Tensor": (f"{name}.Tensor", None),
            "Scalar": (f"{name}.Scalar", None),
            "ScalarList": (f"{name}.Scalar", None),
        }
        for name in ("add", "sub", "mul", "div")
    },
    "pow": {
        "List": ("pow.Tensor_Tensor", None),
        "Scalar": ("pow.Tensor_Scalar", None),
        "ScalarList": ("pow.Tensor_Scalar", None),
    },
    "lerp": {"List": ("lerp.Tensor", None), "Scalar": ("lerp.Scalar", None), "ScalarList": ("lerp.Scalar", None)},
    "addcmul": {"Scalar": ("addcmul.default", "value"), "ScalarList": ("addcmul.default", "value")},
    "addcdiv": {"Scalar": ("addcdiv.default", "value"), "ScalarList": ("addcdiv.default", "value")},
    "maximum": {"List": ("maximum.default", None)},
    "minimum": {"List": ("minimum.default", None)},
    "copy": {"default": ("copy.default", None)},
}


def _lower(ctx: Context, single: str, keyword: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    lowering = LOWERINGS.get(f"aten.{single}")
    if lowering is None:
        ctx.reason = f"no lowering of {single}"
        return NotImplemented
    expected, out = ctx.expected, []
    for k in range(len(args[0])):
        ctx.expected = expected[k : k + 1]
        one = [a[k] if isinstance(a, (list, tuple)) else a for a in args]
        named = {n: a[k] if isinstance(a, (list, tuple)) else a for n, a in kwargs.items()}
        if keyword is not None and len(one) == 4:
            named[keyword] = one.pop()
        found = lowering(ctx, *one, **named)
        if found is NotImplemented:
            return NotImplemented
        out.append(found)
    return tuple(out)


def _register() -> None:
    for name, overloads in _SINGLE.items():
        packet = getattr(torch.ops.aten, f"_foreach_{name}", None)
        for overload, (single, keyword) in overloads.items():
            if packet is None or overload not in packet.overloads():
                continue

            def lower(ctx: Context, *args: Any, _to: tuple[str, str | None] = (single, keyword), **kwargs: Any) -> Any:
                return _lower(ctx, *_to, args, kwargs)

            lowers(f"aten._foreach_{name}.{overload}")(lower)


_register()
