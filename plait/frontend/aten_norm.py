"""Lowerings of layer, RMS, group and batch norm, with their gradients.

Statistics are computed in f32 (f64 for f64) by one rule, `moments`: it reads the data twice, and constant data has its
mean exact: the normalised value is 0, or what eager's own way of applying a norm over channels leaves (see _applied).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plait.frontend.aten_pointwise import constant
from plait.frontend.aten_reduce import count_of, mean_of, refuse_empty
from plait.frontend.context import Context, Tensor
from plait.frontend.promote import Unlowered, category, expected_types, lift, settle, table, to_type
from plait.ir.dtype import DType
from plait.ir.index import Expr

Size = Expr | int


def moments(ctx: Context, v: Tensor, dims: Sequence[int], infinite: bool = False) -> tuple[Tensor, Tensor]:
    """(mean, variance with divisor n), dimensions kept. Both come from the deviations off a first mean: the second pass
    corrects its rounding error, and cancellation in the variance is of that error's size only. `infinite`: the mean of
    values with an infinity among them is one, as where eager divides a sum; where it updates a mean as it goes, NaN."""
    first = mean_of(ctx, v, dims, keepdim=True)
    gap = ctx.map("sub", v, first)
    shift = mean_of(ctx, gap, dims, keepdim=True)
    square = mean_of(ctx, ctx.map("mul", gap, gap), dims, keepdim=True)
    var = ctx.map("maximum", ctx.const(0.0, v.dtype), ctx.map("sub", square, ctx.map("mul", shift, shift)))
    if infinite:  # the deviations off an infinite mean are NaN
        shift = ctx.map("where", ctx.map("ne", shift, shift), ctx.const(0.0, v.dtype), shift)
    return ctx.map("add", first, shift), var


def _rstd(ctx: Context, var: Tensor, eps: Any) -> Tensor:
    return ctx.map("rsqrt", ctx.map("add", var, ctx.scalar(eps, var.dtype)))


def _rstd_over_channels(ctx: Context, var: Tensor, eps: Any) -> Tensor:
    """As eager has it in group norm, and in batch norm of the batch: on a CPU in double, for eps is one there."""
    if not ctx.device.startswith("cpu"):
        return _rstd(ctx, var, eps)
    return ctx.cast(_rstd(ctx, ctx.cast(var, DType.f64), eps), var.dtype)


def _floats_only(*xs: Tensor | None) -> None:
    if any(x is not None and category(x.dtype) != 2 for x in xs):
        raise Unlowered("a norm of integers")


def _stat_type(ctx: Context, x: Tensor, item: int) -> DType:
    """What eager keeps statistic `item` of the results in."""
    known = expected_types(ctx)
    found = known[item] if item < len(known) else None
    return found or (x.dtype if ctx.device == "cpu" else x.dtype.compute)


def _affine(ctx: Context, v: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """v * weight + bias, both broadcast and in v's type."""
    if weight is not None:
        v = ctx.map("mul", v, weight)
    return v if bias is None else ctx.map("add", v, bias)


def _up(ctx: Context, x: Tensor, like: Tensor) -> Tensor:
    return to_type(ctx, x, like.dtype)


def _sum_over(ctx: Context, x: Tensor, dims: Sequence[int]) -> Tensor:
    return ctx.reduce("sum", x, dims) if dims else x


# ------------------------------------------------------------------------------------------------ over the last dimensions
@table("native_layer_norm.default")
def layer_norm(
    ctx: Context, x: Tensor, normalized_shape: Sequence[Size], weight: Tensor | None, bias: Tensor | None, eps: Any
) -> Any:
    """(output, mean, 1 / standard deviation)."""
    _floats_only(x, weight, bias)
    dims = list(range(x.ndim - len(normalized_shape), x.ndim))
    v = lift(ctx, x, x.dtype)
    mean, var = moments(ctx, v, dims)
    rstd = _rstd(ctx, var, eps)
    out = ctx.map("mul", ctx.map("sub", v, mean), rstd)
    out = _affine(ctx, out, weight and _up(ctx, weight, v), bias and _up(ctx, bias, v))
    return (
        settle(ctx, out, x.dtype),
        settle(ctx, mean, _stat_type(ctx, x, 1)),
        settle(ctx, rstd, _stat_type(ctx, x, 2)),
    )


