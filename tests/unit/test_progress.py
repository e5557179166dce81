"""Progress of a compilation on a terminal, and the word about a step that takes very long."""

from __future__ import annotations

import logging
import re
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import plait
from plait.runtime import build, follow, progress, report
from plait.runtime.follow import doing, watching
from plait.runtime.progress import OfGraph, showing
from tests.terminal import Terminal


def two_sums(x: torch.Tensor) -> torch.Tensor:
    return (x - x.sum(-1, keepdim=True)).exp()


@pytest.fixture
def slow_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A C++ compiler that takes its time."""
    path = tmp_path / "slow"
    path.write_text('#!/bin/sh\nif [ "$1" != --version ]; then sleep 1; fi\nexec g++ "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("CXX", str(path))
    build.compiler_identity.cache_clear()
    torch._dynamo.reset()
    yield
    build.compiler_identity.cache_clear()


@pytest.mark.usefixtures("slow_compiler")
def test_a_slow_build_is_named_with_its_graph_stage_kernel_and_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "STALL_SECONDS", 0.3)
    torch.compile(lambda x: x + 1, backend="aot_eager")(torch.zeros(1))  # the first time, torch starts a thread itself
    threads = threading.active_count()
    with caplog.at_level(logging.WARNING, "plait"):
        plait.compile(two_sums, cache_dir="0", strict=True)(torch.randn(64, 64))
    said = [r.getMessage() for r in caplog.records if r.name == "plait"]
    record = report.last()
    assert record is not None
    pattern = (
        rf"plait: {record.name} \(inference\) is still building k0_\w+ after \d+ s\n  at .*test_progress.py:\d+ .*"
    )
    assert any(re.fullmatch(pattern, words) for words in said), said
    assert threading.active_count() == threads and follow._watches == ()


def test_one_stuck_step_is_named_though_others_move(caplog: pytest.LogCaptureFixture) -> None:
    mine = OfGraph(report.CompileRecord("graph7", "backward"), None, "model.py:3 y = f(x)")
    mine.stall_seconds = 0.2
    over = threading.Event()

    def stuck() -> None:
        with doing("building", "k1_stuck"):
            over.wait(30)

    with caplog.at_level(logging.WARNING, "plait"), mine.shown(), watching(mine):
        thread = threading.Thread(target=stuck)
        thread.start()
        for _ in range(400):
            with doing("building", "k2_quick"):
                over.wait(0.005)
            if caplog.records:
                break
        over.set()
        thread.join()
    assert "graph7 (backward) is still building k1_stuck" in caplog.records[0].getMessage()
    assert "at model.py:3 y = f(x)" in caplog.records[0].getMessage()


@pytest.mark.usefixtures("slow_compiler")
@pytest.mark.parametrize("way", ["explain", "command", "unasked", "no terminal"])
def test_progress_is_shown_on_a_terminal_to_who_asks(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Terminal(way != "no terminal")
    monkeypatch.setattr(progress, "_EVERY", 0.05)
    monkeypatch.setattr(sys, "stderr", shown)
    run = plait.compile(two_sums, cache_dir="0", strict=True, explain=way in ("explain", "no terminal"))
    if way == "command":
        with showing():
            run(torch.randn(64, 64))
    else:
        run(torch.randn(64, 64))
    if way in ("explain", "command"):
        assert re.search(r"\rgraph\d+ \(inference\): 0 of 1 built, \d s", shown.text)
        assert shown.text.endswith("\r"), "the line is taken away at the end"
    else:
        assert shown.text == ""


def test_what_is_left_is_guessed_from_what_is_built() -> None:
    mine = OfGraph(report.CompileRecord("graph1"), None, "")
    with watching(mine):
        with doing("planning"):
            assert mine.line().startswith("graph1 (inference): planning, ")
        mine.expects(5)
        assert mine.left() is None
        with doing("building", "k1"):
            pass
    mine._took["building"] = 2.0
    assert mine.left() == 8.0
    assert mine.line() == "graph1 (inference): 1 of 5 built, 0 s, about 8 s left"
