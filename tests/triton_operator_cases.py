"""Hand-built TilePrograms of single operators: arithmetic, conversions, random numbers, against torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tile_make import F32, F64, I32, I64, TORCH, Case, Make, case, randn

from plait.ir.dtype import DType
from plait.ir.index import Expr, axis, const
from plait.tile.program import Let

R, P0, P1 = axis(1), axis(0), axis(1)


def float8_rounding() -> Case:
    x = torch.cat(
        (randn(40) * 100, torch.tensor([448.0, 464, 465, 480, 1e6, float("inf"), float("-inf"), float("nan")]))
    )
    x = torch.cat((x, torch.tensor([57344.0, 61439, 61440, -61440, 65536, 1e-6, 0.0, -0.0, 2**-9, 2**-10, 3 * 2**-11])))
    n = len(x)
    m = Make("p0", [n], "form=flat tile=p0:16 vector=p0")
    a = m.load(x, P0)
    for d in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16):
        m.store(torch.zeros(n, dtype=d), P0, a)
    m.store(torch.zeros(n), P0, m.let("round", a, dtype=F32, dtype_=0))
    last = m.body[-2]
    assert isinstance(last, Let)
    m.body[-2] = Let(last.out, "round", last.args, F32, last.span, (("dtype", DType.bf16),))
    same = [x.to(d) for d in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16)]
    return Case(m, [*same, x.bfloat16().float()])


@case
def integers() -> Case:
    a = torch.tensor([7, -7, 7, -7, 0, 5, -128, 127], dtype=torch.int8)
    b = torch.tensor([2, 2, -2, -2, 3, 5, 3, -1], dtype=torch.int8)
    m = Make("p0", [8], "form=flat tile=p0:8 vector=p0")
    x, y = m.load(a, P0), m.load(b, P0)
    ops = {
        "floordiv": torch.div(a, b, rounding_mode="floor"),
        "truncdiv": torch.div(a, b, rounding_mode="trunc"),
        "remainder": torch.remainder(a, b),
        "fmod": torch.fmod(a, b),
        "add": a + b,
        "mul": a * b,
        "bit_xor": a ^ b,
        "maximum": torch.maximum(a, b),
        "sub": a - b,
    }
    for n in ops:
        m.store(torch.zeros(8, dtype=torch.int8), P0, m.let(n, x, y))
    two = m.const(2, DType.i8)
    m.store(torch.zeros(8, dtype=torch.int8), P0, m.let("shl", x, two))
    m.store(torch.zeros(8, dtype=torch.int8), P0, m.let("shr", x, two))
    m.store(torch.zeros(8, dtype=torch.int8), P0, m.let("bit_not", x))
    m.store(torch.zeros(8, dtype=torch.int8), P0, m.let("ipow", x, two))
    m.store(torch.zeros(8), P0, m.let("cast", x, dtype=F32))
    return Case(m, [*ops.values(), a << 2, a >> 2, ~a, a**2, a.float()])


@case
def float_to_narrow_integers() -> Case:
    x = torch.tensor([1.9, -1.9, 255.0, 300.0, -1.0, 127.6, 0.0, 1e4])
    m = Make("p0", [8], "form=flat tile=p0:8 vector=p0")
    a = m.load(x, P0)
    for d in (torch.uint8, torch.int32, torch.int64, torch.bool):
        m.store(torch.zeros(8, dtype=d), P0, m.let("cast", a, dtype=TORCH[d]))
    return Case(m, [x.to(torch.int64).to(torch.uint8), x.int(), x.long(), x.bool()])


def philox4x32(counter: list[int], key: tuple[int, int]) -> list[int]:
    """Ten rounds, from the published definition."""
    c, (k0, k1), word = list(counter), key, 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k0, b & word, (a >> 32) ^ c[3] ^ k1, a & word]
        k0, k1 = (k0 + 0x9E3779B9) & word, (k1 + 0xBB67AE85) & word
    return c


@case
def random_numbers() -> Case:
    seed, offset, n, draw = 0x1234567_89ABCDEF, (5 << 32) | 77, 12, 3
    m = Make("p0", [n], "form=flat tile=p0:4 vector=p0")
    s, o = m.load(torch.tensor([seed]), const(0)), m.load(torch.tensor([offset]), const(0))
    words = [philox4x32([i, 0, offset & 0xFFFFFFFF, draw], (seed & 0xFFFFFFFF, seed >> 32)) for i in range(n)]
    a, b = (torch.tensor([w[k] for w in words]) for k in (0, 1))
    u, v = (a >> 8).double() * 2.0**-24, (b >> 8).double() * 2.0**-24
    normal = torch.sqrt(-2 * torch.log(1 - u)) * torch.cos(2 * torch.pi * v)
    one = torch.tensor([words[i // 4][i % 4] for i in range(n)])
    unit = (one >> 8).double() * 2.0**-24
    expected = [unit.float(), normal.float(), (one >> 1).int()]
    for op, d in (("rand", F32), ("randn", F32), ("randbits", I32), ("rand", F64), ("randbits", I64)):
        k = m._new({0}, d)
        m.body.append(Let(k, op, (s, o), d, (0,), (("draw", draw), ("dtype", d), ("linear", P0))))
        m.store(torch.zeros(n, dtype={v: t for t, v in TORCH.items()}[d]), P0, k)
    wide = [((w[0] << 32 | w[1]) >> 11) * 2.0**-53 for w in words]
    expected += [torch.tensor(wide, dtype=torch.float64), torch.tensor([(w[1] << 32 | w[0]) >> 1 for w in words])]
    return Case(m, expected)


def _drawn(linear: torch.Tensor, at: Expr, dims: str, extents: list[int], schedule: str) -> Case:
    """rand and randbits at an index, each one word of the block that serves four neighbours."""
    seed, offset, draw = 99, 5, 7
    m = Make(dims, extents, schedule)
    s, o = m.load(torch.tensor([seed]), const(0)), m.load(torch.tensor([offset]), const(0))
    words = [philox4x32([i // 4, 0, offset, draw], (seed, 0))[i % 4] for i in linear.flatten().tolist()]
    one = torch.tensor(words).reshape(linear.shape)
    span = tuple(range(len(extents)))
    for op, d in (("rand", F32), ("randbits", I32)):
        k = m._new(set(span), d)
        m.body.append(Let(k, op, (s, o), d, span, (("draw", draw), ("dtype", d), ("linear", at))))
        place = P0 if len(extents) == 1 else P0 * extents[1] + P1
        m.store(torch.zeros(extents, dtype={v: t for t, v in TORCH.items()}[d]), place, k)
    return Case(m, [((one >> 8).double() * 2.0**-24).float(), (one >> 1).int()])


@case
def random_numbers_in_rows() -> Case:
    rows, columns = torch.arange(3)[:, None], torch.arange(24)
    return _drawn(rows * 24 + columns, P0 * 24 + P1, "p0 p1", [3, 24], "form=flat tile=p0:2,p1:16 vector=p1")


@case
def random_numbers_across_rows() -> Case:
    rows, columns = torch.arange(3)[:, None], torch.arange(10)
    return _drawn(rows * 10 + columns, P0 * 10 + P1, "p0 p1", [3, 10], "form=flat tile=p0:2,p1:16 vector=p1")


@case
def random_numbers_every_third() -> Case:
    return _drawn(torch.arange(20) * 3 + 1, P0 * 3 + 1, "p0", [20], "form=flat tile=p0:8 vector=p0")


@case
def row_divisions() -> Case:
    tiny, big, inf, nan = 1e-40, 3e38, float("inf"), float("nan")
    x = torch.cat((randn(9, 13), torch.tensor([[0.0, inf, -inf, nan, tiny, big, 1, -1, 3, 5e-45, -0.0, 2**-126, 7]])))
    s = torch.tensor([3.0, -0.1, tiny, big, inf, nan, 0.0, -0.0, 7e-39, 49.0])
    m = Make("p0 p1", [10, 13], "form=flat tile=p0:4,p1:16 vector=p1")
    a, b = m.load(x, P0 * 13 + P1), m.load(s, P0)
    m.store(torch.zeros(10, 13), P0 * 13 + P1, m.let("div", a, b))
    m.store(torch.zeros(10, 13, dtype=torch.bfloat16), P0 * 13 + P1, m.let("div", a, b))
    for c in (3.0, 8.0, 1e-30, -0.7):
        m.store(torch.zeros(10, 13), P0 * 13 + P1, m.let("div", a, m.const(c)))
    y = x / s[:, None]
    return Case(m, [y, y.bfloat16(), x / 3, x / 8, x / 1e-30, x / -0.7], rtol=0, atol=0)


def unary_operators() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Float operators with torch's function, checked at the same points."""
    names = (
        "neg abs sign sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh "
    )
    names += "tanh asinh acosh atanh erf erfc erfinv lgamma digamma sigmoid floor ceil round trunc isnan isinf signbit"
    return {n: getattr(torch, n) for n in names.split()}


