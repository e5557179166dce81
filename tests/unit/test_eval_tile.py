"""The tile evaluator: values against torch, and every fault it must see."""

from __future__ import annotations

import pytest
import torch
from tile_make import B1, F32, I64, Make

from plait.errors import CheckFailed
from plait.ir import index as ix
from plait.oracle.eval_tile import TileReport, flat_view, run_tile
from plait.tile.check import check_program
from plait.tile.program import Check, Let, Load, Store

torch.manual_seed(0)
P, R = ix.axis(0), ix.axis(1)


def run(make: Make, **kw: object) -> TileReport:
    program = make.program()
    check_program(program)
    given = [t for b, t in zip(program.buffers, make.tensors, strict=True) if b.role != "scratch"]
    return run_tile(program, [flat_view(t) for t in given], **kw)  # type: ignore[arg-type]


def softmax(swept: bool) -> tuple[Make, torch.Tensor, torch.Tensor]:
    x, y = torch.randn(3, 5), torch.full((3, 5), float("nan"))
    m = Make("p0 r0", [3, 5], "form=swept tile=p0:1,r0:8" if swept else "form=flat tile=p0:1,r0:all")

    def elem() -> int:
        return m.load(x, P * 5 + R)

    if not swept:
        v = elem()
        e = m.let("exp", m.let("sub", v, m.reduce("max", v, (1,))))
        m.store(y, P * 5 + R, m.let("div", e, m.reduce("sum", e, (1,))))
        return m, x, y
    with m.sweep(1):
        top = m.reduce("max", elem(), (1,))
    with m.sweep(1):
        total = m.reduce("sum", m.let("exp", m.let("sub", elem(), top)), (1,))
    with m.sweep(1):
        m.store(y, P * 5 + R, m.let("div", m.let("exp", m.let("sub", elem(), top)), total))
    return m, x, y


@pytest.mark.parametrize("swept", [False, True])
def test_softmax_and_its_traffic(swept: bool) -> None:
    m, x, y = softmax(swept)
    report = run(m, complete=True)
    torch.testing.assert_close(y, torch.softmax(x, -1))
    assert report.failed == ()
    loads = [t for t in report.traffic if t.read_total]
    # the test loads through one buffer per load statement; each reads every element once
    assert [(t.read_unique, t.read_total, t.bytes_read) for t in loads] == [(15, 15, 60)] * (3 if swept else 1)
    out = report.traffic[-1]
    assert (out.written_unique, out.written_total, out.bytes_written) == (15, 15, 60)


def test_row_vector_is_read_once_a_row_but_counts_once() -> None:
    w, y = torch.randn(5), torch.zeros(3, 5)
    m = Make("p0 p1", [3, 5], "form=flat tile=p0:1,p1:all")
    m.store(y, P * 5 + R, m.let("neg", m.load(w, R)))
    m.body[-1] = Store(1, P * 5 + R, 1, (0, 1))
    report = run(m, complete=True)
    assert torch.equal(y, (-w).expand(3, 5))
    assert (report.traffic[0].read_unique, report.traffic[0].read_total) == (5, 15)


def test_argmax_reports_the_first_extreme_whatever_the_order() -> None:
    nan = float("nan")
    x = torch.tensor([[1.0, 7.0, 7.0, 0.0], [2.0, nan, 9.0, nan]])
    i, v = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    m = Make("p0 r0 r1", [2, 2, 2], "form=flat tile=p0:1,r0:all,r1:all")
    # the dims walk the transpose: r1 is the slow one of the linear index
    a, b, c = (ix.axis(k) for k in range(3))
    linear = c * 2 + b
    m.store(i, a, m.reduce("argmax", m.load(x, a * 4 + linear), (1, 2), linear))
    m.store(v, a, m.reduce("argmin", m.load(x, a * 4 + linear), (1, 2), linear))
    run(m)
    assert i.tolist() == [1, 1] and v.tolist() == [3, 1]


def test_guards_fills_rounding_and_holds() -> None:
    x, y = torch.randn(4), torch.zeros(6, dtype=torch.bfloat16)
    m = Make("p0", [6], "form=flat tile=p0:8")
    v = m.load(x, P - 1, guard=(P - 1, ix.const(4) - P), fill=2.5)
    h = len(m.types)
    m.spans[h], m.types[h] = (0,), B1
    m.body.append(Let(h, "holds", (), B1, (0,), (("guard", (P - 1, ix.const(4) - P)),)))
    m.store(y, P, m.let("where", h, v, m.const(-1.0)))
    run(m)
    want = torch.cat([torch.tensor([-1.0]), x, torch.tensor([-1.0])]).bfloat16()
    assert torch.equal(y, want)


def test_checks_report_codes_and_do_not_read() -> None:
    table, k, y = torch.arange(4.0), torch.tensor([3, -1, 9]), torch.zeros(3)
    m = Make("p0", [3], "form=flat tile=p0:4")
    v = m.load(k, P)
    at = ix.value(v)
    m.messages += ["below", "index out of range"]
    m.body.append(Check(at, ix.const(4), 2, (0,)))
    m.body.append(Check(at + 1, ix.const(11), 1, (0,)))
    m.store(y, P, m.load(table, at, guard=(at, ix.const(3) - at), fill=7.0))
    assert run(m).failed == (2,)
    assert y.tolist() == [3.0, 7.0, 7.0]


