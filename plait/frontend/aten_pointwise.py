"""Lowerings of arithmetic, comparisons, logic, bits, selection, bounds and conversions.

Every rule follows eager on the CPU: which operand is rounded before half-precision arithmetic, what wraps, where zero
keeps its sign, what raises.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from plait.frontend.context import Context, Tensor
from plait.frontend.promote import (
    Operand,
    Unlowered,
    category,
    fits,
    float_dtype,
    known,
    lift,
    lift_firm,
    python_number,
    result_dtype,
    settle,
    table,
    to_type,
)
from plait.ir.dtype import DType
from plait.ir.index import Expr


def binary(ctx: Context, op: str, a: Operand, b: Operand, dtype: DType, exact: bool = False) -> Tensor:
    """op in the compute type of `dtype`. `exact`: a scalar second operand keeps its precision, as in eager's opmath kernels."""
    return settle(ctx, ctx.map(op, lift(ctx, a, dtype), lift(ctx, b, dtype, exact)), dtype)


def _opmath(ctx: Context) -> bool:
    # eager's add and sub round a scalar operand on the CPU (their vectorised kernel) and keep it on a GPU
    return ctx.device != "cpu"


# ------------------------------------------------------------------------------------------------ sums and products
@table("add.Tensor", "add.Scalar", "_add_relu.Tensor")
def add(ctx: Context, a: Operand, b: Operand, *, alpha: Operand = 1) -> Any:
    """a + alpha * b; on bools a logical or."""
    return _add(ctx, "add", a, b, alpha)


@table("sub.Tensor", "sub.Scalar")
def sub(ctx: Context, a: Operand, b: Operand, *, alpha: Operand = 1) -> Any:
    """a - alpha * b."""
    return _add(ctx, "sub", a, b, alpha)


@table("rsub.Tensor", "rsub.Scalar")
def rsub(ctx: Context, a: Operand, b: Operand, alpha: Operand = 1) -> Any:
    """b - alpha * a."""
    return _add(ctx, "sub", b, a, alpha)


def _add(ctx: Context, op: str, a: Operand, b: Operand, alpha: Operand) -> Tensor:
    d = result_dtype(a, b)
    if d is DType.b1:
        if op == "sub" or not (isinstance(alpha, bool | int) and alpha):
            raise Unlowered("subtraction or scaled sum of bools")
        return ctx.map("bit_or", lift(ctx, a, d), lift(ctx, b, d))
    if isinstance(alpha, int | float) and alpha == 1:
        return binary(ctx, op, a, b, d, exact=_opmath(ctx))
    if d.is_int and not isinstance(alpha, int | Expr):
        raise Unlowered("a fractional alpha on integers")
    scaled = ctx.map("mul", lift(ctx, b, d), lift(ctx, alpha, d, exact=True))
    return settle(ctx, ctx.map(op, lift(ctx, a, d), scaled), d)


@table("mul.Tensor", "mul.Scalar")
def mul(ctx: Context, a: Operand, b: Operand) -> Any:
    """a * b; on bools a logical and."""
    d = result_dtype(a, b)
    return binary(ctx, "bit_and" if d is DType.b1 else "mul", a, b, d, exact=True)


@table("div.Tensor", "div.Scalar", "true_divide.Tensor")
def div(ctx: Context, a: Operand, b: Operand) -> Any:
    """True division; integers become floats."""
    return binary(ctx, "div", a, b, float_dtype(a, b), exact=True)


@table("div.Tensor_mode", "div.Scalar_mode")
def div_mode(ctx: Context, a: Operand, b: Operand, *, rounding_mode: str | None) -> Any:
    """Division rounded by `rounding_mode`."""
    if rounding_mode is None:
        return div(ctx, a, b)
    d = result_dtype(a, b)
    if d is DType.b1:
        raise Unlowered("rounded division of bools")
    if d.is_int:
        return binary(ctx, "floordiv" if rounding_mode == "floor" else "truncdiv", a, b, d)
    x, y = lift_firm(ctx, a, d), lift_firm(ctx, b, d, exact=True)
    if rounding_mode == "trunc":
        return settle(ctx, ctx.map("trunc", ctx.map("div", x, y)), d)
    return settle(ctx, _floor_divide(ctx, x, y), d)


@table("floor_divide.default", "floor_divide.Scalar")
def floor_divide(ctx: Context, a: Operand, b: Operand) -> Any:
    """a // b."""
    return div_mode(ctx, a, b, rounding_mode="floor")


