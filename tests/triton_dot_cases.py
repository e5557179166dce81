"""Programs with products of matrices, written by hand, for the Triton emitter; each with its meaning in float64.

As a program (TRITON_INTERPRET=1) it runs every case in Triton's interpreter and prints one JSON line each:
{"case": name, "error": text or ""}. The evaluator of TilePrograms is the other side of the comparison.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
import triton_gradient_cases  # noqa: F401  # its cases are run, too
from dot_make import CASES, DotCase, MakeDot, add, causal, empty, since
from tile_make import B1, F32, I64, TORCH, randn

from plait.emit.triton import emit_triton
from plait.ir.dtype import DType
from plait.ir.index import Expr, axis, const, sym, value

BF16, F16 = torch.bfloat16, torch.float16
INF = float("inf")
TILES = "form=swept tile=p0:32,p1:32,r0:16 warps=4 stages=3 vector=p1"


# -------------------------------------------------------------------- one product
def gemm_make(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    schedule: str = TILES,
    a_rows: bool = True,
    b_rows: bool = False,
    epilogue: bool = False,
    prologue: bool = False,
    data: tuple[torch.Tensor, ...] | None = None,
) -> tuple[MakeDot, tuple[torch.Tensor, ...]]:
    """m x k times k x n; `a_rows`: a is stored (m, k), else (k, m); `b_rows`: b is stored (k, n), else (n, k)."""
    a, b, bias = data or (randn(m, k, dtype=dtype), randn(n, k, dtype=dtype), randn(n, dtype=dtype))
    mk = MakeDot("p0 p1 r0", [m, n, k], schedule)
    i, j, r = axis(0), axis(1), axis(2)
    with mk.sweep(2):
        x = mk.load(a if a_rows else a.t().contiguous(), i * k + r if a_rows else r * m + i)
        if prologue:
            x = mk.let("sub", mk.let("exp", x), mk.const(0.5))
        w = mk.load(b.t().contiguous() if b_rows else b, r * n + j if b_rows else j * k + r)
        y = mk.dot(x, w, (2,), dtype)
    if epilogue:
        y = mk.let("add", y, mk.load(bias, j))
        y = mk.let("mul", y, mk.let("sigmoid", y))
    mk.store(empty(m, n, dtype=dtype), i * n + j, y)
    return mk, (a, b, bias)


def gemm(m: int, n: int, k: int, dtype: torch.dtype, schedule: str = TILES, **options: Any) -> DotCase:
    mk, (a, b, bias) = gemm_make(m, n, k, dtype, schedule, **options)
    x = (a.double().exp() - 0.5).to(dtype) if options.get("prologue") else a
    y = x.double() @ b.double().t()
    if options.get("epilogue"):
        y = F.silu(y + bias.double())
    return DotCase(mk, [y])


for _dtype in (BF16, F16, torch.float32, torch.float64):
    add(f"gemm_{_dtype}".replace("torch.", ""), gemm, 64, 32, 48, _dtype)
    add(f"gemm_odd_{_dtype}".replace("torch.", ""), gemm, 37, 41, 53, _dtype)
for _a in (False, True):
    for _b in (False, True):
        add(f"gemm_stored_{int(_a)}{int(_b)}", gemm, 37, 41, 53, BF16, a_rows=_a, b_rows=_b)
WALKING = TILES + " blocks=3"
add("gemm_walked", gemm, 128, 96, 64, BF16, WALKING, epilogue=True)
add("gemm_walked_every", gemm, 77, 88, 56, BF16, TILES + " blocks=all", epilogue=True)
add("gemm_walked_odd", gemm, 77, 88, 56, BF16, WALKING, epilogue=True)
add("gemm_walked_stored_10", gemm, 77, 88, 56, BF16, WALKING, b_rows=True)
add("gemm_walked_stored_01", gemm, 80, 88, 56, F16, WALKING, a_rows=False)
add("gemm_walked_prologue", gemm, 77, 88, 56, BF16, WALKING, prologue=True)
add("gemm_walked_unaligned_rows", gemm, 77, 41, 53, BF16, WALKING)
add("gemm_columns_first", gemm, 37, 41, 53, BF16, TILES.replace("vector=p1", "vector=p0"))
add("gemm_bands", gemm, 163, 51, 16, BF16, TILES.replace("p0:32,p1:32", "p0:16,p1:16"))
add("gemm_epilogue", gemm, 37, 41, 53, BF16, epilogue=True)
add("gemm_prologue", gemm, 37, 41, 53, BF16, prologue=True)
add("gemm_covered", gemm, 37, 41, 53, BF16, "form=swept tile=p0:16,p1:all,r0:all warps=4 stages=1 vector=p1")
add("gemm_covered_prologue", gemm, 37, 41, 53, BF16, "form=swept tile=p0:16,p1:16,r0:all vector=r0", prologue=True)
add("gemm_few_rows", gemm, 5, 41, 53, BF16, "form=swept tile=p0:all,p1:32,r0:16 warps=4 stages=2 vector=r0")
add("gemm_small_tiles", gemm, 9, 20, 23, BF16, "form=swept tile=p0:4,p1:8,r0:8 warps=4 stages=2 vector=r0")
add("gemm_small_tiles_f32", gemm, 9, 20, 23, torch.float32, "form=swept tile=p0:4,p1:8,r0:8 vector=r0")
add("decode", gemm, 1, 70, 150, BF16, "form=swept tile=p1:16,r0:64 warps=4 stages=2 vector=r0", epilogue=True)
add("decode_f32", gemm, 1, 70, 150, torch.float32, "form=swept tile=p1:16,r0:64 vector=r0", epilogue=True)
add("decode_prologue", gemm, 1, 70, 150, F16, "form=swept tile=p1:16,r0:64 vector=r0", prologue=True)
add("inner_few", gemm, 37, 41, 3, BF16, "form=swept tile=p0:16,p1:16,r0:all vector=r0", prologue=True)


def garbage() -> DotCase:
    """What stands beyond the extent of the inner dim in memory is NaN and infinite."""
    a, b = torch.full((40, 64), INF, dtype=BF16), torch.full((48, 64), float("nan"), dtype=BF16)
    a[:, :53], b[:, :53] = randn(40, 53, dtype=BF16), randn(48, 53, dtype=BF16)
    mk = MakeDot("p0 p1 r0", [37, 41, 53], TILES)
    i, j, r = axis(0), axis(1), axis(2)
    with mk.sweep(2):
        x, w = mk.load(a, i * 64 + r), mk.load(b, j * 64 + r)
        y = mk.dot(mk.let("exp", x), mk.let("reciprocal", w), (2,), BF16)  # 1/0 beyond
    mk.store(empty(37, 41, dtype=torch.float32), i * 41 + j, y)
    left = a[:37, :53].double().exp().to(BF16).double()
    return DotCase(mk, [left @ (1 / b[:41, :53].double()).to(BF16).double().t()])


add("garbage_beyond", garbage)


def gate_up(dtype: torch.dtype) -> DotCase:
    """Two products of one operand."""
    m, n, k = 37, 41, 53
    x, g, u = randn(m, k, dtype=dtype), randn(n, k, dtype=dtype), randn(n, k, dtype=dtype).neg().roll(1, 0)
    mk = MakeDot("p0 p1 r0", [m, n, k], TILES)
    i, j, r = axis(0), axis(1), axis(2)
    with mk.sweep(2):
        v = mk.load(x, i * k + r)
        a = mk.dot(v, mk.load(g, j * k + r), (2,), dtype)
        b = mk.dot(v, mk.load(u, j * k + r), (2,), dtype)
    y = mk.let("mul", mk.let("mul", a, mk.let("sigmoid", a)), b)
    mk.store(empty(m, n, dtype=dtype), i * n + j, y)
    return DotCase(mk, [F.silu(x.double() @ g.double().t()) * (x.double() @ u.double().t())])


add("gate_up", gate_up, BF16)
add("gate_up_f32", gate_up, torch.float32)


def norm_prologue() -> DotCase:
    """rmsnorm(x) @ w: the factor is normalised after a first pass over it."""
    m, n, k = 37, 41, 53
    x, w = randn(m, k, dtype=BF16), randn(n, k, dtype=BF16)
    mk = MakeDot("p0 p1 r0", [m, n, k], TILES)
    i, j, r = axis(0), axis(1), axis(2)
    with mk.sweep(2):
        v = mk.load(x, i * k + r)
        total = mk.reduce("sum", mk.let("mul", v, v), (2,))
    inv = mk.let("rsqrt", mk.let("add", mk.let("div", total, mk.const(float(k))), mk.const(1e-6)))
    with mk.sweep(2):
        v = mk.let("mul", mk.load(x, i * k + r), inv)
        y = mk.dot(v, mk.load(w, j * k + r), (2,), BF16)
    mk.store(empty(m, n, dtype=BF16), i * n + j, y)
    d = x.double()
    return DotCase(mk, [(d * torch.rsqrt(d.pow(2).mean(-1, keepdim=True) + 1e-6)).to(BF16).double() @ w.double().t()])


add("norm_prologue", norm_prologue)


def two_inner(schedule: str) -> DotCase:
    """sum over two dims, with two dims on the rows' side: out[a, b, n] = sum over c, e of x[a, c, b, e] w[n, c, e]."""
    a, b, n, c, e = 6, 5, 20, 3, 7
    x, w = randn(a, c, b, e, dtype=BF16), randn(n, c, e, dtype=BF16)
    mk = MakeDot("p0 p1 p2 r0 r1", [a, b, n, c, e], schedule)
    i, j, q, r, s = (axis(t) for t in range(5))
    with mk.sweep(3), mk.sweep(4):
        v = mk.load(x, ((i * c + r) * b + j) * e + s)
        y = mk.dot(v, mk.load(w, (q * c + r) * e + s), (3, 4), BF16)
    mk.store(empty(a, b, n, dtype=BF16), (i * b + j) * n + q, mk.let("mul", y, mk.load(randn(b, dtype=BF16), j)))
    return DotCase(mk, [torch.einsum("acbe,nce->abn", x.double(), w.double()) * randn(b, dtype=BF16).double()[:, None]])


