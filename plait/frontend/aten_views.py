"""Views as index maps: reshapes, permutations, slices, and what else shows a tensor's elements without computing.

No function here makes a node (but `view.dtype`, which is a bitcast). Where a map cannot be told, for instance a slice
whose start is not known to be in range, the lowering returns NotImplemented and the operator is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from plait.frontend.context import Context, Lowering, Tensor, lowers, normalize_dim, to_dtype
from plait.frontend.layout import is_dense
from plait.ir import index as ix
from plait.ir.graph import Shape, contiguous_strides, identity
from plait.ir.index import Expr, floordiv, mod

Size = Expr | int


def views(*names: str) -> Callable[[Lowering], Lowering]:
    """Register under aten names and, where torch has it, the `_copy` form of each."""

    def register(fn: Lowering) -> Lowering:
        for name in names:
            base, overload = name.split(".")
            lowers(f"aten.{name}")(fn)
            packet = getattr(torch.ops.aten, f"{base}_copy", None)
            if packet is not None and overload in packet.overloads():
                lowers(f"aten.{base}_copy.{overload}")(fn)
        return fn

    return register


def index_in(ctx: Context, i: Size, extent: Expr) -> Expr | None:
    """An index counted from the front; None when its sign cannot be told."""
    e = ix.to_expr(i)
    if ctx.facts.is_nonneg(e):
        return e
    return e + extent if ctx.facts.is_less(e, ix.ZERO) else None


def bounds_in(ctx: Context, start: Size | None, end: Size | None, extent: Expr) -> tuple[Expr, Expr] | None:
    """A slice's first index and its end as torch clamps them into [0, extent]; None when that cannot be told."""
    out: list[Expr] = []
    for given, default in ((start, ix.ZERO), (end, extent)):
        e = default if given is None else index_in(ctx, given, extent)
        if e is None:
            return None
        if ctx.facts.is_nonneg(e - extent):
            e = extent
        elif ctx.facts.is_less(e, ix.ZERO):
            e = ix.ZERO
        elif not (ctx.facts.is_nonneg(e) and ctx.facts.is_nonneg(extent - e)):
            return None
        out.append(e)
    return out[0], out[1]


def along(ctx: Context, x: Tensor, dim: int, extent: Expr, at: Expr) -> Tensor:
    """x with dimension `dim` of a new extent, read at `at` (over the new axes)."""
    shape = (*x.shape[:dim], extent, *x.shape[dim + 1 :])
    through = tuple(at if d == dim else ix.axis(d) for d in range(x.ndim))
    return ctx.view(x, shape, through)


def narrow_to(ctx: Context, x: Tensor, dim: int, start: Expr, length: Expr, step: int = 1) -> Tensor:
    """length elements of a dimension from start on, every step-th."""
    if start is ix.ZERO and length is x.shape[dim] and step == 1:
        return x
    return along(ctx, x, dim, length, ix.axis(dim) * step + start)


# -------------------------------------------------------------------------------------------------------- reshapes
@views("view.default", "_unsafe_view.default", "reshape.default", "_reshape_alias.default")
def reshape(ctx: Context, x: Tensor, size: Sequence[Size], stride: Any = None) -> Any:
    """Same elements in row-major order; one extent may be -1."""
    new = [ix.to_expr(n) for n in size]
    if any(n.const == -1 for n in new):
        at = next(k for k, n in enumerate(new) if n.const == -1)
        rest = ix.product(n for k, n in enumerate(new) if k != at)
        if ctx.expected:
            new[at] = ctx.expected[0][0][at]
        elif ctx.facts.is_less(ix.ZERO, rest):
            new[at] = floordiv(ix.product(x.shape), rest, ctx.facts)
        else:
            return NotImplemented
    return ctx.reshape(x, new)


@views("alias.default", "detach.default", "contiguous.default", "lift.default", "lift_fresh.default", "clone.default")
@lowers("prims.view_of.default", "aten._lazy_clone.default")
def same(ctx: Context, x: Tensor, **kwargs: Any) -> Any:
    """The value itself; the memory format asked for lives on in the result's strides."""
    return x


