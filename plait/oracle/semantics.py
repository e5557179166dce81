"""What every operator means, as torch calls: the one table that both evaluators (Graph and TileProgram) read.

Functions get operand tensors of the node's own compute type and return a tensor of the result type. Where eager's rule
for NaN, signs, ties or wrap-around is a rule at all, calling torch's own operator is how it is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from plait.ir.dtype import DType
from plait.ir.index import Atom, Expr

TORCH: dict[DType, torch.dtype] = {
    DType.b1: torch.bool,
    DType.u8: torch.uint8,
    DType.i8: torch.int8,
    DType.i16: torch.int16,
    DType.i32: torch.int32,
    DType.i64: torch.int64,
    DType.f16: torch.float16,
    DType.bf16: torch.bfloat16,
    DType.f32: torch.float32,
    DType.f64: torch.float64,
    DType.f8e4m3: torch.float8_e4m3fn,
    DType.f8e5m2: torch.float8_e5m2,
}

IndexValue = int | Tensor


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a*b + c, in float32 with the one rounding of the instruction (all but always: the sum is rounded in double first)."""
    if a.dtype is not torch.float32:
        return a * b + c
    return (a.double() * b.double() + c.double()).float()


def _minimum_of(dtype: torch.dtype) -> bool | int | float:
    if dtype is torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _maximum_of(dtype: torch.dtype) -> bool | int | float:
    if dtype is torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def identity_of(monoid: str, dtype: torch.dtype) -> bool | int | float:
    """The neutral element of a reduction (L3); argmax and argmin compare like max and min."""
    if monoid in ("max", "argmax"):
        return _minimum_of(dtype)
    if monoid in ("min", "argmin"):
        return _maximum_of(dtype)
    return {"sum": 0, "prod": 1, "any": False, "all": True}[monoid]


# ------------------------------------------------------------------------------------------------ pointwise operators
MAPS: dict[str, Callable[..., Tensor]] = {
    "copy": lambda x: x,
    "where": torch.where,
    "neg": torch.neg,
    "abs": torch.abs,
    "sign": torch.sign,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "log": torch.log,
    "log2": torch.log2,
    "log10": torch.log10,
    "log1p": torch.log1p,
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": torch.tan,
    "asin": torch.asin,
    "acos": torch.acos,
    "atan": torch.atan,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "tanh": torch.tanh,
    "asinh": torch.asinh,
    "acosh": torch.acosh,
    "atanh": torch.atanh,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "erfinv": torch.erfinv,
    "lgamma": torch.lgamma,
    "digamma": torch.digamma,
    "sigmoid": torch.sigmoid,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "trunc": torch.trunc,
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "div": torch.true_divide,
    "pow": torch.pow,
    "atan2": torch.atan2,
    "copysign": torch.copysign,
    "hypot": torch.hypot,
    "fma": _fma,
    "nextafter": torch.nextafter,
    "fmod_f": torch.fmod,
    "remainder_f": torch.remainder,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "bit_and": torch.bitwise_and,
    "bit_or": torch.bitwise_or,
    "bit_xor": torch.bitwise_xor,
    "bit_not": torch.bitwise_not,
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
    "floordiv": torch.floor_divide,
    "truncdiv": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "ipow": torch.pow,
    "isnan": torch.isnan,
    "isinf": torch.isinf,
    "signbit": torch.signbit,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "between": lambda x, first, end: (first <= x) & (x < end),
}
"""Operators whose meaning needs operands only. Those that need attributes (cast, bitcast, const, index, random ones) and
`pieces`, which looks at guards, are in the evaluators, through the functions below."""


def bitcast(x: Tensor, source: DType, target: DType, wide: torch.dtype | None) -> Tensor:
    """Reinterpret the bits `x` has in type `source`; `wide` is the type floats are held in when not their own."""
    held = x.to(TORCH[source]).contiguous().view(TORCH[target])
    return held.to(wide) if wide is not None and target.is_float else held


# ------------------------------------------------------------------------------------------------ reductions and scans
def reduce_trailing(monoid: str, x: Tensor, count: int) -> Tensor:
    """Combine over the last `count` axes, in the type of `x` (i64 for argmax, argmin)."""
    if count == 0:
        return torch.zeros(x.shape, dtype=torch.int64, device=x.device) if monoid in ("argmax", "argmin") else x
    flat = x.flatten(x.dim() - count) if x.numel() else x.reshape(*x.shape[: x.dim() - count], _size(x, count))
    if monoid in ("argmax", "argmin"):
        # torch has no argmax of bool
        flat = flat.to(torch.uint8) if flat.dtype is torch.bool else flat
        return torch.argmax(flat, -1) if monoid == "argmax" else torch.argmin(flat, -1)
    if flat.shape[-1] == 0:
        return torch.full(flat.shape[:-1], identity_of(monoid, x.dtype), dtype=x.dtype, device=x.device)
    if monoid == "sum":
        return torch.any(flat, -1) if x.dtype is torch.bool else torch.sum(flat, -1, dtype=x.dtype)
    if monoid == "prod":
        return torch.all(flat, -1) if x.dtype is torch.bool else torch.prod(flat, -1, dtype=x.dtype)
    plain: dict[str, Callable[..., Tensor]] = {"max": torch.amax, "min": torch.amin, "any": torch.any, "all": torch.all}
    return plain[monoid](flat, -1)


