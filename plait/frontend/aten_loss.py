"""Lowerings of losses and their gradients. `reduction` is 0 (none), 1 (mean), 2 (sum), as ATen numbers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plait.frontend.aten_activation import Calc
from plait.frontend.aten_reduce import mean_of
from plait.frontend.context import Context, Tensor, broadcast_shape
from plait.frontend.promote import Unlowered, category, lift, result_dtype, settle, table
from plait.ir import index as ix
from plait.ir.dtype import DType

NONE, MEAN, SUM = 0, 1, 2


def _operands(ctx: Context, *xs: Tensor) -> tuple[DType, Calc, list[Tensor]]:
    d = result_dtype(*xs)
    if category(d) != 2:
        raise Unlowered("a loss of integers")
    return d, Calc(ctx, d), [lift(ctx, x, d) for x in xs]


def _reduced(ctx: Context, v: Tensor, reduction: int) -> Tensor:
    """The loss of all elements, as `reduction` says."""
    if reduction == NONE:
        return v
    dims = list(range(v.ndim))
    return mean_of(ctx, v, dims) if reduction == MEAN else ctx.reduce("sum", v, dims)


def _shared(ctx: Context, c: Calc, v: Tensor, reduction: int, *inputs: Tensor) -> Tensor:
    """A gradient by element, divided by their number for the mean."""
    if reduction != MEAN:
        return v
    return c("div", v, ctx.scalar(ix.product(broadcast_shape([x.shape for x in inputs])), c.dtype))


def _loss(name: str, value: Callable[..., Tensor], slope: Callable[..., Tensor]) -> None:
    """A loss of (input - target): its value and its slope from the difference, and one number if it has one."""

    @table(f"{name}.default")
    def forward(ctx: Context, x: Tensor, y: Tensor, reduction: int = MEAN, *number: Any, **named: Any) -> Any:
        d, c, (u, v) = _operands(ctx, x, y)
        numbers = [*number, *named.values()]
        return settle(ctx, _reduced(ctx, value(c, c("sub", u, v), *numbers), reduction), d)

    @table(f"{name}_backward.default")
    def backward(ctx: Context, grad: Tensor, x: Tensor, y: Tensor, reduction: int, *number: Any) -> Any:
        d, c, (g, u, v) = _operands(ctx, grad, x, y)
        out = c("mul", _shared(ctx, c, slope(c, c("sub", u, v), *number), reduction, x, y), g)
        return settle(ctx, out, d)


_loss("mse_loss", lambda c, z: c("mul", z, z), lambda c, z: c("mul", z, 2.0))


def _smooth(c: Calc, z: Tensor, beta: float = 1.0) -> Tensor:
    size = c("abs", z)
    if beta == 0:
        return size
    near = c("div", c("mul", c("mul", z, z), 0.5), beta)
    return c("where", c("lt", size, beta), near, c("sub", size, c("mul", c.const(beta), 0.5)))


def _smooth_slope(c: Calc, z: Tensor, beta: float = 1.0) -> Tensor:
    near = c("div", z, beta) if beta else z
    inside = c("where", c("ge", z, beta), 1.0, near)
    return c("where", c("le", z, c("neg", c.const(beta))), -1.0, inside)


def _huber(c: Calc, z: Tensor, delta: float = 1.0) -> Tensor:
    size = c("abs", z)
    far = c("mul", c("sub", size, c("mul", c.const(delta), 0.5)), delta)
    return c("where", c("le", size, delta), c("mul", c("mul", z, z), 0.5), far)


def _huber_slope(c: Calc, z: Tensor, delta: float = 1.0) -> Tensor:
    least = c("neg", c.const(delta))
    return c("where", c("le", z, least), least, c("where", c("ge", z, delta), delta, z))


_loss("smooth_l1_loss", _smooth, _smooth_slope)
_loss("huber_loss", _huber, _huber_slope)


# ------------------------------------------------------------------------------------------------ cross-entropies
@table("binary_cross_entropy.default")
def binary_cross_entropy(
    ctx: Context, x: Tensor, y: Tensor, weight: Tensor | None = None, reduction: int = MEAN
) -> Any:
    """-(y log x + (1 - y) log(1 - x)), logs kept above -100."""
    d, c, (u, v) = _operands(ctx, x, y)
    low = c("maximum", -100.0, c("log1p", c("neg", u)))
    high = c("maximum", -100.0, c("log", u))
    loss = c("sub", c("mul", c("sub", v, 1.0), low), c("mul", v, high))
    if weight is not None:
        loss = c("mul", loss, lift(ctx, weight, d))
    return settle(ctx, _reduced(ctx, loss, reduction), d)


@table("binary_cross_entropy_backward.default")
def binary_cross_entropy_backward(
    ctx: Context, grad: Tensor, x: Tensor, y: Tensor, weight: Tensor | None = None, reduction: int = MEAN
) -> Any:
    """grad (x - y) / (x (1 - x)), the divisor kept above 1e-12."""
    d, c, (g, u, v) = _operands(ctx, grad, x, y)
    divisor = c("maximum", 1e-12, c("mul", c("sub", 1.0, u), u))
    out = c("div", c("mul", g, c("sub", u, v)), divisor)
    if weight is not None:
        out = c("mul", out, lift(ctx, weight, d))
    return settle(ctx, _shared(ctx, c, out, reduction, x), d)


@table("soft_margin_loss_backward.default")
def soft_margin_loss_backward(ctx: Context, grad: Tensor, x: Tensor, y: Tensor, reduction: int) -> Any:
    """-y * sigmoid(-y * x), which loses nothing where 1 - sigmoid(y * x) would cancel."""
    d, c, (g, u, v) = _operands(ctx, grad, x, y)
    slope = c("neg", c("mul", v, c("sigmoid", c("neg", c("mul", v, u)))))
    return settle(ctx, c("mul", _shared(ctx, c, slope, reduction, x, y), g), d)


def _classes(ctx: Context, x: Tensor, target: Tensor, ignore_index: int) -> tuple[int, Tensor, Tensor]:
    """(class dimension, where a target counts, targets with 0 where it does not)."""
    if category(x.dtype) != 2 or target.dtype not in (DType.i64, DType.u8):
        raise Unlowered("a loss of integers, or targets that are no class indices")
    dim = 1 if x.ndim > 1 else 0
    if target.ndim != x.ndim - 1 and not (x.ndim == 1 and target.ndim == 1 and target.shape[0] is ix.ONE):
        raise Unlowered("targets of another rank")
    t = ctx.cast(target, DType.i64)
    if x.ndim == 1 and t.ndim == 1:
        t = ctx.reshape(t, ())
    counts = ctx.map("ne", t, ctx.const(ignore_index, DType.i64))
    return dim, counts, ctx.map("where", counts, t, ctx.const(0, DType.i64))


def _class_weight(ctx: Context, weight: Tensor | None, places: Tensor, dtype: DType) -> Tensor:
    """The weight of each target's class."""
    if weight is None:
        return ctx.const(1.0, dtype.compute)
    return lift(ctx, ctx.gather(weight, [places], places.shape), dtype)


