"""Text of the device functions that emitted Triton kernels call. A kernel's module carries those it uses, and what they use.

Each is written from its definition. Names start with an underscore; `HELPERS` maps a name to its source, and `closure`
puts the needed ones in an order in which they can be defined.
"""

from __future__ import annotations

import re

from plait.emit import triton_reciprocals

_TEXTS = """
def _floor_div(a, b):
    # quotient towards minus infinity; Triton's goes towards zero
    q = a // b
    r = a - q * b
    return tl.where((r != 0) & ((r ^ b) < 0), q - 1, q)

def _floor_mod(a, b):
    r = a % b
    return tl.where((r != 0) & ((r ^ b) < 0), r + b, r)

def _add(a, b):
    return a + b

def _mul(a, b):
    return a * b

def _or(a, b):
    return a | b

def _and(a, b):
    return a & b

def _max(a, b):
    # passes NaN on
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)

def _min(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)

def _argmax(a, i, b, j):
    # a NaN is greater than everything; among equals the first index wins
    left = (a > b) | ((a != a) & (b == b))
    tie = (a == b) | ((a != a) & (b != b))
    left = left | (tie & (i < j))
    return tl.where(left, a, b), tl.where(left, i, j)

def _argmin(a, i, b, j):
    left = (a < b) | ((a != a) & (b == b))
    tie = (a == b) | ((a != a) & (b != b))
    left = left | (tie & (i < j))
    return tl.where(left, a, b), tl.where(left, i, j)

def _logaddexp(a, b):
    high = _max(a, b)
    low = _min(a, b)
    # equal infinities would give inf - inf
    return tl.where((low == high) & (tl.abs(low) == float("inf")), high, libdevice.log1p(libdevice.exp(low - high)) + high)

def _scale_of(d):
    # a power of two that brings a divisor away from the ends of the range (its reciprocal is neither infinite nor
    # subnormal then), with the divisor's sign
    a = tl.abs(d)
    k = tl.where(a > 1152921504606846976.0, 8.673617379884035e-19, 1.0)
    k = tl.where(a < 8.673617379884035e-19, 1152921504606846976.0, k)
    return tl.where(d < 0, k * -1.0, k)

def _quotient(x, d, r):
    # x / d correctly rounded, given d >= 0 and r = 1 / d: the remainder corrects the first quotient where it is finite.
    # The signs are such that a zero quotient keeps its own.
    q = x * r
    e = tl.fma(q, d, x * -1.0)
    return tl.where(tl.abs(e) < float("inf"), tl.fma(e * -1.0, r, q), q)

def _whole(n):
    # an integer in [0, 2^23) as a float
    return (n + 1258291200).to(tl.float32, bitcast=True) - 8388608.0

def _bits(n):
    # an integer n in [0, 2^23) as the float 2^23 + n: differences of two are exact
    return (n | 1258291200).to(tl.float32, bitcast=True)

def _same_near_zero(y, near, x):
    # y is a function of x, `near` what it is near zero: libdevice flushes subnormal numbers to zero
    return tl.where(tl.abs(x) < 1.1754943508222875e-38, near, y)

def _tanh_absolute(x, c):
    # tanh(y) = 1 - 2 / (exp(2 y) + 1), c = 2 log2(e) y / x; where the power overflows, the quotient is 0
    return tl.fma(libdevice.fast_dividef(1.0, tl.exp2(x * c) + 1.0), -2.0, 1.0)

def _tanh_rest(x, c):
    # -1 / (exp(2 y) + 1), c as above
    return _reciprocals(tl.exp2(x * c) * -1.0 - 1.0)

def _rsqrt(x):
    # the hardware instruction flushes subnormal arguments to zero
    tiny = x < 1.1754943508222875e-38
    return tl.rsqrt(tl.where(tiny, x * 16777216.0, x)) * tl.where(tiny, 4096.0, 1.0)

def _sigmoid(x):
    return tl.div_rn(1.0, 1.0 + libdevice.exp(x * -1.0))

def _sigmoid_near(x):
    # the quotient that treats large divisors as infinite: below 2^-126 it is zero
    return libdevice.fast_dividef(1.0, 1.0 + tl.exp2(x * -1.4426950408889634))

def _sigmoid64(x):
    return 1.0 / (1.0 + libdevice.exp(x * -1.0))

def _erfc_near(x):
    # within 6e-6 of erfc, relatively: erfc(a) exp(a a) as a polynomial of 1 / (1 + 0.44 a) (least squares on [0, 10])
    t = libdevice.fast_dividef(1.0, tl.fma(tl.abs(x), 0.44, 1.0))
    p = tl.fma(t, -0.1461113298668184, 0.3506685531620834)
    p = tl.fma(t, p, 0.04071425836010682)
    p = tl.fma(t, p, 0.26359433200556665)
    p = tl.fma(t, p, 0.2425678854143048)
    p = tl.fma(t, p, 0.24856113378938618)
    e = t * p * tl.exp2(x * x * -1.4426950408889634)
    return tl.where(x < 0, 2.0 - e, e)

def _tanh_near(x):
    # within 5e-7 of tanh, relatively: by exponentials, and near zero, where their difference would cancel, by a polynomial
    # (least squares on [0, 0.3])
    a = tl.abs(x)
    t = tl.exp2(a * -2.885390081777927)
    far = (1.0 - t) / (1.0 + t)
    u = x * x
    p = tl.fma(u, tl.fma(u, -0.050585776567459106, 0.133171945810318), -0.3333311378955841)
    return tl.where(a < 0.3, tl.fma(x * u, p, x), tl.where(x < 0, far * -1.0, far))

def _remainder_f(a, b):
    r = libdevice.fmod(a, b)
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)

def _ipow(a, n):
    # wrapping product by squaring; negative exponents as the integers have them: 1, -1 to the parity, else 0
    result = a * 0 + 1
    base = a + n * 0
    left = n + a * 0
    for _ in range(64):
        result = tl.where((left & 1) != 0, result * base, result)
        base = base * base
        left = tl.where(left > 0, left >> 1, left * 0)
    odd = tl.where((n & 1) != 0, a, a * a)
    return tl.where(n < 0, tl.where((a == 1) | (a == -1), odd, a * 0), result)

def _digamma(x):
    # reflection for x < 0, recurrence up to 10, then the asymptotic series; poles: +-0 gives -+inf, negative integers NaN
    pi: tl.constexpr = 3.141592653589793
    y = tl.where(x <= 0, 1.0 - x, x)
    low = tl.zeros_like(x)
    for _ in tl.static_range(10):
        small = y < 10.0
        low = tl.where(small, low - 1.0 / y, low)
        y = tl.where(small, y + 1.0, y)
    z = 1.0 / (y * y)
    tail = z * (1 / 12 - z * (1 / 120 - z * (1 / 252 - z * (1 / 240 - z * (1 / 132 - z * (691 / 32760 - z / 12))))))
    up = tl.log(y) - 0.5 / y - tail + low
    fraction = x - libdevice.trunc(x)
    down = up - pi / libdevice.tan(pi * fraction)
    result = tl.where(x < 0, tl.where(fraction == 0, float("nan"), down), up)
    return tl.where(x == 0, libdevice.copysign(x * 0 + float("inf"), x * -1.0), result)

def _to_f8e4m3(x):
    # saturates
    return x.to(tl.float8e4nv)

def _to_f8e4m3_nan(x):
    # what does not round to at most 448 is NaN
    return tl.where(tl.abs(x) > 464.0, float("nan"), x).to(tl.float8e4nv)

def _to_f8e5m2(x):
    # the conversion saturates, but 61440 and more round to infinity
    bits = x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    inf = (sign | 0x7C).to(tl.uint8)
    return tl.where(tl.abs(x) >= 61440.0, inf, bits).to(tl.float8e5, bitcast=True)

def _philox(seed, offset, linear, draw):
    # Philox 4x32-10 of counter (linear low, linear high, offset low, draw)
    wide = tl.cast(linear, tl.int64)
    return tl.philox(
        seed,
        wide.to(tl.uint32),
        (wide >> 32).to(tl.uint32),
        (wide * 0 + offset).to(tl.uint32),
        (wide * 0 + draw).to(tl.uint32),
    )

def _words(seed, offset, block, draw):
    # the four words of each block, side by side
    a, b, c, d = _philox(seed, offset, block, draw)
    return tl.join(tl.join(a, c), tl.join(b, d))

def _word(seed, offset, linear, draw):
    # of the block that serves four neighbours
    wide = tl.cast(linear, tl.int64)
    a, b, c, d = _philox(seed, offset, wide >> 2, draw)
    odd = (wide & 1) != 0
    return tl.where((wide & 2) != 0, tl.where(odd, d, c), tl.where(odd, b, a))

def _unit(word):
    return (word >> 8).to(tl.float32) * 5.960464477539063e-08

def _rand_words(seed, offset, block, draw):
    return _unit(_words(seed, offset, block, draw))

def _rand(seed, offset, linear, draw):
    return _unit(_word(seed, offset, linear, draw))

def _rand64(seed, offset, linear, draw):
    a, b, c, d = _philox(seed, offset, linear, draw)
    return (((a.to(tl.uint64) << 32) | b.to(tl.uint64)) >> 11).to(tl.float64) * 1.1102230246251565e-16

def _randn(seed, offset, linear, draw):
    # Box and Muller
    a, b, c, d = _philox(seed, offset, linear, draw)
    u = (a >> 8).to(tl.float32) * 5.960464477539063e-08
    w = (b >> 8).to(tl.float32) * 5.960464477539063e-08
    return tl.sqrt_rn(-2.0 * tl.log(1.0 - u)) * libdevice.cospi(2.0 * w)

def _randn64(seed, offset, linear, draw):
    a, b, c, d = _philox(seed, offset, linear, draw)
    u = (a >> 8).to(tl.float64) * 5.960464477539063e-08
    w = (b >> 8).to(tl.float64) * 5.960464477539063e-08
    return tl.sqrt(-2.0 * tl.log(1.0 - u)) * libdevice.cospi(2.0 * w)

def _randbits64(seed, offset, linear, draw):
    a, b, c, d = _philox(seed, offset, linear, draw)
    return (((b.to(tl.uint64) << 32) | a.to(tl.uint64)) >> 1).to(tl.int64)

def _randbits_words(seed, offset, block, draw):
    return (_words(seed, offset, block, draw) >> 1).to(tl.int32)

def _randbits(seed, offset, linear, draw):
    return (_word(seed, offset, linear, draw) >> 1).to(tl.int32)
"""


def _parse() -> dict[str, str]:
    out: dict[str, str] = {}
    texts = [*re.split(r"\n(?=def )", _TEXTS.strip("\n")), triton_reciprocals.helper("_reciprocals")]
    for text in texts:
        out[text[4 : text.index("(")]] = "@triton.jit\n" + text.strip("\n") + "\n"
    return out


HELPERS: dict[str, str] = _parse()
"""Source text by function name."""

_CALLED = re.compile(r"\b_[a-z]\w*\b")


def used(text: str) -> set[str]:
    """The helpers that a text mentions."""
    return {n for n in _CALLED.findall(text) if n in HELPERS}


def closure(text: str) -> list[str]:
    """Sources of the helpers a kernel's text needs, callees first."""
    done: dict[str, None] = {}

    def visit(name: str) -> None:
        if name not in done:
            for inner in sorted(used(HELPERS[name]) - {name}):
                visit(inner)
            done[name] = None

    for name in sorted(used(text)):
        visit(name)
    return [HELPERS[n] for n in done]
