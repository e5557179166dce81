"""Lowerings of activation functions and their gradients.

Each is one expression in the compute type of its floats; the gradients take eager's formula, so that kinks and the two
sides of every threshold agree with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from plait.frontend.context import Context, Tensor, normalize_dim
from plait.frontend.promote import Operand, Unlowered, fits, lift, result_dtype, settle, table
from plait.ir import index as ix
from plait.ir.dtype import DType

SQRT_HALF = math.sqrt(0.5)
TANH_SCALE = math.sqrt(2.0 / math.pi)
TANH_CUBE = 0.044715


class Calc:
    """Arithmetic on lifted tensors of one type, so that formulas read as formulas."""

    def __init__(self, ctx: Context, dtype: DType) -> None:
        self.ctx, self.dtype = ctx, dtype.compute

    def const(self, v: Operand) -> Tensor:
        """A number in the compute type."""
        return self.ctx.scalar(v, self.dtype)

    def __call__(self, op: str, *args: Tensor | float) -> Tensor:
        return self.ctx.map(op, *(a if isinstance(a, Tensor) else self.const(a) for a in args))


def _floats(ctx: Context, *xs: Tensor) -> tuple[DType, Calc, list[Tensor]]:
    """The common float type of `xs`, its calculator, and the operands lifted to it."""
    d = result_dtype(*xs)
    if not d.is_float:
        raise Unlowered("an activation of integers")
    return d, Calc(ctx, d), [lift(ctx, x, d) for x in xs]


def _simple(name: str, fn: Callable[..., Tensor]) -> None:
    """Register `name`.default(x…, numbers…): tensors lifted, numbers passed as they are."""

    @table(f"{name}.default")
    def lower(ctx: Context, *args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in args if isinstance(a, Tensor) and not a.is_number]
        d, c, lifted = _floats(ctx, *tensors)
        queue = iter(lifted)
        moved = [next(queue) if isinstance(a, Tensor) and not a.is_number else a for a in args]
        return settle(ctx, fn(c, *moved, **kwargs), d)


# ------------------------------------------------------------------------------------------------ relu and its kin
@table("hardtanh.default")
def hardtanh(ctx: Context, x: Tensor, low: Operand = -1, high: Operand = 1) -> Any:
    """x kept in [low, high]."""
    return relu(ctx, x, low, high)


@table("relu.default")
def relu(ctx: Context, x: Tensor, low: Operand = 0, high: Operand | None = None) -> Any:
    """x kept in [low, high]; on a tie x itself, so -0.0 stays."""
    d = x.dtype
    if d is DType.b1 or any(isinstance(b, int | float) and not fits(b, d) for b in (low, high) if b is not None):
        raise Unlowered("relu of bools, or a bound the type cannot hold")
    out = ctx.map("maximum", lift(ctx, low, d), lift(ctx, x, d))
    return settle(ctx, out if high is None else ctx.map("minimum", lift(ctx, high, d), out), d)


def _between(c: Calc, x: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    return c("bit_and", c("gt", x, low), c("lt", x, high))


_simple("hardtanh_backward", lambda c, g, x, low, high: c("where", _between(c, x, low, high), g, 0.0))
_simple("leaky_relu", lambda c, x, slope=0.01: c("where", c("gt", x, 0.0), x, c("mul", x, slope)))
_simple(
    "leaky_relu_backward",
    lambda c, g, x, slope, is_result: c("where", c("gt", x, 0.0), g, c("mul", g, slope)),
)
_simple("_prelu_kernel", lambda c, x, w: c("where", c("gt", x, 0.0), x, c("mul", w, x)))


@table("_prelu_kernel_backward.default")
def prelu_backward(ctx: Context, grad: Tensor, x: Tensor, weight: Tensor) -> Any:
    """Gradients of x and of the (broadcast) weight, both of x's shape."""
    d, c, (g, v, w) = _floats(ctx, grad, x, weight)
    positive = c("gt", v, 0.0)
    of_x = c("where", positive, g, c("mul", w, g))
    of_w = c("where", positive, 0.0, c("mul", v, g))
    return settle(ctx, of_x, d), settle(ctx, of_w, d)


