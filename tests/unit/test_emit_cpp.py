"""The C++ emitter on hand-built programs, compiled into one shared object and compared with torch in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cpp_run import TORCH, Library, Prog, compile_programs

from plait.emit.cpp import CppKernel, emit_cpp
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.oracle.semantics import random_values
from plait.tile.program import TileProgram

A = ix.axis
ROWS, COLS = 37, 301
AT = A(0) * COLS + A(1)
MAKERS: list[Callable[[], list[TileProgram]]] = []


def programs(make: Callable[[], list[TileProgram]]) -> Callable[[], list[TileProgram]]:
    """Registers programs for the one library all tests here share."""
    MAKERS.append(make)
    return make


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    folder: Path = tmp_path_factory.mktemp("cpp")
    return compile_programs([p for make in MAKERS for p in make()], folder)


def ulps(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest error in units of the last place of the result's type, `want` in float64."""
    info = torch.finfo(got.dtype)
    return float(((got.double() - want).abs() / (info.eps * want.abs().clamp_min(info.tiny))).max())


def rows(name: str, dtype: DType = DType.f32, out: DType | None = None) -> tuple[Prog, int, int]:
    p = Prog(name, [("p0", ROWS), ("r0", COLS)], vector="r0")
    return p, p.buf("x", dtype, ROWS * COLS), p.buf("o", out or dtype, ROWS * COLS, "out")


# ---------------------------------------------------------------- row kernels
@programs
def norms() -> list[TileProgram]:
    made = []
    for dtype in (DType.f32, DType.bf16, DType.f16, DType.f64):
        p, x, o = rows(f"rmsnorm_{dtype.value}", dtype)
        w = p.buf("w", dtype, COLS)
        kind = dtype.compute
        with p.sweep(1):
            v = p.load(x, AT)
            total = p.reduce("sum", p.let("mul", v, v), [1])
        mean = p.let("mul", total, p.const(1 / COLS, kind))
        scale = p.let("rsqrt", p.let("add", mean, p.const(1e-6, kind)))
        with p.sweep(1):
            p.store(o, AT, p.let("mul", p.let("mul", p.load(x, AT), scale), p.load(w, A(1))))
        made.append(p.done())
    p, x, o = rows("layernorm")
    with p.sweep(1):
        total = p.reduce("sum", p.load(x, AT), [1])
    mean = p.let("mul", total, p.const(1 / COLS))
    with p.sweep(1):
        d = p.let("sub", p.load(x, AT), mean)
        square = p.reduce("sum", p.let("mul", d, d), [1])
    scale = p.let("rsqrt", p.let("add", p.let("mul", square, p.const(1 / COLS)), p.const(1e-5)))
    with p.sweep(1):
        p.store(o, AT, p.let("mul", p.let("sub", p.load(x, AT), mean), scale))
    return [*made, p.done()]


def test_norms(library: Library) -> None:
    for dtype in (DType.f32, DType.bf16, DType.f16, DType.f64):
        x, w = torch.randn(ROWS, COLS).to(TORCH[dtype]), torch.randn(COLS).to(TORCH[dtype])
        o = torch.empty_like(x)
        assert library.run(f"rmsnorm_{dtype.value}", [x, o, w]) == 0
        xd = x.double()
        assert ulps(o, xd * torch.rsqrt((xd * xd).mean(1, keepdim=True) + 1e-6) * w.double()) < 4
    x = torch.randn(ROWS, COLS)
    o = torch.empty_like(x)
    assert library.run("layernorm", [x, o]) == 0
    want = torch.nn.functional.layer_norm(x.double(), (COLS,))
    assert float((o - want).abs().max()) < 2e-6


@programs
def softmaxes() -> list[TileProgram]:
    made = []
    for keep in (False, True):
        p, x, o = rows("softmax_kept" if keep else "softmax")
        row = p.buf("row", DType.f32, COLS, "scratch")
        with p.sweep(1):
            top = p.reduce("max", p.load(x, AT), [1])
        with p.sweep(1):
            e = p.let("exp", p.let("sub", p.load(x, AT), top))
            if keep:
                p.store(row, A(1), e)
            total = p.reduce("sum", e, [1])
        with p.sweep(1):
            e = p.load(row, A(1)) if keep else p.let("exp", p.let("sub", p.load(x, AT), top))
            p.store(o, AT, p.let("div", e, total))
        made.append(p.done())
    return made