@views("permute.default")
@lowers("prims.transpose.default")
def permute(ctx: Context, x: Tensor, dims: Sequence[int]) -> Any:
    """Result dimension k is dimension dims[k]."""
    return ctx.permute(x, dims)


@views("transpose.int")
def transpose(ctx: Context, x: Tensor, a: int, b: int) -> Any:
    """Two dimensions swapped."""
    order = list(range(x.ndim))
    i, j = normalize_dim(a, x.ndim), normalize_dim(b, x.ndim)
    if x.ndim:
        order[i], order[j] = j, i
    return ctx.permute(x, order)


@views("t.default", "numpy_T.default", "mT.default")
def t(ctx: Context, x: Tensor) -> Any:
    """The last two dimensions swapped (of what has two)."""
    return transpose(ctx, x, -1, -2) if x.ndim >= 2 else x


@views("movedim.int", "movedim.intlist")
def movedim(ctx: Context, x: Tensor, source: int | list[int], destination: int | list[int]) -> Any:
    """Dimensions moved to places of the result; the others keep their order."""
    froms = [source] if isinstance(source, int) else source
    tos = [destination] if isinstance(destination, int) else destination
    placed = {normalize_dim(b, x.ndim): normalize_dim(a, x.ndim) for a, b in zip(froms, tos, strict=True)}
    rest = iter(d for d in range(x.ndim) if d not in placed.values())
    return ctx.permute(x, [placed[k] if k in placed else next(rest) for k in range(x.ndim)])


@views("expand.default")
@lowers("aten.broadcast_to.default")
def expand(ctx: Context, x: Tensor, size: Sequence[Size], *, implicit: bool = False) -> Any:
    """Extents of 1 stretched, dimensions added in front."""
    return ctx.expand(x, size)


@views("squeeze.default", "squeeze.dim", "squeeze.dims")
def squeeze(ctx: Context, x: Tensor, dim: int | Sequence[int] | None = None) -> Any:
    """Without its dimensions of extent 1, or those of them named."""
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {normalize_dim(d, x.ndim) for d in dims} if x.ndim else set()
    kept = [d for d in range(x.ndim) if d not in gone or x.shape[d] is not ix.ONE]
    through = tuple(ix.axis(kept.index(d)) if d in kept else ix.ZERO for d in range(x.ndim))
    return ctx.view(x, tuple(x.shape[d] for d in kept), through)


@views("unsqueeze.default")
def unsqueeze(ctx: Context, x: Tensor, dim: int) -> Any:
    """A new dimension of extent 1."""
    return ctx.unsqueeze(x, dim)


@views("view.dtype")
def view_dtype(ctx: Context, x: Tensor, dtype: torch.dtype) -> Any:
    """The same bits as another type of the same size."""
    to = to_dtype(dtype)
    if to is None or to.nbytes != x.dtype.nbytes:
        ctx.reason = "bits seen as a type of another size"
        return NotImplemented
    return x if to is x.dtype else ctx.map("bitcast", x, dtype=to)


# ---------------------------------------------------------------------------------------------------------- slices
@views("slice.Tensor")
def slice_(
    ctx: Context, x: Tensor, dim: int = 0, start: Size | None = None, end: Size | None = None, step: Size = 1
) -> Any:
    """x[..., start:end:step, ...] with Python's clamping."""
    d, by = normalize_dim(dim, x.ndim), ix.to_expr(step).const
    if by is None:
        return NotImplemented
    length = ctx.expected[0][0][d] if ctx.expected else None
    if length is None:
        found = bounds_in(ctx, start, end, x.shape[d])
        if found is None:
            return NotImplemented
        length = floordiv(found[1] - found[0] + (by - 1), by, ctx.facts)
        length = ix.ZERO if length.const is not None and length.const < 0 else length
    first = slice_start(ctx, start, end, x.shape[d], length, by)
    if first is None:
        ctx.reason = "a slice whose start is not known"
        return NotImplemented
    return narrow_to(ctx, x, d, first, length, by)


