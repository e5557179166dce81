"""Lowerings of mathematical functions: what torch calls unary ufuncs, and the binary ones that are not plain arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from plait.frontend.context import Context, Tensor
from plait.frontend.promote import (
    Operand,
    Unlowered,
    fits,
    float_dtype,
    lift,
    lift_firm,
    python_number,
    result_dtype,
    settle,
    table,
)
from plait.ir.dtype import DType

FLOAT_UNARY = (
    "sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh "
    "asinh acosh atanh erf erfc erfinv lgamma digamma sigmoid"
)


def unary(ctx: Context, x: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """fn in the compute type of x, integers as floats, the result in the promoted type."""
    d = float_dtype(x)
    return settle(ctx, fn(lift(ctx, x, d)), d)


def _float_unary(name: str) -> None:
    extra = {"erf": "special_erf", "erfc": "special_erfc", "erfinv": "special_erfinv", "expm1": "special_expm1",
             "exp2": "special_exp2", "digamma": "special_digamma", "log1p": "special_log1p"}  # fmt: skip

    @table(f"{name}.default", *([f"{extra[name]}.default"] if name in extra else []))
    def lower(ctx: Context, x: Tensor) -> Any:
        if name in ("cosh", "sinh") and ctx.device.startswith("cpu") and float_dtype(x) is not DType.f16:
            # infinite from the overflow of exp on in whole vectors, finite up to their own in the rest of its loop; f16
            # overflows long before
            raise Unlowered("where eager's own becomes infinite depends on the place in its loop")
        return unary(ctx, x, lambda v: ctx.map(name, v))


for _name in FLOAT_UNARY.split():
    _float_unary(_name)


# ------------------------------------------------------------------------------------------------ signs and rounding
def _jump(name: str) -> None:
    @table(f"{name}.default")
    def lower(ctx: Context, x: Tensor) -> Any:
        if x.dtype is DType.b1:
            raise Unlowered("rounding of bools")
        if not x.dtype.is_float:
            return x
        return settle(ctx, ctx.map(name, lift(ctx, x, x.dtype)), x.dtype)


for _name in ("floor", "ceil", "trunc", "round"):
    _jump(_name)


@table("round.decimals")
def round_decimals(ctx: Context, x: Tensor, *, decimals: int) -> Any:
    """Round at a decimal place: scale by a power of ten, round, scale back."""
    if not x.dtype.is_float:
        raise Unlowered("decimals of integers")
    if decimals == 0:
        return settle(ctx, ctx.map("round", lift(ctx, x, x.dtype)), x.dtype)
    v = lift_firm(ctx, x, x.dtype)
    scale = ctx.const(float(10 ** abs(decimals)), v.dtype)
    first, last = ("mul", "div") if decimals > 0 else ("div", "mul")
    return settle(ctx, ctx.map(last, ctx.map("round", ctx.map(first, v, scale)), scale), x.dtype)


@table("frac.default")
def frac(ctx: Context, x: Tensor) -> Any:
    """x - trunc(x)."""
    if not x.dtype.is_float:
        raise Unlowered("frac of integers")
    v = lift_firm(ctx, x, x.dtype)
    return settle(ctx, ctx.map("sub", v, ctx.map("trunc", v)), x.dtype)


@table("neg.default")
def neg(ctx: Context, x: Tensor) -> Any:
    """-x, wrapping."""
    if x.dtype is DType.b1:
        raise Unlowered("negative of a bool")
    return settle(ctx, ctx.map("neg", lift(ctx, x, x.dtype)), x.dtype)


@table("abs.default")
def absolute(ctx: Context, x: Tensor) -> Any:
    """|x|, wrapping at the least integer."""
    if x.dtype in (DType.b1, DType.u8):
        return x
    return settle(ctx, ctx.map("abs", lift(ctx, x, x.dtype)), x.dtype)


@table("sign.default", "sgn.default")
def sign(ctx: Context, x: Tensor) -> Any:
    """-1, 0 or 1; 0 for NaN."""
    if x.dtype is DType.b1:
        return x
    return settle(ctx, ctx.map("sign", lift(ctx, x, x.dtype)), x.dtype)


@table("positive.default", "conj_physical.default", "_conj_physical.default")
def identity(ctx: Context, x: Tensor) -> Any:
    """x itself: what these do to a real tensor."""
    return x


@table("signbit.default")
def signbit(ctx: Context, x: Tensor) -> Any:
    """True for negative numbers, -0.0 and negative NaN."""
    if x.dtype in (DType.b1, DType.u8):
        return ctx.expand(ctx.const(False, DType.b1), x.shape)
    v = lift(ctx, x, x.dtype)
    return ctx.map("signbit", v) if x.dtype.is_float else ctx.map("lt", v, ctx.const(0, v.dtype))


def _float_test(name: str, whole: bool, fn: Callable[[Context, Tensor], Tensor]) -> None:
    @table(f"{name}.default")
    def lower(ctx: Context, x: Tensor) -> Any:
        if not x.dtype.is_float:
            return ctx.expand(ctx.const(whole, DType.b1), x.shape)
        return fn(ctx, lift(ctx, x, x.dtype))


def _equals(value: float) -> Callable[[Context, Tensor], Tensor]:
    return lambda ctx, v: ctx.map("eq", v, ctx.const(value, v.dtype))


def is_finite(ctx: Context, v: Tensor) -> Tensor:
    """Neither infinite nor NaN, of the value as it is rounded."""
    return ctx.map("bit_not", ctx.map("bit_or", ctx.map("isnan", v), ctx.map("isinf", v)))


_float_test("isnan", False, lambda ctx, v: ctx.map("isnan", v))
_float_test("isinf", False, lambda ctx, v: ctx.map("isinf", v))
_float_test("isfinite", True, is_finite)
_float_test("isposinf", False, _equals(math.inf))
_float_test("isneginf", False, _equals(-math.inf))


@table("nan_to_num.default")
def nan_to_num(
    ctx: Context, x: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Any:
    """NaN and infinities replaced; by 0 and the type's extremes unless told otherwise."""
    d = x.dtype
    if not d.is_float:
        return x
    top = {DType.f16: 65504.0, DType.bf16: 3.3895313892515355e38, DType.f32: 3.4028234663852886e38}.get(d)
    top = 1.7976931348623157e308 if top is None else top
    v = lift(ctx, x, d)
    high, low = ctx.const(math.inf, v.dtype), ctx.const(-math.inf, v.dtype)
    out = ctx.map("where", ctx.map("isnan", v), lift(ctx, 0.0 if nan is None else nan, d), v)
    out = ctx.map("where", ctx.map("eq", v, high), lift(ctx, top if posinf is None else posinf, d), out)
    out = ctx.map("where", ctx.map("eq", v, low), lift(ctx, -top if neginf is None else neginf, d), out)
    return settle(ctx, out, d)


