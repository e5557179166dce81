"""Contractions in C++: hand-built programs in one shared object, judged by the comparison policy against the evaluator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cpp_run import TORCH, Library, Prog, compile_programs
from tile_softmax import INF, Guard, attention_program, softmax_step
from torch import Tensor

from plait.emit.cpp import CppKernel, emit_cpp
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.oracle.compare import compare
from plait.oracle.eval_tile import run_tile
from plait.tile.check import check_program
from plait.tile.program import Check, Dot, Let, Load, Reduce, Stmt, Sweep, TileProgram

A = ix.axis
F32, F64, BF16, F16, B1 = DType.f32, DType.f64, DType.bf16, DType.f16, DType.b1


@dataclass
class Case:
    """A program, its input tensors (flat or not), the shape of its output, and its symbols' values."""

    prog: Prog
    inputs: list[Tensor]
    shape: tuple[int, ...]
    symbols: tuple[int, ...] = ()
    fault: int = 0


CASES: dict[str, Callable[[], Case]] = {}


def case(*args: Any) -> Callable[[Callable[..., Case]], Callable[..., Case]]:
    """Registers a case for each tuple of arguments."""

    def register(make: Callable[..., Case]) -> Callable[..., Case]:
        for n, a in enumerate(args or [()]):
            name = f"{make.__name__}{n}"
            CASES[name] = lambda name=name, a=a: make(name, *a)
        return make

    return register