add("two_inner_looped", two_inner, "form=swept tile=p0:4,p1:4,p2:16,r0:1,r1:all stages=2 vector=p2")
add("two_inner_covered", two_inner, "form=swept tile=p0:4,p1:4,p2:16,r0:all,r1:all vector=r1")
add("two_inner_mixed", two_inner, "form=swept tile=p0:4,p1:4,p2:16,r0:2,r1:all vector=p0")
add("two_inner_products", two_inner, "form=swept tile=p0:4,p1:2,p2:8,r0:2,r1:4 vector=r1")


def batched(schedule: str, n: int = 18, k: int = 21) -> DotCase:
    b, m = 3, 20
    x, w = randn(b, m, k, dtype=BF16), randn(b, k, n, dtype=BF16)
    mk = MakeDot("p0 p1 p2 r0", [b, m, n, k], schedule)
    z, i, j, r = (axis(t) for t in range(4))
    with mk.sweep(3):
        y = mk.dot(mk.load(x, (z * m + i) * k + r), mk.load(w, (z * k + r) * n + j), (3,), BF16)
    mk.store(empty(b, m, n, dtype=torch.float32), (z * m + i) * n + j, y)
    return DotCase(mk, [x.double() @ w.double()])


add("batched", batched, "form=swept tile=p1:16,p2:16,r0:16 stages=2 vector=p2")
add("batched_walked", batched, "form=swept tile=p1:16,p2:16,r0:16 stages=2 vector=p2 blocks=5", n=24, k=40)
add("batched_in_block", batched, "form=swept tile=p0:2,p1:8,p2:8,r0:16 vector=p2")


