"""What tests/gluon_emulator finds in kernels whose groups of warps do not agree: emitted text, changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.emit.gluon import GluonSource, emit_gluon
from tests.attention_rows import ROWS, arguments
from tests.attention_variants import Sizes
from tests.gluon_emulator import Stuck
from tests.unit import test_gluon_values
from tests.unit.test_gluon_values import emulated

SIZES = Sizes(b=2, h=2, m=140, n=1000, d=64)
WAIT = "    mbarrier.wait(left_ready, 0)\n"
TILES = "    for t in range(count):"
READ = "        mbarrier.arrive(right_free.index(slot), count=1)\n"
STEPS = "for t in range(1, count):"


def run(changes: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths of 666 (more tiles than the ring has) and 0, by a module with texts in place of others."""

    def changed(program: Any, name: str) -> GluonSource:
        source = emit_gluon(program, name)
        text = source.text
        for old, new in changes.items():
            assert old in text, old
            text = text.replace(old, new)
        return replace(source, text=text)

    monkeypatch.setattr(test_gluon_values, "emit_gluon", changed)
    emulated(ROWS["by_length"][0], arguments("by_length", SIZES), monkeypatch)


def test_as_emitted_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run({}, monkeypatch)


def test_a_barrier_that_no_group_is_given_is_overwritten_under_slower_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    early = {WAIT: "", "values_free, left_ready,": "values_free,", "    gl.warp_spec": f"{WAIT}    gl.warp_spec"}
    with pytest.raises(Stuck, match="slower warps"):
        run(early, monkeypatch)


@pytest.mark.parametrize(
    ("changes", "error", "why"),
    [
        ({TILES: "    for t in range(count - 1):"}, Stuck, "every group waits"),
        ({TILES: "    for t in range(count + 1):"}, AssertionError, "nobody waits for"),
        ({READ: ""}, Stuck, "every group waits"),
        # of the second group alone
        ({STEPS: "for t in range(1, count + p2_start // 64 % 2):"}, Stuck, "every group waits"),
        ({STEPS: "for t in range(1, count - p2_start // 64 % 2):"}, AssertionError, "half over"),
    ],
)
def test_groups_that_count_other_steps(
    changes: dict[str, str], error: type[Exception], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(error, match=why):
        run(changes, monkeypatch)