@table("threshold.default")
def threshold(ctx: Context, x: Tensor, limit: Operand, value: Operand) -> Any:
    """x above the limit, else the value (NaN stays)."""
    d = x.dtype
    if d is DType.b1 or any(isinstance(v, int | float) and not fits(v, d) for v in (limit, value)):
        raise Unlowered("threshold of bools, or numbers the type cannot hold")
    v = lift(ctx, x, d)
    return settle(ctx, ctx.map("where", ctx.map("le", v, lift(ctx, limit, d)), lift(ctx, value, d), v), d)


@table("threshold_backward.default")
def threshold_backward(ctx: Context, grad: Tensor, x: Tensor, limit: Operand) -> Any:
    """The gradient where x is above the limit (or NaN)."""
    d = result_dtype(grad, x)
    if d is DType.b1 or (isinstance(limit, int | float) and not fits(limit, d)):
        raise Unlowered("threshold of bools, or a number the type cannot hold")
    v, g = lift(ctx, x, d), lift(ctx, grad, d)
    return settle(ctx, ctx.map("where", ctx.map("le", v, lift(ctx, limit, d)), ctx.const(0, v.dtype), g), d)


# ------------------------------------------------------------------------------------------------ hard forms
def _relu6(c: Calc, x: Tensor) -> Tensor:
    return c("minimum", 6.0, c("maximum", 0.0, x))


_simple("hardsigmoid", lambda c, x: c("div", _relu6(c, c("add", x, 3.0)), 6.0))
_simple(
    "hardsigmoid_backward",
    lambda c, g, x: c("where", _between(c, x, -3.0, 3.0), c("mul", g, 1.0 / 6.0), 0.0),
)
_simple("hardswish", lambda c, x: c("div", c("mul", x, _relu6(c, c("add", x, 3.0))), 6.0))


def _hardswish_backward(c: Calc, g: Tensor, x: Tensor) -> Tensor:
    inner = c("mul", g, c("add", c("div", x, 3.0), 0.5))
    return c("where", c("le", x, -3.0), 0.0, c("where", c("lt", x, 3.0), inner, g))


_simple("hardswish_backward", _hardswish_backward)


def _inside(c: Calc, x: Tensor, limit: float) -> Tensor:
    return c("bit_and", c("ge", x, c("neg", c.const(limit))), c("le", x, limit))


_simple("hardshrink", lambda c, x, limit=0.5: c("where", _inside(c, x, limit), 0.0, x))
_simple("hardshrink_backward", lambda c, g, x, limit: c("where", _inside(c, x, limit), 0.0, g))


def _softshrink(c: Calc, x: Tensor, limit: float = 0.5) -> Tensor:
    low = c("where", c("lt", x, c("neg", c.const(limit))), c("add", x, limit), c("mul", x, 0.0))
    return c("where", c("gt", x, limit), c("sub", x, limit), low)


_simple("softshrink", _softshrink)
_simple("softshrink_backward", lambda c, g, x, limit: c("where", _inside(c, x, limit), 0.0, g))


# ------------------------------------------------------------------------------------------------ exponential forms
_simple("sigmoid_backward", lambda c, g, y: c("mul", g, c("mul", c("sub", 1.0, y), y)))
_simple("tanh_backward", lambda c, g, y: c("mul", g, c("sub", 1.0, c("mul", y, y))))
_simple("silu", lambda c, x: c("div", x, c("add", 1.0, c("exp", c("neg", x)))))


def _silu_backward(c: Calc, g: Tensor, x: Tensor) -> Tensor:
    s = c("sigmoid", x)
    slope = c("add", 1.0, c("mul", x, c("sub", 1.0, s)))
    return c("mul", c("mul", g, s), slope)


_simple("silu_backward", _silu_backward)