def summed_over_a_batch(schedule: str) -> DotCase:
    """The products of a batch are added up, each rounded or not as it comes: a stream that both factors vary over."""
    b, m, n, k = 3, 20, 18, 21
    x, w = randn(b, m, k, dtype=BF16), randn(b, k, n, dtype=BF16)
    mk = MakeDot("p0 p1 r0 r1", [m, n, b, k], schedule)
    i, j, z, r = (axis(t) for t in range(4))
    with mk.sweep(2):
        with mk.sweep(3):
            y = mk.dot(mk.load(x, (z * m + i) * k + r), mk.load(w, (z * k + r) * n + j), (3,), BF16)
        total = mk.reduce("sum", y, (2,))
    mk.store(empty(m, n, dtype=torch.float32), i * n + j, total)
    return DotCase(mk, [(x.double() @ w.double()).sum(0)])


add("batch_summed", summed_over_a_batch, "form=swept tile=p0:16,p1:16,r0:1,r1:16 stages=2 vector=p1")
add("batch_summed_together", summed_over_a_batch, "form=swept tile=p0:16,p1:16,r0:2,r1:all stages=2 vector=p1")


def absent_dim() -> DotCase:
    """A dim that neither factor varies over multiplies by its extent; one that only one varies over is summed."""
    m, n, k = 20, 18, 5
    x, w = randn(m, 6), randn(n, 6)
    mk = MakeDot("p0 p1 r0 r1 r2", [m, n, k, 6, 7], "form=swept tile=p0:16,p1:16,r0:2,r1:all,r2:4 vector=r1")
    i, j = axis(0), axis(1)
    with mk.sweep(2), mk.sweep(3), mk.sweep(4):
        y = mk.dot(mk.load(x, i * 6 + axis(3)), mk.load(w, j * 6), (2, 3, 4), torch.float32)
    mk.store(empty(m, n, dtype=torch.float32), i * n + j, y)
    return DotCase(mk, [35 * x.double().sum(1)[:, None] * w.double()[:, 0]])