@pytest.mark.parametrize("name", ["softmax", "softmax_kept"])
def test_softmax(library: Library, name: str) -> None:
    x = torch.randn(ROWS, COLS)
    o = torch.empty_like(x)
    assert library.run(name, [x, o]) == 0
    assert ulps(o, x.double().softmax(1)) < 6
    x[3, 5] = math.nan
    assert library.run(name, [x, o]) == 0
    assert o[3].isnan().all() and not o[4].isnan().any()


MONOIDS = ("sum", "prod", "max", "min", "argmax", "argmin")


@programs
def reductions() -> list[TileProgram]:
    made = []
    for monoid in MONOIDS:
        for dtype in (DType.f32, DType.i32):
            p = Prog(f"row_{monoid}_{dtype.value}", [("p0", ROWS), ("r0", COLS)], vector="r0")
            out = DType.i64 if monoid.startswith("arg") else dtype
            x, o = p.buf("x", dtype, ROWS * COLS), p.buf("o", out, ROWS, "out")
            with p.sweep(1):
                r = p.reduce(monoid, p.load(x, AT), [1], A(1) if out is DType.i64 else None)
            p.store(o, A(0), r)
            made.append(p.done())
            p = Prog(f"column_{monoid}_{dtype.value}", [("p0", COLS), ("r0", ROWS)], vector="p0")
            p.tile = (("p0", 64),)
            x, o = p.buf("x", dtype, ROWS * COLS), p.buf("o", out, COLS, "out")
            with p.sweep(1):
                r = p.reduce(monoid, p.load(x, A(1) * COLS + A(0)), [1], A(1) if out is DType.i64 else None)
            p.store(o, A(0), r)
            made.append(p.done())
    for monoid in ("any", "all", "sum", "prod"):
        p = Prog(f"bool_{monoid}", [("p0", ROWS), ("r0", COLS)], vector="r0")
        x, o = p.buf("x", DType.b1, ROWS * COLS), p.buf("o", DType.b1, ROWS, "out")
        with p.sweep(1):
            r = p.reduce(monoid, p.load(x, AT), [1])
        p.store(o, A(0), r)
        made.append(p.done())
    return made


@pytest.mark.parametrize("monoid", MONOIDS)
def test_reductions_along_rows_and_columns(library: Library, monoid: str) -> None:
    torch.manual_seed(0)
    ordinary, ties = torch.randn(ROWS, COLS), torch.randint(-2, 3, (ROWS, COLS))
    special = ordinary.clone()
    special[2, 7] = special[2, 100] = math.nan
    special[3] = -math.inf
    special[:, 5] = math.inf
    special[4, :] = math.nan
    for dtype, tensors in (
        (DType.f32, [ordinary, special, ties.float()]),
        (DType.i32, [ties.int(), ties.int() * 10**9]),
    ):
        for x in tensors:
            if monoid == "prod" and x is special:
                continue  # whether 0 meets infinity depends on the order
            for dim, name, count in ((1, "row", ROWS), (0, "column", COLS)):
                out = torch.empty(count, dtype=torch.int64 if monoid.startswith("arg") else TORCH[dtype])
                assert library.run(f"{name}_{monoid}_{dtype.value}", [x, out]) == 0
                if monoid in ("sum", "prod"):
                    want = getattr(x.double() if dtype is DType.f32 else x, monoid)(dim)
                    want = want if dtype is DType.f32 else want.to(torch.int32)
                    torch.testing.assert_close(out.double(), want.double(), rtol=1e-4, atol=1e-5, equal_nan=True)
                else:
                    fn = {"max": torch.amax, "min": torch.amin, "argmax": torch.argmax, "argmin": torch.argmin}[monoid]
                    torch.testing.assert_close(out, fn(x, dim), rtol=0, atol=0, equal_nan=True)