@table("nll_loss_forward.default", "nll_loss2d_forward.default")
def nll_loss(ctx: Context, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int) -> Any:
    """(loss, total weight); a class that does not exist raises when its value is gathered."""
    dim, counts, places = _classes(ctx, x, target, ignore_index)
    d = x.dtype
    c = Calc(ctx, d)
    axes = [ix.axis(k) for k in range(places.ndim)]
    where: list[Any] = [*axes[:dim], places, *axes[dim:]]
    picked = lift(ctx, ctx.gather(x, where, places.shape), d)
    w = c("where", counts, _class_weight(ctx, weight, places, d), 0.0)
    # a value that does not count may be infinite: it is left out, not multiplied by zero
    loss = c("where", counts, c("neg", c("mul", picked, w)), 0.0)
    if reduction == NONE and x.ndim > 1:
        return settle(ctx, loss, d), settle(ctx, c.const(0.0), d)
    dims = list(range(loss.ndim))
    total = ctx.reduce("sum", w, dims)
    out = ctx.reduce("sum", loss, dims)
    if reduction == MEAN:
        out = c("div", out, total)
    return settle(ctx, out, d), settle(ctx, total if reduction != NONE else c.const(0.0), d)


@table("nll_loss_backward.default", "nll_loss2d_backward.default")
def nll_loss_backward(
    ctx: Context,
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Any:
    """-weight at each target's class, 0 elsewhere."""
    dim, counts, places = _classes(ctx, x, target, ignore_index)
    d = x.dtype
    c = Calc(ctx, d)
    g = lift(ctx, grad, d)
    if reduction == MEAN:
        g = c("div", g, lift(ctx, total_weight, d))
    value = c("where", counts, c("neg", c("mul", g, _class_weight(ctx, weight, places, d))), 0.0)
    value = ctx.expand(value, places.shape)
    hit = ctx.map("eq", ctx.unsqueeze(places, dim), ctx.index(ix.axis(dim), x.shape))
    return settle(ctx, c("where", hit, ctx.unsqueeze(value, dim), 0.0), d)