def _floor_divide(ctx: Context, x: Tensor, y: Tensor) -> Tensor:
    """Floats: the exact quotient of x less its remainder, then rounded to the integer it is next to (Python's way)."""
    d = x.dtype
    zero, half, one = ctx.const(0.0, d), ctx.const(0.5, d), ctx.const(1.0, d)
    quotient = ctx.map("div", x, y)
    rest = ctx.map("fmod_f", x, y)
    near = ctx.map("div", ctx.map("sub", x, rest), y)
    signs = ctx.map("ne", ctx.map("lt", y, zero), ctx.map("lt", rest, zero))
    lower = ctx.map("bit_and", ctx.map("ne", rest, zero), signs)
    near = ctx.map("where", lower, ctx.map("sub", near, one), near)
    whole = ctx.map("floor", near)
    high = ctx.map("gt", ctx.map("sub", near, whole), half)
    whole = ctx.map("where", high, ctx.map("add", whole, one), whole)
    whole = ctx.map("where", ctx.map("eq", near, zero), ctx.map("copysign", zero, quotient), whole)
    # a quotient that overflows stays as it is, whatever its remainder
    finite = ctx.map("lt", ctx.map("abs", x), ctx.const(math.inf, d))
    plain = ctx.map("bit_or", ctx.map("eq", y, zero), ctx.map("bit_and", ctx.map("isinf", quotient), finite))
    return ctx.map("where", plain, quotient, whole)


def _modulo(ctx: Context, name: str, a: Operand, b: Operand) -> Tensor:
    d = result_dtype(a, b)
    if d is DType.b1:
        raise Unlowered("remainder of bools")
    op = name if d.is_int else f"{name}_f"
    return settle(ctx, ctx.map(op, lift_firm(ctx, a, d), lift_firm(ctx, b, d)), d)


@table("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")
def remainder(ctx: Context, a: Operand, b: Operand) -> Any:
    """a % b with the divisor's sign."""
    return _modulo(ctx, "remainder", a, b)


@table("fmod.Tensor", "fmod.Scalar")
def fmod(ctx: Context, a: Operand, b: Operand) -> Any:
    """a % b with the dividend's sign."""
    return _modulo(ctx, "fmod", a, b)


# ------------------------------------------------------------------------------------------------ powers
@table("pow.Tensor_Tensor", "pow.Scalar")
def pow_tensor(ctx: Context, a: Operand, b: Operand) -> Any:
    """a ** b; a negative exponent of an integer rounds the result toward zero."""
    d = result_dtype(a, b)
    if d.is_float:
        return binary(ctx, "pow", a, b, d)
    if d is DType.b1:
        raise Unlowered("power of bools")
    base, exponent = lift(ctx, a, d), lift(ctx, b, d)
    zero, one = ctx.const(0, d), ctx.const(1, d)
    minus = ctx.const(-1, d)
    negative = ctx.map("lt", exponent, zero)
    power = ctx.map("ipow", base, ctx.map("maximum", zero, exponent))
    odd = ctx.map("ne", ctx.map("bit_and", exponent, one), zero)
    unit = ctx.map("where", odd, minus, one)
    small = ctx.map("where", ctx.map("eq", base, minus), unit, zero)
    small = ctx.map("where", ctx.map("eq", base, one), one, small)
    return ctx.map("where", negative, small, power)


@table("pow.Tensor_Scalar", "square.default")
def pow_scalar(ctx: Context, a: Tensor, b: Operand = 2) -> Any:
    """a ** b for a number b, with the special cases eager has."""
    d = result_dtype(a, b)
    if not d.is_float:
        if isinstance(b, int) and b >= 0:
            return binary(ctx, "ipow", a, b, d)
        raise Unlowered("an integer to a negative or unknown power")
    if not isinstance(b, int | float):
        return binary(ctx, "pow", a, b, d)
    if b == 0:
        return ctx.expand(ctx.const(1.0, d), a.shape)
    x = lift(ctx, a, d)
    return settle(ctx, _power(ctx, x, float(b)) or ctx.map("pow", x, lift(ctx, b, d)), d)


def _power(ctx: Context, x: Tensor, b: float) -> Tensor | None:
    if b == 1.0:
        return x
    if b == 2.0:
        return ctx.map("mul", x, x)
    if b == 3.0:
        return ctx.map("mul", ctx.map("mul", x, x), x)
    if b == -2.0:
        return ctx.map("reciprocal", ctx.map("mul", x, x))
    plain = {0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}.get(b)
    return ctx.map(plain, x) if plain else None


# ------------------------------------------------------------------------------------------------ order
def _compare(name: str) -> None:
    @table(f"{name}.Tensor", f"{name}.Scalar")
    def compare(ctx: Context, a: Operand, b: Operand) -> Any:
        d = result_dtype(a, b)
        return ctx.map(name, lift(ctx, a, d), lift(ctx, b, d))


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _compare(_name)


