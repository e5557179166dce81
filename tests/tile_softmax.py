"""Hand-built programs of a softmax between two products."""

from __future__ import annotations

from collections.abc import Callable

from cpp_run import Prog

from plait.ir import index as ix
from plait.ir.dtype import DType

A = ix.axis
B1 = DType.b1
INF = float("inf")
Guard = Callable[[ix.Expr, ix.Expr], tuple[ix.Expr, ...]]


def softmax_step(p: Prog, t: int, dim: int) -> tuple[int, int, int, int]:
    """(maximum, exponentials, their sum, the correction of what was added up before) of an online softmax."""
    low, zero = p.const(-INF), p.const(0.0)
    top = p.reduce("max", t, [dim])
    now, before = p.let("running", top), p.let("before", top)
    base = p.let("where", p.let("eq", now, low, result=B1), zero, now)
    scale = p.let("exp", p.let("sub", before, base))
    e = p.let("exp", p.let("sub", t, base))
    return top, e, p.reduce("sum", e, [dim], scale=scale), scale


def attention_program(
    name: str, sizes: tuple[int, int, int, int], dtype: DType, guard: Guard | None, tile: tuple[int, int]
) -> Prog:
    """Of heads, rows, keys and points of each, in tiles of rows x keys."""
    h, m, n, d = sizes
    p = Prog(name, [("p0", h), ("p1", m), ("p2", d), ("r0", n), ("r1", d)], vector="p2")
    p.tile = (("p1", tile[0]), ("p2", 0), ("r0", tile[1]), ("r1", 0))
    kind = dtype.compute
    q, k, v = (p.buf(b, dtype, h * rows * d) for b, rows in (("q", m), ("k", n), ("v", n)))
    o = p.buf("o", dtype, h * m * d, "out")
    with p.sweep(3):
        with p.sweep(4):
            s = p.dot(p.load(q, (A(0) * m + A(1)) * d + A(4)), p.load(k, (A(0) * n + A(3)) * d + A(4)), [4], dtype)
        t = p.let("mul", s, p.const(d**-0.5, kind))
        if guard:
            t = p.let("where", p.let("holds", result=B1, guard=guard(A(1), A(3))), t, p.const(-INF, kind))
        top = p.reduce("max", t, [3])
        now, before = p.let("running", top), p.let("before", top)
        empty = p.let("eq", now, p.const(-INF, kind), result=B1)
        base = p.let("where", empty, p.const(0.0, kind), now)
        scale = p.let("exp", p.let("sub", before, base))
        e = p.let("exp", p.let("sub", t, base))
        total = p.reduce("sum", e, [3], scale=scale)
        acc = p.dot(e, p.load(v, (A(0) * n + A(3)) * d + A(2)), [3], dtype, scale=scale)
    p.store(o, (A(0) * m + A(1)) * d + A(2), p.let("div", acc, total))
    return p