# ------------------------------------------------------------------------------------------------ one-argument specials
def _scaled(name: str, factor: float) -> None:
    @table(f"{name}.default")
    def lower(ctx: Context, x: Tensor) -> Any:
        # eager multiplies by a Python number: integers become floats
        return unary(ctx, x, lambda v: ctx.map("mul", v, ctx.const(factor, v.dtype)))


_scaled("deg2rad", math.pi / 180.0)
_scaled("rad2deg", 180.0 / math.pi)


@table("sinc.default", "special_sinc.default")
def sinc(ctx: Context, x: Tensor) -> Any:
    """sin(pi x) / (pi x), 1 at 0."""

    def fn(v: Tensor) -> Tensor:
        t = ctx.map("mul", v, ctx.const(math.pi, v.dtype))
        ratio = ctx.map("div", ctx.map("sin", t), t)
        return ctx.map("where", ctx.map("eq", v, ctx.const(0.0, v.dtype)), ctx.const(1.0, v.dtype), ratio)

    return unary(ctx, x, fn)


@table("logit.default", "special_logit.default")
def logit(ctx: Context, x: Tensor, eps: float | None = None) -> Any:
    """log(x / (1 - x)), x first kept in [eps, 1 - eps]."""

    def fn(v: Tensor) -> Tensor:
        one = ctx.const(1.0, v.dtype)
        if eps is not None and eps >= 0:
            low, high = ctx.const(float(eps), v.dtype), ctx.const(1.0 - float(eps), v.dtype)
            v = ctx.map("minimum", high, ctx.map("maximum", low, v))
        return ctx.map("log", ctx.map("div", v, ctx.map("sub", one, v)))

    return unary(ctx, x, fn)