def softplus_of(c: Calc, x: Tensor) -> Tensor:
    """log(1 + exp(x))."""
    return c("log1p", c("exp", x))


_simple("mish", lambda c, x: c("mul", x, c("tanh", softplus_of(c, x))))


def _mish_backward(c: Calc, g: Tensor, x: Tensor) -> Tensor:
    t, s = c("tanh", softplus_of(c, x)), c("sigmoid", x)
    slope = c("mul", c("mul", x, s), c("sub", 1.0, c("mul", t, t)))
    return c("mul", g, c("add", t, slope))


_simple("mish_backward", _mish_backward)


def _softplus(c: Calc, x: Tensor, beta: float = 1, limit: float = 20) -> Tensor:
    scaled = c("mul", x, beta)
    return c("where", c("gt", scaled, limit), x, c("div", softplus_of(c, scaled), beta))


def _softplus_backward(c: Calc, g: Tensor, x: Tensor, beta: float, limit: float) -> Tensor:
    scaled = c("mul", x, beta)
    z = c("exp", scaled)
    return c("where", c("gt", scaled, limit), g, c("div", c("mul", g, z), c("add", z, 1.0)))


_simple("softplus", _softplus)
_simple("softplus_backward", _softplus_backward)


def _elu(c: Calc, x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    negative = c("mul", c("expm1", c("mul", x, input_scale)), c("mul", c.const(alpha), scale))
    return c("where", c("lt", x, 0.0), negative, c("mul", x, scale))


def _elu_backward(
    c: Calc, g: Tensor, alpha: float, scale: float, input_scale: float, is_result: bool, x: Tensor
) -> Tensor:
    negative = c("mul", c.const(alpha), scale)
    if is_result:
        slope = c("mul", c("add", x, negative), input_scale)
    else:
        slope = c("mul", c("mul", c("exp", c("mul", x, input_scale)), negative), input_scale)
    return c("where", c("le", x, 0.0), c("mul", g, slope), c("mul", g, scale))


_simple("elu", _elu)
_simple("elu_backward", _elu_backward)


@table("celu.default")
def celu(ctx: Context, x: Tensor, alpha: float = 1.0) -> Any:
    """elu with its negative side scaled to meet at slope 1."""
    d, c, (v,) = _floats(ctx, x)
    return settle(ctx, _elu(c, v, alpha, 1.0, 1.0 / alpha), d)


def _log_sigmoid(c: Calc, x: Tensor) -> Tensor:
    tail = c("log1p", c("exp", c("neg", c("abs", x))))
    return c("sub", c("minimum", 0.0, x), tail)


_simple("log_sigmoid", _log_sigmoid)


@table("log_sigmoid_forward.default")
def log_sigmoid_forward(ctx: Context, x: Tensor) -> Any:
    """(log sigmoid, buffer); on the CPU the buffer is exp(-|x|), elsewhere it is empty."""
    d, c, (v,) = _floats(ctx, x)
    out = settle(ctx, _log_sigmoid(c, v), d)
    if ctx.device != "cpu":
        return out, ctx.expand(ctx.cast(ctx.const(0.0, c.dtype), d), (0,))
    return out, settle(ctx, c("exp", c("neg", c("abs", v))), d)


@table("log_sigmoid_backward.default")
def log_sigmoid_backward(ctx: Context, grad: Tensor, x: Tensor, buffer: Tensor) -> Any:
    """grad / (1 + exp(x)), from exp(-|x|) so that nothing overflows."""
    d, c, (g, v) = _floats(ctx, grad, x)
    z = c("exp", c("neg", c("abs", v)))
    negative = c("lt", v, 0.0)
    top = c("where", negative, 1.0, 0.0)
    sign = c("where", negative, 1.0, -1.0)
    share = c("mul", sign, c("div", z, c("add", 1.0, z)))
    return settle(ctx, c("mul", g, c("sub", top, share)), d)


# ------------------------------------------------------------------------------------------------ gelu, glu
def _tanh_share(c: Calc, x: Tensor) -> Tensor:
    """(1 + tanh(inner)) / 2 as sigmoid(2 inner), which does not cancel where tanh is near -1 and costs one exponential."""
    cube = c("mul", c("mul", x, x), x)
    return c("sigmoid", c("mul", 2.0 * TANH_SCALE, c("add", x, c("mul", TANH_CUBE, cube))))


def _gelu(c: Calc, x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        return c("mul", x, _tanh_share(c, x))
    return c("mul", c("mul", x, 0.5), c("add", 1.0, c("erf", c("mul", x, SQRT_HALF))))


def _gelu_backward(c: Calc, g: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        s = _tanh_share(c, x)
        inner = c("mul", 2.0 * TANH_SCALE, c("add", 1.0, c("mul", 3.0 * TANH_CUBE, c("mul", x, x))))
        slope = c("mul", c("mul", s, c("sub", 1.0, s)), inner)
        return c("mul", g, c("add", s, c("mul", x, slope)))
    cdf = c("mul", 0.5, c("add", 1.0, c("erf", c("mul", x, SQRT_HALF))))
    pdf = c("mul", c("exp", c("mul", c("mul", x, x), -0.5)), 1.0 / math.sqrt(2.0 * math.pi))
    return c("mul", g, c("add", cdf, c("mul", x, pdf)))


_simple("gelu", _gelu)
_simple("gelu_backward", _gelu_backward)


def _halves(ctx: Context, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The two halves of x along dim, as views."""
    d = normalize_dim(dim, x.ndim)
    size = x.shape[d].const
    if size is None or size % 2:
        raise Unlowered("glu over a dimension of unknown or odd size")
    shape = (*x.shape[:d], ix.const(size // 2), *x.shape[d + 1 :])
    axes = [ix.axis(k) for k in range(x.ndim)]
    second = [a + size // 2 if k == d else a for k, a in enumerate(axes)]
    return ctx.view(x, shape, tuple(axes)), ctx.view(x, shape, tuple(second))


@table("glu.default")
def glu(ctx: Context, x: Tensor, dim: int = -1) -> Any:
    """first half times sigmoid of the second."""
    a, b = _halves(ctx, x, dim)
    d, c, (u, v) = _floats(ctx, a, b)
    return settle(ctx, c("mul", u, c("sigmoid", v)), d)


@table("glu_backward.default")
def glu_backward(ctx: Context, grad: Tensor, x: Tensor, dim: int) -> Any:
    """Gradients of both halves, put side by side."""
    a, b = _halves(ctx, x, dim)
    d, c, (g, u, v) = _floats(ctx, grad, a, b)
    s = c("sigmoid", v)
    of_a = settle(ctx, c("mul", g, s), d)
    slope = c("mul", c("mul", c("sub", 1.0, s), s), c("mul", g, u))
    of_b = settle(ctx, slope, d)
    k = normalize_dim(dim, x.ndim)
    half = a.shape[k]
    axes = tuple(ix.axis(j) for j in range(x.ndim))
    inside = (half - 1 - axes[k],)
    left = ctx.view(of_a, x.shape, axes, inside)
    shifted = tuple(e - half if j == k else e for j, e in enumerate(axes))
    right = ctx.view(of_b, x.shape, shifted, (axes[k] - half,))
    return ctx.pieces([left, right], x.shape)


@table("rrelu_with_noise.default")
def rrelu(ctx: Context, x: Tensor, noise: Tensor, lower: float = 0.125, upper: float = 1 / 3, training: bool = False,
          generator: Any = None) -> Any:  # fmt: skip
    """leaky_relu with the mean slope; in training ATen draws the slopes."""
    if training:
        raise Unlowered("random slopes")
    d, c, (v,) = _floats(ctx, x)
    return settle(ctx, c("where", c("gt", v, 0.0), v, c("mul", v, (lower + upper) / 2)), d)