def _normed_gradient(ctx: Context, g: Tensor, xhat: Tensor, rstd: Tensor, dims: Sequence[int], centred: bool) -> Tensor:
    """rstd * (g - mean(g) - xhat * mean(g * xhat)); without mean(g) where no mean was subtracted."""
    slope = ctx.map("mul", xhat, mean_of(ctx, ctx.map("mul", g, xhat), dims, keepdim=True))
    rest = ctx.map("sub", g, mean_of(ctx, g, dims, keepdim=True)) if centred else g
    return ctx.map("mul", rstd, ctx.map("sub", rest, slope))


@table("native_layer_norm_backward.default")
def layer_norm_backward(
    ctx: Context,
    grad: Tensor,
    x: Tensor,
    normalized_shape: Sequence[Size],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> Any:
    """Gradients of x, weight and bias, those that are wanted."""
    _floats_only(grad, x, weight, bias)
    outer = list(range(x.ndim - len(normalized_shape)))
    v = lift(ctx, x, x.dtype)
    g, m, r = _up(ctx, grad, v), _up(ctx, mean, v), _up(ctx, rstd, v)
    xhat = ctx.map("mul", ctx.map("sub", v, m), r)
    of_x, of_w, of_b = None, None, None
    if output_mask[0]:
        scaled = g if weight is None else ctx.map("mul", g, _up(ctx, weight, v))
        inner = list(range(len(outer), x.ndim))
        of_x = settle(ctx, _normed_gradient(ctx, scaled, xhat, r, inner, centred=True), x.dtype)
    if output_mask[1] and weight is not None:
        of_w = settle(ctx, _sum_over(ctx, ctx.map("mul", g, xhat), outer), weight.dtype)
    if output_mask[2] and bias is not None:
        of_b = settle(ctx, _sum_over(ctx, g, outer), bias.dtype)
    return of_x, of_w, of_b


@table("_fused_rms_norm.default")
def rms_norm(ctx: Context, x: Tensor, normalized_shape: Sequence[Size], weight: Tensor | None, eps: Any = None) -> Any:
    """(output, 1 / root mean square)."""
    _floats_only(x, weight)
    dims = list(range(x.ndim - len(normalized_shape), x.ndim))
    v = lift(ctx, x, x.dtype)
    if eps is None:
        eps = 2.220446049250313e-16 if v.dtype is DType.f64 else 1.1920928955078125e-07
    rstd = _rstd(ctx, mean_of(ctx, ctx.map("mul", v, v), dims, keepdim=True), eps)
    out = _affine(ctx, ctx.map("mul", v, rstd), weight and _up(ctx, weight, v), None)
    return settle(ctx, out, x.dtype), settle(ctx, rstd, _stat_type(ctx, x, 1))


@table("_fused_rms_norm_backward.default")
def rms_norm_backward(
    ctx: Context,
    grad: Tensor,
    x: Tensor,
    normalized_shape: Sequence[Size],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> Any:
    """Gradients of x and weight, those that are wanted."""
    _floats_only(grad, x, weight)
    outer = list(range(x.ndim - len(normalized_shape)))
    v = lift(ctx, x, x.dtype)
    g, r = _up(ctx, grad, v), _up(ctx, rstd, v)
    xhat = ctx.map("mul", v, r)
    of_x, of_w = None, None
    if output_mask[0]:
        scaled = g if weight is None else ctx.map("mul", g, _up(ctx, weight, v))
        inner = list(range(len(outer), x.ndim))
        of_x = settle(ctx, _normed_gradient(ctx, scaled, xhat, r, inner, centred=False), x.dtype)
    if output_mask[1] and weight is not None:
        of_w = settle(ctx, _sum_over(ctx, ctx.map("mul", g, xhat), outer), weight.dtype)
    return of_x, of_w


# ------------------------------------------------------------------------------------------------ over groups of channels
def _grouped(ctx: Context, x: Tensor, group: int) -> Tensor:
    """(N, C, …) as (N, G, C/G, …)."""
    channels = x.shape[1].const
    if channels is None or channels % group:
        raise Unlowered("a group norm over an unknown number of channels")
    return ctx.reshape(x, (x.shape[0], group, channels // group, *x.shape[2:]))


def _per_channel(ctx: Context, stat: Tensor, x: Tensor) -> Tensor:
    """A statistic (N, G) for every channel of x, with ones for what follows."""
    size = x.shape[1].const
    groups = stat.shape[1].const
    assert size is not None and groups is not None
    wide = ctx.expand(ctx.unsqueeze(stat, 2), (x.shape[0], groups, size // groups))
    return ctx.reshape(wide, (x.shape[0], size, *(1 for _ in x.shape[2:])))


def _channel(ctx: Context, w: Tensor, x: Tensor, like: Tensor) -> Tensor:
    """A vector over channels, broadcast along dimension 1 of x."""
    return _up(ctx, ctx.reshape(w, (w.shape[0], *(1 for _ in x.shape[2:]))), like)


def _applied(
    ctx: Context,
    v: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    line: bool,
) -> Tensor:
    """(v - mean) * rstd * weight + bias, weight and bias by channel of x.

    `line`: as scale * v + (bias - scale * mean), both with one rounding, which is how eager's kernels apply a norm over
    channels. Constant data then leaves eager's own remainder, the rounding error of scale * mean, and not 0: what
    magnifies it afterwards (a logarithm, say) agrees.
    """
    weight, bias = weight and _channel(ctx, weight, x, v), bias and _channel(ctx, bias, x, v)
    if not line:
        return _affine(ctx, ctx.map("mul", ctx.map("sub", v, mean), rstd), weight, bias)
    scale = rstd if weight is None else ctx.map("mul", rstd, weight)
    shift = ctx.map("fma", ctx.map("neg", scale), mean, bias or ctx.const(0.0, v.dtype))
    return ctx.map("fma", v, scale, shift)


@table("native_group_norm.default")
def group_norm(
    ctx: Context,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    n: Size,
    c: Size,
    hxw: Size,
    group: int,
    eps: Any,
) -> Any:
    """(output, mean, 1 / standard deviation), statistics by sample and group."""
    _floats_only(x, weight, bias)
    refuse_empty(x, list(range(x.ndim)))
    v = lift(ctx, x, x.dtype)
    parts = _grouped(ctx, v, group)
    mean, var = moments(ctx, parts, list(range(2, parts.ndim)))
    shape = (x.shape[0], group)
    mean, rstd = ctx.reshape(mean, shape), ctx.reshape(_rstd_over_channels(ctx, var, eps), shape)
    affine = weight is not None or bias is not None
    out = _applied(ctx, v, x, weight, bias, _per_channel(ctx, mean, x), _per_channel(ctx, rstd, x), line=affine)
    return (
        settle(ctx, out, x.dtype),
        settle(ctx, mean, _stat_type(ctx, x, 1)),
        settle(ctx, rstd, _stat_type(ctx, x, 2)),
    )


@table("native_group_norm_backward.default")
def group_norm_backward(
    ctx: Context,
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    n: Size,
    c: Size,
    hxw: Size,
    group: int,
    output_mask: Sequence[bool],
) -> Any:
    """Gradients of x, weight and bias, those that are wanted."""
    _floats_only(grad, x, weight)
    refuse_empty(x, list(range(x.ndim)))
    v = lift(ctx, x, x.dtype)
    g, m, r = _up(ctx, grad, v), _up(ctx, mean, v), _up(ctx, rstd, v)
    xhat = ctx.map("mul", ctx.map("sub", v, _per_channel(ctx, m, x)), _per_channel(ctx, r, x))
    of_x, of_w, of_b = None, None, None
    others = [0, *range(2, x.ndim)]
    if output_mask[0]:
        scaled = g if weight is None else ctx.map("mul", g, _channel(ctx, weight, x, v))
        parts, hats = _grouped(ctx, scaled, group), _grouped(ctx, xhat, group)
        inner = list(range(2, parts.ndim))
        scale = ctx.reshape(r, (*r.shape, *(1 for _ in inner)))
        of_x = ctx.reshape(_normed_gradient(ctx, parts, hats, scale, inner, centred=True), x.shape)
        of_x = settle(ctx, of_x, x.dtype)
    kind = weight.dtype if weight is not None else x.dtype
    if output_mask[1]:
        of_w = settle(ctx, ctx.reduce("sum", ctx.map("mul", g, xhat), others), kind)
    if output_mask[2]:
        of_b = settle(ctx, ctx.reduce("sum", g, others), kind)
    return of_x, of_w, of_b


# ------------------------------------------------------------------------------------------------ over the batch
def _batch_stats(ctx: Context, v: Tensor, eps: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(mean, variance, 1 / standard deviation), by channel, shaped to broadcast against v."""
    mean, var = moments(ctx, v, [0, *range(2, v.ndim)], infinite=ctx.device.startswith("cpu"))
    return mean, var, _rstd_over_channels(ctx, var, eps)


def _batch_norm(
    ctx: Context, v: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor
) -> Tensor:
    out = _applied(ctx, v, x, weight, bias, mean, rstd, line=ctx.device.startswith("cpu"))
    return settle(ctx, out, x.dtype)


def _flat(ctx: Context, stat: Tensor, x: Tensor) -> Tensor:
    return ctx.reshape(stat, (x.shape[1],))


def _nothing(ctx: Context, dtype: DType) -> Tensor:
    return ctx.expand(constant(ctx, 0, dtype), (0,))


def _moved(ctx: Context, running: Tensor, new: Tensor, momentum: Any) -> Tensor:
    """momentum * new + (1 - momentum) * running."""
    old = lift(ctx, running, running.dtype)
    new = to_type(ctx, new, old.dtype)
    m = ctx.scalar(momentum, old.dtype)
    stays = ctx.map("mul", ctx.map("sub", ctx.const(1.0, old.dtype), m), old)
    return settle(ctx, ctx.map("add", ctx.map("mul", m, new), stays), running.dtype)


@table("_native_batch_norm_legit_functional.default")
def batch_norm(
    ctx: Context,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: Any,
    eps: Any,
) -> Any:
    """(output, mean, 1 / standard deviation, new running mean, new running variance)."""
    if not training:
        out, *empty = batch_norm_inference(ctx, x, weight, bias, running_mean, running_var, momentum, eps)
        return out, *empty, running_mean, running_var
    _floats_only(x, weight, bias)
    refuse_empty(x, list(range(x.ndim)))
    v = lift(ctx, x, x.dtype)
    mean, var, rstd = _batch_stats(ctx, v, eps)
    count = count_of(x, [0, *range(2, x.ndim)])
    unbiased = ctx.map("mul", var, _bessel(ctx, count, v.dtype))
    flat_mean = _flat(ctx, mean, x)
    return (
        _batch_norm(ctx, v, x, weight, bias, mean, rstd),
        settle(ctx, flat_mean, _stat_type(ctx, x, 1)),
        settle(ctx, _flat(ctx, rstd, x), _stat_type(ctx, x, 2)),
        _moved(ctx, running_mean, flat_mean, momentum),
        _moved(ctx, running_var, _flat(ctx, unbiased, x), momentum),
    )


def _bessel(ctx: Context, count: Expr, dtype: DType) -> Tensor:
    """n / (n - 1)."""
    return ctx.map("div", ctx.scalar(count, dtype), ctx.scalar(count - 1, dtype))


@table("native_batch_norm.default", "_native_batch_norm_legit.default")
def batch_norm_in_place(
    ctx: Context,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: Any,
    eps: Any,
) -> Any:
    """The forms that update the running statistics in place: native only where there are none to update."""
    if training and running_mean is None and running_var is None:
        return batch_norm_no_stats(ctx, x, weight, bias, training, momentum, eps)
    if training or running_mean is None or running_var is None:
        raise Unlowered("running statistics updated in place")
    return batch_norm_inference(ctx, x, weight, bias, running_mean, running_var, momentum, eps)


@table("_native_batch_norm_legit_no_training.default")
def batch_norm_inference(
    ctx: Context,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: Any,
    eps: Any,
) -> Any:
    """(output, mean, 1 / standard deviation), by the running statistics; on a CPU, which has no use for them, the latter
    two are empty."""
    _floats_only(x, weight, bias)
    v = lift(ctx, x, x.dtype)
    mean, var = _channel(ctx, running_mean, x, v), _channel(ctx, running_var, x, v)
    out = _batch_norm(ctx, v, x, weight, bias, mean, _rstd(ctx, var, eps))
    types = _stat_type(ctx, x, 1), _stat_type(ctx, x, 2)
    if ctx.device.startswith("cpu"):
        return out, _nothing(ctx, types[0]), _nothing(ctx, types[1])
    rstd = _rstd(ctx, ctx.cast(running_var, v.dtype), eps)
    return out, ctx.cast(running_mean, types[0]), ctx.cast(rstd, types[1])


@table("_native_batch_norm_legit.no_stats")
def batch_norm_no_stats(
    ctx: Context, x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: Any, eps: Any
) -> Any:
    """(output, mean, 1 / standard deviation) of the batch alone."""
    _floats_only(x, weight, bias)
    refuse_empty(x, list(range(x.ndim)))
    v = lift(ctx, x, x.dtype)
    mean, _, rstd = _batch_stats(ctx, v, eps)
    return (
        _batch_norm(ctx, v, x, weight, bias, mean, rstd),
        settle(ctx, _flat(ctx, mean, x), _stat_type(ctx, x, 1)),
        settle(ctx, _flat(ctx, rstd, x), _stat_type(ctx, x, 2)),
    )


@table("_batch_norm_with_update_functional.default")
def batch_norm_with_update(
    ctx: Context,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: Any,
    eps: Any,
) -> Any:
    """As in training, with the (empty) reserve that GPU libraries use."""
    out, mean, rstd, *new = batch_norm(ctx, x, weight, bias, running_mean, running_var, True, momentum, eps)
    return out, mean, rstd, _nothing(ctx, DType.u8), *new


@table("_batch_norm_no_update.default")
def batch_norm_no_update(ctx: Context, *args: Any) -> Any:
    """As in inference, with the reserve."""
    return *batch_norm_inference(ctx, *args), _nothing(ctx, DType.u8)


@table("native_batch_norm_backward.default", "batch_norm_backward.default")
def batch_norm_backward(
    ctx: Context,
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_rstd: Tensor | None,
    train: bool,
    eps: Any,
    output_mask: Sequence[bool],
    reserve: Tensor | None = None,
) -> Any:
    """Gradients of x, weight and bias, those that are wanted."""
    _floats_only(grad, x, weight)
    refuse_empty(x, list(range(x.ndim)))
    v = lift(ctx, x, x.dtype)
    g = _up(ctx, grad, v)
    if train:
        if save_mean is None or save_rstd is None:
            raise Unlowered("a gradient without saved statistics")
        mean, rstd = _channel(ctx, save_mean, x, v), _channel(ctx, save_rstd, x, v)
    else:
        if running_mean is None or running_var is None:
            raise Unlowered("a gradient without running statistics")
        mean, rstd = _channel(ctx, running_mean, x, v), _rstd(ctx, _channel(ctx, running_var, x, v), eps)
    others = [0, *range(2, x.ndim)]
    xhat = ctx.map("mul", ctx.map("sub", v, mean), rstd)
    of_x, of_w, of_b = None, None, None
    if output_mask[0]:
        scaled = g if weight is None else ctx.map("mul", g, _channel(ctx, weight, x, v))
        plain = ctx.map("mul", scaled, rstd)
        of_x = _normed_gradient(ctx, scaled, xhat, rstd, others, centred=True) if train else plain
        of_x = settle(ctx, of_x, x.dtype)
    kind = weight.dtype if weight is not None else x.dtype
    if output_mask[1]:
        of_w = settle(ctx, ctx.reduce("sum", ctx.map("mul", g, xhat), others), kind)
    if output_mask[2]:
        of_b = settle(ctx, ctx.reduce("sum", g, others), kind)
    return of_x, of_w, of_b