add("absent_dim", absent_dim)


# -------------------------------------------------------------------- attention
ATTENTION = "form=swept tile=p0:1,p1:16,p2:all,r0:16,r1:all warps=4 stages=2 vector=p2"


def attention_make(
    heads: int,
    m: int,
    n: int,
    d: int,
    e: int,
    dtype: torch.dtype,
    schedule: str = ATTENTION,
    guards: tuple[Callable[[Expr, Expr], Expr], ...] = (),
    bias: torch.Tensor | None = None,
    compared: str = "",
    data: tuple[torch.Tensor, ...] | None = None,
    shown: Callable[[MakeDot, Expr, Expr], Callable[[Expr], int]] | None = None,
) -> tuple[MakeDot, tuple[torch.Tensor, ...]]:
    """softmax(q k^T / sqrt(d)) v a head; `guards` of (query, key) hold where a key counts; `compared`: that is where
    the query's index compares so with the key's ("ge"), or does not ("not lt"); `shown` of (head, query), called before
    the loop, gives a function that makes a bool of the key in it."""
    q, k, v = data or (
        randn(heads, m, d, dtype=dtype),
        randn(heads, n, d, dtype=dtype),
        randn(heads, n, e, dtype=dtype) + 1,
    )
    mk = MakeDot("p0 p1 p2 r0 r1", [heads, m, e, n, d], schedule)
    h, i, j, r, s = (axis(t) for t in range(5))
    scale, nothing, wide = d**-0.5, -INF, TORCH[dtype].compute
    keep = shown(mk, h, i) if shown is not None else None
    with mk.sweep(3):
        with mk.sweep(4):
            score = mk.dot(mk.load(q, (h * m + i) * d + s), mk.load(k, (h * n + r) * d + s), (4,), dtype)
        t = mk.let("mul", score, mk.const(scale, wide))
        if bias is not None:
            t = mk.let("add", t, mk.load(bias, i * n + r))
        if guards:
            holds = mk.let("holds", dtype=B1, guard=tuple(g(i, r) for g in guards))
            t = mk.let("where", holds, t, mk.const(nothing, wide), dtype=wide)
        if keep is not None:
            t = mk.let("where", keep(r), t, mk.const(nothing, wide), dtype=wide)
        if compared:
            query, key = mk.let("index", dtype=I64, expr=i), mk.let("index", dtype=I64, expr=r)
            holds = mk.let(compared[-2:], query, key, dtype=B1)
            holds = mk.let("bit_not", holds) if compared.startswith("not") else holds
            t = mk.let("where", holds, t, mk.rounded(mk.const(nothing, wide), DType.bf16), dtype=wide)
        top = mk.reduce("max", t, (3,))
        now, old = mk.running(top), mk.before(top)
        base = mk.let("where", mk.let("eq", now, mk.const(nothing, wide), dtype=B1), mk.const(0.0, wide), now)
        none = mk.let("eq", old, mk.const(nothing, wide), dtype=B1)
        corr = mk.let("where", none, mk.const(0.0, wide), mk.exp_of_difference(old, base))
        p = mk.exp_of_difference(t, base)
        total = mk.carried("sum", p, (3,), corr)
        out = mk.dot(p, mk.load(v, (h * n + r) * e + j), (3,), dtype, corr)
    mk.store(empty(heads, m, e, dtype=dtype), (h * m + i) * e + j, mk.let("div", out, total))
    return mk, (q, k, v)


