"""Lowerings of random numbers: counter-based, a function of (seed, draw, linear index of the element).

The seed comes from torch's generator once a run; each draw of a graph has a number of its own, so that equal-looking
draws are never one node. Under rng="eager" every random operator is ATen's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from plait.frontend.context import Context, Tensor, as_read, whole
from plait.frontend.draws import OFFSET
from plait.frontend.promote import Operand, Unlowered, category, default_float, known, lift, settle, table, to_type
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.graph import Shape
from plait.ir.index import Expr

Size = Expr | int
_MANTISSA = {DType.f16: 11, DType.bf16: 8}


def _draw(ctx: Context, op: str, shape: Shape, dtype: DType) -> Tensor:
    """Random values of a compute type, different from those of every other draw."""
    if ctx.rng != "plait":
        raise Unlowered("random numbers are eager's own")
    _refuse_none(shape)
    return _node(ctx, op, shape, dtype, ctx.seed(), ctx.serial())


def _node(ctx: Context, op: str, shape: Shape, dtype: DType, stream: tuple[Tensor, Tensor], draw: int) -> Tensor:
    """A draw of a stream (seed, offset)."""
    reads = [as_read(ctx.expand(s, shape)) for s in stream]
    linear = ix.flatten([ix.axis(d) for d in range(len(shape))], shape)
    return whole(ctx.builder.node(op, shape, reads, dtype=dtype, draw=draw, linear=linear))


def _refuse_none(shape: Shape) -> None:
    if any(n.const == 0 for n in shape):
        raise Unlowered("no elements to draw")


@table("plait.seed.default")
def seed(ctx: Context, device: torch.device) -> Any:
    """The seed of a training step's dropouts."""
    _plain(ctx, {"device": device})
    return ctx.seed()[0]


@table("plait.uniform.default")
def uniform_by_seed(ctx: Context, seed: Tensor, draw: int, size: Sequence[Size]) -> Any:
    """Uniform numbers of a seed: the same ones in the forward and in the backward."""
    shape = _extents(size)
    _refuse_none(shape)
    return _node(ctx, "rand", shape, DType.f32, (seed, ctx.const(OFFSET, DType.i64)), draw)


def _plain(ctx: Context, options: dict[str, Any]) -> None:
    device = options.get("device")
    if device is not None and torch.device(device).type != torch.device(ctx.device).type:
        raise Unlowered("a tensor on another device")
    if options.get("generator") is not None or options.get("layout") not in (None, torch.strided):
        raise Unlowered("a generator of the user's, or a sparse tensor")


def _extents(size: Sequence[Size]) -> Shape:
    return tuple(ix.to_expr(n) for n in size)


def uniform_unit(ctx: Context, shape: Shape, dtype: DType) -> Tensor:
    """Uniform in [0, 1); half types get as many bits as they can hold, so that rounding never gives 1."""
    bits = _MANTISSA.get(dtype)
    if bits is None:
        return _draw(ctx, "rand", shape, dtype)
    word = ctx.map("bit_and", _draw(ctx, "randbits", shape, DType.i32), ctx.const((1 << bits) - 1, DType.i32))
    scaled = ctx.map("mul", ctx.cast(word, DType.f32), ctx.const(2.0**-bits, DType.f32))
    return to_type(ctx, scaled, dtype)


def _float_type(dtype: torch.dtype | None, default: DType) -> DType:
    d = default if dtype is None else known(dtype)
    if category(d) != 2:
        raise Unlowered("random integers by a float operator")
    return d


def normal_unit(ctx: Context, shape: Shape, dtype: DType) -> Tensor:
    """Standard normal, in the compute type of `dtype`."""
    return _draw(ctx, "randn", shape, dtype.compute)