def slice_start(ctx: Context, start: Size | None, end: Size | None, extent: Expr, length: Expr, by: int) -> Expr | None:
    """Where a slice of a known length begins, though an end of it may not be known; None where that cannot be told."""
    found = bounds_in(ctx, start, None, extent)
    if found is not None or length is ix.ZERO:
        return found[0] if found is not None else ix.ZERO
    first = None if start is None else index_in(ctx, start, extent)
    if first is not None and ctx.facts.is_nonneg(first) and ctx.facts.is_less(ix.ZERO, length):
        return first  # the slice is not empty, so its start was in range
    stop = bounds_in(ctx, None, end, extent)
    return stop[1] - length if by == 1 and stop is not None else None


@views("select.int")
def select(ctx: Context, x: Tensor, dim: int, index: Size) -> Any:
    """One index of a dimension, which disappears."""
    d = normalize_dim(dim, x.ndim)
    at = index_in(ctx, index, x.shape[d])
    if at is None:
        ctx.reason = "an index whose sign is not known"
        return NotImplemented
    through = tuple(at if k == d else ix.axis(k if k < d else k - 1) for k in range(x.ndim))
    return ctx.view(x, (*x.shape[:d], *x.shape[d + 1 :]), through)


@views("narrow.default")
def narrow(ctx: Context, x: Tensor, dim: int, start: Size, length: Size) -> Any:
    """length elements from start on."""
    d = normalize_dim(dim, x.ndim)
    at = index_in(ctx, start, x.shape[d])
    return NotImplemented if at is None else narrow_to(ctx, x, d, at, ix.to_expr(length))


@views("split.Tensor", "unsafe_split.Tensor")
def split(ctx: Context, x: Tensor, size: Size, dim: int = 0) -> Any:
    """Parts of one size; the last may be smaller."""
    d, by = normalize_dim(dim, x.ndim), ix.to_expr(size)
    n = x.shape[d]
    if ctx.expected:
        lengths = [shape[d] for shape, _ in ctx.expected]
    elif n.const is not None and by.const:
        lengths = [ix.const(min(by.const, n.const - k)) for k in range(0, n.const, by.const)] or [ix.ZERO]
    else:
        return NotImplemented
    return tuple(narrow_to(ctx, x, d, by * k, length) for k, length in enumerate(lengths))


@views("split_with_sizes.default", "unsafe_split_with_sizes.default")
def split_with_sizes(ctx: Context, x: Tensor, sizes: Sequence[Size], dim: int = 0) -> Any:
    """Parts of the sizes given."""
    d, start, out = normalize_dim(dim, x.ndim), ix.ZERO, []
    for size in sizes:
        out.append(narrow_to(ctx, x, d, start, ix.to_expr(size)))
        start = start + size
    return tuple(out)


@views("chunk.default", "unsafe_chunk.default")
def chunk(ctx: Context, x: Tensor, chunks: int, dim: int = 0) -> Any:
    """At most `chunks` parts of equal size, but for the last."""
    n = x.shape[normalize_dim(dim, x.ndim)]
    each = floordiv(n + (chunks - 1), chunks, ctx.facts)
    if each is ix.ZERO:
        return tuple(x for _ in range(chunks))
    return split(ctx, x, each, dim)


@views("unbind.int")
def unbind(ctx: Context, x: Tensor, dim: int = 0) -> Any:
    """Every index of a dimension on its own."""
    n = x.shape[normalize_dim(dim, x.ndim)].const
    return NotImplemented if n is None else tuple(select(ctx, x, dim, k) for k in range(n))


@views("unfold.default")
def unfold(ctx: Context, x: Tensor, dim: int, size: int, step: int) -> Any:
    """Windows of a dimension, their elements along a new last one."""
    if x.ndim == 0:
        return ctx.view(x, (ix.const(size),), ())
    d = normalize_dim(dim, x.ndim)
    count = floordiv(x.shape[d] - size, step, ctx.facts) + 1
    shape = (*x.shape[:d], count, *x.shape[d + 1 :], ix.const(size))
    through = [ix.axis(k) for k in range(x.ndim)]
    through[d] = ix.axis(d) * step + ix.axis(x.ndim)
    return ctx.view(x, shape, tuple(through))