def rand(*shape: int, dtype: DType = F32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(TORCH[dtype])


# ---------------------------------------------------------------- products
@case(
    (100, 130, 300, F32, "nt", (64, 64, 128)),
    (65, 31, 257, F32, "nn", (32, 64, 64)),
    (37, 45, 19, F32, "tn", (16, 16, 8)),
    (50, 70, 33, F32, "tt", (0, 0, 0)),
    (49, 75, 300, BF16, "nt", (48, 64, 0)),
    (13, 75, 300, BF16, "tn", (8, 64, 32)),
    (33, 41, 65, F16, "nn", (32, 32, 32)),
    (33, 41, 65, F64, "nt", (32, 32, 32)),
    (1, 300, 530, F32, "nt", (1, 128, 0)),
    (1, 300, 530, F32, "nn", (1, 128, 0)),
    (1, 300, 530, BF16, "nt", (1, 64, 64)),
    (2, 33, 130, F32, "nt", (2, 24, 50)),
    (3, 31, 61, F64, "nt", (3, 0, 0)),
    (4, 50, 300, F32, "nt", (4, 48, 0)),
    (5, 29, 77, F32, "nt", (5, 29, 40)),
    (6, 7, 5, F32, "nt", (6, 7, 5)),
    (7, 64, 129, F32, "nt", (7, 40, 0)),
    (8, 45, 300, F64, "nt", (8, 16, 128)),
    (3, 40, 1, F32, "nt", (2, 16, 8)),
    (20, 1, 50, F32, "nn", (8, 1, 16)),
    (5, 6, 7, F32, "nn", (1, 1, 1)),
)
def gemm(name: str, m: int, n: int, k: int, dtype: DType, form: str, tile: tuple[int, ...]) -> Case:
    p = Prog(name, [("p0", m), ("p1", n), ("r0", k)], vector="p1")
    p.tile = tuple(zip(("p0", "p1", "r0"), tile, strict=True))
    a, b, bias = p.buf("a", dtype, m * k), p.buf("b", dtype, n * k), p.buf("bias", dtype, n)
    o = p.buf("o", dtype, m * n, "out")
    with p.sweep(2):
        x = p.load(a, A(0) * k + A(2) if form[0] == "n" else A(2) * m + A(0))
        y = p.load(b, A(2) * n + A(1) if form[1] == "n" else A(1) * k + A(2))
        acc = p.dot(x, y, [2], dtype)
    p.store(o, A(0) * n + A(1), p.let("tanh", p.let("add", acc, p.load(bias, A(1)))))
    return Case(p, [rand(m * k, dtype=dtype), rand(n * k, dtype=dtype), rand(n, dtype=dtype)], (m, n))


@case((37,), (64,), (0,))
def dynamic(name: str, rows: int) -> Case:
    n, k = 40, 64
    m = ix.sym("s0")
    p = Prog(name, [("p0", m), ("p1", n), ("r0", k)], vector="p1", symbols=["s0"])
    p.tile = (("p0", 32), ("p1", 32), ("r0", 32))
    a, b, o = p.buf("a", F32, m * k), p.buf("b", F32, n * k), p.buf("o", F32, m * n, "out")
    with p.sweep(2):
        acc = p.dot(p.load(a, A(2) * m + A(0)), p.load(b, A(1) * k + A(2)), [2], F32)
    p.store(o, A(0) * n + A(1), acc)
    return Case(p, [rand(rows * k), rand(n * k)], (rows, n), (rows,))


@case((F32,), (BF16,))
def norm_prologue(name: str, dtype: DType) -> Case:
    m, n, k = 30, 50, 90
    p = Prog(name, [("p0", m), ("p1", n), ("r0", k)], vector="p1")
    p.tile = (("p0", 16), ("p1", 32), ("r0", 32))
    a, w, b = p.buf("a", dtype, m * k), p.buf("w", dtype, k), p.buf("b", dtype, n * k)
    o = p.buf("o", dtype, m * n, "out")
    with p.sweep(2):
        x = p.load(a, A(0) * k + A(2))
        total = p.reduce("sum", p.let("mul", x, x), [2])
    scale = p.let("rsqrt", p.let("add", p.let("mul", total, p.const(1 / k)), p.const(1e-5)))
    with p.sweep(2):
        x = p.let("mul", p.let("mul", p.load(a, A(0) * k + A(2)), scale), p.load(w, A(2)))
        acc = p.dot(x, p.load(b, A(1) * k + A(2)), [2], dtype)
    p.store(o, A(0) * n + A(1), acc)
    return Case(p, [rand(m * k, dtype=dtype), rand(k, dtype=dtype), rand(n * k, dtype=dtype)], (m, n))


@case()
def dequantised(name: str) -> Case:
    m, n, k = 20, 33, 70
    p = Prog(name, [("p0", m), ("p1", n), ("r0", k)], vector="p1")
    p.tile = (("p0", 16), ("p1", 16), ("r0", 32))
    a, w, c = p.buf("a", BF16, m * k), p.buf("w", DType.i8, n * k), p.buf("c", F32, n)
    o = p.buf("o", F32, m * n, "out")
    with p.sweep(2):
        q = p.let("cast", p.load(w, A(1) * k + A(2)), result=F32, dtype=F32)
        y = p.let("mul", q, p.load(c, A(1)))
        acc = p.dot(p.load(a, A(0) * k + A(2)), y, [2], BF16)
    p.store(o, A(0) * n + A(1), acc)
    weights = torch.randint(-128, 128, (n * k,), dtype=torch.int8)
    return Case(p, [rand(m * k, dtype=BF16), weights, rand(n).abs()], (m, n))


@case()
def gated(name: str) -> Case:
    """Gate and up share the rows; the first factor is the one of the columns."""
    m, n, k = 40, 70, 100
    p = Prog(name, [("p0", m), ("p1", n), ("r0", k)], vector="p1")
    p.tile = (("p0", 32), ("p1", 64), ("r0", 64))
    a, g, u = p.buf("a", F32, m * k), p.buf("g", F32, n * k), p.buf("u", F32, n * k)
    o = p.buf("o", F32, m * n, "out")
    with p.sweep(2):
        x = p.load(a, A(0) * k + A(2))
        gate = p.dot(p.load(g, A(1) * k + A(2)), x, [2], F32)
        up = p.dot(x, p.load(u, A(1) * k + A(2)), [2], F32)
    p.store(o, A(0) * n + A(1), p.let("mul", p.let("mul", gate, p.let("sigmoid", gate)), up))
    return Case(p, [rand(m * k), rand(n * k), rand(n * k)], (m, n))


@case(
    (4, 3, 20, 12, F32),
    (1, 3, 20, 12, F32),
    (1, 12, 32, 40, F32),
    (1, 5, 70, 20, BF16),
    (1, 3, 300, 12, F32),
    (1, 7, 9, 1, F32),
)
def batched_over_two_dims(name: str, batch: int, h: int, d: int, n: int, dtype: DType) -> Case:
    """o[b, m, n] = sum over h, d of x[b, m, h, d] * w[b, n, h, d], with more than one batch in a tile."""
    b, m = 6, 10
    p = Prog(name, [("p0", m), ("p1", b), ("p2", n), ("r0", h), ("r1", d)], vector="p2")
    p.tile = (("p0", 8), ("p1", batch), ("p2", 24), ("r0", 8 if h > 8 else 2), ("r1", 0))
    x, w, o = p.buf("x", dtype, b * m * h * d), p.buf("w", dtype, b * n * h * d), p.buf("o", F32, b * m * n, "out")
    with p.sweep(3), p.sweep(4):
        acc = p.dot(
            p.load(x, ((A(1) * h + A(3)) * m + A(0)) * d + A(4)),
            p.load(w, ((A(1) * n + A(2)) * h + A(3)) * d + A(4)),
            [3, 4],
            dtype,
        )
    p.store(o, (A(1) * m + A(0)) * n + A(2), acc)
    return Case(p, [rand(b * m * h * d, dtype=dtype), rand(b * n * h * d, dtype=dtype)], (b, m, n))


@case()
def chained(name: str) -> Case:
    """relu(x w) v: a Dot whose factor is a Dot's result."""
    m, h, n, k = 30, 50, 20, 40
    p = Prog(name, [("p0", m), ("p1", n), ("r0", h), ("r1", k)], vector="p1")
    p.tile = (("p0", 16), ("p1", 0), ("r0", 32), ("r1", 16))
    x, w, v = p.buf("x", F32, m * k), p.buf("w", F32, h * k), p.buf("v", F32, n * h)
    o = p.buf("o", F32, m * n, "out")
    zero = p.const(0.0)
    with p.sweep(2):
        with p.sweep(3):
            s = p.dot(p.load(x, A(0) * k + A(3)), p.load(w, A(2) * k + A(3)), [3], F32)
        acc = p.dot(p.let("maximum", s, zero), p.load(v, A(1) * h + A(2)), [2], F32)
    p.store(o, A(0) * n + A(1), acc)
    return Case(p, [rand(m * k), rand(h * k), rand(n * h)], (m, n))


@case()
def absent_dims(name: str) -> Case:
    """Factors that do not vary over a reduced dim, or over nothing at all."""
    m, n, k, j = 9, 10, 11, 5
    p = Prog(name, [("p0", m), ("p1", n), ("r0", k), ("r1", j)], vector="p1")
    p.tile = (("p0", 4), ("p1", 8), ("r0", 4), ("r1", 0))
    x, y, o = p.buf("x", F32, m * k), p.buf("y", F32, n), p.buf("o", F32, m * n, "out")
    half = p.const(0.5)
    with p.sweep(2), p.sweep(3):
        a, b = p.load(x, A(0) * k + A(2)), p.load(y, A(1))
        acc, other = p.dot(a, b, [2, 3], F32), p.dot(half, a, [2, 3], F32)
    p.store(o, A(0) * n + A(1), p.let("add", acc, other))
    return Case(p, [rand(m * k), rand(n)], (m, n))


@case()
def convolution(name: str) -> Case:
    """Factors gathered through a guard: a padded convolution along rows."""
    t, c, n, w = 50, 12, 20, 3
    p = Prog(name, [("p0", t), ("p1", n), ("r0", c), ("r1", w)], vector="p1")
    p.tile = (("p0", 16), ("p1", 16), ("r0", 8), ("r1", 0))
    x, f, o = p.buf("x", F32, t * c), p.buf("f", F32, n * c * w), p.buf("o", F32, t * n, "out")
    with p.sweep(2), p.sweep(3):
        at = A(0) + A(3) - 1
        a = p.load(x, at * c + A(2), (at, t - 1 - at), 0.0)
        acc = p.dot(a, p.load(f, (A(1) * c + A(2)) * w + A(3)), [2, 3], F32)
    p.store(o, A(0) * n + A(1), acc)
    return Case(p, [rand(t * c), rand(n * c * w)], (t, n))


@case((False,), (True,))
def embedding(name: str, broken: bool) -> Case:
    m, n, k, rows = 30, 20, 40, 11
    p = Prog(name, [("p0", m), ("p1", n), ("r0", k)], vector="p1")
    p.tile = (("p0", 16), ("p1", 16), ("r0", 16))
    p.messages = ["out of range"]
    ids, table, w = p.buf("ids", DType.i64, m), p.buf("table", F32, rows * k), p.buf("w", F32, n * k)
    o = p.buf("o", F32, m * n, "out")
    at = p.load(ids, A(0))
    p.check(ix.value(at), rows, 1)
    with p.sweep(2):
        acc = p.dot(p.load(table, ix.value(at) * k + A(2)), p.load(w, A(1) * k + A(2)), [2], F32)
    p.store(o, A(0) * n + A(1), acc)
    picked = torch.arange(m) % rows
    if broken:
        picked[17] = rows
    return Case(p, [picked, rand(rows * k), rand(n * k)], (m, n), fault=int(broken))


@case()
def dropout(name: str) -> Case:
    m, n, k = 30, 20, 40
    p = Prog(name, [("p0", m), ("p1", n), ("r0", k)], vector="p1")
    p.tile = (("p0", 16), ("p1", 16), ("r0", 16))
    seed, a, w = p.buf("seed", DType.i64, 2), p.buf("a", F32, m * k), p.buf("w", F32, n * k)
    o = p.buf("o", F32, m * n, "out")
    with p.sweep(2):
        acc = p.dot(p.load(a, A(0) * k + A(2)), p.load(w, A(1) * k + A(2)), [2], F32)
    draw = p.let("rand", p.load(seed, 0), p.load(seed, 1), result=F32, dtype=F32, draw=0, linear=A(0) * n + A(1))
    keep = p.let("lt", draw, p.const(0.5), result=B1)
    p.store(o, A(0) * n + A(1), p.let("where", keep, acc, p.const(0.0)))
    return Case(p, [torch.tensor([77, 5]), rand(m * k), rand(n * k)], (m, n))


# ---------------------------------------------------------------- contractions with reductions around them
@case(("max",), ("sum",), ("min",), ("prod",), ("argmax",), ("argmin",))
def row_statistic(name: str, monoid: str) -> Case:
    """A reduction over the columns of a product, and one over its rows' points."""
    m, n, k = 20, 70, 30
    p = Prog(name, [("p0", m), ("r0", n), ("r1", k)], vector="r0")
    p.tile = (("p0", 16), ("r0", 32), ("r1", 0))
    x, w = p.buf("x", F32, m * k), p.buf("w", F32, n * k)
    o = p.buf("o", DType.i64 if monoid.startswith("arg") else F32, m, "out")
    with p.sweep(1):
        with p.sweep(2):
            s = p.dot(p.load(x, A(0) * k + A(2)), p.load(w, A(1) * k + A(2)), [2], F32)
        found = p.reduce(monoid, s, [1], A(1) if monoid.startswith("arg") else None)
    p.store(o, A(0), found)
    return Case(p, [rand(m * k), rand(n * k)], (m,))


@case()
def column_sums(name: str) -> Case:
    """Reduced over the rows of a product, kept along its vector dim; and whether any is large."""
    m, n, k = 50, 70, 30
    p = Prog(name, [("p0", n), ("r0", m), ("r1", k)], vector="p0")
    p.tile = (("p0", 32), ("r0", 16), ("r1", 0))
    x, w, o = p.buf("x", F32, m * k), p.buf("w", F32, n * k), p.buf("o", F32, n, "out")
    with p.sweep(1):
        with p.sweep(2):
            s = p.dot(p.load(x, A(1) * k + A(2)), p.load(w, A(0) * k + A(2)), [2], F32)
        total = p.reduce("sum", s, [1])
        large = p.reduce("any", p.let("gt", s, p.const(12.0), result=B1), [1])
    p.store(o, A(0), p.let("where", large, total, p.let("neg", total)))
    return Case(p, [rand(m * k), rand(n * k)], (n,))


@case((F32, 16), (BF16, 0))
def log_sum_exp(name: str, dtype: DType, depth: int) -> Case:
    m, n, k = 20, 150, 48
    p = Prog(name, [("p0", m), ("r0", n), ("r1", k)], vector="r0")
    p.tile = (("p0", 16), ("r0", 64), ("r1", depth))
    x, w, o = p.buf("x", dtype, m * k), p.buf("w", dtype, n * k), p.buf("o", F32, m, "out")
    with p.sweep(1):
        with p.sweep(2):
            s = p.dot(p.load(x, A(0) * k + A(2)), p.load(w, A(1) * k + A(2)), [2], dtype)
        top, _, total, _ = softmax_step(p, s, 1)
    p.store(o, A(0), p.let("add", top, p.let("log", total)))
    return Case(p, [rand(m * k, dtype=dtype), rand(n * k, dtype=dtype)], (m,))


@case((3000, False), (301, True))
def log_sum_exp_of_rows(name: str, n: int, dynamic: bool) -> Case:
    """No contraction, but a maximum that is read while it is found; the exponentials go through memory of a block's own."""
    m, size = 5, ix.sym("s0") if dynamic else ix.const(n)
    p = Prog(name, [("p0", m), ("r0", size)], vector="r0", symbols=["s0"] if dynamic else [])
    p.tile = (("r0", 0),)
    x, o = p.buf("x", F32, m * size), p.buf("o", F32, m, "out")
    held = p.buf("row", F32, size, "scratch")
    with p.sweep(1):
        top, _, total, _ = softmax_step(p, p.load(x, A(0) * size + A(1)), 1)
    with p.sweep(1):
        p.store(held, A(1), p.load(x, A(0) * size + A(1)))
    with p.sweep(1):
        again = p.reduce("sum", p.load(held, A(1)), [1])
    p.store(o, A(0), p.let("add", p.let("add", top, p.let("log", total)), again))
    return Case(p, [rand(m * n)], (m,), (n,) if dynamic else ())


def causal(m: ix.Expr, n: ix.Expr) -> tuple[ix.Expr, ...]:
    return (m - n,)


def window(m: ix.Expr, n: ix.Expr) -> tuple[ix.Expr, ...]:
    return (m - n, n - m + 37)


def late(m: ix.Expr, n: ix.Expr) -> tuple[ix.Expr, ...]:
    """The first rows see no key at all."""
    return (m - n - 70,)


def prefix(m: ix.Expr, n: ix.Expr) -> tuple[ix.Expr, ...]:
    return (ix.const(99) - n,)


@case(
    (100, 150, 32, F32, None, (64, 64), 0),
    (150, 150, 32, F32, causal, (64, 32), 0),
    (201, 201, 24, F32, window, (32, 32), 0),
    (130, 150, 16, F32, late, (32, 32), 0),
    (65, 203, 16, F32, prefix, (32, 32), 0),
    (150, 150, 32, BF16, causal, (64, 64), 0),
    (70, 70, 8, F64, causal, (32, 16), 0),
    (1, 300, 32, F32, None, (1, 128), 0),
    (100, 100, 16, F32, causal, (32, 32), INF),
    (100, 100, 16, F32, None, (32, 32), float("nan")),
    (21, 21, 32, F32, None, (0, 0), 0),
    (7, 17, 40, F32, causal, (0, 0), 0),
    (77, 90, 24, F64, late, (0, 0), 0),
    (53, 61, 20, BF16, window, (16, 0), float("nan")),
    (50, 55, 80, F32, None, (48, 0), INF),
)
def attention(
    name: str, m: int, n: int, d: int, dtype: DType, guard: Guard | None, tile: tuple[int, int], odd: float
) -> Case:
    h = 3
    p = attention_program(name, (h, m, n, d), dtype, guard, tile)
    values = [rand(h, m, d, dtype=dtype), rand(h, n, d, dtype=dtype), rand(h, n, d, dtype=dtype) + 1]
    if odd:
        values[1][1, 50, 3] = odd
    return Case(p, values, (h, m, d))


# ---------------------------------------------------------------- judging
def in_double(program: TileProgram) -> TileProgram:
    """The program with every float type f64: what a result is measured against."""

    def wide(d: Any) -> Any:
        return F64 if isinstance(d, DType) and d.is_float else d

    def visit(s: Stmt) -> Stmt:
        if isinstance(s, Sweep):
            return replace(s, body=tuple(visit(t) for t in s.body))
        if isinstance(s, Dot):
            return replace(s, dtype=F64, operand=F64)
        if isinstance(s, Let) and s.op in ("rand", "lt"):
            return s
        if isinstance(s, Let):
            return replace(s, dtype=wide(s.dtype), attrs=tuple((k, wide(v)) for k, v in s.attrs))
        return replace(s, dtype=wide(s.dtype)) if isinstance(s, Load | Reduce) else s

    buffers = tuple(replace(b, dtype=wide(b.dtype)) for b in program.buffers)
    return replace(program, buffers=buffers, body=tuple(visit(s) for s in program.body))


def output_type(program: TileProgram) -> torch.dtype:
    return next(TORCH[b.dtype] for b in program.buffers if b.role == "out")


def evaluate(program: TileProgram, made: Case) -> tuple[Tensor, tuple[int, ...]]:
    result = torch.zeros(made.shape, dtype=output_type(program))
    inputs = [
        x.flatten().to(TORCH[b.dtype]) if b.dtype.is_float else x.flatten()
        for x, b in zip(made.inputs, program.buffers, strict=False)
    ]
    report = run_tile(program, [*inputs, result.view(-1)], dict(zip(program.symbols, made.symbols, strict=True)))
    return result, report.failed


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    programs: Sequence[TileProgram] = [make().prog.done() for make in CASES.values()]
    return compile_programs(programs, Path(tmp_path_factory.mktemp("cppdot")))


@pytest.mark.parametrize("name", CASES)
def test_contraction(library: Library, name: str) -> None:
    made = CASES[name]()
    program = made.prog.done()
    check_program(program)
    faults = any(isinstance(s, Check) for s in program.walk())
    for threads in (1, 2):
        got = torch.full(made.shape, 77, dtype=output_type(program))
        assert library.run(name, [*made.inputs, got], made.symbols, threads) == made.fault
        if faults and made.fault:
            continue
        eager, failed = evaluate(program, made)
        assert not failed
        reference, _ = evaluate(in_double(program), made)
        verdict = compare(got, eager, reference, name=name)
        assert verdict.status != "FAIL", verdict


# ---------------------------------------------------------------- sweeps that masks shorten
def masked_sum(fill: float, additive: bool = False, other: bool = False) -> str:
    """The source of a causal attention whose masked scores are `fill`."""
    m = n = 256
    p = Prog("masked", [("p1", m), ("p2", 32), ("r0", n), ("r1", 32)], vector="p2")
    p.tile = (("p1", 32), ("p2", 0), ("r0", 64), ("r1", 0))
    q, k, v, o = (p.buf(b, F32, m * 32, "out" if b == "o" else "in") for b in "qkvo")
    with p.sweep(2):
        with p.sweep(3):
            s = p.dot(p.load(q, A(0) * 32 + A(3)), p.load(k, A(2) * 32 + A(3)), [3], F32)
        holds = p.let("holds", result=B1, guard=causal(A(0), A(2)))
        if additive:
            t = p.let("add", s, p.let("where", holds, p.const(0.0), p.const(fill)))
        else:
            t = p.let("where", holds, s, p.const(fill))
        _, e, total, scale = softmax_step(p, t, 2)
        acc = p.dot(e, p.load(v, A(2) * 32 + A(1)), [2], F32, scale=scale)
        seen = p.reduce("sum", s, [2]) if other else acc  # a reduction that sees masked points too
    result = p.let("div", acc, total)
    p.store(o, A(0) * 32 + A(1), p.let("add", result, seen) if other else result)
    check_program(p.done())
    return emit_cpp([CppKernel("masked", (p.done(),))])


def test_sweeps_end_where_a_causal_mask_does() -> None:
    line = next(x for x in masked_sum(-INF).split("\n") if "for (int64_t r0_lo" in x)
    assert "r0_lo < plait::at_most_of(r0_n," in line and "p1_lo + 32 - 1" in line


@pytest.mark.parametrize("source", [masked_sum(-30.0), masked_sum(-INF, additive=True), masked_sum(-INF, other=True)])
def test_sweeps_run_whole_where_masked_points_count(source: str) -> None:
    assert "for (int64_t r0_lo = 0; r0_lo < r0_n; r0_lo += 64) {" in source


def test_tiles_behind_the_mask_are_not_read(library: Library) -> None:
    """Values that are no numbers, behind the mask of every row but in no tile of it, leave no trace."""
    name = "attention1"
    made = CASES[name]()
    clean, got = torch.zeros(made.shape), torch.zeros(made.shape)
    assert library.run(name, [*made.inputs, clean], (), 1) == 0
    made.inputs[2][:, 128:] = float("nan")
    assert library.run(name, [*made.inputs, got], (), 1) == 0
    assert torch.equal(got[:, :128], clean[:, :128]) and bool(got[:, 128:].isnan().all())
