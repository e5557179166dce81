"""Tensors put together by guards: cat, stack, pads, and scatters into slices.

A guard is a list of expressions that are all >= 0 where the part applies. A pad is a guarded view; cat and the slice
scatters are one `pieces` node, the first part whose guard holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from plait.frontend.aten_views import Size, index_in, slice_start
from plait.frontend.context import Context, Tensor, from_dtype, lowers, normalize_dim
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.graph import Scalar, Shape
from plait.ir.index import Expr, floordiv, mod


def solid(ctx: Context, x: Tensor) -> Tensor:
    """x without guards, so that it can be a part under another guard."""
    return ctx.map("copy", x) if x.guard else x


def equal(a: Expr, b: Expr) -> tuple[Expr, Expr]:
    """The guard a == b."""
    return (a - b, b - a)


def filler(value: Any, dtype: DType) -> Scalar | None:
    """A fill as eager stores it: converted to the type. None when it is not a constant."""
    if isinstance(value, Expr):
        value = value.const
    if value is None or isinstance(value, Tensor):
        return None
    out = torch.tensor(value).to(from_dtype(dtype)).item()
    assert isinstance(out, (bool, int, float))
    return out


# ------------------------------------------------------------------------------------------------ put together
@lowers("aten.cat.default", "aten.concat.default", "aten.concatenate.default", "prims.cat.default")
def cat(ctx: Context, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Tensors end to end; an empty 1-dim tensor joins anything, and says nothing."""
    xs = [x for x in tensors if not (x.ndim == 1 and x.shape[0] is ix.ZERO)] or [tensors[0]]
    dtype = ctx.expected[0][1] if ctx.expected else xs[0].dtype
    if dtype is None:
        return NotImplemented
    xs = [ctx.cast(x, dtype) for x in xs]
    d = normalize_dim(dim, xs[0].ndim)
    xs = [x for x in xs if x.shape[d] is not ix.ZERO] or xs[:1]
    if len(xs) == 1:
        return xs[0]
    total = ix.ZERO
    for x in xs:
        total = total + x.shape[d]
    shape = (*xs[0].shape[:d], total, *xs[0].shape[d + 1 :])
    parts, start = [], ix.ZERO
    for x in xs:
        here = ix.axis(d) - start
        through = tuple(here if k == d else ix.axis(k) for k in range(len(shape)))
        parts.append(ctx.view(solid(ctx, x), shape, through, (here, x.shape[d] - 1 - here)))
        start = start + x.shape[d]
    return ctx.pieces(parts, shape)