@table("special_entr.default")
def entr(ctx: Context, x: Tensor) -> Any:
    """-x log x, 0 at 0, -inf below."""

    def fn(v: Tensor) -> Tensor:
        zero = ctx.const(0.0, v.dtype)
        value = ctx.map("mul", ctx.map("neg", v), ctx.map("log", v))
        value = ctx.map("where", ctx.map("eq", v, zero), zero, value)
        return ctx.map("where", ctx.map("lt", v, zero), ctx.const(-math.inf, v.dtype), value)

    return unary(ctx, x, fn)


@table("special_ndtr.default")
def ndtr(ctx: Context, x: Tensor) -> Any:
    """The normal distribution function, by erfc where erf would cancel."""

    def fn(v: Tensor) -> Tensor:
        d = v.dtype
        scaled = ctx.map("mul", v, ctx.const(math.sqrt(0.5), d))
        half, one = ctx.const(0.5, d), ctx.const(1.0, d)
        near = ctx.map("mul", half, ctx.map("add", one, ctx.map("erf", scaled)))
        tail = ctx.map("mul", half, ctx.map("erfc", ctx.map("abs", scaled)))
        far = ctx.map("where", ctx.map("gt", scaled, ctx.const(0.0, d)), ctx.map("sub", one, tail), tail)
        return ctx.map("where", ctx.map("lt", ctx.map("abs", scaled), ctx.const(math.sqrt(0.5), d)), near, far)

    return unary(ctx, x, fn)


# ------------------------------------------------------------------------------------------------ two-argument functions
def _float_binary(op: str, *names: str, ints: bool) -> None:
    @table(*names)
    def lower(ctx: Context, a: Operand, b: Operand) -> Any:
        d = float_dtype(a, b) if ints else result_dtype(a, b)
        if not d.is_float:
            raise Unlowered(f"{op} of integers")
        return settle(ctx, ctx.map(op, lift(ctx, a, d), lift(ctx, b, d)), d)


_float_binary("atan2", "atan2.default", ints=True)
_float_binary("copysign", "copysign.Tensor", "copysign.Scalar", ints=True)
_float_binary("hypot", "hypot.default", ints=False)


@table("nextafter.default")
def nextafter(ctx: Context, a: Tensor, b: Tensor) -> Any:
    """The next number toward b, in f32 and f64; half types step in their own grid, which ATen does."""
    d = result_dtype(a, b)
    if d not in (DType.f32, DType.f64):
        raise Unlowered("nextafter outside f32 and f64")
    return ctx.map("nextafter", lift(ctx, a, d), lift(ctx, b, d))


def _log_add(ctx: Context, a: Tensor, b: Tensor, exp: str, base: float) -> Any:
    d = result_dtype(a, b)
    if not d.is_float:
        raise Unlowered("logaddexp of integers")
    x, y = lift(ctx, a, d), lift(ctx, b, d)
    top = ctx.map("maximum", x, y)
    gap = ctx.map("neg", ctx.map("abs", ctx.map("sub", x, y)))
    tail = ctx.map("log1p", ctx.map(exp, gap))
    if base != math.e:
        tail = ctx.map("mul", tail, ctx.const(1.0 / math.log(base), x.dtype))
    same = ctx.map("bit_and", ctx.map("isinf", x), ctx.map("eq", x, y))
    return settle(ctx, ctx.map("where", same, x, ctx.map("add", top, tail)), d)


@table("logaddexp.default")
def logaddexp(ctx: Context, a: Tensor, b: Tensor) -> Any:
    """log(exp(a) + exp(b)) without overflow; equal infinities stay."""
    return _log_add(ctx, a, b, "exp", math.e)


@table("logaddexp2.default")
def logaddexp2(ctx: Context, a: Tensor, b: Tensor) -> Any:
    """log2(2**a + 2**b) without overflow."""
    return _log_add(ctx, a, b, "exp2", 2.0)


def _x_log(op: str, *names: str) -> None:
    @table(*names)
    def lower(ctx: Context, a: Operand, b: Operand) -> Any:
        d = float_dtype(a, b)
        x, y = lift(ctx, a, d), lift(ctx, b, d)
        zero = ctx.const(0.0, x.dtype)
        out = ctx.map("where", ctx.map("eq", x, zero), zero, ctx.map("mul", x, ctx.map(op, y)))
        return settle(ctx, ctx.map("where", ctx.map("isnan", y), y, out), d)