def extreme(ctx: Context, op: str, a: Operand, b: Operand, dtype: DType) -> Tensor:
    """maximum, minimum, fmax, fmin; on bools or and and; on integers NaN is no question."""
    if dtype is DType.b1:
        op = "bit_or" if op in ("maximum", "fmax") else "bit_and"
    elif dtype.is_int:
        op = {"fmax": "maximum", "fmin": "minimum"}.get(op, op)
    return binary(ctx, op, a, b, dtype)


def _keep_zeros(ctx: Context, dtype: DType) -> None:
    """On a CPU eager's whole vectors take the second of two equal operands and the rest of its loop the first, which shows
    where they are zeros of two signs. Where vectors end depends on machine, layout and threads: eager's bits need its loop."""
    if ctx.numerics == "eager" and ctx.device.startswith("cpu") and dtype.is_float:
        raise Unlowered("which of two zeros is the lesser depends on the place in eager's loop")


def _extreme(name: str, *names: str) -> None:
    @table(*names)
    def lower(ctx: Context, a: Operand, b: Operand) -> Any:
        d = result_dtype(a, b)
        if name in ("maximum", "minimum"):
            _keep_zeros(ctx, d)
        return extreme(ctx, name, a, b, d)


_extreme("maximum", "maximum.default", "max.other")
_extreme("minimum", "minimum.default", "min.other")
_extreme("fmax", "fmax.default")
_extreme("fmin", "fmin.default")


@table("clamp.default", "clamp.Tensor", "clip.default")
def clamp(ctx: Context, x: Tensor, min: Operand | None = None, max: Operand | None = None) -> Any:
    """x kept in [min, max]; NaN in any of them passes on; where min > max, max wins. On a tie, which shows where zeros have
    two signs, the second operand stays: x itself and not a number, but a tensor's element and not x."""
    bounds = [b for b in (min, max) if b is not None]
    d = result_dtype(x, *bounds)
    if d is DType.b1 or not bounds:
        raise Unlowered("clamp of bools, or without bounds")
    for b in bounds:
        if isinstance(b, int | float) and not fits(b, d):
            raise Unlowered("a bound that the type cannot hold")
    if any(isinstance(b, Tensor) for b in bounds):
        _keep_zeros(ctx, d)
    out = lift(ctx, x, d)
    for op, bound in (("maximum", min), ("minimum", max)):
        if bound is not None:
            pair = (out, lift(ctx, bound, d)) if isinstance(bound, Tensor) else (lift(ctx, bound, d), out)
            out = ctx.map(op, *pair)
    return settle(ctx, out, d)


@table("clamp_min.default", "clamp_min.Tensor")
def clamp_min(ctx: Context, x: Tensor, min: Operand) -> Any:
    """clamp from below."""
    return clamp(ctx, x, min, None)


@table("clamp_max.default", "clamp_max.Tensor")
def clamp_max(ctx: Context, x: Tensor, max: Operand) -> Any:
    """clamp from above."""
    return clamp(ctx, x, None, max)


# ------------------------------------------------------------------------------------------------ logic and bits
def as_bool(ctx: Context, v: Operand) -> Tensor:
    """Truth: not equal to zero (NaN is true)."""
    return to_type(ctx, v, DType.b1) if isinstance(v, Tensor) else ctx.const(bool(python_number(v)), DType.b1)


@table("logical_not.default")
def logical_not(ctx: Context, x: Tensor) -> Any:
    """Not."""
    return ctx.map("bit_not", as_bool(ctx, x))


def _logical(name: str, op: str) -> None:
    @table(f"logical_{name}.default")
    def lower(ctx: Context, a: Operand, b: Operand) -> Any:
        return ctx.map(op, as_bool(ctx, a), as_bool(ctx, b))


def _bitwise(name: str, op: str) -> None:
    @table(f"bitwise_{name}.Tensor", f"bitwise_{name}.Scalar", f"bitwise_{name}.Scalar_Tensor", f"__{name}__.Tensor",
           f"__{name}__.Scalar")  # fmt: skip
    def lower(ctx: Context, a: Operand, b: Operand) -> Any:
        d = result_dtype(a, b)
        if d.is_float:
            raise Unlowered("bitwise operator on floats")
        return binary(ctx, op, a, b, d)


for _name in ("and", "or", "xor"):
    _logical(_name, f"bit_{_name}")
    _bitwise(_name, f"bit_{_name}")


