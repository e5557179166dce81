"""Hand-built TilePrograms with tensors and torch's answer: what the Triton emitter's tests run and compile.

As a program (TRITON_INTERPRET=1) it runs every case and prints one JSON line a case: {"case": name, "error": text or ""}.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

import torch
import triton_operator_cases  # noqa: F401  (registers its cases)
from tile_make import B1, CASES, F32, I64, Case, Make, case, randn

from plait.emit.triton import emit_triton
from plait.ir.index import axis, const, floordiv, mod, sym, value
from plait.tile.program import Load

R, P0, P1 = axis(1), axis(0), axis(1)


@case
def pointwise_strided() -> Case:
    x, y = randn(13, 20), randn(20, 13).t()
    m = Make("p0 p1", [13, 20], "form=flat tile=p0:4,p1:8 vector=p1")
    a = m.load(x, P0 * 20 + P1)
    b = m.load(y.t().contiguous(), P1 * 13 + P0)
    m.store(torch.zeros(13, 20), P0 * 20 + P1, m.let("div", m.let("add", a, b), m.let("exp", a)))
    return Case(m, [(x + y) / x.exp()])


@case
def pointwise_symbolic() -> Case:
    n, k = sym("s0"), sym("s1")
    x, w = randn(7, 24, dtype=torch.bfloat16), randn(24)
    m = Make("p0 p1", [n, k], "form=flat tile=p0:2,p1:16 vector=p1", ("s0", "s1"))
    a = m.load(x, P0 * k + P1, elems=n * k)
    m.store(torch.zeros(7, 24), P0 * k + P1, m.let("mul", a, m.load(w, P1, elems=k)), elems=n * k)
    return Case(m, [x.float() * w], {"s0": 7, "s1": 24})


def _rmsnorm(m: Make, x: torch.Tensor, w: torch.Tensor) -> int:
    d = x.shape[1]
    a = m.load(x, P0 * d + R)
    total = m.reduce("sum", m.let("mul", a, a), (1,))
    scale = m.let("rsqrt", m.let("add", m.let("div", total, m.const(float(d))), m.const(1e-6)))
    return m.let("mul", m.let("mul", a, scale), m.load(w, R))


def _rms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x.float()
    return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * w.float()


def rmsnorm_make(n: int, d: int, schedule: str, dtype: torch.dtype) -> Make:
    """Also compiled at full size; then the tensors are on the meta device."""
    device = "cpu" if n * d < 1 << 20 else "meta"
    x = randn(n, d, dtype=dtype) if device == "cpu" else torch.empty(n, d, dtype=dtype, device=device)
    w = randn(d, dtype=dtype)
    m = Make("p0 r0", [n, d], schedule)
    m.store(torch.empty(n, d, dtype=dtype, device=device), P0 * d + R, _rmsnorm(m, x, w))
    return m


def rmsnorm_swept_make(n: int, d: int, schedule: str, dtype: torch.dtype) -> Make:
    """The same in two passes over the row."""
    x, w = torch.empty(n, d, dtype=dtype, device="meta"), torch.empty(d, dtype=dtype, device="meta")
    m = Make("p0 r0", [n, d], schedule)
    with m.sweep(1):
        a = m.load(x, P0 * d + R)
        total = m.reduce("sum", m.let("mul", a, a), (1,))
    scale = m.let("rsqrt", m.let("add", m.let("div", total, m.const(float(d))), m.const(1e-6)))
    with m.sweep(1):
        y = m.let("mul", m.let("mul", m.load(x, P0 * d + R), scale), m.load(w, R))
        m.store(torch.empty(n, d, dtype=dtype, device="meta"), P0 * d + R, y)
    return m


@case
def rmsnorm_flat() -> Case:
    m = rmsnorm_make(6, 40, "form=flat tile=p0:1,r0:all vector=r0", torch.bfloat16)
    return Case(m, [_rms(m.tensors[0], m.tensors[1]).bfloat16()], rtol=2**-8)


@case
def rmsnorm_rows() -> Case:
    m = rmsnorm_make(6, 40, "form=flat tile=p0:4,r0:all vector=r0", torch.float32)
    return Case(m, [_rms(m.tensors[0], m.tensors[1])])


@case
def softmax_flat() -> Case:
    x = randn(5, 33)
    x[2] = float("-inf")
    m = Make("p0 r0", [5, 33], "form=flat tile=p0:2,r0:all vector=r0")
    a = m.load(x, P0 * 33 + R)
    e = m.let("exp", m.let("sub", a, m.reduce("max", a, (1,))))
    m.store(torch.zeros(5, 33), P0 * 33 + R, m.let("div", e, m.reduce("sum", e, (1,))))
    return Case(m, [torch.softmax(x, -1)])


def _softmax_swept(x: torch.Tensor, schedule: str) -> Case:
    m = Make("p0 r0", [5, 50], schedule)
    bx = m.buffer(x)

    def load() -> int:
        n = m._new({0, 1}, F32)
        m.body.append(Load(n, bx, P0 * 50 + R, F32, (0, 1)))
        return n

    with m.sweep(1):
        top = m.reduce("max", load(), (1,))
    with m.sweep(1):
        total = m.reduce("sum", m.let("exp", m.let("sub", load(), top)), (1,))
    with m.sweep(1):
        e = m.let("exp", m.let("sub", load(), top))
        m.store(torch.zeros(5, 50, dtype=x.dtype), P0 * 50 + R, m.let("div", e, total))
    m.store(torch.zeros(5), P0, total)
    y = x.float()
    sums = (y - y.amax(-1, keepdim=True)).exp().sum(-1)
    return Case(m, [torch.softmax(y, -1).to(x.dtype), sums], rtol=2**-8 if x.dtype is torch.bfloat16 else 2e-6)


@case
def softmax_swept() -> Case:
    return _softmax_swept(randn(5, 50) * 10, "form=swept tile=p0:1,r0:16 warps=1 vector=r0")


@case
def softmax_swept_lanes() -> Case:
    x = randn(5, 50) * 10
    x[1, :40], x[2, 3], x[3] = float("-inf"), float("nan"), float("-inf")
    x[4, 7] = float("inf")
    return _softmax_swept(x.bfloat16(), "form=swept tile=p0:4,r0:64 warps=1 vector=r0")


@case
def softmax_swept_in_lanes() -> Case:
    x = randn(5, 50) * 10
    x[1, :40], x[2, 3], x[3] = float("-inf"), float("nan"), float("-inf")
    return _softmax_swept(x, "form=swept tile=p0:4,r0:32 warps=1 vector=r0")


@case
def layernorm_flat() -> Case:
    x, w, b = randn(4, 40), randn(40), randn(41)[:40].clone()
    m = Make("p0 r0", [4, 40], "form=flat tile=p0:1,r0:all vector=r0")
    a = m.load(x, P0 * 40 + R)
    n = m.const(40.0)
    centred = m.let("sub", a, m.let("div", m.reduce("sum", a, (1,)), n))
    var = m.let("div", m.reduce("sum", m.let("mul", centred, centred), (1,)), n)
    y = m.let("div", centred, m.let("sqrt", m.let("add", var, m.const(1e-5))))
    y = m.let("add", m.let("mul", y, m.load(w, R)), m.load(b, R))
    m.store(torch.zeros(4, 40), P0 * 40 + R, y)
    return Case(m, [torch.nn.functional.layer_norm(x, (40,), w, b)])


@case
def column_sum() -> Case:
    x = randn(37, 20)
    m = Make("p0 r0", [20, 37], "form=swept tile=p0:8,r0:4 vector=p0")
    with m.sweep(1):
        a = m.load(x, R * 20 + P0)
        total, least = m.reduce("sum", a, (1,)), m.reduce("min", a, (1,))
    m.store(torch.zeros(20), P0, total)
    m.store(torch.zeros(20), P0, least)
    return Case(m, [x.sum(0), x.amin(0)], atol=1e-5)


@case
def block_quant() -> Case:
    x = randn(3, 64)
    m = Make("p0 j0 j1", [3, 4, 16], "form=flat tile=p0:2,j0:all,j1:all vector=j1")
    at = P0 * 64 + axis(1) * 16 + axis(2)
    a = m.load(x, at)
    scale = m.let("div", m.reduce("max", m.let("abs", a), (2,)), m.const(448.0))
    m.store(torch.zeros(3, 64, dtype=torch.float8_e4m3fn), at, m.let("div", a, scale))
    m.store(torch.zeros(3, 4), P0 * 4 + axis(1), scale)
    m.store(torch.zeros(3), P0, m.reduce("sum", a, (1, 2)))
    y = x.view(3, 4, 16)
    s = y.abs().amax(-1, keepdim=True) / 448.0
    return Case(m, [(y / s).view(3, 64).to(torch.float8_e4m3fn), s[..., 0], x.sum(-1)], atol=1e-5)


@case
def arg_extremes() -> Case:
    x = torch.tensor([[1.0, 3, 3, 0, 2], [float("-inf")] * 5, [0, float("nan"), 9, float("nan"), 1], [5, 5, 5, 5, 5]])
    m = Make("p0 r0", [4, 5], "form=flat tile=p0:2,r0:all vector=r0")
    a = m.load(x, P0 * 5 + R)
    m.store(torch.zeros(4, dtype=torch.int64), P0, m.reduce("argmax", a, (1,), R))
    m.store(torch.zeros(4, dtype=torch.int64), P0, m.reduce("argmin", a, (1,), R))
    m.store(torch.zeros(4), P0, m.reduce("max", a, (1,)))
    return Case(m, [x.argmax(-1), x.argmin(-1), x.amax(-1)])


@case
def arg_extremes_swept() -> Case:
    x = torch.randint(0, 4, (3, 21), generator=torch.Generator().manual_seed(1))
    m = Make("p0 r0", [3, 21], "form=swept tile=p0:1,r0:8 vector=r0")
    with m.sweep(1):
        a = m.load(x, P0 * 21 + R)
        big, small = m.reduce("argmax", a, (1,), R), m.reduce("argmin", a, (1,), R)
    m.store(torch.zeros(3, dtype=torch.int64), P0, big)
    m.store(torch.zeros(3, dtype=torch.int64), P0, small)
    return Case(m, [x.argmax(-1), x.argmin(-1)])


@case
def any_all_prod() -> Case:
    x = randn(4, 11)
    m = Make("p0 r0", [4, 11], "form=flat tile=p0:4,r0:all vector=r0")
    a = m.load(x, P0 * 11 + R)
    big = m.let("gt", a, m.const(-0.5), dtype=B1)
    m.store(torch.zeros(4, dtype=torch.bool), P0, m.reduce("all", big, (1,)))
    m.store(torch.zeros(4, dtype=torch.bool), P0, m.reduce("any", m.let("lt", a, m.const(-1.5), dtype=B1), (1,)))
    m.store(torch.zeros(4), P0, m.reduce("prod", a, (1,)))
    m.store(torch.zeros(4, dtype=torch.int64), P0, m.reduce("sum", m.let("cast", big, dtype=I64), (1,)))
    return Case(m, [(x > -0.5).all(-1), (x < -1.5).any(-1), x.prod(-1), (x > -0.5).sum(-1)])


@case
def scans() -> Case:
    x = randn(3, 12)
    x[1, 4] = float("nan")
    m = Make("p0 r0", [3, 12], "form=flat tile=p0:1,r0:all vector=r0")
    a = m.load(x, P0 * 12 + R)
    names = ["cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"]
    for n in names:
        m.store(torch.zeros(3, 12), P0 * 12 + R, m.scan(n, a, 1))
    out = [getattr(torch, n)(x, -1) for n in names]
    return Case(m, [o if isinstance(o, torch.Tensor) else o[0] for o in out])


@case
def scans_swept() -> Case:
    x = randn(2, 21)
    m = Make("p0 r0", [2, 21], "form=swept tile=p0:2,r0:8 vector=r0")
    with m.sweep(1):
        a = m.load(x, P0 * 21 + R)
        for n in ("cumsum", "cummax", "logcumsumexp"):
            m.store(torch.zeros(2, 21), P0 * 21 + R, m.scan(n, a, 1))
    return Case(m, [x.cumsum(-1), x.cummax(-1)[0], x.logcumsumexp(-1)])


@case
def rotated_half() -> Case:
    x = randn(5, 16)
    m = Make("p0 p1", [5, 16], "form=flat tile=p0:4,p1:16 vector=p1")
    high = m.load(x, P0 * 16 + P1 + 8, guard=(const(7) - P1,))
    low = m.load(x, P0 * 16 + P1 - 8, guard=(P1 - 8,))
    is_low = m.let("holds", dtype=B1, guard=(const(7) - P1,))
    m.store(torch.zeros(5, 16), P0 * 16 + P1, m.let("where", is_low, m.let("neg", high), low))
    a, b = x.chunk(2, -1)
    return Case(m, [torch.cat((-b, a), -1)])


def _norm_and_rotate() -> Case:
    x, w, c = randn(5, 32), randn(32), randn(5, 32)
    m = Make("p0 r0", [5, 32], "form=flat tile=p0:4,r0:all vector=r0")
    at = P0 * 32 + R
    a = m.load(x, at)
    scale = m.let("rsqrt", m.reduce("sum", m.let("mul", a, a), (1,)))
    top, big = m.reduce("max", a, (1,)), m.reduce("any", m.let("gt", a, m.const(2.0), dtype=B1), (1,))

    def normal(shift: int, guard: tuple[Any, ...] = ()) -> int:
        v = m.let("mul", m.load(x, at + shift, guard=guard), scale)
        return m.let("mul", v, m.load(w, R + shift, guard=guard))

    y, high, low = normal(0), normal(16, (const(15) - R,)), normal(-16, (R - 16,))
    turned = m.let("where", m.let("holds", dtype=B1, guard=(const(15) - R,)), m.let("neg", high), low)
    m.store(torch.zeros(5, 32), at, m.let("add", y, m.let("mul", turned, m.load(c, at))))
    m.store(torch.zeros(5), P0, top)
    m.store(torch.zeros(5, dtype=torch.bool), P0, big)
    z = x / x.pow(2).sum(-1, keepdim=True).sqrt() * w
    a, b = z.chunk(2, -1)
    return Case(m, [z + torch.cat((-b, a), -1) * c, x.amax(-1), (x > 2).any(-1)])


@case
def norm_and_rotate() -> Case:
    return _norm_and_rotate()


@case
def norm_and_rotate_in_pieces() -> Case:
    c = _norm_and_rotate()
    c.make.cut()
    assert c.make.dims[1].extent is const(16) and not any(isinstance(s, Load) and s.guard for s in c.make.body)
    return c


@case
def gather_checked() -> Case:
    table, ids = randn(10, 8), torch.tensor([3, 0, 9, 3, 12, -1, 5])
    m = Make("p0 p1", [7, 8], "form=flat tile=p0:2,p1:8 vector=p1")
    k = m.load(ids, P0)
    m.check(value(k), const(10), "row out of range")
    m.store(torch.zeros(7, 8), P0 * 8 + P1, m.load(table, value(k) * 8 + P1))
    expected = torch.where(((ids >= 0) & (ids < 10))[:, None], table[ids.clamp(0, 9)], 0.0)
    return Case(m, [expected], fault=1)


@case
def divisions_in_addresses() -> Case:
    x = randn(6, 10)
    m = Make("p0", [60], "form=flat tile=p0:16 vector=p0")
    a = m.load(x, mod(P0, 6) * 10 + floordiv(P0, 6))
    b = m.load(x, floordiv(P0 - 7, 2) + 4)
    m.store(torch.zeros(60), P0, m.let("add", a, b))
    return Case(m, [x.t().reshape(-1) + x.reshape(-1)[torch.div(torch.arange(60) - 7, 2, rounding_mode="floor") + 4]])


@case
@case
def two_row_dims_swept() -> Case:
    x = randn(3, 6, 20)
    m = Make("p0 j0 j1", [3, 6, 20], "form=swept tile=p0:1,j0:1,j1:8 vector=j1")
    with m.sweep(1), m.sweep(2):
        a = m.load(x, P0 * 120 + axis(1) * 20 + axis(2))
        total = m.reduce("sum", a, (1, 2))
        best = m.reduce("argmax", a, (1, 2), axis(1) * 20 + axis(2))
    m.store(torch.zeros(3), P0, total)
    m.store(torch.zeros(3, dtype=torch.int64), P0, best)
    return Case(m, [x.sum((1, 2)), x.view(3, -1).argmax(-1)], atol=1e-5)


@case
def inner_sweep_of_outer_sweep() -> Case:
    x = randn(2, 3, 10)
    m = Make("p0 j0 j1", [2, 3, 10], "form=swept tile=p0:1,j0:1,j1:4 vector=j1")
    with m.sweep(1):
        with m.sweep(2):
            total = m.reduce("sum", m.load(x, P0 * 30 + axis(1) * 10 + axis(2)), (2,))
        m.store(torch.zeros(2, 3), P0 * 3 + axis(1), total)
        top = m.reduce("max", total, (1,))
    m.store(torch.zeros(2), P0, top)
    return Case(m, [x.sum(-1), x.sum(-1).amax(-1)])


@case
def parts_side_by_side() -> Case:
    n, k = sym("s0"), sym("s1")
    makes, expected = [], []
    for size, extent in ((20, const(20)), (7, n), (33, k), (12, n + 5)):
        x, ids = randn(size), torch.arange(size).flip(0)
        m = Make("p0", [extent], "form=flat tile=p0:8 vector=p0", ("s0", "s1"))
        a = m.load(ids, P0)
        m.check(value(a), const(size if size != 12 else 10), "row out of range")
        m.store(torch.zeros(size), P0, m.let("tanh", m.load(x, value(a))))
        makes.append(m)
        expected.append(torch.where(torch.arange(size) > 1, x.flip(0).tanh(), 0) if size == 12 else x.flip(0).tanh())
    return Case(makes[0], expected, {"s0": 7, "s1": 33}, fault=4, more=makes[1:])


def _reduced_together(schedule: str) -> Case:
    x = randn(3, 5, 8)
    m = Make("p0 j0 j1", [3, 5, 8], schedule)
    outs = []

    def all_of() -> None:
        a = m.load(x, P0 * 40 + axis(1) * 8 + axis(2))
        large = m.let("gt", a, m.const(2.5), dtype=B1)
        outs.extend([m.reduce("sum", a, (1, 2)), m.reduce("max", a, (1, 2)), m.reduce("any", large, (1, 2))])
        outs.append(m.reduce("min", m.let("abs", a), (1, 2)))

    if schedule.startswith("form=swept"):
        with m.sweep(1), m.sweep(2):
            all_of()
    else:
        all_of()
    expected = [x.sum((1, 2)), x.amax((1, 2)), (x > 2.5).any(2).any(1), x.abs().amin((1, 2))]
    for v, y in zip(outs, expected, strict=True):
        m.store(torch.zeros(3, dtype=y.dtype), P0, v)
    return Case(m, expected)


@case
def reduced_together() -> Case:
    return _reduced_together("form=flat tile=p0:2,j0:all,j1:all vector=j1")


@case
def reduced_together_swept() -> Case:
    return _reduced_together("form=swept tile=p0:2,j0:2,j1:4 vector=j1")


@case
def empty_dims() -> Case:
    x = torch.full((1,), 7.0)
    m = Make("p0 r0", [3, 0], "form=flat tile=p0:1,r0:all vector=r0")
    a = m.load(x, R)
    m.store(torch.ones(3), P0, m.reduce("sum", a, (1,)))
    m.store(torch.ones(3), P0, m.reduce("prod", a, (1,)))
    return Case(m, [torch.zeros(3), torch.ones(3)])


def run(name: str) -> str:
    """Run one case in the interpreter; the text of what is wrong, or nothing."""
    from triton_interpreter import run_interpreted

    c = CASES[name]()
    makes = (c.make, *c.more)
    try:
        parts = [m.program(name) for m in makes]
        source = emit_triton(parts, "kernel")
        fault = run_interpreted(source, parts, [m.tensors for m in makes], c.sizes)
    except Exception:
        return traceback.format_exc()[-1500:]
    if fault != c.fault:
        return f"fault {fault}, wanted {c.fault}"
    outs = [t for m in makes for t, b in zip(m.tensors, m.buffers, strict=True) if b.role == "out"]
    for i, (got, want) in enumerate(zip(outs, c.expected, strict=True)):
        g, w = got.double(), want.double()
        ok = torch.allclose(g, w, rtol=c.rtol, atol=c.atol, equal_nan=True) and got.dtype is want.dtype
        # the sign of zero counts as well
        if not ok or not torch.equal(torch.signbit(g[w == 0]), torch.signbit(w[w == 0])):
            bad = ~torch.isclose(g, w, rtol=c.rtol, atol=c.atol, equal_nan=True)
            return f"output {i}: got {got[bad]}\nwanted {want[bad]}\n{got.dtype} {want.dtype}\n{source.text}"
    return ""


if __name__ == "__main__":
    for each in sys.argv[1:] or CASES:
        print(json.dumps({"case": each, "error": run(each)}), flush=True)