def _unary(dtype: torch.dtype, rtol: float) -> Case:
    x = torch.cat((randn(20) * 3, torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 0.5, 1.5, -2.5])))
    x = torch.cat((x, torch.tensor([1e-38, 0.3, -0.999, 1.0]))).to(dtype)
    m = Make("p0", [32], "form=flat tile=p0:32 vector=p0")
    a = m.load(x, P0)
    expected = []
    for n, f in unary_operators().items():
        y = f(x)
        m.store(torch.zeros(32, dtype=y.dtype), P0, m.let(n, a, dtype=TORCH[y.dtype]))
        expected.append(y)
    return Case(m, expected, rtol=rtol, atol=rtol)


@case
def unary_f32() -> Case:
    return _unary(torch.float32, 3e-6)


@case
def unary_f64() -> Case:
    return _unary(torch.float64, 1e-12)


@case
def binary_f32() -> Case:
    return _binary(torch.float32)


@case
def binary_f64() -> Case:
    return _binary(torch.float64)


@case
def fused_multiply_add() -> Case:
    x, y = randn(28), randn(28)
    m = Make("p0", [28], "form=flat tile=p0:32 vector=p0")
    a, b = m.load(x, P0), m.load(y, P0)
    product = m.let("mul", a, b)
    # what rounding the product loses, and a product of which nothing is lost
    m.store(torch.zeros(28), P0, m.let("fma", a, b, m.let("neg", product)))
    m.store(torch.zeros(28), P0, m.let("fma", a, m.const(2.0), b))
    exact = x.double() * y.double() - (x * y).double()
    return Case(m, [exact.float(), x * 2 + y], rtol=0, atol=0)