def _size(x: Tensor, count: int) -> int:
    return math.prod(x.shape[x.dim() - count :])


def contract(a: Tensor, b: Tensor, dims: Sequence[int], extents: Sequence[int]) -> Tensor:
    """The sum over `dims` of a * b, both of the rank of `extents` with extent 1 where they do not vary; the result likewise,
    with extent 1 in `dims`. Never forms the product of all extents."""
    count = math.prod(extents[d] for d in dims if a.shape[d] == b.shape[d] == 1)
    letters = [chr(ord("a") + d) for d in range(len(extents))]
    names = ["".join(c for c, n in zip(letters, x.shape, strict=True) if n != 1) for x in (a, b)]
    kept = [d for d in range(len(extents)) if d not in dims and letters[d] in names[0] + names[1]]
    squeezed = [x.reshape([n for n in x.shape if n != 1]) for x in (a, b)]
    found = torch.einsum(f"{names[0]},{names[1]}->{''.join(letters[d] for d in kept)}", *squeezed)
    return (found * count if count != 1 else found).reshape(
        [extents[d] if d in kept else 1 for d in range(len(extents))]
    )


def scan_along(scan: str, x: Tensor, dim: int) -> Tensor:
    """Inclusive scan along `dim`, in the type of `x`."""
    if scan == "cumsum":
        return torch.cumsum(x, dim, dtype=x.dtype)
    if scan == "cumprod":
        return torch.cumprod(x, dim, dtype=x.dtype)
    if scan == "cummax":
        return torch.cummax(x, dim).values
    if scan == "cummin":
        return torch.cummin(x, dim).values
    if scan == "logcumsumexp":
        return torch.logcumsumexp(x, dim)
    raise KeyError(scan)


# ------------------------------------------------------------------------------------------------ index expressions
def eval_index(e: Expr, env: Mapping[Atom, IndexValue]) -> IndexValue:
    """The expression's value: an int, or an i64 tensor that broadcasts over the axes in use."""
    total: IndexValue = 0
    for monomial, coefficient in e.terms:
        part: IndexValue = coefficient
        for a in monomial:
            part = part * _eval_atom(a, env)
        total = total + part
    return total


def _eval_atom(a: Atom, env: Mapping[Atom, IndexValue]) -> IndexValue:
    if a.kind not in ("div", "mod"):
        return env[a]
    x, y = a.args
    assert isinstance(x, Expr) and isinstance(y, Expr)
    n, d = eval_index(x, env), eval_index(y, env)
    if isinstance(n, int) and isinstance(d, int):
        return n // d if a.kind == "div" else n % d
    n, d = torch.as_tensor(n), torch.as_tensor(d)
    return torch.div(n, d, rounding_mode="floor") if a.kind == "div" else torch.remainder(n, d)


def axis_values(extents: Sequence[int]) -> list[Tensor]:
    """For each axis its indices, shaped to broadcast over all of them."""
    rank = len(extents)
    return [torch.arange(n).reshape([n if d == i else 1 for d in range(rank)]) for i, n in enumerate(extents)]


# ------------------------------------------------------------------------------------------------ random numbers
_MASK = 0xFFFFFFFF


def _mul_hi_lo(a: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """High and low words of a 32x32-bit product held in i64 (a in [0, 2**32)); split so that nothing overflows."""
    low = (a & 0xFFFF) * m
    high = (a >> 16) * m + (low >> 16)
    return (high >> 16) & _MASK, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(linear: Tensor, seed: int, offset: int, draw: int) -> list[Tensor]:
    """The four words of Philox-4x32 with 10 rounds, as i64 tensors in [0, 2**32). Counter: (low and high word of the
    linear index, low word of the offset, the draw); key: (low and high word of the seed)."""
    c0, c1 = linear & _MASK, (linear >> 32) & _MASK
    c2, c3 = torch.full_like(c0, offset & _MASK), torch.full_like(c0, draw & _MASK)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        h0, l0 = _mul_hi_lo(c0, 0xD2511F53)
        h1, l1 = _mul_hi_lo(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return [c0, c1, c2, c3]


def random_values(op: str, linear: Tensor, seed: int, offset: int, draw: int, dtype: DType) -> Tensor:
    """rand, randn and randbits of the linear index, in the compute type of `dtype`. What takes one word shares a block of
    four with its neighbours: word `linear % 4` of block `linear // 4`."""
    if (op, dtype.compute.nbytes) in (("rand", 4), ("randbits", 4)):
        words = torch.stack(philox(linear >> 2, seed, offset, draw), -1)
        word = words.gather(-1, (linear & 3)[..., None])[..., 0]
        return (word >> 1).to(TORCH[dtype]) if op == "randbits" else (word >> 8).to(TORCH[dtype.compute]) * 2.0**-24
    w = philox(linear, seed, offset, draw)
    if op == "randbits":
        return (((w[1] << 32) | w[0]) >> 1) & (2**63 - 1)
    held = TORCH[dtype.compute]
    if op == "rand":
        return (((w[0] << 21) | (w[1] >> 11)).to(held)) * 2.0**-53
    u0, u1 = ((x >> 8).to(held) * 2.0**-24 for x in w[:2])
    return torch.sqrt(-2.0 * torch.log(1.0 - u0)) * torch.cos((2.0 * math.pi) * u1)