def test_boolean_reductions(library: Library) -> None:
    x = torch.rand(ROWS, COLS) < 0.01
    x[0], x[1] = False, True
    out = torch.empty(ROWS, dtype=torch.bool)
    for monoid, want in (("any", x.any(1)), ("sum", x.any(1)), ("all", x.all(1)), ("prod", x.all(1))):
        assert library.run(f"bool_{monoid}", [x, out]) == 0
        assert (out == want).all()


@programs
def long_sums() -> list[TileProgram]:
    p = Prog("long_sum", [("r0", ix.sym("n"))], vector="r0", symbols=["n"])
    x, o = p.buf("x", DType.f32, ix.sym("n")), p.buf("o", DType.f32, 1, "out")
    with p.sweep(0):
        total = p.reduce("sum", p.load(x, A(0)), [0])
    p.store(o, 0, total)
    n = ix.sym("n")
    q = Prog("tall_sum", [("p0", 8), ("r0", n)], vector="p0", symbols=["n"])
    x, o = q.buf("x", DType.f32, n * 8), q.buf("o", DType.f32, 8, "out")
    with q.sweep(1):
        total = q.reduce("sum", q.load(x, A(1) * 8 + A(0)), [1])
    q.store(o, A(0), total)
    return [p.done(), q.done()]


def test_long_sums_are_as_accurate_as_eager(library: Library) -> None:
    torch.manual_seed(0)
    for n, times in ((1000, 300), (100_003, 20), (3_000_000, 2)):
        for scale, shift in ((1.0, 0.0), (1e3, 1e4)):
            ours, theirs = [], []
            for _ in range(times):
                x, o = torch.randn(n) * scale + shift, torch.empty(1)
                assert library.run("long_sum", [x, o], [n]) == 0
                want = float(x.double().sum())
                ours.append((float(o) - want) ** 2)
                theirs.append(max((float(x.sum()) - want) ** 2, (2.0**-25 * want) ** 2))
            assert sum(ours) <= 1.2 * sum(theirs), (n, scale)
    x, o = torch.rand(100_000, 8), torch.empty(8)
    assert library.run("tall_sum", [x, o], [100_000]) == 0
    want = x.double().sum(0)
    assert (o - want).abs().max() <= torch.maximum((x.sum(0) - want).abs().max(), 2.0**-24 * want.max())


# ---------------------------------------------------------------- nested sweeps, strips, scans
@programs
def nested() -> list[TileProgram]:
    # blocks of a row, two reduced dims: the block's maximum over (j0, j1), then a scaled copy
    p = Prog("block_amax", [("p0", 6), ("j0", 3), ("j1", 50)], vector="j1")
    x, o = p.buf("x", DType.f32, 900), p.buf("o", DType.f32, 900, "out")
    at = A(0) * 150 + A(1) * 50 + A(2)
    with p.sweep(1), p.sweep(2):
        top = p.reduce("max", p.let("abs", p.load(x, at)), [1, 2])
    with p.sweep(1), p.sweep(2):
        p.store(o, at, p.let("div", p.load(x, at), top))
    # inner reductions ending inside an outer sweep, the vector dim being the outer one: a strip with a sweep inside
    q = Prog("strip", [("p0", 5), ("r0", 200), ("r1", 7)], vector="r0")
    x, o = q.buf("x", DType.f32, 7000), q.buf("o", DType.f32, 1000, "out")
    s = q.buf("s", DType.f32, 5, "out")
    with q.sweep(1):
        first = q.let("mul", q.load(x, A(0) * 1400 + A(1) * 7), q.const(2.0))
        with q.sweep(2):
            inner = q.reduce("sum", q.load(x, A(0) * 1400 + A(1) * 7 + A(2)), [2])
        mixed = q.let("add", inner, first)
        total = q.reduce("sum", mixed, [1])
        q.store(o, A(0) * 200 + A(1), mixed)
    q.store(s, A(0), total)
    # a grid vector dim with values crossing two sweeps, and scratch for each of its lanes
    t = Prog("columns", [("p0", 130), ("r0", 20)], vector="p0")
    t.tile = (("p0", 32),)
    x, o, row = t.buf("x", DType.f32, 2600), t.buf("o", DType.f32, 2600, "out"), t.buf("row", DType.f32, 20, "scratch")
    shift = t.let("exp", t.load(x, A(0)))
    with t.sweep(1):
        e = t.let("add", t.load(x, A(1) * 130 + A(0)), shift)
        t.store(row, A(1), e)
        top = t.reduce("max", e, [1])
    with t.sweep(1):
        t.store(o, A(1) * 130 + A(0), t.let("sub", t.load(row, A(1)), top))
    return [p.done(), q.done(), t.done()]