@lowers("aten.stack.default")
def stack(ctx: Context, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Tensors side by side along a new dimension."""
    d = normalize_dim(dim, tensors[0].ndim + 1)
    return cat(ctx, [ctx.unsqueeze(x, d) for x in tensors], d)


# -------------------------------------------------------------------------------------------------------------- pads
@lowers("aten.constant_pad_nd.default")
def constant_pad(ctx: Context, x: Tensor, pad: Sequence[Size], value: Any = 0) -> Any:
    """Rows of a constant around; negative amounts crop."""
    fill = filler(value, x.dtype)
    if fill is None:
        ctx.reason = "a pad value that is not a constant"
        return NotImplemented
    shape, through = list(x.shape), [ix.axis(d) for d in range(x.ndim)]
    guard: list[Expr] = []
    for k in range(len(pad) // 2):
        d = x.ndim - 1 - k
        low, high = ix.to_expr(pad[2 * k]), ix.to_expr(pad[2 * k + 1])
        shape[d] = x.shape[d] + low + high
        through[d] = ix.axis(d) - low
        guard += [through[d], x.shape[d] - 1 - through[d]]
    return ctx.view(x, tuple(shape), tuple(through), tuple(guard), fill)


@lowers("aten.reflection_pad1d.default", "aten.reflection_pad2d.default", "aten.reflection_pad3d.default")
def reflection_pad(ctx: Context, x: Tensor, padding: Sequence[Size]) -> Any:
    """Mirrored at the borders, which are not repeated."""

    def mirrored(at: Tensor, n: Expr) -> Tensor:
        last = ctx.scalar(n - 1, DType.i64)
        return ctx.map("sub", last, ctx.map("abs", ctx.map("sub", last, ctx.map("abs", at))))

    return _pad_by_index(ctx, x, padding, mirrored)


@lowers("aten.replication_pad1d.default", "aten.replication_pad2d.default", "aten.replication_pad3d.default")
def replication_pad(ctx: Context, x: Tensor, padding: Sequence[Size]) -> Any:
    """The border repeated."""

    def clamped(at: Tensor, n: Expr) -> Tensor:
        low = ctx.map("maximum", at, ctx.scalar(0, DType.i64))
        return ctx.map("minimum", low, ctx.scalar(n - 1, DType.i64))

    return _pad_by_index(ctx, x, padding, clamped)


def _pad_by_index(ctx: Context, x: Tensor, padding: Sequence[Size], place: Any) -> Tensor:
    """Each padded dimension is read at place(index before padding, extent)."""
    shape, index = list(x.shape), [ix.axis(d) for d in range(x.ndim)]
    lows: dict[int, Expr] = {}
    for k in range(len(padding) // 2):
        d = x.ndim - 1 - k
        lows[d] = ix.to_expr(padding[2 * k])
        shape[d] = x.shape[d] + lows[d] + padding[2 * k + 1]
    entries: list[Expr | Tensor] = list(index)
    for d, low in lows.items():
        trailing = (ix.ONE,) * (x.ndim - 1 - d)
        # over one axis only, so that it stays cheap to compute wherever it is wanted
        entries[d] = place(ctx.index(ix.axis(0) - low, (shape[d], *trailing)), x.shape[d])
    return ctx.gather(x, entries, tuple(shape))


# ------------------------------------------------------------------------------------------------ scatters into slices
@lowers("aten.slice_scatter.default")
def slice_scatter(
    ctx: Context,
    x: Tensor,
    src: Tensor,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: Size = 1,
) -> Any:
    """x with src in place of a slice."""
    part = _in_slice(ctx, ctx.cast(src, x.dtype), x.shape, dim, start, end, step)
    return NotImplemented if part is None else ctx.pieces([part, solid(ctx, x)], x.shape)


@lowers("aten.slice_backward.default")
def slice_backward(
    ctx: Context, grad: Tensor, sizes: Sequence[Size], dim: int, start: Size, end: Size, step: Size
) -> Any:
    """grad in a tensor of zeros."""
    part = _in_slice(ctx, grad, tuple(ix.to_expr(n) for n in sizes), dim, start, end, step)
    return NotImplemented if part is None else part


def _in_slice(
    ctx: Context, src: Tensor, shape: Shape, dim: int, start: Size | None, end: Size | None, step: Size
) -> Tensor | None:
    """src seen over `shape`, where it is the slice, with a guard; None when the slice's bounds cannot be told."""
    d, by = normalize_dim(dim, len(shape)), ix.to_expr(step).const
    first = None if by is None else slice_start(ctx, start, end, shape[d], src.shape[d], by)
    if by is None or first is None:
        ctx.reason = "a slice whose bounds are not known"
        return None
    away = ix.axis(d) - first
    guard = [away, (src.shape[d] - 1) * by - away]
    through = [ix.axis(k) for k in range(len(shape))]
    through[d] = away
    if by != 1:
        facts = ctx.over(shape)
        guard.append(-mod(away, by, facts))
        through[d] = floordiv(away, by, facts)
    return ctx.view(solid(ctx, src), shape, tuple(through), tuple(guard))


@lowers("aten.select_scatter.default")
def select_scatter(ctx: Context, x: Tensor, src: Tensor, dim: int, index: Size) -> Any:
    """x with src in place of one index of a dimension."""
    part = _in_select(ctx, ctx.cast(src, x.dtype), x.shape, dim, index)
    return NotImplemented if part is None else ctx.pieces([part, solid(ctx, x)], x.shape)


@lowers("aten.select_backward.default")
def select_backward(ctx: Context, grad: Tensor, sizes: Sequence[Size], dim: int, index: Size) -> Any:
    """grad in a tensor of zeros."""
    part = _in_select(ctx, grad, tuple(ix.to_expr(n) for n in sizes), dim, index)
    return NotImplemented if part is None else part


def _in_select(ctx: Context, src: Tensor, shape: Shape, dim: int, index: Size) -> Tensor | None:
    d = normalize_dim(dim, len(shape))
    at = index_in(ctx, index, shape[d])
    if at is None:
        ctx.reason = "an index whose sign is not known"
        return None
    through = tuple(ix.axis(k if k < d else k + 1) for k in range(len(shape) - 1))
    return ctx.view(solid(ctx, src), shape, through, equal(ix.axis(d), at))


@lowers("aten.diagonal_scatter.default")
def diagonal_scatter(ctx: Context, x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """x with src in place of a diagonal."""
    part = _on_diagonal(ctx, ctx.cast(src, x.dtype), x.shape, offset, dim1, dim2)
    return ctx.pieces([part, solid(ctx, x)], x.shape)


@lowers("aten.diagonal_backward.default")
def diagonal_backward(ctx: Context, grad: Tensor, sizes: Sequence[Size], offset: int, dim1: int, dim2: int) -> Any:
    """grad on the diagonal of a tensor of zeros."""
    return _on_diagonal(ctx, grad, tuple(ix.to_expr(n) for n in sizes), offset, dim1, dim2)


@lowers("aten.diag_embed.default")
def diag_embed(ctx: Context, x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    """The last dimension on a diagonal of two new ones."""
    a, b = normalize_dim(dim1, x.ndim + 1), normalize_dim(dim2, x.ndim + 1)
    rest = iter(x.shape[:-1])
    side = x.shape[-1] + abs(offset)
    shape = tuple(side if k in (a, b) else next(rest) for k in range(x.ndim + 1))
    return _on_diagonal(ctx, x, shape, offset, a, b)


def _on_diagonal(ctx: Context, src: Tensor, shape: Shape, offset: int, dim1: int, dim2: int) -> Tensor:
    a, b = normalize_dim(dim1, len(shape)), normalize_dim(dim2, len(shape))
    kept = [ix.axis(k) for k in range(len(shape)) if k not in (a, b)]
    along = ix.axis(a) - max(-offset, 0)
    inside = (along, src.shape[-1] - 1 - along)
    guard = (*equal(ix.axis(b), ix.axis(a) + offset), *inside)
    return ctx.view(solid(ctx, src), shape, (*kept, along), guard)


@lowers("aten.copy.default")
def copy(ctx: Context, x: Tensor, src: Tensor, non_blocking: bool = False) -> Any:
    """src in x's type and shape."""
    return ctx.expand(ctx.cast(src, x.dtype), x.shape)


@lowers("aten._local_scalar_dense.default")
def local_scalar(ctx: Context, x: Tensor) -> Any:
    """A float taken out of a tensor stays a 0-dim value: nothing waits for it."""
    if not x.dtype.is_float:
        ctx.reason = "an integer taken out of a tensor"
        return NotImplemented
    return ctx.cast(ctx.reshape(x, ()), DType.f64)