def _binary(dtype: torch.dtype) -> Case:
    x = torch.cat((randn(20), torch.tensor([0.0, -0.0, float("nan"), 1.0, float("inf"), 5.5, -5.5, -5.5])))
    y = torch.cat((randn(21)[:20], torch.tensor([0.0, -0.0, 1.0, float("nan"), 2.0, 2.0, 2.0, -2.0])))
    x, y = x.to(dtype), y.to(dtype)
    m = Make("p0", [28], "form=flat tile=p0:32 vector=p0")
    a, b = m.load(x, P0), m.load(y, P0)
    ops = {
        n: getattr(torch, n)
        for n in [
            "add",
            "sub",
            "mul",
            "maximum",
            "minimum",
            "div",
            "pow",
            "atan2",
            "copysign",
            "hypot",
            "nextafter",
            "fmax",
            "fmin",
        ]
    }
    ops |= {"fmod_f": torch.fmod, "remainder_f": torch.remainder}
    ops |= {n: getattr(torch, n) for n in ["eq", "ne", "lt", "le", "gt", "ge"]}
    for n, f in ops.items():
        d = f(x, y).dtype
        m.store(torch.zeros(28, dtype=d), P0, m.let(n, a, b, dtype=TORCH[d]))
    return Case(m, [f(x, y) for f in ops.values()])
