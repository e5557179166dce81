"""Every invariant of the TileProgram checker, broken on purpose; and the printer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from plait.errors import CheckFailed
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.tile.check import check_program
from plait.tile.program import Buffer, Check, Dim, Let, Load, Reduce, Scan, Stmt, Store, Sweep, TileProgram
from plait.tile.schedule import parse_schedule
from plait.tile.text import print_program

F32, I64, B1, BF16 = DType.f32, DType.i64, DType.b1, DType.bf16
P, R, S = ix.axis(0), ix.axis(1), ix.sym("s0")
DIMS = (Dim("p0", S, "grid"), Dim("r0", ix.const(5), "row"))
BUFFERS = (Buffer("x", BF16, "in", S * 5), Buffer("k", I64, "in", S), Buffer("y", BF16, "out", S * 5))


def program(*body: Stmt, swept: bool = False, **changes: object) -> TileProgram:
    schedule = parse_schedule("form=swept tile=p0:1,r0:4" if swept else "form=flat tile=p0:4,r0:all")
    made = TileProgram("k", DIMS, BUFFERS, ("s0",), body, schedule, ("index out of range",), ("softmax", "m.py:3"))
    return replace(made, **changes)  # type: ignore[arg-type]


LOAD = Load(0, 0, P * 5 + R, F32, (0, 1))
MAX = Reduce(1, "max", 0, (1,), F32, (0,))
SUB = Let(2, "sub", (0, 1), F32, (0, 1))
STORE = Store(2, P * 5 + R, 2, (0, 1))
INDEX = Load(3, 1, P, I64, (0,))
CHECK = Check(ix.value(3), S, 1, (0,))
FLAT = (LOAD, MAX, SUB, INDEX, CHECK, STORE)
RELOAD = replace(LOAD, out=4)
SWEPT = (Sweep(1, (LOAD, MAX)), Sweep(1, (RELOAD, replace(SUB, args=(4, 1)), STORE)))


def test_good_programs_pass() -> None:
    check_program(program(*FLAT))
    check_program(program(*SWEPT, swept=True))


def test_text_is_complete_and_deterministic() -> None:
    text = print_program(program(*FLAT))
    assert text == print_program(program(*FLAT))
    assert (
        text
        == """\
