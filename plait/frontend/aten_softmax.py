"""Lowerings of softmax, its relatives and their gradients: shifted by the row's maximum, as eager computes them."""

from __future__ import annotations

import math
from typing import Any

import torch

from plait.frontend.aten_reduce import Dims, count_of, dims_of, keep, refuse_empty
from plait.frontend.context import Context, Tensor
from plait.frontend.promote import Unlowered, category, float_dtype, known, lift, settle, table, to_type
from plait.ir.dtype import DType


def _float_operand(ctx: Context, x: Tensor, half_to_float: bool) -> tuple[DType, Tensor]:
    """The result type and x in its compute type."""
    if category(x.dtype) != 2:
        raise Unlowered("softmax of integers")
    d = DType.f32 if half_to_float else x.dtype
    return d, to_type(ctx, x, d.compute)


def _shifted(ctx: Context, v: Tensor, dims: list[int]) -> Tensor:
    return ctx.map("sub", v, ctx.reduce("max", v, dims, keepdim=True))


def _softmax_of(ctx: Context, v: Tensor, dims: list[int]) -> Tensor:
    """A row of -inf alone gives NaN."""
    e = ctx.map("exp", _shifted(ctx, v, dims))
    return ctx.map("div", e, ctx.reduce("sum", e, dims, keepdim=True))


@table("_softmax.default")
def softmax(ctx: Context, x: Tensor, dim: int, half_to_float: bool) -> Any:
    """exp(x) / sum exp(x) along dim."""
    d, v = _float_operand(ctx, x, half_to_float)
    dims = dims_of(x, dim)
    refuse_empty(x, list(range(x.ndim)))
    return settle(ctx, _softmax_of(ctx, v, dims), d)


@table("_log_softmax.default")
def log_softmax(ctx: Context, x: Tensor, dim: int, half_to_float: bool) -> Any:
    """x - log sum exp(x) along dim."""
    d, v = _float_operand(ctx, x, half_to_float)
    dims = dims_of(x, dim)
    refuse_empty(x, list(range(x.ndim)))
    shifted = _shifted(ctx, v, dims)
    total = ctx.reduce("sum", ctx.map("exp", shifted), dims, keepdim=True)
    return settle(ctx, ctx.map("sub", shifted, ctx.map("log", total)), d)


@table("_safe_softmax.default")
def safe_softmax(ctx: Context, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """softmax with 0 for rows of -inf alone: their maximum counts as 0, so that their terms are 0, and their sum as 1."""
    d = x.dtype if dtype is None else known(dtype)
    if category(d) != 2:
        raise Unlowered("softmax of integers")
    dims = dims_of(x, dim)
    refuse_empty(x, list(range(x.ndim)))
    v = to_type(ctx, to_type(ctx, x, d), d.compute)
    top = _replaced(ctx, ctx.reduce("max", v, dims, keepdim=True), -math.inf, 0.0)
    e = ctx.map("exp", ctx.map("sub", v, top))
    total = _replaced(ctx, ctx.reduce("sum", e, dims, keepdim=True), 0.0, 1.0)
    return settle(ctx, ctx.map("div", e, total), d)


def _replaced(ctx: Context, x: Tensor, value: float, by: float) -> Tensor:
    """x with another value for one."""
    return ctx.map("where", ctx.map("eq", x, ctx.const(value, x.dtype)), ctx.const(by, x.dtype), x)


@table("_softmax_backward_data.default")
def softmax_backward(ctx: Context, grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Any:
    """(grad - sum(grad * output)) * output."""
    d = float_dtype(grad, output)
    g, y = lift(ctx, grad, d), lift(ctx, output, d)
    total = ctx.reduce("sum", ctx.map("mul", g, y), dims_of(output, dim), keepdim=True)
    return settle(ctx, ctx.map("mul", ctx.map("sub", g, total), y), known(input_dtype))


@table("_log_softmax_backward_data.default")
def log_softmax_backward(ctx: Context, grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Any:
    """grad - exp(output) * sum(grad)."""
    d = float_dtype(grad, output)
    g, y = lift(ctx, grad, d), lift(ctx, output, d)
    total = ctx.reduce("sum", g, dims_of(output, dim), keepdim=True)
    return settle(ctx, ctx.map("sub", g, ctx.map("mul", ctx.map("exp", y), total)), known(input_dtype))


@table("logsumexp.default")
def logsumexp(ctx: Context, x: Tensor, dim: Dims, keepdim: bool = False) -> Any:
    """log sum exp(x); infinite maxima are not subtracted, so that all -inf gives -inf and inf gives inf."""
    d = float_dtype(x)
    v = lift(ctx, x, d)
    dims = dims_of(x, dim)
    if count_of(x, dims).const == 0:
        empty = ctx.reduce("sum", ctx.map("exp", v), dims, keepdim)
        return settle(ctx, ctx.map("log", empty), d)
    top = ctx.reduce("max", v, dims)
    infinite = ctx.map("isinf", top)
    shift = ctx.map("where", infinite, ctx.const(0.0, v.dtype), top)
    row = keep(ctx, shift, dims) if x.ndim else shift
    total = ctx.reduce("sum", ctx.map("exp", ctx.map("sub", v, row)), dims)
    out = settle(ctx, ctx.map("add", ctx.map("log", total), shift), d)
    return keep(ctx, out, dims) if keepdim and x.ndim else out
