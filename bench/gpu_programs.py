"""The memory-bound GPU workloads as hand-written TilePrograms, so that schedules can be compared before (and apart from)
what the planner makes of them. Each function takes a device and a schedule line and gives the parts of one kernel.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

from tile_make import B1, F32, Make

from plait.ir.dtype import DType
from plait.ir.index import axis, const, floordiv, value
from plait.tile.program import Let, Load

P0, BF16 = axis(0), torch.bfloat16
PROGRAMS: dict[str, Callable[[str, str], list[Make]]] = {}


def program(f: Callable[[str, str], list[Make]]) -> Callable[[str, str], list[Make]]:
    PROGRAMS[f.__name__] = f
    return f


def _randn(device: str, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return (
        torch.empty(*shape, dtype=dtype, device=device)
        if device == "meta"
        else torch.randn(*shape, device=device).to(dtype)
    )


def _empty(device: str, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=device)


def _round_to(m: Make, v: int) -> int:
    n = m._new(m.spans[v], F32)
    m.body.append(Let(n, "round", (v,), F32, m.spans[v], (("dtype", DType.bf16),)))
    return n


def _mean(m: Make, v: int, dims: tuple[int, ...], n: int) -> int:
    return m.let("div", m.reduce("sum", v, dims), m.const(float(n)))


@program
def l2norm(device: str, schedule: str) -> list[Make]:
    n, d = 16384, 4096
    m = Make("p0 r0", [n, d], schedule)
    at = P0 * d + axis(1)
    x = m.load(_randn(device, n, d, dtype=torch.float32), at)
    total = m.let("add", m.reduce("sum", m.let("mul", x, x), (1,)), m.const(1e-12))
    m.store(_empty(device, n, d, dtype=torch.float32), at, m.let("div", x, m.let("sqrt", total)))
    return [m]


def _rms(m: Make, x: int, w: int, dims: tuple[int, ...], d: int) -> int:
    total = m.let("add", _mean(m, m.let("mul", x, x), dims, d), m.const(1e-6))
    return m.let("mul", _round_to(m, m.let("mul", x, m.let("rsqrt", total))), w)


@program
def rmsnorm(device: str, schedule: str) -> list[Make]:
    n, d = 16384, 4096
    m = Make("p0 r0", [n, d], schedule)
    at = P0 * d + axis(1)
    x = m.load(_randn(device, n, d), at)
    m.store(_empty(device, n, d), at, _rms(m, x, m.load(_randn(device, d), axis(1)), (1,), d))
    return [m]


@program
def add_layernorm_dropout(device: str, schedule: str) -> list[Make]:
    n, d = 16384, 4096
    m = Make("p0 r0", [n, d], schedule)
    at = P0 * d + axis(1)
    y = m.let("add", m.load(_randn(device, n, d), at), m.load(_randn(device, n, d), at))
    c = m.let("sub", y, _mean(m, y, (1,), d))
    rstd = m.let("rsqrt", m.let("add", _mean(m, m.let("mul", c, c), (1,), d), m.const(1e-5)))
    y = m.let("mul", m.let("mul", c, rstd), m.load(_randn(device, d), axis(1)))
    y = m.let("add", y, m.load(_randn(device, d), axis(1)))
    seed = m.load(torch.zeros(1, dtype=torch.int64, device=device), const(0))
    k = m._new({0, 1}, F32)
    m.body.append(Let(k, "rand", (seed, seed), F32, (0, 1), (("draw", 0), ("dtype", F32), ("linear", at))))
    kept = m.let("gt", k, m.const(0.1), dtype=B1)
    y = m.let("where", kept, m.let("mul", y, m.const(1 / 0.9)), m.const(0.0))
    m.store(_empty(device, n, d), at, y)
    return [m]


@program
def swiglu_act(device: str, schedule: str) -> list[Make]:
    n = 16384 * 14336
    m = Make("p0", [n], schedule)
    a, b = m.load(_randn(device, n), P0), m.load(_randn(device, n), P0)
    m.store(_empty(device, n), P0, m.let("mul", m.let("mul", a, m.let("sigmoid", a)), b))
    return [m]


@program
def rmsnorm_fp8_quant(device: str, schedule: str) -> list[Make]:
    n, d = 16384, 4096
    m = Make("p0 r0", [n, d], schedule)
    at = P0 * d + axis(1)
    x = m.load(_randn(device, n, d), at)
    y = _round_to(m, _rms(m, x, m.load(_randn(device, d), axis(1)), (1,), d))
    top = m.let("maximum", m.reduce("max", m.let("abs", y), (1,)), m.const(1e-8))
    s = m.let("div", top, m.const(448.0))
    m.store(_empty(device, n, d, dtype=torch.float8_e4m3fn), at, m.let("div", y, s))
    m.store(_empty(device, n, dtype=torch.float32), P0, s)
    return [m]


@program
def rmsnorm_block_quant(device: str, schedule: str) -> list[Make]:
    n, d = 16384, 4096
    m = Make("p0 j0 j1", [n, 128, 32], schedule)
    at = P0 * d + axis(1) * 32 + axis(2)
    x = m.load(_randn(device, n, d), at)
    y = _round_to(m, _rms(m, x, m.load(_randn(device, d), axis(1) * 32 + axis(2)), (1, 2), d))
    top = m.let("maximum", m.reduce("max", m.let("abs", y), (2,)), m.const(1e-8))
    s = m.let("exp2", m.let("ceil", m.let("log2", m.let("div", top, m.const(448.0)))))
    m.store(_empty(device, n, d, dtype=torch.float8_e4m3fn), at, m.let("div", y, s))
    m.store(_empty(device, n, 128, dtype=torch.float32), P0 * 128 + axis(1), s)
    return [m]


@program
def qk_norm_rope(device: str, schedule: str) -> list[Make]:
    t, d = 8192, 128
    cos, sin = _randn(device, t, d), _randn(device, t, d)
    out = []
    for heads in (32, 8):
        m = Make("p0 p1 r0", [t, heads, d], schedule)
        p1, r = axis(1), axis(2)
        at = P0 * (heads * d) + p1 * d + r
        q, w = _randn(device, t, heads, d), _randn(device, d)
        y = _rms(m, m.load(q, at), m.load(w, r), (2,), d)
        rstd = next(s.out for s in m.body if isinstance(s, Let) and s.op == "rsqrt")

        def rotated(shift: int, guard: object, q=q, w=w, m=m, at=at, r=r, rstd=rstd) -> int:
            v = m.load(q, at + shift, guard=(guard,))
            return m.let("mul", _round_to(m, m.let("mul", v, rstd)), m.load(w, r + shift, guard=(guard,)))

        high, low = rotated(64, const(63) - r), rotated(-64, r - 64)
        turned = m.let("where", m.let("holds", dtype=B1, guard=(const(63) - r,)), m.let("neg", high), low)
        c, s = m.load(cos, P0 * d + r), m.load(sin, P0 * d + r)
        y = m.let("add", m.let("mul", y, c), m.let("mul", turned, s))
        m.store(_empty(device, t, heads, d), at, y)
        out.append(m.cut())
    return out


@program
def multi_reduce(device: str, schedule: str) -> list[Make]:
    n, d = 16384, 8192
    m = Make("p0 r0", [n, d], schedule)
    x = m.load(_randn(device, n, d), P0 * d + axis(1))
    mean = _mean(m, x, (1,), d)
    c = m.let("sub", x, mean)
    values = [mean, m.let("div", m.reduce("sum", m.let("mul", c, c), (1,)), m.const(float(d - 1)))]
    values += [m.reduce("max", x, (1,)), m.reduce("sum", m.let("abs", x), (1,))]
    values += [m.reduce("sum", m.let("mul", x, x), (1,)), m.reduce("min", x, (1,))]
    for v in values:
        m.store(_empty(device, n, dtype=torch.float32), P0, v)
    return [m]


@program
def groupnorm_silu(device: str, schedule: str) -> list[Make]:
    groups, d = 1024, 40960
    m = Make("p0 r0", [groups, d], schedule)
    r, x = axis(1), _randn(device, groups, d)
    again = m.buffer(x)
    assert again == 0

    def load() -> int:
        n = m._new({0, 1}, F32)
        m.body.append(Load(n, 0, P0 * d + r, F32, (0, 1)))
        return n

    with m.sweep(1):
        total = m.reduce("sum", load(), (1,))
    mean = m.let("div", total, m.const(float(d)))
    with m.sweep(1):
        c = m.let("sub", load(), mean)
        square = m.reduce("sum", m.let("mul", c, c), (1,))
    rstd = m.let("rsqrt", m.let("add", m.let("div", square, m.const(float(d))), m.const(1e-5)))
    with m.sweep(1):
        channel = (P0 - floordiv(P0, 32) * 32) * 10 + floordiv(r, 4096)
        y = m.let("mul", m.let("mul", m.let("sub", load(), mean), rstd), m.load(_randn(device, 320), channel))
        y = m.let("add", y, m.load(_randn(device, 320), channel))
        m.store(_empty(device, groups, d), P0 * d + r, m.let("mul", y, m.let("sigmoid", y)))
    return [m]


def _softmax_passes(m: Make, d: int) -> tuple[Callable[[], int], int, int]:
    def load() -> int:
        n = m._new({0, 1}, F32)
        m.body.append(Load(n, 0, P0 * d + axis(1), F32, (0, 1)))
        return n

    with m.sweep(1):
        top = m.reduce("max", load(), (1,))
    with m.sweep(1):
        total = m.reduce("sum", m.let("exp", m.let("sub", load(), top)), (1,))
    return load, top, total


@program
def softmax_wide(device: str, schedule: str) -> list[Make]:
    n, d = 2048, 131072
    m = Make("p0 r0", [n, d], schedule)
    m.buffer(_randn(device, n, d))
    load, top, total = _softmax_passes(m, d)
    with m.sweep(1):
        e = m.let("exp", m.let("sub", load(), top))
        m.store(_empty(device, n, d), P0 * d + axis(1), m.let("div", e, total))
    return [m]


@program
def cross_entropy(device: str, schedule: str) -> list[Make]:
    n, d = 8192, 128256
    m = Make("p0 r0", [n, d], schedule)
    m.buffer(_randn(device, n, d))
    _, top, total = _softmax_passes(m, d)
    target = torch.zeros(n, dtype=torch.int64, device=device)
    if device != "meta":
        target.random_(0, d)
    t = m.load(target, P0)
    x = m.load(m.tensors[0], P0 * d + value(t))
    lse = m.let("add", m.let("log", total), top)
    m.store(_empty(device, n, dtype=torch.float32), P0, lse)
    m.store(_empty(device, n, dtype=torch.float32), P0, m.let("sub", lse, x))
    return [m]


@program
def horizontal_small(device: str, schedule: str) -> list[Make]:
    out = []
    for i in range(64):
        n = 65536 + 256 * i
        m = Make("p0", [n], schedule)
        x, y = m.load(_randn(device, n), P0), m.load(_randn(device, n), P0)
        m.store(_empty(device, n), P0, m.let("add", m.let("mul", m.let("tanh", x), y), x))
        out.append(m)
    return out
