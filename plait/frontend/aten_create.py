"""Lowerings of tensors made from nothing: constants, and functions of the index."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from plait.frontend.aten_pointwise import constant
from plait.frontend.context import Context, Tensor
from plait.frontend.promote import Operand, Unlowered, default_float, fits, known, table, to_type
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.graph import Shape
from plait.ir.index import Expr

Size = Expr | int


def _here(ctx: Context, options: dict[str, Any]) -> None:
    """Refuse what is not a plain tensor on the graph's own device."""
    device = options.get("device")
    if device is not None and torch.device(device).type != torch.device(ctx.device).type:
        raise Unlowered("a tensor on another device")
    if options.get("layout") not in (None, torch.strided) or options.get("pin_memory"):
        raise Unlowered("a sparse or pinned tensor")


def _number_type(v: Operand) -> DType:
    if isinstance(v, bool):
        return DType.b1
    return DType.i64 if isinstance(v, int | Expr) else default_float()


def filled(ctx: Context, size: Sequence[Size], value: Operand, dtype: DType) -> Tensor:
    """value everywhere."""
    if isinstance(value, bool | int | float) and not fits(value, dtype):
        raise Unlowered("a number that the type cannot hold")
    return ctx.expand(constant(ctx, value, dtype), tuple(ix.to_expr(n) for n in size))


def _dtype_of(dtype: torch.dtype | None, default: DType) -> DType:
    return default if dtype is None else known(dtype)


@table("full.default")
def full(
    ctx: Context, size: Sequence[Size], value: Operand, *, dtype: torch.dtype | None = None, **options: Any
) -> Any:
    """A constant tensor, of the number's own type unless told."""
    _here(ctx, options)
    return filled(ctx, size, value, _dtype_of(dtype, _number_type(value)))