@table("bitwise_not.default")
def bitwise_not(ctx: Context, x: Tensor) -> Any:
    """~x."""
    if x.dtype.is_float:
        raise Unlowered("bitwise_not of floats")
    return ctx.map("bit_not", x)


def shift(ctx: Context, op: str, a: Operand, b: Operand) -> Tensor:
    """Shifts by less than 0 or by the width and more give 0, or the sign on the way right."""
    d = result_dtype(a, b)
    if not d.is_int:
        raise Unlowered("shift of floats or bools")
    x, y = lift(ctx, a, d), lift(ctx, b, d)
    width = 8 * d.nbytes
    if isinstance(b, int) and 0 <= b < width:
        return ctx.map(op, x, y)
    zero, top = ctx.const(0, d), ctx.const(width - 1, d)
    inside = ctx.map("bit_and", ctx.map("ge", y, zero), ctx.map("le", y, top))
    moved = ctx.map(op, x, ctx.map("where", inside, y, top if op == "shr" and d is not DType.u8 else zero))
    if op == "shr" and d is not DType.u8:
        return moved
    return ctx.map("where", inside, moved, zero)


@table("bitwise_left_shift.Tensor", "bitwise_left_shift.Tensor_Scalar", "bitwise_left_shift.Scalar_Tensor",
       "__lshift__.Tensor", "__lshift__.Scalar")  # fmt: skip
def left_shift(ctx: Context, a: Operand, b: Operand) -> Any:
    """a << b."""
    return shift(ctx, "shl", a, b)


@table("bitwise_right_shift.Tensor", "bitwise_right_shift.Tensor_Scalar", "bitwise_right_shift.Scalar_Tensor",
       "__rshift__.Tensor", "__rshift__.Scalar")  # fmt: skip
def right_shift(ctx: Context, a: Operand, b: Operand) -> Any:
    """a >> b, arithmetic."""
    return shift(ctx, "shr", a, b)


# ------------------------------------------------------------------------------------------------ selection
@table("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def where(ctx: Context, condition: Tensor, a: Operand, b: Operand) -> Any:
    """a where the condition holds, else b, in their promoted type."""
    d = result_dtype(a, b)
    for v in (a, b):
        if isinstance(v, int | float) and not fits(v, d):
            raise Unlowered("a number that the type cannot hold")
    return settle(ctx, ctx.map("where", as_bool(ctx, condition), lift(ctx, a, d), lift(ctx, b, d)), d)


@table("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(ctx: Context, x: Tensor, mask: Tensor, value: Operand) -> Any:
    """value where the mask holds, in the type of x."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if x.dtype.is_int and math.isfinite(value):
            value = int(value)
        if not fits(value, x.dtype):
            raise Unlowered("a number that the type cannot hold")
    d = x.dtype
    if category(result_dtype(x, value)) > category(d):
        raise Unlowered("a value of a higher type than the tensor's")
    return settle(ctx, ctx.map("where", as_bool(ctx, mask), lift(ctx, value, d), lift(ctx, x, d)), d)


# ------------------------------------------------------------------------------------------------ conversions
@table("prims.convert_element_type.default")
def convert_element_type(ctx: Context, x: Tensor, dtype: torch.dtype) -> Any:
    """A conversion that a decomposition put in: what the operator does at its end."""
    d = known(dtype)
    return settle(ctx, x, d) if x.dtype.is_float and d.is_float and d.nbytes < x.dtype.nbytes else to_type(ctx, x, d)


@table("_to_copy.default")
def to_copy(ctx: Context, x: Tensor, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    """A conversion the user wrote: it rounds."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != torch.device(ctx.device).type:
        raise Unlowered("a copy to another device")
    if kwargs.get("layout") not in (None, torch.strided):
        raise Unlowered("a sparse layout")
    return x if dtype is None else to_type(ctx, x, known(dtype))


@table("fill.Scalar", "fill.Tensor")
def fill(ctx: Context, x: Tensor, value: Operand) -> Any:
    """value everywhere, in the type of x."""
    if not isinstance(value, Tensor | Expr) and not fits(value, x.dtype):
        raise Unlowered("a number that the type cannot hold")
    v = to_type(ctx, value, x.dtype) if isinstance(value, Tensor) else constant(ctx, value, x.dtype)
    return ctx.expand(v, x.shape)


def constant(ctx: Context, v: Operand, dtype: DType) -> Tensor:
    """A number, SymInt or SymFloat as a 0-dim value of `dtype`, a storage type included."""
    if isinstance(v, Tensor) or dtype.is_storage_only:
        lifted = v if isinstance(v, Tensor) else ctx.scalar(v, DType.f32)
        return to_type(ctx, lifted, dtype)
    return ctx.scalar(v, dtype)