def test_nested_sweeps_and_strips(library: Library) -> None:
    x = torch.randn(6, 150)
    o = torch.empty_like(x)
    assert library.run("block_amax", [x, o]) == 0
    assert (o == x / x.abs().amax(1, keepdim=True)).all()
    x, o, s = torch.randn(5, 200, 7), torch.empty(5, 200), torch.empty(5)
    assert library.run("strip", [x, o, s]) == 0
    want = x.double().sum(2) + 2 * x[:, :, 0].double()
    torch.testing.assert_close(o, want.float())
    torch.testing.assert_close(s, want.sum(1).float())
    x, o = torch.randn(20, 130), torch.empty(20, 130)
    assert library.run("columns", [x, o]) == 0
    e = x + x[0].exp()
    torch.testing.assert_close(o, e - e.amax(0))


SCANS = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")


@programs
def scans() -> list[TileProgram]:
    made = []
    for kind in SCANS:
        p, x, o = rows(f"row_{kind}")
        with p.sweep(1):
            v = p.load(x, AT)
            p.store(o, AT, p.scan(kind, v, 1))
        made.append(p.done())
        p = Prog(f"column_{kind}", [("p0", COLS), ("r0", ROWS)], vector="p0")
        x, o = p.buf("x", DType.f32, ROWS * COLS), p.buf("o", DType.f32, ROWS * COLS, "out")
        at = A(1) * COLS + A(0)
        with p.sweep(1):
            p.store(o, at, p.scan(kind, p.load(x, at), 1))
        made.append(p.done())
    return made


@pytest.mark.parametrize("kind", SCANS)
def test_scans(library: Library, kind: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, COLS)
    x[2, 9], x[3, 0], x[4] = math.nan, -math.inf, -math.inf
    for dim, name in ((1, "row"), (0, "column")):
        o = torch.empty_like(x)
        assert library.run(f"{name}_{kind}", [x, o]) == 0
        want = getattr(torch, kind)(x.double(), dim)
        want = (want[0] if isinstance(want, tuple) else want).float()
        torch.testing.assert_close(o, want, rtol=1e-5, atol=1e-6, equal_nan=True)


# ---------------------------------------------------------------- guards, gathers, checks
@programs
def guarded() -> list[TileProgram]:
    # cat of (ROWS, 100) and (ROWS, 201) along the row; and the same along a grid vector dim
    made = []
    for name, role in (("cat_row", "r0"), ("cat_grid", "p1")):
        p = Prog(name, [("p0", ROWS), (role, COLS)], vector=role)
        a, b = p.buf("a", DType.f32, ROWS * 100), p.buf("b", DType.f32, ROWS * 201)
        o = p.buf("o", DType.f32, ROWS * COLS, "out")
        left, right = (ix.const(99) - A(1),), (A(1) - 100,)

        def body(
            p: Prog = p,
            a: int = a,
            b: int = b,
            o: int = o,
            left: tuple[ix.Expr, ...] = left,
            right: tuple[ix.Expr, ...] = right,
        ) -> None:
            x = p.load(a, A(0) * 100 + A(1), left)
            y = p.load(b, A(0) * 201 + A(1) - 100, right)
            p.store(o, AT, p.let("where", p.let("holds", result=DType.b1, guard=left), x, y))

        if role == "r0":
            with p.sweep(1):
                body()
        else:
            body()
        made.append(p.done())
    # pad by a fill, flipped, with a store of every third element only, through divisions by the vector dim
    p = Prog("pad_flip", [("p0", 500)], vector="p0")
    x, o, third = p.buf("x", DType.f32, 400), p.buf("o", DType.f32, 500, "out"), p.buf("third", DType.f32, 167, "out")
    v = p.load(x, ix.const(449) - A(0), (ix.const(449) - A(0), A(0) - 50), -7.5)
    p.store(o, A(0), v)
    p.store(third, ix.floordiv(A(0), 3), v, (-ix.mod(A(0), 3),))
    # (n // 16) * 32 + n % 16: every second block of 16
    q = Prog("blocks", [("p0", 320)], vector="p0")
    x, o = q.buf("x", DType.bf16, 640), q.buf("o", DType.f32, 320, "out")
    q.store(o, A(0), q.load(x, ix.floordiv(A(0), 16) * 32 + ix.mod(A(0), 16)))
    return [*made, p.done(), q.done()]


