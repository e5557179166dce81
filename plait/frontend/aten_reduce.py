"""Lowerings of reductions and scans.

Half-precision operands are accumulated in f32 and the result rounded once; integer sums and products are i64, as in
eager. A reduction over nothing gives its identity where eager gives one, and goes to ATen where eager raises.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from plait.frontend.aten_pointwise import as_bool
from plait.frontend.context import Context, Tensor, normalize_dim
from plait.frontend.promote import (
    Unlowered,
    category,
    float_dtype,
    known,
    lift,
    lift_firm,
    python_number,
    settle,
    table,
    to_type,
)
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.index import Expr

Dims = Sequence[int] | int | None


def dims_of(x: Tensor, dim: Dims, empty_is_all: bool = True) -> list[int]:
    """A `dim=` argument as dimensions counted from the front; None, and mostly the empty list, mean all of them."""
    if dim is None or (empty_is_all and not isinstance(dim, int) and not dim):
        return list(range(x.ndim))
    return [normalize_dim(d, x.ndim) for d in ([dim] if isinstance(dim, int) else dim)]


def count_of(x: Tensor, dims: Sequence[int]) -> Expr:
    """How many elements a reduction over `dims` combines."""
    return ix.product(x.shape[d] for d in dims) if x.ndim else ix.ONE


def refuse_empty(x: Tensor, dims: Sequence[int]) -> None:
    """For reductions without an identity: eager raises, so ATen gets the call."""
    if any(x.shape[d].const == 0 for d in dims if x.ndim) or (not dims and any(n.const == 0 for n in x.shape)):
        raise Unlowered("a reduction of nothing")


def keep(ctx: Context, x: Tensor, dims: Sequence[int]) -> Tensor:
    """Put reduced dimensions back with extent 1."""
    for d in sorted(dims):
        x = ctx.unsqueeze(x, d)
    return x


def accumulator(x: Tensor, dtype: torch.dtype | None) -> DType:
    """The result type of sum and prod."""
    if dtype is not None:
        return known(dtype)
    return x.dtype if category(x.dtype) == 2 else DType.i64


# ------------------------------------------------------------------------------------------------ sums
def _total(ctx: Context, op: str, x: Tensor, dims: Sequence[int], keepdim: bool, d: DType) -> Tensor:
    v = to_type(ctx, to_type(ctx, x, d), d.compute)
    if d is DType.b1:
        return ctx.reduce("any" if op == "sum" else "all", v, dims, keepdim)
    return settle(ctx, ctx.reduce(op, v, dims, keepdim), d)


@table("sum.default", "sum.dim_IntList")
def sum_(ctx: Context, x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """Sum; integers and bools in i64."""
    return _total(ctx, "sum", x, dims_of(x, dim), keepdim, accumulator(x, dtype))


@table("prod.default", "prod.dim_int")
def prod(ctx: Context, x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """Product; integers and bools in i64."""
    return _total(ctx, "prod", x, dims_of(x, dim), keepdim, accumulator(x, dtype))


@table("nansum.default")
def nansum(
    ctx: Context, x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """Sum with NaN as 0."""
    d = accumulator(x, dtype)
    v = to_type(ctx, to_type(ctx, x, d), d.compute)
    if d.is_float:
        v = ctx.map("where", ctx.map("isnan", v), ctx.const(0.0, v.dtype), v)
    return settle(ctx, ctx.reduce("sum", v, dims_of(x, dim), keepdim), d)


def mean_of(ctx: Context, v: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
    """Mean of a float in its own (compute) type."""
    total = ctx.reduce("sum", v, dims, keepdim)
    return ctx.map("div", total, ctx.scalar(count_of(v, dims), v.dtype))


@table("mean.default", "mean.dim")
def mean(ctx: Context, x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """Mean of floats."""
    d = x.dtype if dtype is None else known(dtype)
    if category(d) != 2:
        raise Unlowered("mean of integers")
    v = to_type(ctx, to_type(ctx, x, d), d.compute)
    return settle(ctx, mean_of(ctx, v, dims_of(x, dim), keepdim), d)


@table("count_nonzero.default", "count_nonzero.dim_IntList")
def count_nonzero(ctx: Context, x: Tensor, dim: Dims = None) -> Any:
    """How many elements are not zero."""
    return ctx.reduce("sum", ctx.cast(as_bool(ctx, x), DType.i64), dims_of(x, dim))


# ------------------------------------------------------------------------------------------------ extremes
def extreme_of(ctx: Context, op: str, x: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
    """max or min; of bools any or all. NaN passes on."""
    category(x.dtype)
    if x.dtype is DType.b1:
        return ctx.reduce("any" if op == "max" else "all", x, dims, keepdim)
    return settle(ctx, ctx.reduce(op, lift(ctx, x, x.dtype), dims, keepdim), x.dtype)


def place_of(ctx: Context, op: str, x: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
    """argmax or argmin: row-major over `dims`, the first among equals, NaN before all."""
    v = to_type(ctx, x, DType.u8) if x.dtype is DType.b1 else lift(ctx, x, x.dtype)
    return ctx.reduce(op, v, dims, keepdim)


def _extreme(op: str) -> None:
    @table(f"a{op}.default")
    def over_dims(ctx: Context, x: Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
        dims = dims_of(x, dim)
        refuse_empty(x, dims)
        return extreme_of(ctx, op, x, dims, keepdim)

    @table(f"{op}.default")
    def of_all(ctx: Context, x: Tensor) -> Any:
        dims = dims_of(x, None)
        refuse_empty(x, dims)
        return extreme_of(ctx, op, x, dims)

    @table(f"{op}.dim")
    def with_index(ctx: Context, x: Tensor, dim: int, keepdim: bool = False) -> Any:
        dims = dims_of(x, dim)
        refuse_empty(x, dims)
        return extreme_of(ctx, op, x, dims, keepdim), place_of(ctx, f"arg{op}", x, dims, keepdim)

    @table(f"arg{op}.default")
    def index_only(ctx: Context, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
        if x.dtype is DType.b1:
            raise Unlowered(f"arg{op} of bools")
        dims = dims_of(x, dim)
        refuse_empty(x, dims)
        return place_of(ctx, f"arg{op}", x, dims, keepdim)


_extreme("max")
_extreme("min")


@table("aminmax.default")
def aminmax(ctx: Context, x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    """(min, max)."""
    dims = dims_of(x, dim)
    refuse_empty(x, dims)
    return extreme_of(ctx, "min", x, dims, keepdim), extreme_of(ctx, "max", x, dims, keepdim)


def _truth(op: str) -> None:
    @table(f"{op}.default", f"{op}.dim", f"{op}.dims")
    def lower(ctx: Context, x: Tensor, dim: Dims = None, keepdim: bool = False) -> Any:
        # the empty list of dimensions keeps every element here, unlike in sums
        out = ctx.reduce(op, as_bool(ctx, x), dims_of(x, dim, empty_is_all=False), keepdim)
        # answers about uint8 are uint8
        return ctx.cast(out, DType.u8) if x.dtype is DType.u8 else out


_truth("any")
_truth("all")


# ------------------------------------------------------------------------------------------------ spread
def refined_mean(ctx: Context, v: Tensor, dims: Sequence[int]) -> Tensor:
    """A mean (dimensions kept) that is exact for constant data: the first mean plus the mean of what it leaves."""
    first = mean_of(ctx, v, dims, keepdim=True)
    return ctx.map("add", first, mean_of(ctx, ctx.map("sub", v, first), dims, keepdim=True))


def _variance(
    ctx: Context, x: Tensor, dim: Dims, correction: Any, keepdim: bool, *, root: bool
) -> tuple[DType, Tensor, Tensor]:
    d = x.dtype
    if category(d) != 2:
        raise Unlowered("variance of integers")
    dims = dims_of(x, dim)
    v = lift(ctx, x, d)
    c = 1 if correction is None else python_number(correction)
    center = refined_mean(ctx, v, dims)
    gap = ctx.map("sub", v, center)
    total = ctx.reduce("sum", ctx.map("mul", gap, gap), dims, keepdim)
    count = count_of(v, dims)
    if count.const is not None:
        free = ctx.const(max(count.const - c, 0.0), v.dtype)
    else:
        left = ctx.map("sub", ctx.scalar(count, v.dtype), ctx.const(c, v.dtype))
        free = ctx.map("maximum", ctx.const(0.0, v.dtype), left)
    var = ctx.map("div", total, free)
    mid = center if keepdim else ctx.reshape(center, total.shape)
    return d, ctx.map("sqrt", var) if root else var, mid


def _spread(name: str, root: bool) -> None:
    @table(f"{name}.correction")
    def alone(ctx: Context, x: Tensor, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Any:
        d, out, _ = _variance(ctx, x, dim, correction, keepdim, root=root)
        return settle(ctx, out, d)

    @table(f"{name}_mean.correction")
    def with_mean(ctx: Context, x: Tensor, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Any:
        d, out, mid = _variance(ctx, x, dim, correction, keepdim, root=root)
        return settle(ctx, out, d), settle(ctx, mid, d)


_spread("var", root=False)
_spread("std", root=True)


# ------------------------------------------------------------------------------------------------ norms of vectors
@table("linalg_vector_norm.default")
def vector_norm(
    ctx: Context,
    x: Tensor,
    order: Any = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """The p-norm over `dim`."""
    d = x.dtype if dtype is None else known(dtype)
    if category(d) != 2:
        raise Unlowered("norm of integers")
    p = float(python_number(order))
    dims = dims_of(x, dim)
    if p < 0 or math.isinf(p):
        refuse_empty(x, dims)
    return settle(ctx, _norm(ctx, to_type(ctx, to_type(ctx, x, d), d.compute), p, dims, keepdim), d)


def _norm(ctx: Context, v: Tensor, p: float, dims: Sequence[int], keepdim: bool) -> Tensor:
    size = ctx.map("abs", v)
    if math.isinf(p):
        return ctx.reduce("max" if p > 0 else "min", size, dims, keepdim)
    if p == 0:
        zero = ctx.const(0.0, v.dtype)
        return ctx.reduce("sum", ctx.cast(ctx.map("ne", v, zero), v.dtype), dims, keepdim)
    if p == 1:
        return ctx.reduce("sum", size, dims, keepdim)
    if p == 2:
        return ctx.map("sqrt", ctx.reduce("sum", ctx.map("mul", v, v), dims, keepdim))
    total = ctx.reduce("sum", ctx.map("pow", size, ctx.const(p, v.dtype)), dims, keepdim)
    return ctx.map("pow", total, ctx.const(1.0 / p, v.dtype))


@table("norm.ScalarOpt_dim", "norm.Scalar", "norm.ScalarOpt_dim_dtype", "norm.ScalarOpt_dtype")
def norm(
    ctx: Context, x: Tensor, p: Any = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """The older name of the p-norm."""
    return vector_norm(ctx, x, 2 if p is None else p, dim, keepdim, dtype=dtype)


@table("dist.default")
def dist(ctx: Context, a: Tensor, b: Tensor, p: Any = 2) -> Any:
    """The p-norm of a - b."""
    d = float_dtype(a, b)
    gap = settle(ctx, ctx.map("sub", lift(ctx, a, d), lift(ctx, b, d)), d)
    return vector_norm(ctx, gap, p)


# ------------------------------------------------------------------------------------------------ scans
def _scan(name: str) -> None:
    @table(f"{name}.default")
    def lower(ctx: Context, x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
        d = accumulator(x, dtype)
        if d is DType.b1:
            raise Unlowered("a scan in bool")
        v = to_type(ctx, to_type(ctx, x, d), d.compute)
        return settle(ctx, ctx.scan(name, v, dim), d)


_scan("cumsum")
_scan("cumprod")


@table("logcumsumexp.default")
def logcumsumexp(ctx: Context, x: Tensor, dim: int) -> Any:
    """log of the running sum of exp(x)."""
    if category(x.dtype) != 2:
        raise Unlowered("logcumsumexp of integers")
    return settle(ctx, ctx.scan("logcumsumexp", lift(ctx, x, x.dtype), dim), x.dtype)


def _running(name: str) -> None:
    @table(f"{name}.default")
    def lower(ctx: Context, x: Tensor, dim: int) -> Any:
        return running_extreme(ctx, name, x, dim)


def running_extreme(ctx: Context, name: str, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """(extreme so far, index of its last occurrence). An element is such an occurrence when it equals the extreme so far
    (or is NaN); the latest of those is a running maximum of their indices."""
    if any(n.const == 0 for n in x.shape):
        raise Unlowered("a running extreme of nothing")
    if x.dtype is DType.b1:
        values, places = running_extreme(ctx, name, ctx.cast(x, DType.u8), dim)
        return ctx.cast(values, DType.b1), places
    v = lift_firm(ctx, x, x.dtype)
    best = ctx.scan(name, v, dim)
    hit = ctx.map("eq", v, best)
    if v.dtype.is_float:
        hit = ctx.map("bit_or", hit, ctx.map("isnan", v))
    d = normalize_dim(dim, x.ndim)
    i = ctx.index(ix.axis(d) if x.ndim else ix.ZERO, x.shape)
    marked = ctx.map("where", hit, i, ctx.const(0, DType.i64))
    return settle(ctx, best, x.dtype), ctx.scan("cummax", marked, dim)


_running("cummax")
_running("cummin")
