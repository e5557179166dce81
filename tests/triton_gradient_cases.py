"""Gradients of products, written by hand, for the Triton emitter: a tensor that is read from two sides. See triton_dot_cases."""

from __future__ import annotations

from collections.abc import Callable

import torch
from dot_make import DotCase, MakeDot, add, causal, empty, since
from tile_make import B1, TORCH, randn

from plait.ir.index import Expr, axis, const

BF16, F16 = torch.bfloat16, torch.float16
INF = float("inf")
GRADIENT = "form=swept tile=p0:1,p1:16,p2:all,r0:16,r1:all warps=4 stages=2 vector=p2"


def gradient(
    m: int,
    n: int,
    d: int,
    dtype: torch.dtype,
    of_keys: bool,
    guards: tuple[Callable[[Expr, Expr], Expr], ...] = (),
    schedule: str = GRADIENT,
    heads: int = 2,
    divided: bool = False,
) -> DotCase:
    """sum of p(i, r) * b(r, d), p = exp(scores - a saved statistic of their row): b is read as (r, d) and as (r, d') for the
    scores. Rows are queries and r keys, or the other way round."""
    q, k = randn(heads, m, d, dtype=dtype), randn(heads, n, d, dtype=dtype)
    keep = torch.tensor([[all(g(const(i), const(j)).const >= 0 for g in guards) for j in range(n)] for i in range(m)])
    scores = (q.double() @ k.double().transpose(1, 2) * d**-0.5).masked_fill(~keep, -INF)
    row = torch.logsumexp(scores, -1).float()
    own, other, sizes = (k, q, (n, m)) if of_keys else (q, k, (m, n))
    mk = MakeDot("p0 p1 p2 r0 r1", [heads, sizes[0], d, sizes[1], d], schedule)
    h, i, j, r, s = (axis(t) for t in range(5))
    query, key = (r, i) if of_keys else (i, r)
    wide = TORCH[dtype].compute
    with mk.sweep(3):
        with mk.sweep(4):
            a = mk.load(own, (h * sizes[0] + i) * d + s)
            b = mk.load(other, (h * sizes[1] + r) * d + s)
            score = mk.dot(a, b, (4,), dtype)
        t = mk.let("div", score, mk.const(d**0.5, wide)) if divided else mk.let("mul", score, mk.const(d**-0.5, wide))
        if guards:
            holds = mk.let("holds", dtype=B1, guard=tuple(g(query, key) for g in guards))
            t = mk.let("where", holds, t, mk.const(-INF, wide), dtype=wide)
        p = mk.exp_of_difference(t, mk.load(row, h * m + query))
        out = mk.dot(p, mk.load_again(other, (h * sizes[1] + r) * d + j), (3,), dtype)
    mk.store(empty(heads, sizes[0], d, dtype=dtype), (h * sizes[0] + i) * d + j, out)
    p64 = torch.exp(scores - row.double()[..., None])
    return DotCase(mk, [(p64.transpose(1, 2) if of_keys else p64) @ other.double()])


add("gradient", gradient, 64, 64, 16, BF16, False)
add("gradient_f32", gradient, 64, 64, 16, torch.float32, False)
add("gradient_causal", gradient, 64, 64, 16, BF16, False, (causal(0),))
add("gradient_causal_divided", gradient, 64, 64, 16, BF16, False, (causal(0),), divided=True)
add("gradient_causal_odd", gradient, 70, 53, 24, BF16, False, (causal(0),))
add("gradient_of_keys", gradient, 64, 64, 16, BF16, True, (causal(0),))
add("gradient_of_keys_odd", gradient, 53, 70, 24, F16, True, (causal(17),))
add(
    "gradient_of_keys_turned",
    gradient,
    64,
    64,
    16,
    BF16,
    True,
    (causal(0),),
    GRADIENT.replace("vector=p2", "vector=r0"),
)
add("gradient_window", gradient, 150, 150, 16, BF16, False, (causal(0), since(70)))
add("gradient_window_of_keys", gradient, 150, 150, 16, BF16, True, (causal(0), since(70)))
add("gradient_window_narrow", gradient, 100, 100, 16, BF16, True, (causal(0), since(20)))