@table("scalar_tensor.default")
def scalar_tensor(ctx: Context, value: Operand, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """A 0-dim tensor, float unless told; constants of the CPU serve graphs of other devices as well."""
    if options.get("layout") not in (None, torch.strided):
        raise Unlowered("a sparse tensor")
    return filled(ctx, (), value, _dtype_of(dtype, default_float()))


def _factory(value: int, *names: str) -> None:
    @table(*names)
    def lower(ctx: Context, size: Sequence[Size], *_: Any, dtype: torch.dtype | None = None, **options: Any) -> Any:
        _here(ctx, options)
        return filled(ctx, size, value, _dtype_of(dtype, default_float()))


# memory that nobody has written holds zeros: one defined answer, which costs nothing where the value is overwritten
_factory(0, "zeros.default", "empty.memory_format", "empty_strided.default", "empty_permuted.default")
_factory(1, "ones.default")


def _alike(value: int, *names: str) -> None:
    @table(*names)
    def lower(ctx: Context, x: Tensor, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
        _here(ctx, options)
        return filled(ctx, x.shape, value, _dtype_of(dtype, x.dtype))


def _new(value: int, *names: str) -> None:
    @table(*names)
    def lower(
        ctx: Context, x: Tensor, size: Sequence[Size], *_: Any, dtype: torch.dtype | None = None, **options: Any
    ) -> Any:
        _here(ctx, options)
        return filled(ctx, size, value, _dtype_of(dtype, x.dtype))


_alike(0, "zeros_like.default", "empty_like.default")
_alike(1, "ones_like.default")
_new(0, "new_zeros.default", "new_empty.default", "new_empty_strided.default")
_new(1, "new_ones.default")


@table("full_like.default")
def full_like(ctx: Context, x: Tensor, value: Operand, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """A constant of x's shape and type."""
    _here(ctx, options)
    return filled(ctx, x.shape, value, _dtype_of(dtype, x.dtype))


@table("new_full.default")
def new_full(
    ctx: Context, x: Tensor, size: Sequence[Size], value: Operand, *, dtype: torch.dtype | None = None, **options: Any
) -> Any:
    """A constant of x's type."""
    _here(ctx, options)
    return filled(ctx, size, value, _dtype_of(dtype, x.dtype))


# ------------------------------------------------------------------------------------------------ functions of the index
@table("arange.start_step", "arange.start", "arange.default", "prims.iota.default")
def arange(ctx: Context, *args: Any, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """start, start + step, … below end; `prims.iota` counts from start and has its length."""
    _here(ctx, options)
    if "start" in options:
        first, step = ix.to_expr(options["start"]), ix.to_expr(options["step"])
        return to_type(ctx, ctx.index(first + ix.axis(0) * step, (ix.to_expr(args[0]),)), _dtype_of(dtype, DType.i64))
    start, end, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
    if all(isinstance(v, int | Expr) for v in (start, end, step)):
        d = _dtype_of(dtype, DType.i64)
        first, width = ix.to_expr(start), ix.to_expr(step)
        shape = (_length(ctx, first, ix.to_expr(end), width),)
        return to_type(ctx, ctx.index(first + ix.axis(0) * width, shape), d)
    if not all(isinstance(v, int | float) for v in (start, end, step)):
        raise Unlowered("a range with bounds known at run time only")
    d = _dtype_of(dtype, default_float())
    if not d.is_float:
        raise Unlowered("an integer range with fractional bounds")
    return _affine(ctx, float(start), float(step), math.ceil((end - start) / step), d)


def _length(ctx: Context, start: Expr, end: Expr, step: Expr) -> Expr:
    if step.const is None or step.const == 0:
        raise Unlowered("a range with a step known at run time only")
    span, width = (end - start, step.const) if step.const > 0 else (start - end, -step.const)
    n = ix.floordiv(span + (width - 1), width, ctx.facts)
    if n.const is not None and n.const < 0:
        raise Unlowered("a range that ends before it starts")
    return n


def _affine(ctx: Context, start: float, step: float, n: int, dtype: DType) -> Tensor:
    """start + step * i, in double as eager accumulates it, rounded once."""
    i = ctx.cast(ctx.index(ix.axis(0), (ix.const(n),)), DType.f64)
    scaled = ctx.map("mul", i, ctx.const(step, DType.f64))
    return to_type(ctx, ctx.map("add", ctx.const(start, DType.f64), scaled), dtype)


@table("linspace.default")
def linspace(
    ctx: Context, start: Operand, end: Operand, steps: int, *, dtype: torch.dtype | None = None, **options: Any
) -> Any:
    """Evenly spaced values, counted from the nearer end so that both ends are exact."""
    _here(ctx, options)
    d = _dtype_of(dtype, default_float())
    numbers = isinstance(start, int | float) and isinstance(end, int | float)
    if not d.is_float or not numbers or not isinstance(steps, int):
        raise Unlowered("linspace of integers, tensors or of a size known at run time only")
    assert isinstance(start, int | float) and isinstance(end, int | float)
    c = d.compute
    if steps == 1:
        return filled(ctx, (1,), float(start), d)
    i = ctx.index(ix.axis(0), (ix.const(steps),))
    step = ctx.map("div", ctx.const(float(end) - float(start), c), ctx.const(float(steps - 1), c))
    up = ctx.map("add", ctx.const(float(start), c), ctx.map("mul", step, ctx.cast(i, c)))
    back = ctx.cast(ctx.index(ix.const(steps - 1) - ix.axis(0), (ix.const(steps),)), c)
    down = ctx.map("sub", ctx.const(float(end), c), ctx.map("mul", step, back))
    first = ctx.map("lt", i, ctx.const(steps // 2, DType.i64))
    return to_type(ctx, ctx.map("where", first, up, down), d)


@table("eye.default", "eye.m")
def eye(ctx: Context, n: Size, m: Size | None = None, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """1 on the diagonal."""
    _here(ctx, options)
    shape: Shape = (ix.to_expr(n), ix.to_expr(n if m is None else m))
    same = ctx.map("eq", ctx.index(ix.axis(0), shape), ctx.index(ix.axis(1), shape))
    return to_type(ctx, same, _dtype_of(dtype, default_float()))
