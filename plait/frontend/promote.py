"""torch's type promotion, and how an operand enters arithmetic.

Three categories (bool < integer < float) and three priorities: tensors with dimensions decide, then 0-dim tensors, then
Python numbers; a lower priority matters only where its category is higher. Arithmetic on f16 and bf16 happens in f32
between casts: up at the operand, `implicit` down at the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from plait.errors import ImportFailed
from plait.frontend.context import Context, Lowering, Tensor, lowers, to_dtype
from plait.ir.dtype import DType
from plait.ir.graph import Scalar
from plait.ir.index import Expr

Operand = Tensor | Expr | bool | int | float

_FLOATS = (DType.f16, DType.bf16, DType.f32, DType.f64)
_SIGNED = (DType.i8, DType.i16, DType.i32, DType.i64)
_FLOAT_MAX = {DType.f16: 65504.0, DType.bf16: 3.3895313892515355e38, DType.f32: 3.4028234663852886e38}


class Unlowered(ImportFailed):
    """Raised inside a lowering: this form of the operator goes to its ATen call, for the reason given."""


def table(*names: str) -> Callable[[Lowering], Lowering]:
    """`lowers`, with Unlowered raised anywhere below turned into NotImplemented and the reason recorded."""

    def register(fn: Lowering) -> Lowering:
        @functools.wraps(fn)
        def guarded(ctx: Context, *args: Any, **kwargs: Any) -> Any:
            try:
                return fn(ctx, *args, **kwargs)
            except Unlowered as refused:
                ctx.reason = refused.message
                return NotImplemented

        return lowers(*(n if n.startswith(("prims.", "plait.")) else f"aten.{n}" for n in names))(guarded)

    return register


def default_float() -> DType:
    """What integers become in float arithmetic."""
    return known(torch.get_default_dtype())


def known(dtype: torch.dtype) -> DType:
    """plait's type for a dtype argument."""
    found = to_dtype(dtype)
    if found is None:
        raise Unlowered(f"{dtype} is not a type plait computes in")
    return found


def category(dtype: DType) -> int:
    """0 bool, 1 integer, 2 float; fp8 and unknown types take no part in arithmetic."""
    if dtype is DType.b1:
        return 0
    if dtype.is_int:
        return 1
    if dtype in _FLOATS:
        return 2
    raise Unlowered(f"no arithmetic on {dtype!r}")


def join(a: DType, b: DType) -> DType:
    """torch.promote_types."""
    if a is b:
        return a
    if category(a) != category(b):
        return a if category(a) > category(b) else b
    if a.is_float:
        if {a, b} == {DType.f16, DType.bf16}:
            return DType.f32
        return max(a, b, key=_FLOATS.index)
    if DType.u8 in (a, b):
        other = b if a is DType.u8 else a
        return DType.i16 if other is DType.i8 else other
    return max(a, b, key=_SIGNED.index)


def _scalar_dtype(v: Operand) -> DType:
    if isinstance(v, Tensor):
        return default_float()
    if isinstance(v, bool):
        return DType.b1
    if isinstance(v, int | Expr):
        return DType.i64
    if isinstance(v, float):
        return default_float()
    raise Unlowered(f"operand {v!r}")


def result_dtype(*args: Operand) -> DType:
    """torch.result_type of tensors, 0-dim tensors, SymInts and Python numbers."""
    tiers: list[DType | None] = [None, None, None]
    for a in args:
        weak = not isinstance(a, Tensor) or a.is_number
        tier = 2 if weak else 1 if a.ndim == 0 else 0  # type: ignore[union-attr]
        d = _scalar_dtype(a) if weak else a.dtype  # type: ignore[union-attr]
        category(d)
        old = tiers[tier]
        tiers[tier] = d if old is None else join(old, d)
    out: DType | None = None
    for d2 in tiers:
        if d2 is not None and (out is None or category(d2) > category(out)):
            out = d2
    assert out is not None, "no operands"
    return out


def float_dtype(*args: Operand) -> DType:
    """The promoted type where integers and bools become the default float."""
    d = result_dtype(*args)
    return d if d.is_float else default_float()


def fits(v: Scalar, dtype: DType) -> bool:
    """Whether torch's checked conversion of a number takes `v` (clamp, masked_fill, fill refuse others)."""
    if dtype is DType.b1:
        return True
    if dtype.is_float:
        limit = _FLOAT_MAX.get(dtype)
        return limit is None or v != v or abs(v) in (float("inf"), 0.0) or abs(float(v)) <= limit
    if isinstance(v, float) and not v.is_integer():  # true of infinities and NaN too
        return False
    if dtype is DType.u8:
        return abs(int(v)) <= 255  # negative numbers wrap
    top = 1 << (8 * dtype.nbytes - 1)
    return -top <= int(v) < top


