"""Gluon streams under masks that compare positions with numbers of the rows: values in the emulator, the text, and what it
compiles to for sm_90 (no card is needed)."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from gluon_resources import compile_gluon, halves_that_share_a_predicate, stores_over_barriers

from plait.emit.gluon import GluonSource, emit_gluon
from plait.emit.gluon_shape import loads_beside_factors
from plait.options import Options
from plait.oracle.compare import FAIL, compare
from plait.oracle.reference import reference
from plait.runtime import assemble, report
from plait.tile.program import TileProgram
from tests.attention_rows import RANGES, ROWS, arguments, planned
from tests.attention_variants import Sizes
from tests.unit import test_gluon_values
from tests.unit.test_gluon_values import emulated

LARGE = Sizes(b=2, h=8, m=2040, n=2048, d=64)


@pytest.mark.parametrize("name", list(ROWS))
def test_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, args = ROWS[name][0], arguments(name, Sizes(b=3, h=2, m=520, n=392, d=64))
    verdict = compare(emulated(fn, args, monkeypatch), fn(*args), reference(fn, args), name=name)
    assert verdict.status != FAIL, verdict.message


@pytest.mark.parametrize("name", list(RANGES))
def test_ranges(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """None, one and all keys, about tiles' edges, crossed, out of range; more tiles than the ring of four has."""
    fn, args = RANGES[name][0], arguments(name, Sizes(b=1, h=1, m=140, n=700, d=64))
    sources: list[GluonSource] = []

    def noted(program: TileProgram, kernel: str) -> GluonSource:
        sources.append(emit_gluon(program, kernel))
        return sources[-1]

    monkeypatch.setattr(test_gluon_values, "emit_gluon", noted)
    verdict = compare(emulated(fn, args, monkeypatch), fn(*args), reference(fn, args), name=name)
    assert verdict.status != FAIL, verdict.message
    assert [s.by_rows for s in sources] == [True]


def _text(name: str) -> str:
    (launch,) = (launch for launch in planned(name, LARGE).launches if launch.parts)
    assert not loads_beside_factors(launch.parts[0].program)
    return emit_gluon(launch.parts[0].program, "kernel").text


def test_tiles_are_counted_before_the_groups_part() -> None:
    kernel = _text("grouped_by_position").split("def kernel(")[1]
    assert kernel.count(" = row_ends(b0_ptr, p2_start") == 2, "of the rows of both groups"
    assert "_most + 1) - first + 127) >> 7), 1)" in kernel.split("high = ")[0]


def test_a_length_is_read_once() -> None:
    kernel = _text("by_length").split("def kernel(")[1]
    assert kernel.count(" = row_ends(") == 1


def test_cut_tiles_before_the_whole_ones_are_tiles_that_come() -> None:
    assert ", count)" in _text("window_by_position").split("    low = ")[1].split("\n")[0]


@pytest.mark.parametrize(
    "name", ["grouped_by_position", "by_length", "causal_by_length", "window_by_position", "prefix_until"]
)
def test_nothing_spills_and_no_barrier_is_stored_over(name: str) -> None:
    (launch,) = (launch for launch in planned(name, LARGE).launches if launch.parts)
    made = compile_gluon(emit_gluon(launch.parts[0].program, "kernel"))
    assert made.stack == made.counts["STL"] == made.counts["LDL"] == 0
    assert not stores_over_barriers(made.sass)


@pytest.mark.parametrize("name", ["causal_by_length", "causal_until"])
def test_tiles_are_not_counted_in_halves_of_registers(name: str) -> None:
    """Divided by the tile, small counts became sixteen bits wide, and "more than one" was asked of the wrong half."""
    (launch,) = (launch for launch in planned(name, Sizes(b=2, h=4, m=333, n=477, d=64)).launches if launch.parts)
    assert not halves_that_share_a_predicate(compile_gluon(emit_gluon(launch.parts[0].program, "kernel")).sass)


def test_halves_that_share_a_predicate_are_seen() -> None:
    assert halves_that_share_a_predicate("VIMNMX.S16x2 R6, P1, P1, R6, 0x1, !PT ;") == ["P1"]
    assert not halves_that_share_a_predicate(
        "VIMNMX.S16x2 R3, R8, 0x10001, !PT ; VIMNMX.S16x2 R6, P1, P2, R6, 0x1, !PT ;"
    )


@pytest.mark.parametrize(("asked", "built"), [("measured", False), ("all", True)])
def test_such_loops_are_built_where_every_form_is_asked_for(
    asked: str, built: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None has run on a card yet."""
    monkeypatch.setattr(assemble, "can_run", lambda device: True)
    (launch,) = (launch for launch in planned("by_length", LARGE).launches if launch.parts)
    with report.compiling("inference"):
        found = assemble._in_gluon(launch, "cuda", Options.make(None, {"gluon": asked}))
    assert (found is not None) is built