@views("diagonal.default")
def diagonal(ctx: Context, x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """The elements with second index = first + offset, along a new last dimension."""
    a, b = normalize_dim(dim1, x.ndim), normalize_dim(dim2, x.ndim)
    rows, cols = x.shape[a] - max(-offset, 0), x.shape[b] - max(offset, 0)
    if ctx.expected:
        length = ctx.expected[0][0][-1]
    elif rows.const is not None and cols.const is not None:
        length = ix.const(max(0, min(rows.const, cols.const)))
    else:
        return NotImplemented
    kept = [d for d in range(x.ndim) if d not in (a, b)]
    last = ix.axis(len(kept))
    at = {a: last + max(-offset, 0), b: last + max(offset, 0)}
    through = tuple(at[d] if d in at else ix.axis(kept.index(d)) for d in range(x.ndim))
    return ctx.view(x, (*(x.shape[d] for d in kept), length), through)


@views("as_strided.default")
def as_strided(
    ctx: Context, x: Tensor, size: Sequence[Size], stride: Sequence[Size], offset: Size | None = None
) -> Any:
    """Elements by their place in memory, where memory is known: x is dense and (the importer sees to it) all there is."""
    strides = x.strides if x.strides is not None else contiguous_strides(x.shape)
    ctx.reason = "as_strided of memory that is not one dense tensor"
    shape = tuple(ix.to_expr(n) for n in size)
    if any(n is ix.ZERO for n in (*shape, *x.shape)):
        return ctx.view(x, shape, (ix.ZERO,) * x.ndim)
    if not is_dense(x.shape, strides):
        return NotImplemented
    place = ix.ZERO if offset is None else ix.to_expr(offset)
    for d, step in enumerate(stride):
        place = place + ix.axis(d) * ix.to_expr(step)
    # dimensions in the order they lie in memory; their row-major index is the address
    order = sorted((d for d in range(x.ndim) if x.shape[d] is not ix.ONE), key=lambda d: _inner(x.shape, strides, d))
    facts = ctx.over(shape)
    through = [ix.ZERO] * x.ndim
    for d, e in zip(order, ix.unflatten(place, tuple(x.shape[d] for d in order), facts), strict=True):
        through[d] = e
    return ctx.view(x, shape, tuple(through))


def _inner(shape: Shape, strides: Shape, d: int) -> int:
    """How many dimensions lie outside d, in a dense layout: a stride times its extent is the next stride out."""
    count, step = 0, strides[d] * shape[d]
    while True:
        outer = next((k for k in range(len(shape)) if strides[k] is step and shape[k] is not ix.ONE), None)
        if outer is None:
            return count
        count, step = count + 1, strides[outer] * shape[outer]


# ------------------------------------------------------------------------------------------- mirrored and repeated
@lowers("aten.flip.default", "prims.rev.default")
def flip(ctx: Context, x: Tensor, dims: Sequence[int]) -> Any:
    """Dimensions read backwards."""
    gone = {normalize_dim(d, x.ndim) for d in dims}
    through = tuple(x.shape[d] - 1 - ix.axis(d) if d in gone and x.ndim else ix.axis(d) for d in range(x.ndim))
    return ctx.view(x, x.shape, through)


@lowers("aten.roll.default")
def roll(ctx: Context, x: Tensor, shifts: Sequence[Size], dims: Sequence[int] = ()) -> Any:
    """Elements moved cyclically; without dims, along the flattened tensor."""
    if not dims:
        flat = ctx.reshape(x, (ix.product(x.shape),))
        return ctx.reshape(roll(ctx, flat, shifts, [0]), x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        d, by = normalize_dim(dim, x.ndim), ix.to_expr(shift)
        if not x.ndim or x.shape[d].const == 0:
            continue
        if not ctx.facts.is_less(ix.ZERO, x.shape[d]):
            return NotImplemented
        back = mod(-by, x.shape[d], ctx.facts)
        x = along(ctx, x, d, x.shape[d], mod(ix.axis(d) + back, x.shape[d], ctx.over(x.shape)))
    return x


@lowers("aten.repeat.default", "aten.tile.default")
def repeat(ctx: Context, x: Tensor, repeats: Sequence[Size]) -> Any:
    """Copies laid side by side along each dimension."""
    times = [ix.to_expr(r) for r in repeats]
    times = [ix.ONE] * (x.ndim - len(times)) + times
    for _ in range(len(times) - x.ndim):
        x = ctx.unsqueeze(x, 0)
    shape = tuple(n * r for n, r in zip(x.shape, times, strict=True))
    if any(n is ix.ZERO for n in shape):
        return ctx.view(x, shape, (ix.ZERO,) * x.ndim)
    facts, through = ctx.over(shape), []
    for d, (n, r) in enumerate(zip(x.shape, times, strict=True)):
        if not ctx.facts.is_less(ix.ZERO, n):
            return NotImplemented
        through.append(ix.axis(d) if r is ix.ONE else mod(ix.axis(d), n, facts))
    return ctx.view(x, shape, tuple(through))


@lowers("aten.repeat_interleave.self_int")
def repeat_interleave(
    ctx: Context, x: Tensor, repeats: Size, dim: int | None = None, *, output_size: Any = None
) -> Any:
    """Every element of a dimension several times in a row."""
    if dim is None:
        return repeat_interleave(ctx, ctx.reshape(x, (ix.product(x.shape),)), repeats, 0)
    if x.ndim == 0:
        x = ctx.unsqueeze(x, 0)
    d, times = normalize_dim(dim, x.ndim), ix.to_expr(repeats)
    if times is ix.ZERO:
        return along(ctx, x, d, ix.ZERO, ix.ZERO)
    if not ctx.facts.is_less(ix.ZERO, times):
        return NotImplemented
    extent = x.shape[d] * times
    shape = (*x.shape[:d], extent, *x.shape[d + 1 :])
    return along(ctx, x, d, extent, floordiv(ix.axis(d), times, ctx.over(shape)))


# ------------------------------------------------------------------------------------------------ rearranged channels
@lowers("aten.pixel_shuffle.default")
def pixel_shuffle(ctx: Context, x: Tensor, factor: int) -> Any:
    """(…, c*r*r, h, w) → (…, c, h*r, w*r)."""
    *lead, c, h, w = x.shape
    out = floordiv(c, factor * factor, ctx.facts)
    k = len(lead)
    y = ctx.reshape(x, [*lead, out, factor, factor, h, w])
    y = ctx.permute(y, [*range(k), k, k + 3, k + 1, k + 4, k + 2])
    return ctx.reshape(y, [*lead, out, h * factor, w * factor])


@lowers("aten.pixel_unshuffle.default")
def pixel_unshuffle(ctx: Context, x: Tensor, factor: int) -> Any:
    """(…, c, h*r, w*r) → (…, c*r*r, h, w)."""
    *lead, c, h, w = x.shape
    k, rows, cols = len(lead), floordiv(h, factor, ctx.facts), floordiv(w, factor, ctx.facts)
    y = ctx.reshape(x, [*lead, c, rows, factor, cols, factor])
    y = ctx.permute(y, [*range(k), k, k + 2, k + 4, k + 1, k + 3])
    return ctx.reshape(y, [*lead, c * (factor * factor), rows, cols])


@lowers("aten.channel_shuffle.default", "aten.native_channel_shuffle.default")
def channel_shuffle(ctx: Context, x: Tensor, groups: int) -> Any:
    """Channels (g, c/g) read as (c/g, g)."""
    each = floordiv(x.shape[1], groups, ctx.facts)
    y = ctx.reshape(x, [x.shape[0], groups, each, *x.shape[2:]])
    return ctx.reshape(ctx.permute(y, [0, 2, 1, *range(3, y.ndim)]), x.shape)


@lowers("aten.tril.default")
def tril(ctx: Context, x: Tensor, diagonal: Size = 0) -> Any:
    """Zero above a diagonal: a guard on the two last axes."""
    return ctx.view(x, x.shape, identity(x.shape), (ix.axis(x.ndim - 2) + diagonal - ix.axis(x.ndim - 1),), 0)


@lowers("aten.triu.default")
def triu(ctx: Context, x: Tensor, diagonal: Size = 0) -> Any:
    """Zero below a diagonal."""
    return ctx.view(x, x.shape, identity(x.shape), (ix.axis(x.ndim - 1) - ix.axis(x.ndim - 2) - diagonal,), 0)
