"""C++ expressions of Lets, element types, and conversions at loads and stores."""

from __future__ import annotations

import math
from collections.abc import Sequence

from plait.errors import LowerFailed
from plait.ir.dtype import DType
from plait.tile.program import Let, Scalar

CTYPE = {
    DType.b1: "bool",
    DType.u8: "uint8_t",
    DType.i8: "int8_t",
    DType.i16: "int16_t",
    DType.i32: "int32_t",
    DType.i64: "int64_t",
    DType.f32: "float",
    DType.f64: "double",
}
"""C++ types of locals (compute types)."""

_STORED = {
    DType.b1: "uint8_t",
    DType.f16: "uint16_t",
    DType.bf16: "uint16_t",
    DType.f8e4m3: "uint8_t",
    DType.f8e5m2: "uint8_t",
}


def memory_type(dtype: DType) -> str:
    """The C++ type of an element in memory."""
    return _STORED.get(dtype) or CTYPE[dtype]


def loaded(dtype: DType, element: str) -> str:
    """The compute value of an element expression in memory."""
    if dtype is DType.b1:
        return f"{element} != 0"
    return f"plait::from_{dtype.value}({element})" if dtype.is_storage_only else element


def stored(dtype: DType, value: str) -> str:
    """What to write to memory for a compute value."""
    return f"plait::to_{dtype.value}({value})" if dtype.is_storage_only else value


def literal(value: Scalar, dtype: DType) -> str:
    """A constant as a C++ expression of the dtype's compute type. Out-of-range integers wrap."""
    dtype = dtype.compute
    if dtype is DType.b1:
        return "true" if value else "false"
    if dtype.is_int:
        n = int(value)
        wide = 8 * dtype.nbytes
        n &= (1 << wide) - 1
        if dtype is not DType.u8 and n >> (wide - 1):
            n -= 1 << wide
        if dtype is DType.i64:
            return "INT64_MIN" if n == -(1 << 63) else f"INT64_C({n})"
        return f"{CTYPE[dtype]}({n})"
    x, c = float(value), CTYPE[dtype]
    if math.isnan(x):
        return f"std::numeric_limits<{c}>::quiet_NaN()"
    if math.isinf(x):
        return ("-" if x < 0 else "") + f"std::numeric_limits<{c}>::infinity()"
    if dtype is DType.f64:
        return repr(x)
    if abs(x) >= 3.4028235677973366e38:  # what f32 rounds to infinity
        return ("-" if x < 0 else "") + "std::numeric_limits<float>::infinity()"
    return f"float({x!r})" if "e" in repr(x) or len(repr(x)) > 9 else f"{x!r}f"


_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "bit_and": "&", "bit_or": "|", "bit_xor": "^"}
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_BOOL_ARITH = {"add": "|", "sub": "^", "mul": "&", "maximum": "|", "minimum": "&"}
INT_DIVISIONS = {"floordiv": "pyfloordiv", "truncdiv": "truncdiv", "remainder": "remainder", "fmod": "fmod"}
"""Integer operators that fail on zero divisors, and their functions in the header."""

_CALLS = frozenset(
    [
        "abs",
        "sign",
        "sqrt",
        "rsqrt",
        "reciprocal",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log2",
        "log10",
        "log1p",
        "sin",
        "cos",
        "tan",
        "asin",
        "acos",
        "atan",
        "sinh",
        "cosh",
        "tanh",
        "asinh",
        "acosh",
        "atanh",
        "erf",
        "erfc",
        "erfinv",
        "lgamma",
        "digamma",
        "sigmoid",
        "floor",
        "ceil",
        "round",
        "trunc",
        "maximum",
        "minimum",
        "pow",
        "atan2",
        "copysign",
        "hypot",
        "fma",
        "nextafter",
        "fmod_f",
        "remainder_f",
        "fmax",
        "fmin",
        "shl",
        "shr",
        "ipow",
        "isnan",
        "isinf",
        "signbit",
    ]
)


def let_expression(let: Let, args: Sequence[str], arg_types: Sequence[DType], linear: str = "") -> str:
    """The value of a Let; `args` are the operands' C++ names and `linear` the rendered index of index
    operators, and of random ones the index and the draw."""
    op, ctype = let.op, CTYPE[let.dtype]
    if op == "const":
        return literal(let.attr("value"), let.dtype)
    if op == "index":
        return linear
    if op == "copy":
        return args[0]
    if op == "cast":
        return _cast(let, args[0], arg_types[0])
    if op == "round" and let.attrs:  # to a storage type; without attributes it is the map operator, half to even
        return f"plait::round_{let.attr('dtype').value}({args[0]})" if let.attr("dtype").is_storage_only else args[0]
    if op == "bitcast":
        return _bitcast(let, args[0], arg_types[0])
    if op == "where":
        return f"{args[0]} ? {args[1]} : {args[2]}"
    if op in ("rand", "randn", "randbits"):
        return f"plait::{op}<{ctype}>({args[0]}, {args[1]}, {linear})"
    return _arithmetic(let, args, arg_types)


def _arithmetic(let: Let, args: Sequence[str], arg_types: Sequence[DType]) -> str:
    op, ctype = let.op, CTYPE[let.dtype]
    if op in _COMPARE:
        return f"{args[0]} {_COMPARE[op]} {args[1]}"
    if op == "between":
        if not args:  # implied by others, and asked for bounds only
            return "true"
        return f"bool(({args[1]} <= {args[0]}) & ({args[0]} < {args[2]}))"
    if op == "neg":
        return f"-{args[0]}" if let.dtype.is_float else f"{ctype}(-{args[0]})"
    if op == "bit_not":
        return f"!{args[0]}" if let.dtype is DType.b1 else f"{ctype}(~{args[0]})"
    if let.dtype is DType.b1 and op in _BOOL_ARITH:
        return f"bool({args[0]} {_BOOL_ARITH[op]} {args[1]})"
    if op in _INFIX:
        text = f"{args[0]} {_INFIX[op]} {args[1]}"
        # C++ computes narrow integers as int: cut back to the width after every operator
        return text if let.dtype in (DType.f32, DType.f64, DType.i32, DType.i64) else f"{ctype}({text})"
    if op in INT_DIVISIONS:
        return f"plait::{INT_DIVISIONS[op]}<{ctype}>({args[0]}, {args[1]})"
    if op in _CALLS:
        return f"plait::{op}({', '.join(args)})"
    raise LowerFailed(f"the C++ emitter has no expression for {op} on {list(arg_types)}")


def _cast(let: Let, arg: str, arg_type: DType) -> str:
    text = arg if arg_type is let.dtype else f"plait::cast<{CTYPE[let.dtype]}>({arg})"
    target = let.attr("dtype")
    return f"plait::round_{target.value}({text})" if target.is_storage_only else text


def _bitcast(let: Let, arg: str, arg_type: DType) -> str:
    target = let.attr("dtype")
    if target is arg_type:
        return arg
    if target.is_storage_only and target.nbytes == arg_type.nbytes:
        return f"plait::from_{target.value}({memory_type(target)}({arg}))"
    if target.nbytes != arg_type.nbytes or DType.b1 in (target, arg_type):
        raise LowerFailed(f"bitcast from {arg_type} to {target} changes the size")
    return f"plait::bits<{CTYPE[target]}>({arg})"
