"""What Triton expression each map and random operator becomes. A rule sees operand texts and types, and gives the text.

Division, square root and the elementary functions are the accurate ones that eager's own kernels use: Triton's plain `/`
on f32 is an approximation, its `sqrt` too.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from plait.errors import LowerFailed, TableIncomplete
from plait.ir.dtype import DType

_NAMES = {
    DType.b1: "int1",
    DType.u8: "uint8",
    DType.i8: "int8",
    DType.i16: "int16",
    DType.i32: "int32",
    DType.i64: "int64",
    DType.f16: "float16",
    DType.bf16: "bfloat16",
    DType.f32: "float32",
    DType.f64: "float64",
    DType.f8e4m3: "float8e4nv",
    DType.f8e5m2: "float8e5",
}


def tl_type(d: DType) -> str:
    """Text of a type, such as tl.float32."""
    return f"tl.{_NAMES[d]}"


@dataclass(frozen=True)
class Call:
    """One use of an operator: operand texts (names, possibly widened), their types, the result type and attributes."""

    args: tuple[str, ...]
    types: tuple[DType, ...]
    dtype: DType
    attrs: Mapping[str, Any]
    fast: bool = False  # errors of a few ulps of f32 are invisible in what becomes of the result


Rule = Callable[[Call], str]


def literal(value: bool | int | float, d: DType) -> str:
    """Text of a constant of type d, for use where the other operand has the type."""
    if d is DType.b1:
        return str(bool(value))
    if d.is_float:
        f = float(value)
        if math.isnan(f) or math.isinf(f):
            return f'float("{"nan" if math.isnan(f) else "inf" if f > 0 else "-inf"}")'
        return repr(f)
    return str(int(value))


def convert(text: str, source: DType, to: DType) -> str:
    """A value of compute type `source` as a value of type `to` (storage types: rounded), as torch converts."""
    if source is to:
        return text
    if to is DType.b1:
        return f"({text} != 0)"
    if to in (DType.f8e4m3, DType.f8e5m2):
        return f"_to_{to.value}({convert(text, source, DType.f32)})"
    if source is DType.f64 and to.is_storage_only:
        text = f"{text}.to(tl.float32)"  # eager narrows f64 in two steps
    if source.is_float and to in (DType.u8, DType.i8, DType.i16):
        # out of range values wrap, through a wider integer
        return f"{text}.to(tl.int{64 if to is DType.u8 else 32}).to({tl_type(to)})"
    return f"{text}.to({tl_type(to)})"


def rounded(text: str, d: DType, storage: DType) -> str:
    """A value of compute type d rounded to `storage` and back."""
    return convert_up(convert(text, d, storage), storage, d)


def convert_up(text: str, storage: DType, to: DType) -> str:
    """A loaded value of a storage type in its compute type."""
    if storage is to:
        return text
    if storage.is_storage_only:
        return text + f".to({tl_type(to)})"
    return convert(text, storage, to)


def _fmt(template: str) -> Rule:
    """{0}, {1}, … are operands."""
    return lambda c: template.format(*c.args)


def _by_width(f32: str, f64: str, fast: str = "") -> Rule:
    return lambda c: (f64 if c.dtype is DType.f64 else fast if c.fast and fast else f32).format(*c.args)


def _bool_or(on_bool: str, otherwise: str) -> Rule:
    return lambda c: (on_bool if c.types[0] is DType.b1 else otherwise).format(*c.args)


def _float_or(on_float: str, otherwise: str) -> Rule:
    return lambda c: (on_float if c.types[0].is_float else otherwise).format(*c.args)


def _sign(c: Call) -> str:
    if c.dtype is DType.b1:
        return c.args[0]
    t = tl_type(c.dtype)
    return f"({c.args[0]} > 0).to({t}) - ({c.args[0]} < 0).to({t})"


def _compare(op: str) -> Rule:
    def rule(c: Call) -> str:
        a, b = c.args
        if c.types[0] is DType.b1:  # a one-bit integer is signed: true would be less than false
            a, b = f"{a}.to(tl.int8)", f"{b}.to(tl.int8)"
        return f"{a} {op} {b}"

    return rule


def _shift(c: Call, left: bool) -> str:
    a, b = c.args
    d = c.dtype
    bits = d.nbytes * 8
    fits = f"({b} >= 0) & ({b} < {bits})"
    if left:
        return f"tl.where({fits}, {a} << tl.where({fits}, {b}, 0), 0)"
    if d is DType.u8:
        return f"tl.where({fits}, {a} >> tl.where({fits}, {b}, 0), 0)"
    return f"{a} >> tl.where({fits}, {b}, {bits - 1})"


def _signed_or(helper: str, unsigned: str) -> Rule:
    return lambda c: (unsigned if c.dtype in (DType.u8, DType.b1) else helper).format(*c.args)


def _ipow(c: Call) -> str:
    if c.dtype is DType.u8:
        return "_ipow({}.to(tl.int64), {}.to(tl.int64)).to(tl.uint8)".format(*c.args)
    return "_ipow({}, {})".format(*c.args)


def _cast(c: Call) -> str:
    to = c.attrs["dtype"]
    if to.is_storage_only:
        return rounded(c.args[0], c.types[0], to)
    return convert(c.args[0], c.types[0], to)


def _round(c: Call) -> str:
    if "dtype" in c.attrs:
        return rounded(c.args[0], c.types[0], c.attrs["dtype"])
    return f"libdevice.rint({c.args[0]})"


def _bitcast(c: Call) -> str:
    to, source = c.attrs["dtype"], c.types[0]
    if to.nbytes != source.nbytes:
        raise LowerFailed(f"bitcast from {source} to {to}: the sizes differ")
    text = f"{c.args[0]}.to({tl_type(to)}, bitcast=True)"
    return convert_up(text, to, c.dtype)


def _const(c: Call) -> str:
    return f"tl.full([], {literal(c.attrs['value'], c.dtype)}, {tl_type(c.dtype)})"


def _true(c: Call) -> str:
    return _const(Call((), (), c.dtype, {"value": True}))


def _lowered(c: Call) -> str:
    raise LowerFailed("pieces and gather are guarded loads and selections by the time they are emitted")


def _random(f32: str, f64: str) -> Rule:
    """Operands: seed, offset, linear index, draw (put in by the emitter)."""
    return lambda c: f"{f64 if c.dtype.nbytes == 8 else f32}({', '.join(c.args)})"


def _libdevice(name: str, arity: int = 1) -> Rule:
    operands = ", ".join(f"{{{i}}}" for i in range(arity))
    return _fmt(f"libdevice.{name}({operands})")


def _same_near_zero(text: str, fast: str = "") -> Rule:
    """Of a function that is x near zero, in f32."""
    return _by_width(f"_same_near_zero({text}, {{0}}, {{0}})", text, fast)


# without the care that Triton's exp takes of subnormal results
_FAST_EXP = "tl.exp2(({0}) * 1.4426950408889634)"


def _value_rules() -> dict[str, Rule]:
    return {
        "const": _const,
        "index": lambda c: c.args[0],
        "cast": _cast,
        "bitcast": _bitcast,
        "copy": _fmt("{0}"),
        "pieces": _lowered,
        "gather": _lowered,
        "holds": lambda c: " & ".join(c.args) if c.args else _true(c),
        "where": _fmt("tl.where({0}, {1}, {2})"),
        "between": lambda c: "({1} <= {0}) & ({0} < {2})".format(*c.args) if c.args else _true(c),
        "rand": _random("_rand", "_rand64"),
        "randn": _random("_randn", "_randn64"),
        "randbits": _random("_randbits", "_randbits64"),
    }


def _number_rules() -> dict[str, Rule]:
    nan = "propagate_nan=tl.PropagateNan.ALL"
    order = (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="))
    return {
        "neg": _float_or("{0} * -1.0", "-{0}"),  # Triton's minus is 0 - x, which loses -0.0
        "abs": _bool_or("{0}", "tl.abs({0})"),
        "sign": _sign,
        "add": _bool_or("{0} | {1}", "{0} + {1}"),
        "sub": _fmt("{0} - {1}"),
        "mul": _bool_or("{0} & {1}", "{0} * {1}"),
        "maximum": lambda c: _extreme(c, "maximum", "|", nan),
        "minimum": lambda c: _extreme(c, "minimum", "&", nan),
        "eq": _fmt("{0} == {1}"),
        "ne": _fmt("{0} != {1}"),
        "isnan": _fmt("{0} != {0}"),
        "isinf": _fmt('tl.abs({0}) == float("inf")'),
        "signbit": lambda c: f"{c.args[0]}.to(tl.int{8 * c.types[0].nbytes}, bitcast=True) < 0",
    } | {n: _compare(o) for n, o in order}


def _integer_rules() -> dict[str, Rule]:
    return {
        "bit_and": _fmt("{0} & {1}"),
        "bit_or": _fmt("{0} | {1}"),
        "bit_xor": _fmt("{0} ^ {1}"),
        "bit_not": _bool_or("{0} == 0", "~{0}"),
        "shl": lambda c: _shift(c, True),
        "shr": lambda c: _shift(c, False),
        "floordiv": _signed_or("_floor_div({0}, {1})", "{0} // {1}"),
        "truncdiv": _fmt("{0} // {1}"),
        "remainder": _signed_or("_floor_mod({0}, {1})", "{0} % {1}"),
        "fmod": _fmt("{0} % {1}"),
        "ipow": _ipow,
    }


def _float_rules() -> dict[str, Rule]:
    unary = "exp2 log10 acos cosh acosh erfc erfinv lgamma trunc"
    near_zero = "expm1 log1p tan asin atan sinh asinh atanh"
    binary = {"fmod_f": "fmod"} | {n: n for n in ("pow", "atan2", "copysign", "hypot", "nextafter")}
    plain = {n: _libdevice(n) for n in unary.split()} | {n: _libdevice(f, 2) for n, f in binary.items()}
    plain |= {n: _same_near_zero(f"libdevice.{n}({{0}})") for n in near_zero.split()}
    return {
        "sqrt": _by_width("tl.sqrt_rn({0})", "tl.sqrt({0})"),
        "rsqrt": _by_width("_rsqrt({0})", "libdevice.rsqrt({0})"),
        "reciprocal": _by_width("tl.div_rn(1.0, {0})", "1.0 / {0}", "1.0 / {0}"),
        "sigmoid": _by_width("_sigmoid({0})", "_sigmoid64({0})", "_sigmoid_near({0})"),
        "tanh": _same_near_zero("libdevice.tanh({0})", "_tanh_near({0})"),
        "exp": _by_width("libdevice.exp({0})", "libdevice.exp({0})", _FAST_EXP),
        "log": _fmt("tl.log({0})"),
        "log2": _fmt("tl.log2({0})"),
        "sin": _same_near_zero("tl.sin({0})"),
        "cos": _fmt("tl.cos({0})"),
        "erf": _by_width("_same_near_zero(tl.erf({0}), {0} * 1.1283791670955126, {0})", "tl.erf({0})"),
        "digamma": _fmt("_digamma({0})"),
        "floor": _fmt("tl.floor({0})"),
        "ceil": _fmt("tl.ceil({0})"),
        "round": _round,
        "div": _by_width("tl.div_rn({0}, {1})", "{0} / {1}", "{0} / {1}"),
        "remainder_f": _fmt("_remainder_f({0}, {1})"),
        "fma": _fmt("tl.fma({0}, {1}, {2})"),
        "fmax": _fmt("tl.where(({0} > {1}) | ({1} != {1}), {0}, {1})"),
        "fmin": _fmt("tl.where(({0} < {1}) | ({1} != {1}), {0}, {1})"),
    } | plain


def division_by_constant(x: str, divisor: float, fast: bool) -> str | None:
    """x / divisor in f32 by multiplication, or None where only a division is right."""
    d = _f32(divisor)
    if not 2.0**-60 <= abs(d) <= 2.0**60:
        return None
    r = _f32(1.0 / d)
    if fast or abs(math.frexp(d)[0]) == 0.5:
        return f"{x} * {r!r}"
    return f"_quotient({x}, {d!r}, {r!r})" if d > 0 else f"_quotient({x} * -1.0, {-d!r}, {-r!r})"


def division_by_few(
    x: str, divisor: str, widened: Callable[[str], str], scale: str, inverse: str, fast: bool
) -> tuple[list[str], str]:
    """(lines, text) of x / divisor in f32 where the divisor varies over fewer axes: one reciprocal for many quotients.
    `widened` makes a name that varies as the divisor does fit x; `scale` and `inverse` name what the lines define, `scale`
    is "" for a divisor known to be positive and to have a reciprocal."""
    lines: list[str] = []
    if scale:
        lines = [f"{scale}_k = _scale_of({divisor})", f"{scale}_d = {divisor} * {scale}_k"]
        x, divisor = f"{x} * {widened(f'{scale}_k')}", f"{scale}_d"
    lines.append(f"{inverse} = tl.div_rn(1.0, {divisor})")
    d, r = widened(divisor), widened(inverse)
    return lines, f"{x} * {r}" if fast else f"_quotient({x}, {d}, {r})"


def _f32(x: float) -> float:
    return float(struct.unpack("f", struct.pack("f", x))[0])


def _extreme(c: Call, name: str, on_bool: str, nan: str) -> str:
    a, b = c.args
    if c.dtype is DType.b1:
        return f"{a} {on_bool} {b}"
    return f"tl.{name}({a}, {b}{', ' + nan if c.dtype.is_float else ''})"


RULES: dict[str, Rule] = _value_rules() | _number_rules() | _integer_rules() | _float_rules()
"""Emission rule by operator name; complete over the map and random operators of ir/ops."""


def rule_of(op: str) -> Rule:
    """The rule, or TableIncomplete."""
    try:
        return RULES[op]
    except KeyError:
        raise TableIncomplete(f"no Triton emission rule for operator {op}") from None