def rounded(v: Scalar, dtype: DType) -> Scalar:
    """A number as a storage type holds it."""
    if dtype in (DType.f16, DType.bf16):
        kind = torch.float16 if dtype is DType.f16 else torch.bfloat16
        return float(torch.tensor(float(v), dtype=torch.float32).to(kind).item())
    return v


_MOVES = frozenset({"copy", "pieces", "gather", "where"})
_COARSE = (DType.f8e4m3, DType.f8e5m2)


def firm(ctx: Context, x: Tensor) -> Tensor:
    """x rounded to its own type for certain: for operators whose result jumps where the operand does, but whose formula
    does not show it to the node that jumps. Other types than f16 and bf16 are never held unrounded."""
    node = x.source
    if x.dtype not in (DType.f16, DType.bf16):
        return x
    if node.op == "cast" and node.attr("implicit"):
        rounding = ctx.builder.node("cast", node.axes, node.reads, dtype=node.dtype, implicit=False)
        return replace(x, source=rounding)
    if node.op in _MOVES:
        return ctx.cast(ctx.cast(x, DType.f32), x.dtype, implicit=False)
    return x


def to_type(ctx: Context, x: Tensor, dtype: DType, implicit: bool = False) -> Tensor:
    """x in another type as eager's conversion does it, in steps whose meaning is plain in C: floats reach narrow integers
    through i64 (u8) or i32 (i8, i16), and everything reaches a storage type through f32. What integers, bools and fp8 are
    made of is rounded first."""
    if x.dtype is dtype:
        return x
    if not dtype.is_float or dtype in _COARSE:
        x = firm(ctx, x)
    if x.dtype.is_storage_only and dtype is not DType.f32:
        x = ctx.cast(x, DType.f32)
    if x.dtype.is_float and dtype.is_int and dtype.nbytes < 4:
        x = ctx.cast(x, DType.i64 if dtype is DType.u8 else DType.i32)
    elif dtype.is_storage_only and x.dtype is not DType.f32:
        x = ctx.cast(x, DType.f32)
    return ctx.cast(x, dtype, implicit=implicit)


def lift_firm(ctx: Context, v: Operand, dtype: DType, exact: bool = False) -> Tensor:
    """`lift` of an operand that is rounded for certain."""
    return lift(ctx, firm(ctx, v) if isinstance(v, Tensor) else v, dtype, exact)


def lift(ctx: Context, v: Operand, dtype: DType, exact: bool = False) -> Tensor:
    """An operand in the compute type of `dtype`. It is rounded to `dtype` first, as TensorIterator's cast does;
    `exact` keeps a number (on the CPU a 0-dim tensor too) at compute precision, as eager's opmath kernels do."""
    target = dtype.compute
    if not isinstance(v, Tensor):
        if not isinstance(v, bool | int | float | Expr):
            raise Unlowered(f"operand {v!r}")
        if not isinstance(v, Expr) and not exact:
            v = rounded(v, dtype)
        return ctx.scalar(v, target)
    if v.dtype is dtype or (exact and v.ndim == 0 and ctx.device == "cpu"):
        return to_type(ctx, v, target)
    category(v.dtype)
    # a value of another type: only a narrowing to a storage type can change it before it is widened again
    if dtype.is_storage_only:
        v = to_type(ctx, v, dtype)
    return to_type(ctx, v, target)


def settle(ctx: Context, x: Tensor, dtype: DType) -> Tensor:
    """A result computed in `dtype.compute`, as `dtype`."""
    return ctx.cast(x, dtype, implicit=True)


def with_dtype(ctx: Context, x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A `dtype=` argument: the operand is converted first."""
    return x if dtype is None else to_type(ctx, x, known(dtype))


def python_number(v: Any) -> Scalar:
    """A number known at compile time; anything else is refused."""
    if isinstance(v, Expr) and v.const is not None:
        return v.const
    if isinstance(v, bool | int | float):
        return v
    raise Unlowered(f"{v!r} is not a number known at compile time")


def expected_types(ctx: Context) -> list[DType | None]:
    """Types of the results that eager gave the operator being lowered; empty where nothing is known."""
    return [dtype for _, dtype in ctx.expected]