def attention(heads: int, m: int, n: int, d: int, e: int, dtype: torch.dtype, **options: Any) -> DotCase:
    mk, (q, k, v) = attention_make(heads, m, n, d, e, dtype, **options)
    t = q.double() @ k.double().transpose(1, 2) * d**-0.5
    if options.get("bias") is not None:
        t = t + options["bias"].double()
    keep = torch.ones(m, n, dtype=torch.bool)
    shown = {"": (), "ge": (causal(0),), "not lt": (causal(0),), "gt": (causal(-1),)}[options.get("compared", "")]
    for g in (*options.get("guards", ()), *shown):
        keep &= torch.tensor([[g(const(i), const(j)).const >= 0 for j in range(n)] for i in range(m)])
    t = t.masked_fill(~keep, -INF)
    return DotCase(mk, [torch.softmax(t, -1) @ v.double()])


add("attention", attention, 1, 48, 48, 32, 16, BF16)
add("attention_f32", attention, 1, 48, 48, 32, 16, torch.float32)
add("attention_odd", attention, 1, 37, 53, 24, 20, BF16)
add("attention_odd_f16", attention, 1, 37, 53, 24, 20, F16)
for _size in (1e3, 1e6, 1e14):  # exponents whose rounding is more than exp2 can give, and before
    _huge = tuple(t * _size for t in (randn(1, 48, 32, dtype=BF16), randn(1, 48, 32, dtype=BF16)))
    add(f"attention_of_{_size:.0e}", attention, 1, 48, 48, 32, 16, BF16, data=(*_huge, randn(1, 48, 16, dtype=BF16)))
add("attention_causal", attention, 1, 64, 64, 32, 16, BF16, guards=(causal(0),))
add("attention_causal_odd", attention, 1, 70, 53, 32, 16, BF16, guards=(causal(0),))
add("attention_causal_shifted", attention, 1, 37, 53, 32, 16, BF16, guards=(causal(16),))
add("attention_empty_rows", attention, 1, 70, 50, 16, 16, BF16, guards=(causal(-20),))
add("attention_window", attention, 1, 100, 100, 16, 16, BF16, guards=(causal(0), since(20)))
add("attention_window_ends", attention, 1, 100, 60, 16, 16, BF16, guards=(causal(0), since(20)))
add("attention_ahead", attention, 1, 80, 100, 16, 16, BF16, guards=(since(-10),))
add("attention_causal_f32", attention, 1, 37, 53, 24, 20, torch.float32, guards=(causal(16),))
add("attention_strided_causal", attention, 1, 40, 70, 16, 16, BF16, guards=(lambda i, r: i * 2 - r,))
add("attention_compared", attention, 1, 37, 53, 16, 16, BF16, compared="ge")
add("attention_compared_not", attention, 1, 37, 53, 16, 16, BF16, compared="not lt")
add("attention_compared_less", attention, 1, 37, 53, 16, 16, BF16, compared="gt")
add("attention_short", attention, 3, 5, 40, 16, 16, BF16, schedule=ATTENTION.replace("p1:16", "p1:all"))
add("attention_decode", attention, 3, 1, 70, 16, 16, BF16, schedule=ATTENTION.replace("p1:16", "p1:1"))
add("attention_split_head", attention, 1, 37, 53, 48, 16, BF16, schedule=ATTENTION.replace("r1:all", "r1:16"))
add(
    "attention_one_step",
    attention,
    1,
    37,
    53,
    16,
    16,
    BF16,
    schedule=ATTENTION.replace("r0:16", "r0:all"),
    guards=(causal(0),),
)
add("attention_transposed", attention, 1, 37, 53, 16, 16, BF16, schedule=ATTENTION.replace("vector=p2", "vector=p1"))
add(
    "attention_f64",
    attention,
    1,
    5,
    13,
    4,
    4,
    torch.float64,
    schedule=ATTENTION.replace("p1:16", "p1:4").replace("r0:16", "r0:4"),
)


