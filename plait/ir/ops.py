"""The operator table of Graph: name, kind, arity and result type. No cost, no lowering, no meaning: those are other tables.

Kinds: `source` (input, scalar), `map` (pointwise over the node's axes), `reduce` (by a monoid over trailing axes),
`contract` (a sum of products over trailing axes), `scan` (inclusive, along the last axis), `random` (counter-based),
`extern` (an ATen call: a contraction that stays the vendor library's, a scatter, or opaque), `project` (one result of an
extern with several).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from plait.ir.dtype import DType

Attrs = dict[str, Any]
Infer = Callable[[Sequence[DType], Attrs], DType]


@dataclass(frozen=True, slots=True)
class OpDef:
    """One operator. `arity` None: any number of reads. `attrs` names the attributes it takes (all required),
    `optional` those that it may have."""

    name: str
    kind: str
    arity: int | None
    infer: Infer
    attrs: tuple[str, ...] = ()
    # True for operators whose result jumps: their operands are rounded to the user's dtype first (compare, floor, argmax …)
    discontinuous: bool = False
    optional: tuple[str, ...] = ()


class TypeMismatch(TypeError):
    """Operand types that an operator does not take; raised by `infer`, a bug of whoever built the node."""


def _same(dtypes: Sequence[DType], attrs: Attrs) -> DType:
    if any(d is not dtypes[0] for d in dtypes):
        raise TypeMismatch(f"operands differ: {list(dtypes)}")
    return dtypes[0]


def _arith(dtypes: Sequence[DType], attrs: Attrs) -> DType:
    d = _same(dtypes, attrs)
    if d.is_storage_only:
        raise TypeMismatch(f"arithmetic in storage-only type {d}")
    return d


def _float(dtypes: Sequence[DType], attrs: Attrs) -> DType:
    d = _arith(dtypes, attrs)
    if not d.is_float:
        raise TypeMismatch(f"wants a float, got {d}")
    return d


def _integral(dtypes: Sequence[DType], attrs: Attrs) -> DType:
    d = _same(dtypes, attrs)
    if d.is_float:
        raise TypeMismatch(f"wants an integer or bool, got {d}")
    return d


def _compare(dtypes: Sequence[DType], attrs: Attrs) -> DType:
    _arith(dtypes, attrs)
    return DType.b1


def _float_test(dtypes: Sequence[DType], attrs: Attrs) -> DType:
    _float(dtypes, attrs)
    return DType.b1


def _where(dtypes: Sequence[DType], attrs: Attrs) -> DType:
    if dtypes[0] is not DType.b1:
        raise TypeMismatch(f"condition is {dtypes[0]}")
    return _same(dtypes[1:], attrs)


def _bools(dtypes: Sequence[DType], attrs: Attrs) -> DType:
    if dtypes[0] is not DType.b1:
        raise TypeMismatch(f"wants bool, got {dtypes[0]}")
    return DType.b1


def _attr_dtype(dtypes: Sequence[DType], attrs: Attrs) -> DType:
    d = attrs["dtype"]
    assert isinstance(d, DType)
    return d


def _dot(dtypes: Sequence[DType], attrs: Attrs) -> DType:
    d = _same(dtypes, attrs)
    if not d.is_float:
        raise TypeMismatch(f"a contraction of {d}")
    return d.compute


def _i64(dtypes: Sequence[DType], attrs: Attrs) -> DType:
    _arith(dtypes, attrs)
    return DType.i64


def _gather(dtypes: Sequence[DType], attrs: Attrs) -> DType:
    if not all(d.is_int for d in dtypes[1:]):
        raise TypeMismatch(f"indices are integers, got {list(dtypes[1:])}")
    return dtypes[0]


def _index(dtypes: Sequence[DType], attrs: Attrs) -> DType:
    return DType.i64


def _table() -> dict[str, OpDef]:
    defs: list[OpDef] = [
        OpDef("input", "source", 0, _attr_dtype, ("dtype", "name")),
        OpDef("const", "map", 0, _attr_dtype, ("dtype", "value")),
        OpDef("index", "map", 0, _index, ("expr",)),
        OpDef("cast", "map", 1, _attr_dtype, ("dtype", "implicit")),
        OpDef("bitcast", "map", 1, _attr_dtype, ("dtype",)),
        OpDef("copy", "map", 1, _same),
        OpDef("pieces", "map", None, _same),
        # read 0 is the data, whose index uses value(k) of reads 1..: integers that are not negative
        OpDef("gather", "map", None, _gather),
        OpDef("where", "map", 3, _where),
        # random: reads are (seed, offset), both i64 scalars; the counter is offset + linear index of the axes
        OpDef("rand", "random", 2, _attr_dtype, ("dtype", "draw", "linear"), optional=("twin",)),
        OpDef("randn", "random", 2, _attr_dtype, ("dtype", "draw", "linear"), optional=("twin",)),
        OpDef("randbits", "random", 2, _attr_dtype, ("dtype", "draw", "linear"), optional=("twin",)),
        OpDef("extern", "extern", None, _attr_dtype, ("dtype", "target", "role", "template", "outs", "serial")),
        OpDef("project", "project", 1, _attr_dtype, ("dtype", "item")),
    ]
    arith1 = "neg abs sign"
    float1 = (
        "sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh "
        "asinh acosh atanh erf erfc erfinv lgamma digamma sigmoid"
    )
    jump1 = "floor ceil round trunc"
    arith2 = "add sub mul maximum minimum"
    float2 = "div pow atan2 copysign hypot nextafter fmod_f remainder_f fmax fmin"
    int2 = "bit_and bit_or bit_xor"
    shift2 = "shl shr floordiv truncdiv remainder fmod ipow"
    defs += [OpDef(n, "map", 1, _arith) for n in arith1.split()]
    defs += [OpDef(n, "map", 1, _float) for n in float1.split()]
    defs += [OpDef(n, "map", 1, _float, discontinuous=True) for n in jump1.split()]
    defs += [OpDef(n, "map", 2, _arith) for n in arith2.split()]
    defs += [OpDef(n, "map", 2, _float) for n in float2.split()]
    defs += [OpDef("fma", "map", 3, _float)]
    defs += [OpDef(n, "map", 2, _integral) for n in (int2 + " " + shift2).split()]
    defs += [OpDef("bit_not", "map", 1, _integral)]
    defs += [OpDef(n, "map", 1, _float_test, discontinuous=True) for n in ("isnan", "isinf", "signbit")]
    defs += [OpDef(n, "map", 2, _compare, discontinuous=True) for n in ("eq", "ne", "lt", "le", "gt", "ge")]
    defs += [OpDef("between", "map", 3, _compare, discontinuous=True)]
    defs += [OpDef(n, "reduce", 1, _arith) for n in ("sum", "prod", "max", "min")]
    defs += [OpDef(n, "reduce", 1, _bools) for n in ("any", "all")]
    defs += [OpDef(n, "reduce", 1, _i64, discontinuous=True) for n in ("argmax", "argmin")]
    # products of storage types are exact in the compute type, in which they are added up
    defs += [OpDef("dot", "contract", 2, _dot, optional=("twin", "sums"))]
    defs += [OpDef(n, "scan", 1, _arith) for n in ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")]
    return {d.name: d for d in defs}


OPS: dict[str, OpDef] = _table()
"""Every operator by name. `max`, `min`, `maximum`, `minimum`, `cummax`, `cummin` pass NaN on; `fmax`, `fmin` drop it.
`argmax`, `argmin` give the row-major index over the reduced axes of the first extreme (a NaN counts as extreme).
`floordiv`, `remainder` follow Python's signs, `truncdiv`, `fmod` C's; on zero divisors the program raises.
`fmod_f`, `remainder_f` are their float forms. `round` is half to even. `fma(a, b, c)` is a*b + c with
one rounding, where the machine has the instruction. `between(x, first, end)` is first <= x < end, and implied by
what it is put on: where it is false, nothing changes if it is taken for true (loops end there; see rewrite/passes/block_bounds).
`ipow` is integer power by wrapping products."""