def test_guards_and_divisions(library: Library) -> None:
    a, b, o = torch.randn(ROWS, 100), torch.randn(ROWS, 201), torch.empty(ROWS, COLS)
    for name in ("cat_row", "cat_grid"):
        o.fill_(0)
        assert library.run(name, [a, b, o]) == 0
        assert (o == torch.cat([a, b], 1)).all()
    x, o, third = torch.randn(400), torch.empty(500), torch.empty(167)
    assert library.run("pad_flip", [x, o, third]) == 0
    want = torch.nn.functional.pad(x.flip(0), (50, 50), value=-7.5)
    assert (o == want).all() and (third == want[::3]).all()
    y, o = torch.randn(640).bfloat16(), torch.empty(320)
    assert library.run("blocks", [y, o]) == 0
    assert (o == y.view(20, 2, 16)[:, 0].reshape(-1)).all()


@programs
def gathers() -> list[TileProgram]:
    p = Prog("embedding", [("p0", 40), ("r0", 64)], vector="r0")
    ids, table = p.buf("ids", DType.i32, 40), p.buf("table", DType.f32, 640)
    o = p.buf("o", DType.f32, 40 * 64, "out")
    k = p.load(ids, A(0))
    p.check(ix.value(k), 10, 1)
    with p.sweep(1):
        p.store(o, A(0) * 64 + A(1), p.load(table, ix.value(k) * 64 + A(1)))
    q = Prog("pick", [("p0", 1000)], vector="p0")
    ids, table, o = q.buf("ids", DType.i64, 1000), q.buf("table", DType.f32, 10), q.buf("o", DType.f32, 1000, "out")
    k = q.load(ids, A(0))
    q.check(ix.value(k), 10, 2)
    q.store(o, A(0), q.load(table, ix.value(k)))
    return [p.done(), q.done()]


def test_gathers_fail_without_touching_memory(library: Library) -> None:
    table, ids, o = torch.randn(10, 64), torch.randint(0, 10, (40,), dtype=torch.int32), torch.empty(40, 64)
    assert library.run("embedding", [ids, table, o]) == 0
    assert (o == table[ids.long()]).all()
    ids[7] = 1 << 30
    ids[9] = -(1 << 30)
    assert library.run("embedding", [ids, table, o]) == 1
    picked, flat, out = torch.randint(0, 10, (1000,)), torch.randn(10), torch.empty(1000)
    assert library.run("pick", [picked, flat, out]) == 0
    assert (out == flat[picked]).all()
    picked[3] = 1 << 60
    picked[4] = -1
    assert library.run("pick", [picked, flat, out]) == 2


@programs
def integers() -> list[TileProgram]:
    made = []
    for op in ("floordiv", "remainder"):
        p = Prog(f"int_{op}", [("p0", 1000)], vector="p0")
        x, y, o = (p.buf(n, DType.i64, 1000, r) for n, r in (("x", "in"), ("y", "in"), ("o", "out")))
        p.store(o, A(0), p.let(op, p.load(x, A(0)), p.load(y, A(0))))
        made.append(p.done())
    return made


def test_integer_division_by_zero_is_reported(library: Library) -> None:
    x, y, o = torch.arange(-500, 500), torch.arange(1000) % 7 - 9, torch.empty(1000, dtype=torch.int64)
    assert library.run("int_floordiv", [x, y, o]) == 0 and (o == torch.floor_divide(x, y)).all()
    y[77] = 0
    assert library.run("int_remainder", [x, y, o]) == 999