_x_log("log", "xlogy.Tensor", "xlogy.Scalar_Self", "xlogy.Scalar_Other")
_x_log("log1p", "special_xlog1py.default", "special_xlog1py.self_scalar", "special_xlog1py.other_scalar")


@table("ldexp.Tensor")
def ldexp(ctx: Context, a: Tensor, b: Tensor) -> Any:
    """a * 2**b, with 2**b in the type that b alone promotes to."""
    p = float_dtype(b)
    power = settle(ctx, ctx.map("pow", lift(ctx, 2.0, p), lift(ctx, b, p)), p)
    d = result_dtype(a, power)
    return settle(ctx, ctx.map("mul", lift(ctx, a, d), lift(ctx, power, d)), d)


@table("heaviside.default")
def heaviside(ctx: Context, x: Tensor, values: Tensor) -> Any:
    """0 below, 1 above, `values` at 0; both of one type."""
    if x.dtype is not values.dtype or x.dtype is DType.b1:
        raise Unlowered("heaviside of two types, or of bools")
    v, w = lift(ctx, x, x.dtype), lift(ctx, values, x.dtype)
    zero = ctx.const(0, v.dtype)
    step = ctx.map("cast", ctx.map("gt", v, zero), dtype=v.dtype, implicit=False)
    return settle(ctx, ctx.map("where", ctx.map("eq", v, zero), w, step), x.dtype)


# ------------------------------------------------------------------------------------------------ three arguments
@table("lerp.Tensor", "lerp.Scalar")
def lerp(ctx: Context, a: Tensor, b: Tensor, weight: Operand) -> Any:
    """a + weight (b - a), from the nearer end."""
    d = a.dtype
    if not d.is_float or b.dtype is not d:
        raise Unlowered("lerp of two types, or of integers")
    x, y = lift(ctx, a, d), lift(ctx, b, d)
    w = lift(ctx, weight, d, exact=True)
    one = ctx.const(1.0, x.dtype)
    step = ctx.map("sub", y, x)
    forward = ctx.map("add", x, ctx.map("mul", w, step))
    if isinstance(weight, int | float) and abs(weight) < 0.5:
        return settle(ctx, forward, d)
    backward = ctx.map("sub", y, ctx.map("mul", step, ctx.map("sub", one, w)))
    if isinstance(weight, int | float):
        return settle(ctx, backward, d)
    near = ctx.map("lt", ctx.map("abs", w), ctx.const(0.5, x.dtype))
    return settle(ctx, ctx.map("where", near, forward, backward), d)


def _add_product(ctx: Context, op: str, x: Tensor, a: Tensor, b: Tensor, value: Operand) -> Tensor:
    d = result_dtype(x, a, b)
    if d is DType.b1 or (op == "div" and not d.is_float):
        raise Unlowered("integer division, or bools")
    if d.is_int and not fits(python_number(value), d):
        raise Unlowered("a fractional value on integers")
    u, v, w = lift(ctx, x, d), lift(ctx, a, d), lift(ctx, b, d)
    if not (isinstance(value, int | float) and value == 1):
        v = ctx.map("mul", lift(ctx, value, d, exact=True), v)
    return settle(ctx, ctx.map("add", u, ctx.map(op, v, w)), d)


@table("addcmul.default")
def addcmul(ctx: Context, x: Tensor, a: Tensor, b: Tensor, *, value: Operand = 1) -> Any:
    """x + value * a * b."""
    return _add_product(ctx, "mul", x, a, b, value)


@table("addcdiv.default")
def addcdiv(ctx: Context, x: Tensor, a: Tensor, b: Tensor, *, value: Operand = 1) -> Any:
    """x + value * a / b."""
    return _add_product(ctx, "div", x, a, b, value)


@table("angle.default")
def angle(ctx: Context, x: Tensor) -> Any:
    """pi for negative numbers, 0 for others, NaN for NaN."""

    def fn(v: Tensor) -> Tensor:
        zero = ctx.const(0.0, v.dtype)
        out = ctx.map("where", ctx.map("lt", v, zero), ctx.const(math.pi, v.dtype), zero)
        return ctx.map("where", ctx.map("isnan", v), v, out)

    return unary(ctx, x, fn)
