"""Lowerings of indirect reads. Scatters are ATen's.

Which negative indices count from the end follows eager: those of `index` and `take` do, those of `embedding`, `gather`
and `index_select` raise. An index out of range raises at run time, wherever it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plait.frontend.context import Context, Tensor, broadcast_shape, normalize_dim
from plait.frontend.promote import Unlowered, table
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.graph import Shape
from plait.ir.index import Expr

Entry = Expr | Tensor


def _integers(ctx: Context, t: Tensor) -> Tensor:
    if t.dtype not in (DType.i64, DType.i32):
        raise Unlowered(f"indices of type {t.dtype!r}")
    return ctx.cast(t, DType.i64)


def _place(ctx: Context, t: Tensor, shape: Shape, at: int) -> Tensor:
    """t over the axes at … at + t.ndim of `shape`, broadcast along the others."""
    for _ in range(len(shape) - at - t.ndim):
        t = ctx.unsqueeze(t, t.ndim)
    return ctx.expand(t, shape)


@table("embedding.default")
def embedding(ctx: Context, weight: Tensor, indices: Tensor, *_: Any) -> Any:
    """Rows of weight."""
    shape = (*indices.shape, weight.shape[1])
    rows = _place(ctx, _integers(ctx, indices), shape, 0)
    return ctx.gather(weight, [rows, ix.axis(indices.ndim)], shape)


@table("index_select.default")
def index_select(ctx: Context, x: Tensor, dim: int, index: Tensor) -> Any:
    """x at `index` along dim."""
    t = _integers(ctx, index)
    if x.ndim == 0:
        x = ctx.unsqueeze(x, 0)
        picked = ctx.gather(x, [ctx.reshape(t, (ix.ONE,))], (ix.ONE,))
        return ctx.reshape(picked, ())
    d = normalize_dim(dim, x.ndim)
    t = t if t.ndim else ctx.unsqueeze(t, 0)
    shape = (*x.shape[:d], t.shape[0], *x.shape[d + 1 :])
    entries: list[Entry] = [ix.axis(k) for k in range(x.ndim)]
    entries[d] = _place(ctx, t, shape, d)
    return ctx.gather(x, entries, shape)


@table("gather.default")
def gather(ctx: Context, x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Any:
    """x with one coordinate taken from `index`, whose shape the result has."""
    t = _integers(ctx, index)
    if x.ndim == 0 or index.ndim == 0:
        x, flat = (ctx.unsqueeze(v, 0) if v.ndim == 0 else v for v in (x, t))
        return ctx.reshape(ctx.gather(x, [flat], flat.shape), index.shape)
    d = normalize_dim(dim, x.ndim)
    entries: list[Entry] = [ix.axis(k) for k in range(x.ndim)]
    entries[d] = t
    return ctx.gather(x, entries, t.shape)


@table("take.default")
def take(ctx: Context, x: Tensor, index: Tensor) -> Any:
    """Elements of x counted row by row."""
    count = ix.product(x.shape)
    t = ctx.wrap_index(_integers(ctx, index), count)
    return ctx.gather(ctx.reshape(x, (count,)), [t], index.shape)


@table("index.Tensor", "_unsafe_index.Tensor")
def index(ctx: Context, x: Tensor, indices: Sequence[Tensor | None]) -> Any:
    """Index tensors broadcast together; their axes stand where the first of them stood when they are neighbours, else
    in front."""
    given = {d: t for d, t in enumerate(indices) if t is not None}
    if not given:
        return x
    if any(t.dtype in (DType.b1, DType.u8) for t in given.values()):
        raise Unlowered("a mask as index: the size of the result depends on data")
    common = broadcast_shape([t.shape for t in given.values()])
    places = list(given)
    adjacent = places == list(range(places[0], places[-1] + 1))
    front = places[0] if adjacent else 0
    rest = [d for d in range(x.ndim) if d not in given]
    shape = (*(x.shape[d] for d in rest[:front]), *common, *(x.shape[d] for d in rest[front:]))
    entries: list[Entry] = []
    for d in range(x.ndim):
        t = given.get(d)
        if t is None:
            k = rest.index(d)
            entries.append(ix.axis(k if k < front else k + len(common)))
        else:
            wrapped = ctx.wrap_index(_integers(ctx, t), x.shape[d])
            entries.append(_place(ctx, ctx.expand(wrapped, common), shape, front))
    return ctx.gather(x, entries, shape)


# ------------------------------------------------------------------------------------------------ nearest resize
def _nearest(ctx: Context, old: Expr, new: Expr, scale: float | None, shift: float) -> Expr | Tensor:
    """The source index of each new index along one dimension: the product in f32, rounded down, kept below the extent.
    Whole factors are exact as integers."""
    if scale is None and old is new:
        return ix.axis(0)
    size, target = old.const, new.const
    if size is None or target is None:
        raise Unlowered("a resize between sizes known at run time only")
    if target % size == 0 and size > 0 and (scale is None or scale == target // size):
        return ix.floordiv(ix.axis(0), target // size, ctx.over((new,)))
    ratio = ctx.const(size / target, DType.f32) if scale is None else _inverse(ctx, scale)
    i = ctx.cast(ctx.index(ix.axis(0), (new,)), DType.f32)
    if shift:
        i = ctx.map("add", i, ctx.const(shift, DType.f32))
    place = ctx.cast(ctx.map("floor", ctx.map("mul", i, ratio)), DType.i64)
    return ctx.map("minimum", place, ctx.const(size - 1, DType.i64))


def _inverse(ctx: Context, scale: float) -> Tensor:
    return ctx.const(1.0 / scale, DType.f32)


def _resized(ctx: Context, x: Tensor, size: Sequence[Any], scales: Sequence[float | None], shift: float) -> Tensor:
    lead = x.ndim - len(size)
    shape = (*x.shape[:lead], *(ix.to_expr(n) for n in size))
    entries: list[Entry] = [ix.axis(k) for k in range(lead)]
    for d in range(lead, x.ndim):
        at = _nearest(ctx, x.shape[d], shape[d], scales[d - lead], shift)
        if isinstance(at, Expr):
            entries.append(at.substitute({ix.axis_atom(0): ix.axis(d)}, ctx.over(shape)))
        else:
            entries.append(_place(ctx, at, shape, d))
    return ctx.gather(x, entries, shape)


def _resize(name: str, rank: int, shift: float) -> None:
    @table(f"{name}{rank}d.default")
    def by_size(ctx: Context, x: Tensor, size: Sequence[Any], *scales: Any, **named: Any) -> Any:
        given = [*scales, *named.values()]
        return _resized(ctx, x, size, given or [None] * rank, shift)

    @table(f"{name}{rank}d.vec")
    def by_factor(ctx: Context, x: Tensor, size: Sequence[Any] | None, factors: Sequence[float] | None) -> Any:
        if size is not None:
            return _resized(ctx, x, size, [None] * rank, shift)
        assert factors is not None
        extents = [n.const for n in x.shape[-rank:]]
        if any(n is None for n in extents):
            raise Unlowered("a resize of sizes known at run time only")
        out = [int(n * f) for n, f in zip(extents, factors, strict=True) if n is not None]
        return _resized(ctx, x, out, factors, shift)


for _rank in (1, 2, 3):
    _resize("upsample_nearest", _rank, 0.0)
    _resize("_upsample_nearest_exact", _rank, 0.5)