# softmax
# m.py:3
program "k"
schedule form=flat tile=p0:4,r0:all warps=4 stages=1 vector=
symbols s0
dim p0: s0 grid
dim r0: 5 row
buffer b0 "x": bf16 in, 5*s0 elements
buffer b1 "k": i64 in, s0 elements
buffer b2 "y": bf16 out, 5*s0 elements
message 1 "index out of range"
v0: f32<p0,r0> = load b0[5*p0 + r0]
v1: f32<p0> = max v0 over r0
v2: f32<p0,r0> = sub(v0, v1)
v3: i64<p0> = load b1[p0]
check 0 <= v3 < s0 else 1 over <p0>
store b2[5*p0 + r0] = v2 over <p0,r0>
"""
    )
    assert "\n    v0: f32<p0,r0> = load" in print_program(program(*SWEPT, swept=True))
    assert "softmax" not in print_program(program(*FLAT), header=False)


CHANGES: list[Callable[[], TileProgram]] = [
    lambda: program(*FLAT, name="other"),
    lambda: program(*FLAT, swept=True),
    lambda: program(*FLAT, messages=("other",)),
    lambda: program(replace(LOAD, guard=(R - 1,)), *FLAT[1:]),
    lambda: program(replace(LOAD, guard=(R - 1,), fill=-float("inf")), *FLAT[1:]),
    lambda: program(replace(LOAD, guard=(R - 1,), fill=0.0), *FLAT[1:]),
    lambda: program(LOAD, replace(MAX, monoid="min"), *FLAT[2:]),
    lambda: program(LOAD, replace(MAX, monoid="argmax", dtype=I64, linear=R), *FLAT[2:]),
    lambda: program(*FLAT[:4], replace(CHECK, guard=(R,)), STORE),
    lambda: program(*FLAT[:5], replace(STORE, guard=(R,))),
    lambda: program(*FLAT[:5], replace(STORE, span=(1,))),
    lambda: program(*FLAT, buffers=(*BUFFERS[:2], replace(BUFFERS[2], dtype=F32))),
    lambda: program(LOAD, MAX, replace(SUB, attrs=(("draw", 1),)), *FLAT[3:]),
    lambda: program(LOAD, MAX, replace(SUB, attrs=(("draw", True),)), *FLAT[3:]),
]


def test_different_programs_print_differently() -> None:
    texts = [print_program(program(*FLAT), header=False), *(print_program(make(), header=False) for make in CHANGES)]
    assert len(set(texts)) == len(texts)


BROKEN: list[tuple[str, Callable[[], TileProgram]]] = [
    ("P2", lambda: program(LOAD, LOAD)),
    ("P2", lambda: program(MAX, LOAD)),
    ("P2", lambda: program(LOAD, MAX, replace(SUB, args=(0, 9)))),
    ("P1", lambda: program(replace(LOAD, buffer=7))),
    ("P1", lambda: program(replace(LOAD, buffer=2))),
    ("P1", lambda: program(*FLAT[:5], replace(STORE, buffer=0))),
    ("P1", lambda: program(replace(LOAD, address=ix.axis(4)))),
    ("P1", lambda: program(replace(LOAD, address=P * ix.sym("s9")))),
    ("P1", lambda: program(*FLAT[:4], replace(CHECK, code=2))),
    ("P1", lambda: program(*FLAT, messages=("",))),
    ("P1", lambda: program(*FLAT, dims=(DIMS[0], replace(DIMS[1], name="p0")))),
    ("P1", lambda: program(*FLAT, dims=(DIMS[0], replace(DIMS[1], role="col")))),
    ("P1", lambda: program(*FLAT, dims=(DIMS[0], replace(DIMS[1], extent=P)))),
    ("P1", lambda: program(*FLAT, schedule=parse_schedule("tile=q7:4"))),
    ("P1", lambda: program(LOAD, replace(MAX, dims=(0,), span=(1,)))),
    ("P1", lambda: program(LOAD, replace(MAX, monoid="median"))),
    ("P1", lambda: program(LOAD, MAX, replace(SUB, op="sum"))),
    ("P3", lambda: program(replace(LOAD, span=(0,)))),
    ("P3", lambda: program(replace(LOAD, span=(1, 0)))),
    ("P3", lambda: program(LOAD, MAX, replace(SUB, span=(0,)))),
    ("P3", lambda: program(*FLAT[:5], replace(STORE, span=(0,)))),
    ("P3", lambda: program(LOAD, *SWEPT, swept=True)),
    ("P4", lambda: program(replace(LOAD, dtype=BF16))),
    ("P4", lambda: program(replace(LOAD, dtype=I64))),
    ("P4", lambda: program(LOAD, MAX, replace(SUB, dtype=B1))),
    ("P4", lambda: program(LOAD, MAX, replace(SUB, args=(0,)))),
    ("P4", lambda: program(LOAD, MAX, replace(SUB, op="bit_and"))),
    ("P4", lambda: program(LOAD, Let(1, "cast", (0,), I64, (0, 1)))),
    ("P4", lambda: program(LOAD, Let(1, "round", (0,), F32, (0, 1), (("dtype", F32),)))),
    ("P4", lambda: program(INDEX, replace(STORE, value=3))),
    ("P4", lambda: program(LOAD, Load(5, 0, ix.value(0), F32, (0, 1)))),
    ("P4", lambda: program(LOAD, replace(MAX, monoid="argmax", dtype=I64))),
    ("L2", lambda: program(Let(1, "const", (), F32, (), (("value", 1.0),)), Store(2, R, 1, (1,)))),
    (
        "L2",
        lambda: program(
            Sweep(1, (INDEX, LOAD)), Sweep(1, (Load(6, 0, P, F32, (0,)), Store(2, P, 6, (0,)))), swept=True
        ),
    ),
    ("L4", lambda: program(Sweep(1, (LOAD,)), Sweep(1, (replace(SUB, args=(0, 0)),)), swept=True)),
    ("L4", lambda: program(Sweep(1, (LOAD, MAX, SUB)), swept=True)),
    ("L4", lambda: program(Sweep(1, (Sweep(1, (LOAD,)),)), swept=True)),
    (
        "L4",
        lambda: program(Sweep(1, (INDEX,)), Load(7, 1, P, I64, (0,)), Reduce(8, "sum", 7, (1,), I64, (0,)), swept=True),
    ),
    ("L5", lambda: program(LOAD, replace(MAX, dtype=DType.f64))),
    ("L5", lambda: program(LOAD, Scan(1, "cumsum", 0, 1, DType.f64, (0, 1)))),
]


@pytest.mark.parametrize("case", range(len(BROKEN)))
def test_broken_programs_are_found(case: int) -> None:
    invariant, make = BROKEN[case]
    with pytest.raises(CheckFailed) as found:
        check_program(make())
    assert found.value.invariant == invariant, str(found.value)


def test_a_result_exists_after_the_outermost_sweep_over_its_dims() -> None:
    dims = (*DIMS, Dim("r1", ix.const(3), "row"))
    load = Load(0, 0, P * 5 + R, F32, (0, 1))
    total = Reduce(1, "sum", 0, (1, 2), F32, (0,))
    scaled = Let(2, "neg", (1,), F32, (0,))
    outer = Sweep(1, (Sweep(2, (load, total)),))
    end = Store(2, P, 2, (0,))
    check_program(program(outer, scaled, end, swept=True, dims=dims))
    with pytest.raises(CheckFailed, match="left its scope"):
        check_program(program(Sweep(1, (Sweep(2, (load, total)), scaled)), swept=True, dims=dims))
    row = Reduce(1, "sum", 0, (2,), F32, (0, 1))
    # an accumulator that would have to live across a sweep its result still varies over
    with pytest.raises(CheckFailed, match="lives across"):
        check_program(program(Sweep(2, (Sweep(1, (load, row)),)), swept=True, dims=dims))