def test_random_values_are_philox() -> None:
    y, b = torch.zeros(1000), torch.zeros(1000, dtype=torch.int64)
    m = Make("p0", [1000], "form=flat tile=p0:8")
    seed, offset = m.const(2**40 + 17, I64), m.const(3, I64)
    for op, t in (("rand", F32), ("randbits", I64)):
        n = m._new((0,), t)
        attrs = (("draw", 1), ("dtype", t), ("linear", P))
        m.body.append(Let(n, op, (seed, offset), t, (0,), attrs))
        m.store(y if op == "rand" else b, P, n)
    run(m)
    assert 0.45 < y.mean() < 0.55 and y.min() >= 0 and y.max() < 1 and len(y.unique()) == 1000
    assert b.min() >= 0


def test_philox_known_answers() -> None:
    from plait.oracle.semantics import philox

    # the published known-answer vectors of Philox-4x32-10
    zero = philox(torch.zeros(1, dtype=torch.int64), 0, 0, 0)
    assert [int(w) for w in zero] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = philox(torch.tensor([-1]), -1, 0xFFFFFFFF, 0xFFFFFFFF)
    assert [int(w) for w in ones] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    linear = torch.tensor([0x85A308D3243F6A88 - 2**64])
    pi = philox(linear, 0x299F31D0A4093822, 0x13198A2E, 0x03707344)
    assert [int(w) for w in pi] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_scans_and_scratch() -> None:
    x, y, scratch = torch.randn(2, 4), torch.zeros(2, 4), torch.zeros(4)
    m = Make("p0 r0", [2, 4], "form=swept tile=p0:1,r0:4")
    s = m.buffer(scratch, "scratch")
    with m.sweep(1):
        m.body.append(Store(s, R, m.let("exp", m.load(x, P * 4 + R)), (0, 1)))
    with m.sweep(1):
        n = m._new((0, 1), F32)
        m.body.append(Load(n, s, R, F32, (0, 1)))
        m.store(y, P * 4 + R, m.scan("cumsum", n, 1))
    # scratch buffers come last
    order = [k for k, b in enumerate(m.buffers) if b.role != "scratch"] + [s]
    m.buffers, m.tensors = [m.buffers[k] for k in order], [m.tensors[k] for k in order]
    m.body = [_renumber(st, {old: new for new, old in enumerate(order)}) for st in m.body]
    run(m, complete=True)
    torch.testing.assert_close(y, x.exp().cumsum(-1))


def _renumber(s: object, to: dict[int, int]) -> object:
    from dataclasses import replace

    if hasattr(s, "body"):
        return replace(s, body=tuple(_renumber(x, to) for x in s.body))
    return replace(s, buffer=to[s.buffer]) if hasattr(s, "buffer") else s


def faulty(kind: str) -> Make:
    x, y = torch.zeros(4), torch.zeros(4)
    m = Make("p0", [4], "form=flat tile=p0:4")
    if kind == "load beyond":
        m.store(y, P, m.load(x, P + 1))
    elif kind == "store below":
        m.store(y, P - 1, m.load(x, P))
    elif kind == "stored twice":
        m.store(y, ix.floordiv(P, 2), m.load(x, P))
    elif kind == "never stored":
        m.store(y, P, m.load(x, P), guard=(ix.const(2) - P,))
    elif kind == "unwritten scratch":
        m.store(y, P, m.load(x, P, role="scratch"))
    elif kind == "wrong type":
        m.store(y, P, m.let("lt", m.load(x, P), m.load(x, P), dtype=F32))
    elif kind == "hidden dim":
        v = m.load(x, P)
        m.body[-1] = Load(v, 0, P, F32, ())
    return m


@pytest.mark.parametrize(
    ("kind", "invariant"),
    [
        ("load beyond", "L1"),
        ("store below", "L1"),
        ("stored twice", "L2"),
        ("never stored", "L2"),
        ("unwritten scratch", "L1"),
        ("wrong type", "P4"),
        ("hidden dim", "P3"),
    ],
)
def test_faults_are_seen(kind: str, invariant: str) -> None:
    m = faulty(kind)
    program = m.program()
    given = [t for b, t in zip(program.buffers, m.tensors, strict=True) if b.role != "scratch"]
    with pytest.raises(CheckFailed) as e:
        run_tile(program, given, complete=True)
    assert e.value.invariant == invariant
    if kind == "load beyond":
        assert "^^^" in e.value.window and "load b0" in e.value.window


def test_symbols() -> None:
    n = ix.sym("s0")
    x, y = torch.randn(7), torch.zeros(7)
    m = Make("p0", [n], "form=flat tile=p0:4", symbols=("s0",))
    m.store(y, P, m.load(x, n - 1 - P, elems=n), elems=n)
    run(m, symbols={"s0": 7}, complete=True)
    assert torch.equal(y, x.flip(0))