def _holes(m: int, n: int) -> torch.Tensor:
    bias = randn(m, n)
    bias[3] = -INF
    bias[:, : n // 2] = -INF
    return bias


add("attention_holes", attention, 1, 37, 53, 16, 16, BF16, bias=_holes(37, 53))


# -------------------------------------------------------------------- a loop inside a loop
def linear_loss(dtype: torch.dtype, schedule: str) -> DotCase:
    """logsumexp(x w^T) a row, and the row's logit of its target."""
    m, n, k = 37, 53, 40
    x, w, target = randn(m, k, dtype=dtype), randn(n, k, dtype=dtype), torch.arange(m) * 7 % n
    mk = MakeDot("p0 r0 r1", [m, n, k], schedule)
    i, r, s = axis(0), axis(1), axis(2)
    at = mk.load(target, i)
    with mk.sweep(1):
        with mk.sweep(2):
            t = mk.dot(mk.load(x, i * k + s), mk.load(w, r * k + s), (2,), dtype)
        top = mk.reduce("max", t, (1,))
        now, old = mk.running(top), mk.before(top)
        base = mk.let("where", mk.let("eq", now, mk.const(-INF), dtype=B1), mk.const(0.0), now)
        total = mk.carried("sum", mk.exp_of_difference(t, base), (1,), mk.exp_of_difference(old, base))
        here = mk.let("holds", dtype=B1, guard=(r - value(at), value(at) - r))
        logit = mk.reduce("sum", mk.let("where", here, t, mk.const(0.0), dtype=F32), (1,))
    lse = mk.let("add", top, mk.let("log", total))
    mk.store(empty(m, dtype=torch.float32), i, lse)
    mk.store(empty(m, dtype=torch.float32), i, mk.let("sub", lse, logit))
    y = x.double() @ w.double().t()
    return DotCase(mk, [y.logsumexp(-1), y.logsumexp(-1) - y[torch.arange(m), target]])


LOSS = "form=swept tile=p0:32,r0:16,r1:16 warps=4 stages=2 vector=r1"
add("linear_loss", linear_loss, BF16, LOSS)
add("linear_loss_f32", linear_loss, torch.float32, LOSS)
add("linear_loss_covered", linear_loss, BF16, LOSS.replace("r1:16", "r1:all"))
add("linear_loss_small", linear_loss, BF16, LOSS.replace("p0:32", "p0:8").replace("r0:16,r1:16", "r0:8,r1:32"))


def two_layers() -> DotCase:
    """relu(x w^T) v^T: a product's result is a factor of the next; the middle dim is swept."""
    m, n, k, e = 37, 53, 24, 20
    x, w, v = randn(m, k, dtype=BF16), randn(n, k, dtype=BF16), randn(e, n, dtype=BF16)
    mk = MakeDot("p0 p1 r0 r1", [m, e, n, k], "form=swept tile=p0:16,p1:all,r0:16,r1:16 warps=4 stages=2 vector=r1")
    i, j, r, s = (axis(t) for t in range(4))
    with mk.sweep(2):
        with mk.sweep(3):
            h = mk.dot(mk.load(x, i * k + s), mk.load(w, r * k + s), (3,), BF16)
        # beyond the extent of r0 the factor is not zero: exp(0)
        g = mk.let("exp", mk.let("minimum", h, mk.const(0.0)))
        y = mk.dot(g, mk.load(v, j * n + r), (2,), BF16)
    mk.store(empty(m, e, dtype=BF16), i * e + j, y)
    h64 = (x.double() @ w.double().t()).clamp(max=0).exp().to(BF16).double()
    return DotCase(mk, [h64 @ v.double().t()])


add("two_layers", two_layers)


def row_softmax_epilogue() -> DotCase:
    """softmax of the rows of a product, whose columns a block has whole."""
    m, n, k = 37, 24, 40
    x, w = randn(m, k, dtype=BF16), randn(n, k, dtype=BF16)
    mk = MakeDot("p0 r0 r1", [m, n, k], "form=swept tile=p0:16,r0:all,r1:16 stages=2 vector=r0")
    i, r, s = axis(0), axis(1), axis(2)
    with mk.sweep(1):
        with mk.sweep(2):
            t = mk.dot(mk.load(x, i * k + s), mk.load(w, r * k + s), (2,), BF16)
        top = mk.reduce("max", t, (1,))
        total = mk.carried("sum", mk.exp_of_difference(t, mk.running(top)), (1,))
    mk.store(empty(m, dtype=torch.float32), i, mk.let("add", mk.let("log", total), top))
    return DotCase(mk, [(x.double() @ w.double().t()).logsumexp(-1)])


add("row_softmax_epilogue", row_softmax_epilogue)


def logsumexp(schedule: str) -> DotCase:
    """No product: a maximum and the sum that follows it."""
    m, n = 5, 150
    x = randn(m, n) * 30
    x[1], x[2, :100], x[3, 7] = -INF, -INF, INF
    mk = MakeDot("p0 r0", [m, n], schedule)
    with mk.sweep(1):
        t = mk.load(x, axis(0) * n + axis(1))
        top = mk.reduce("max", t, (1,))
        now, old = mk.running(top), mk.before(top)
        base = mk.let("where", mk.let("eq", now, mk.const(-INF), dtype=B1), mk.const(0.0), now)
        corr = mk.let(
            "where", mk.let("eq", old, mk.const(-INF), dtype=B1), mk.const(0.0), mk.exp_of_difference(old, base)
        )
        total = mk.carried("sum", mk.exp_of_difference(t, base), (1,), corr)
    mk.store(empty(m, dtype=torch.float32), axis(0), mk.let("add", mk.let("log", total), top))
    top64 = x.double().amax(1, keepdim=True)
    low = torch.where(top64 == -INF, 0.0, top64)
    return DotCase(mk, [(x.double() - low).exp().sum(1).log() + top64[:, 0]])


add("logsumexp", logsumexp, "form=swept tile=p0:2,r0:32 vector=r0")
add("logsumexp_lanes", logsumexp, "form=swept tile=p0:1,r0:128 warps=1 vector=r0")


def unknown_sizes(case: str, names: str) -> DotCase:
    """A case whose dims `names` have extents known at run time only."""
    c = CASES[case]()
    sizes: dict[str, int] = {}
    for d in c.make.dims:
        if d.name in names.split():
            assert d.extent.const is not None
            sizes[f"s_{d.name}"] = d.extent.const
    c.make.symbols = tuple(sizes)
    c.make.dims = tuple(replace(d, extent=sym(f"s_{d.name}")) if f"s_{d.name}" in sizes else d for d in c.make.dims)
    return replace(c, sizes=sizes)


add("unknown_gemm", unknown_sizes, "gemm_odd_bfloat16", "p0 r0")
add("unknown_gemm_bands", unknown_sizes, "gemm_bands", "p0 p1")
add("unknown_attention", unknown_sizes, "attention_causal_odd", "p1 r0")
add("unknown_attention_window", unknown_sizes, "attention_window_ends", "p1 r0")
add("unknown_attention_strided", unknown_sizes, "attention_strided_causal", "p1 r0")


def wrong(name: str) -> str:
    """What differs from the evaluator, or nothing."""
    from triton_interpreter import run_interpreted

    from plait.oracle.compare import compare
    from plait.oracle.eval_tile import run_tile
    from plait.tile.check import check_program

    try:
        c = CASES[name]()
        program = c.make.program(name)
        check_program(program)
        outs = [i for i, b in enumerate(program.buffers) if b.role == "out"]
        buffers = [t.clone().flatten() for t in c.make.tensors]
        run_tile(program, buffers, c.sizes, complete=True)
        source = emit_triton(program, "kernel")
        run_interpreted(source, [program], [c.make.tensors], c.sizes)
    except Exception:
        return traceback.format_exc()[-3000:]
    for i, reference in zip(outs, c.reference, strict=True):
        got = c.make.tensors[i]
        verdict = compare(got, buffers[i].reshape(got.shape), reference)
        if verdict.status != "PASS":
            return f"output {i}: {verdict}\n{got}\n{reference}\n{source.text}"
    return ""


if __name__ == "__main__":
    for each in sys.argv[1:] or CASES:
        print(json.dumps({"case": each, "error": wrong(each)}), flush=True)
