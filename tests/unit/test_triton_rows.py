"""Loop bounds from masks that compare positions with numbers of the rows: values in Triton's interpreter, the text, and what it
compiles to for sm_90 (no card is needed)."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import triton_row_cases
import triton_row_forward
from triton_module import interpreted
from triton_resources import compile_sm90

from plait.emit.triton import emit_triton
from tests.attention_rows import ROWS, not_in_window, planned
from tests.attention_variants import Sizes, qkv

pytestmark = pytest.mark.timeout(300)  # the first case waits for all of them
LARGE = Sizes(b=2, h=8, m=2040, n=2048, d=64)


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    return interpreted("triton_row_cases.py")


@pytest.mark.parametrize("name", list(triton_row_cases.ROWS))
def test_case(name: str, results: dict[str, str]) -> None:
    assert name in results, results[""]
    assert not results[name], results[name]


@pytest.fixture(scope="module")
def forward() -> dict[str, str]:
    return interpreted("triton_row_forward.py")


@pytest.mark.parametrize("name", triton_row_forward.CASES)
def test_planned_attention(name: str, forward: dict[str, str]) -> None:
    assert name in forward, forward[""]
    assert not forward[name], forward[name]


def _text(name: str) -> str:
    return emit_triton(triton_row_cases.ROWS[name]().make.program(name), "kernel").text


def _planned(name: str) -> str:
    (launch,) = (launch for launch in planned(name, LARGE).launches if launch.parts)
    (part,) = launch.parts
    return emit_triton(part.program, "kernel").text


def test_a_loop_ends_where_the_last_row_does_and_masks_from_the_first_on() -> None:
    before, full, cut = _text("rows_le").split("    for ")
    assert "_most = tl.reduce(tl.where(p1_ok, " in before, "rows beyond the extent do not count"
    assert "tl.minimum(53, " in before and "_least + 1), 0) & -16" in before
    assert ">= r0" not in full
    assert "_most + 1), 16" in cut and ">= r0[None, :]" in cut


def test_a_loop_starts_where_the_first_row_does() -> None:
    _, cut, full = _text("rows_ge").split("    for ")[:3]
    assert "tl.range(tl.maximum(" in cut and "_least, 0) & -16" in cut
    assert "r0[None, :] >=" in cut
    assert "r0[None, :] >=" not in full


def test_both_sides_bound_one_loop() -> None:
    text = _text("rows_between")
    assert len(text.split("    for ")) == 4
    assert "in tl.range(r0_from, r0_full, 16" in text


def test_a_number_of_the_batch_needs_no_reduction() -> None:
    before = _text("lengths_i32").split("    for ")[0]
    assert "tl.reduce" not in before and "_most = v" in before


def test_few_rows_take_one_loop() -> None:
    """As decoding does: its time is the loads', which a second loop would begin to wait for again."""
    loops = _text("few_rows").split("    for ")[1:]
    assert len(loops) == 1
    assert "tl.range(0, tl.minimum(53, " in loops[0] and "_most), 16" in loops[0]


def test_numbers_are_compared_in_32_bits_and_do_not_overflow() -> None:
    text = _text("rows_gt")
    assert "tl.cast(tl.minimum(tl.maximum(v0, -53), 53), tl.int32)" in text
    assert "int64" not in text.split("    for ", 1)[1]


def test_what_the_mask_does_not_hide_keeps_every_tile() -> None:
    text = _text("sum_besides")
    assert "in tl.range(r0_full, 53, 16" in text
    assert "_most" not in text


def test_blocks_with_the_last_positions_come_first() -> None:
    assert "p1_tile = (5) - 1 - (" in _text("rows_le")


@pytest.mark.parametrize("name", list(ROWS))
def test_planned_attention_has_bounds(name: str) -> None:
    _, *loops = _planned(name).split("    for ")
    assert len(loops) >= 2
    assert "_most" in loops[-1].split("\n")[0] or "_least" in loops[0].split("\n")[0]
    masked = [">=" in loop for loop in loops]
    assert masked in ([False, True], [True, False, True]), masked


def test_a_conjunction_that_is_denied_bounds_loops_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROWS, "not_in_window", (not_in_window, qkv))
    loops = _planned("not_in_window").split("    for ")[1:]
    assert "r0_from" in loops[0] and "r0_full" in loops[1] and len(loops) == 3


@pytest.mark.parametrize("name", ["grouped_by_position", "by_length", "window_by_position"])
def test_nothing_spills(name: str) -> None:
    (launch,) = (launch for launch in planned(name, LARGE).launches if launch.parts)
    got = compile_sm90(emit_triton(launch.parts[0].program, "kernel"))
    assert got.stack == 0
    assert got.registers <= 255