@table("rand.default")
def rand(ctx: Context, size: Sequence[Size], *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """Uniform in [0, 1)."""
    _plain(ctx, options)
    return uniform_unit(ctx, _extents(size), _float_type(dtype, default_float()))


@table("rand_like.default")
def rand_like(ctx: Context, x: Tensor, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """rand of x's shape and type."""
    _plain(ctx, options)
    return uniform_unit(ctx, x.shape, _float_type(dtype, x.dtype))


@table("randn.default")
def randn(ctx: Context, size: Sequence[Size], *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """Standard normal."""
    _plain(ctx, options)
    d = _float_type(dtype, default_float())
    return settle(ctx, normal_unit(ctx, _extents(size), d), d)


@table("randn_like.default")
def randn_like(ctx: Context, x: Tensor, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """randn of x's shape and type."""
    _plain(ctx, options)
    d = _float_type(dtype, x.dtype)
    return settle(ctx, normal_unit(ctx, x.shape, d), d)


def _integers(ctx: Context, shape: Shape, low: Size, high: Size, dtype: DType) -> Tensor:
    if isinstance(low, int) and isinstance(high, int) and high <= low:
        raise Unlowered("a range without integers")
    word = _draw(ctx, "randbits", shape, DType.i64)
    span = ctx.scalar(ix.to_expr(high) - ix.to_expr(low), DType.i64)
    value = ctx.map("add", ctx.map("remainder", word, span), ctx.scalar(low, DType.i64))
    return to_type(ctx, value, dtype)


@table("randint.default", "randint.low")
def randint(ctx: Context, *args: Any, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """Integers of [low, high)."""
    _plain(ctx, options)
    low, high, size = args if len(args) == 3 else (0, *args)
    return _integers(ctx, _extents(size), low, high, DType.i64 if dtype is None else known(dtype))


@table("randint_like.default", "randint_like.low_dtype")
def randint_like(ctx: Context, x: Tensor, *bounds: Size, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """randint of x's shape and type."""
    _plain(ctx, options)
    low, high = bounds if len(bounds) == 2 else (0, *bounds)
    return _integers(ctx, x.shape, low, high, x.dtype if dtype is None else known(dtype))


# ------------------------------------------------------------------------------------------------ distributions
@table("native_dropout.default")
def native_dropout(ctx: Context, x: Tensor, p: float, train: bool | None) -> Any:
    """(x with elements dropped and the rest scaled, mask of the kept)."""
    if category(x.dtype) != 2:
        raise Unlowered("dropout of integers")
    if train is False or p == 0:
        return x, ctx.expand(ctx.const(True, DType.b1), x.shape)
    v = lift(ctx, x, x.dtype)
    if p >= 1:
        gone = ctx.expand(ctx.const(0.0, v.dtype), x.shape)
        return settle(ctx, gone, x.dtype), ctx.expand(ctx.const(False, DType.b1), x.shape)
    kept = ctx.map("ge", _draw(ctx, "rand", x.shape, DType.f32), ctx.const(float(p), DType.f32))
    scale = ctx.const(1.0 / (1.0 - p), v.dtype)
    # a product, not a selection: eager keeps NaN and the sign of zero
    out = ctx.map("mul", ctx.map("mul", v, ctx.cast(kept, v.dtype)), scale)
    return settle(ctx, out, x.dtype), kept


@table("native_dropout_backward.default")
def native_dropout_backward(ctx: Context, grad: Tensor, mask: Tensor, scale: float) -> Any:
    """grad * mask * scale."""
    if category(grad.dtype) != 2:
        raise Unlowered("a gradient of integers")
    g = lift(ctx, grad, grad.dtype)
    kept = to_type(ctx, mask, g.dtype)
    return settle(ctx, ctx.map("mul", ctx.map("mul", g, kept), ctx.scalar(scale, g.dtype)), grad.dtype)


def _bernoulli(ctx: Context, shape: Shape, p: Tensor, dtype: DType) -> Tensor:
    hit = ctx.map("lt", _draw(ctx, "rand", shape, p.dtype), ctx.expand(p, shape))
    return to_type(ctx, hit, dtype)


@table("bernoulli.default")
def bernoulli(ctx: Context, x: Tensor, *, generator: Any = None) -> Any:
    """1 with probability x."""
    _plain(ctx, {"generator": generator})
    if category(x.dtype) != 2:
        raise Unlowered("probabilities that are integers")
    return _bernoulli(ctx, x.shape, lift(ctx, x, x.dtype), x.dtype)


@table("bernoulli.p")
def bernoulli_p(ctx: Context, x: Tensor, p: Operand = 0.5, *, generator: Any = None) -> Any:
    """1 with probability p, of x's shape and type."""
    _plain(ctx, {"generator": generator})
    return _bernoulli(ctx, x.shape, ctx.scalar(p, DType.f32), x.dtype)


@table("bernoulli.Tensor")
def bernoulli_tensor(ctx: Context, x: Tensor, p: Tensor, *, generator: Any = None) -> Any:
    """1 with probability p, of x's shape and type."""
    _plain(ctx, {"generator": generator})
    if category(p.dtype) != 2:
        raise Unlowered("probabilities that are integers")
    return _bernoulli(ctx, x.shape, lift(ctx, p, p.dtype), x.dtype)


@table("uniform.default")
def uniform(ctx: Context, x: Tensor, low: float = 0.0, high: float = 1.0, *, generator: Any = None) -> Any:
    """Uniform in [low, high), of x's shape and type."""
    _plain(ctx, {"generator": generator})
    d = _float_type(None, x.dtype)
    u = lift(ctx, uniform_unit(ctx, x.shape, d), d)
    width = ctx.map("sub", ctx.scalar(high, u.dtype), ctx.scalar(low, u.dtype))
    return settle(ctx, ctx.map("add", ctx.map("mul", u, width), ctx.scalar(low, u.dtype)), d)


def _normal(ctx: Context, shape: Shape, mean: Operand, std: Operand, dtype: DType) -> Tensor:
    z = normal_unit(ctx, shape, dtype)
    scaled = ctx.map("mul", z, lift(ctx, std, dtype, exact=True))
    return settle(ctx, ctx.map("add", scaled, lift(ctx, mean, dtype, exact=True)), dtype)


@table("normal_functional.default")
def normal_functional(ctx: Context, x: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Any:
    """Normal, of x's shape and type."""
    _plain(ctx, {"generator": generator})
    return _normal(ctx, x.shape, mean, std, _float_type(None, x.dtype))


@table("normal.float_float")
def normal(
    ctx: Context, mean: float, std: float, size: Sequence[Size], *, dtype: torch.dtype | None = None, **options: Any
) -> Any:
    """Normal."""
    _plain(ctx, options)
    return _normal(ctx, _extents(size), mean, std, _float_type(dtype, default_float()))


@table("exponential.default")
def exponential(ctx: Context, x: Tensor, rate: float = 1.0, *, generator: Any = None) -> Any:
    """Exponential with the given rate, of x's shape and type: -log(1 - u) / rate."""
    _plain(ctx, {"generator": generator})
    d = _float_type(None, x.dtype)
    u = _draw(ctx, "rand", x.shape, d.compute)
    tail = ctx.map("neg", ctx.map("log1p", ctx.map("neg", u)))
    return settle(ctx, ctx.map("div", tail, ctx.scalar(rate, u.dtype)), d)