# ---------------------------------------------------------------- random numbers
@programs
def randoms() -> list[TileProgram]:
    made = []
    for op, dtype in (
        ("rand", DType.f32),
        ("rand", DType.f64),
        ("randn", DType.f32),
        ("randbits", DType.i64),
        ("randbits", DType.i32),
    ):
        p = Prog(f"{op}_{dtype.value}", [("p0", 5000)], vector="p0")
        seed, offset, o = p.buf("seed", DType.i64, 1), p.buf("offset", DType.i64, 1), p.buf("o", dtype, 5000, "out")
        v = p.let(op, p.load(seed, 0), p.load(offset, 0), result=dtype, dtype=dtype, draw=3, linear=A(0) + (1 << 33))
        p.store(o, A(0), v)
        made.append(p.done())
    return made


def test_random_streams_are_the_documented_ones(library: Library) -> None:
    seed, offset = torch.tensor([0x123456789ABCDEF]), torch.tensor([77])
    linear = torch.arange(5000) + (1 << 33)
    for op, dtype in (
        ("rand", DType.f32),
        ("rand", DType.f64),
        ("randn", DType.f32),
        ("randbits", DType.i64),
        ("randbits", DType.i32),
    ):
        o = torch.empty(5000, dtype=TORCH[dtype])
        assert library.run(f"{op}_{dtype.value}", [seed, offset, o], (3,)) == 0
        want = random_values(op, linear, int(seed), int(offset), 3, dtype)
        if op == "randn":
            torch.testing.assert_close(o, want, rtol=1e-5, atol=1e-6)
            assert abs(float(o.mean())) < 0.05 and abs(float(o.std()) - 1) < 0.05
        else:
            assert (o == want).all()


# ---------------------------------------------------------------- the shape of kernels
def test_parts_run_in_one_kernel_and_report_their_number(tmp_path: Path) -> None:
    parts = []
    for k, n in enumerate((10, 3000)):
        p = Prog(f"part{k}", [("p0", ix.sym("n"))], vector="p0", symbols=["n"])
        ids, table, o = p.buf("ids", DType.i64, n), p.buf("table", DType.f32, 10), p.buf("o", DType.f32, n, "out")
        v = p.load(ids, A(0))
        p.check(ix.value(v), 10, 1)
        p.store(o, A(0), p.load(table, ix.value(v)))
        parts.append(p.done())
    lib = Library([CppKernel("two", tuple(parts))], tmp_path)
    table = torch.randn(10)
    ids = [torch.randint(0, 10, (n,)) for n in (10, 3000)]
    outs = [torch.empty(n) for n in (10, 3000)]
    args = [ids[0], table, outs[0], ids[1], table, outs[1]]
    assert lib.run("two", args, [10, 3000]) == 0
    assert all((o == table[i]).all() for o, i in zip(outs, ids, strict=True))
    ids[1][2999] = 10
    assert lib.run("two", args, [10, 3000]) == 1001
    ids[0][0] = -1
    assert lib.run("two", args, [10, 3000], threads=1) == 1
    assert lib.run("two", args, [0, 0]) == 0


def test_strided_pointwise_over_two_grid_dims(tmp_path: Path) -> None:
    p = Prog("strided", [("p0", ix.sym("m")), ("p1", ix.sym("n"))], vector="p1", symbols=["m", "n", "s"])
    x, o = p.buf("x", DType.f32, 10_000), p.buf("o", DType.f32, 10_000, "out")
    v = p.let(
        "add",
        p.load(x, A(0) + A(1) * ix.sym("s")),
        p.let("cast", p.let("index", result=DType.i64, expr=A(1)), result=DType.f32, dtype=DType.f32),
    )
    p.store(o, A(0) * ix.sym("n") + A(1), v)
    lib = compile_programs([p.done()], tmp_path)
    x, o = torch.randn(120, 60), torch.empty(60, 120)
    assert lib.run("strided", [x, o], [60, 120, 60]) == 0
    assert (o == x.t() + torch.arange(120)).all()


def test_emission_is_deterministic_and_carries_its_header() -> None:
    first, second = (emit_cpp([CppKernel(p.name, (p,)) for p in norms()]) for _ in range(2))
    assert first == second
    assert "// rmsnorm_f32\n// form=swept" in first
