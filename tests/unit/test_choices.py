"""Remembered choices: what is kept is found by others, whatever else is in the file or the folder, and is not timed again."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import BadOption
from plait.options import Options
from plait.runtime import choices as module
from plait.runtime import report, tune
from plait.runtime.cache import Cache
from plait.runtime.choices import (
    Choice,
    Choices,
    Note,
    choices_for,
    content_key,
    parse_choice,
    parse_choices,
    read_file,
)
from plait.runtime.tune import Tuned

KEY, OTHER = "0" * 31 + "1", "0" * 31 + "2"
CHOICE = Choice(
    KEY, "k0_exp", (("form=flat tile=p0:64 warps=8", 12.5), ("form=flat tile=p0:64 warps=4", 13.25)), "2026-11-30"
)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    report.reset()
    yield
    report.reset()


def choices(home: pathlib.Path, device: str = "Card X 9.0") -> Choices:
    """As another process has it."""
    return Choices(Cache(str(home)), device)


def the_file(home: pathlib.Path) -> pathlib.Path:
    return home / "tuned" / "Card_X_9.0.txt"


def test_a_choice_is_a_line_and_found_by_others(tmp_path: pathlib.Path) -> None:
    one, two = choices(tmp_path / "c"), choices(tmp_path / "c")
    assert one.get(KEY) is None and two.get(KEY) is None
    one.put(CHOICE)
    assert two.get(KEY) == CHOICE and choices(tmp_path / "c").get(KEY) == CHOICE
    assert choices(tmp_path / "c", "Card Y 9.0").get(KEY) is None
    path = the_file(tmp_path / "c")
    assert one.path == str(path)
    head, line = path.read_text().splitlines()
    assert head.startswith("# plait tuned 1, Card X 9.0: ")
    times = "12.500; 13.250 form=flat tile=p0:64 warps=4"
    assert line == f"{KEY}\tk0_exp\tform=flat tile=p0:64 warps=8\t{times}\t2026-11-30"
    assert (path.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)


def test_the_last_line_wins_and_files_are_joined_by_writing_one_behind_the_other(tmp_path: pathlib.Path) -> None:
    one = choices(tmp_path / "c")
    one.put(CHOICE)
    newer = Choice(KEY, "k0_exp", tuple(reversed(CHOICE.times_us)), "2026-12-01")
    one.put(newer)
    one.put(Choice(OTHER, "k1", (("gluon", 1.0),), "2026-11-30"))
    assert choices(tmp_path / "c").get(KEY) == newer == one.get(KEY)
    text = the_file(tmp_path / "c").read_bytes()
    assert parse_choices(text + module.file_text("another card", [CHOICE]).encode())[0][KEY] == CHOICE
    assert list(parse_choices(text)[0]) == [KEY, OTHER]


BAD: dict[str, str] = {
    "words": "hello world",
    "no time": str(CHOICE).replace("12.500", "fast"),
    "a time of nothing": str(CHOICE).replace("12.500", "0"),
    "no number": str(CHOICE).replace("13.250", "nan"),
    "another key": str(CHOICE).replace(KEY, "../../etc/passwd"),
    "no date": str(CHOICE).rpartition("\t")[0] + "\t",
    "a field too many": str(CHOICE) + "\tmore",
    "two lines in one": str(CHOICE)[:50] + str(CHOICE),
    "bytes": str(CHOICE).replace("k0_exp", "k0\x1b[2J"),
    "another alphabet": str(CHOICE).replace("k0_exp", "k\u00e9"),
    "no end": str(CHOICE).replace("k0_exp", "k" * 10000),
}


@pytest.mark.parametrize("name", list(BAD))
def test_a_line_that_cannot_be_read_is_counted_and_passed_over(name: str, tmp_path: pathlib.Path) -> None:
    choices(tmp_path / "c").put(Choice(OTHER, "k1", (("gluon", 1.0),), "2026-11-30"))
    with the_file(tmp_path / "c").open("a") as out:
        out.write(f"{BAD[name]}\n{CHOICE}\n")
    found = choices(tmp_path / "c")
    assert found.get(KEY) == CHOICE and found.get(OTHER) is not None
    assert (found.stats.bad_lines, found.stats.errors) == (1, 0)


@given(st.binary(max_size=400))
def test_no_bytes_break_it(noise: bytes) -> None:
    found, bad = parse_choices(noise + b"\n" + str(CHOICE).encode() + b"\n" + noise)
    assert found == {KEY: CHOICE} and bad <= noise.count(b"\n") * 2 + 1


def test_every_cut_of_a_line_is_none_or_whole() -> None:
    line = str(CHOICE)
    assert parse_choice(line) == CHOICE
    for end in range(len(line)):
        assert parse_choices(line[:end].encode()) == ({}, 0)  # may be being written
        found, bad = parse_choices(f"{line[:end]}\n{line}".encode())
        assert found == {KEY: CHOICE} and bad == (end > 0)


def test_a_line_that_was_broken_off_does_not_spoil_the_next(tmp_path: pathlib.Path) -> None:
    one = choices(tmp_path / "c")
    one.put(CHOICE)
    os.truncate(the_file(tmp_path / "c"), the_file(tmp_path / "c").stat().st_size - 5)
    one.put(Choice(OTHER, "k1", (("gluon", 1.0),), "2026-11-30"))
    found = choices(tmp_path / "c")
    assert found.get(OTHER) is not None and found.get(KEY) is None and found.stats.bad_lines == 1


def _link(path: pathlib.Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def _fifo(path: pathlib.Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _open_to_others(path: pathlib.Path) -> None:
    path.chmod(0o666)


def _second_name(path: pathlib.Path) -> None:
    os.link(path, path.parent.parent / "second")


@pytest.mark.parametrize("spoil", [_link, _fifo, _open_to_others, _second_name])
def test_a_file_that_is_not_ours_alone_is_not_read_and_is_replaced(
    spoil: Callable[[pathlib.Path], None], tmp_path: pathlib.Path
) -> None:
    choices(tmp_path / "c").put(CHOICE)
    spoil(the_file(tmp_path / "c"))
    one = choices(tmp_path / "c")
    assert one.get(KEY) is None and one.stats.errors == 1
    one.put(Choice(OTHER, "k1", (("gluon", 1.0),), "2026-11-30"))
    found = choices(tmp_path / "c")
    assert found.get(OTHER) is not None and found.get(KEY) is None and found.stats.errors == 0
    for name in ("elsewhere", "second"):
        outside = tmp_path / "c" / name
        assert not outside.exists() or OTHER not in outside.read_text()


def test_a_folder_that_others_may_write_or_none_at_all_keeps_choices_for_the_process(tmp_path: pathlib.Path) -> None:
    (tmp_path / "c" / "tuned").mkdir(parents=True, mode=0o700)
    (tmp_path / "c").chmod(0o700)
    (tmp_path / "c" / "tuned").chmod(0o777)
    for one in (choices(tmp_path / "c"), Choices(Cache(None), "Card X 9.0")):
        one.put(CHOICE)
        assert one.get(KEY) == CHOICE
    assert not the_file(tmp_path / "c").exists()
    assert Choices(Cache(None), "Card X 9.0").path is None


def test_a_full_disk_is_counted(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    one = choices(tmp_path / "c")
    assert one.cache.usable
    monkeypatch.setattr(module.folders, "write_all", full)
    one.put(CHOICE)
    assert one.get(KEY) == CHOICE and "No space" in one.stats.last_error and one.stats.stores == 0


def test_a_large_file_is_written_anew_with_each_choice_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LARGE_BYTES", 2000)
    monkeypatch.setattr(module, "_MOST_KEPT", 3)
    one, two = choices(tmp_path / "c"), choices(tmp_path / "c")
    two.put(Choice(OTHER, "k1", (("gluon", 1.0),), "2026-11-30"))
    for _ in range(40):
        one.put(CHOICE)
    assert the_file(tmp_path / "c").stat().st_size < 2400
    assert {c for c in (KEY, OTHER) if choices(tmp_path / "c").get(c)} == {KEY, OTHER}
    for n in range(40):
        one.put(Choice(f"{n + 16:032x}", "k", CHOICE.times_us, "2026-11-30"))
    kept, bad = parse_choices(the_file(tmp_path / "c").read_bytes())
    assert bad == 0 and f"{39 + 16:032x}" in kept and KEY not in kept
    assert [p.name for p in (tmp_path / "c" / "tuned").iterdir()] == ["Card_X_9.0.txt"]


WRITER = """
import sys
from plait.runtime import choices as m
from plait.runtime.cache import Cache
from plait.runtime.choices import Choice, Choices
if sys.argv[3] == "rewrites":
    m._LARGE_BYTES = 4000
one = Choices(Cache(sys.argv[1]), "Card X 9.0")
for n in range(60):
    one.put(Choice(f"{int(sys.argv[2]) * 1000 + n:032x}", "k", (("gluon", 1.0 + n), ("form=flat " * 10, 2.0)), "2026-11-30"))
assert one.stats.errors == 0 and one.stats.stores == 60, one.stats
"""


@pytest.mark.parametrize("way", ["appends", "rewrites"])
def test_writers_at_the_same_time_lose_nothing(way: str, tmp_path: pathlib.Path) -> None:
    folder = str(tmp_path / "c")
    children = [subprocess.Popen([sys.executable, "-c", WRITER, folder, str(n), way]) for n in range(1, 5)]
    assert [c.wait(timeout=240) for c in children] == [0] * 4
    found, bad = parse_choices(the_file(tmp_path / "c").read_bytes())
    assert bad == 0 and set(found) == {f"{n * 1000 + k:032x}" for n in range(1, 5) for k in range(60)}


def test_keys_tell_sources_and_devices_apart() -> None:
    keys = {
        content_key(d, s) for d in ("Card X 9.0", "Card X 8.0") for s in ([("a", 1)], [("a", 2)], [("a", 1), ("b", 1)])
    }
    assert len(keys) == 6 and content_key("Card X 9.0", [("a", 1)]) in keys
    assert all(module._KEY.fullmatch(k) for k in keys)


# --------------------------------------------------------------------------------------------------------- in a process
class Timed:
    """A kernel that counts its launches."""

    def __init__(self, ms: float) -> None:
        self.ms, self.launches = ms, 0

    def bind(self, buffers: Any, symbols: Any, messages: Any) -> Callable[[Any], None]:
        def go(slots: Any) -> None:
            self.launches += 1

        go.of = self  # type: ignore[attr-defined]
        return go


def tuned_of(ms: list[float], note: Note | None, monkeypatch: pytest.MonkeyPatch) -> Tuned:
    """Timed on a clock of its own."""
    kernels = [Timed(t) for t in ms]
    monkeypatch.setattr(tune, "_time_ms", lambda go, slots: go.of.ms)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return Tuned(kernels, [f"v{k}" for k in range(len(ms))], note)


def test_what_is_timed_is_remembered_and_then_taken_without_timing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def note() -> Note:
        return Note(choices(tmp_path / "c"), KEY, "k0 exp")

    first = tuned_of([0.3, 0.1, 0.2], note(), monkeypatch)
    early = tuned_of([0.3, 0.1, 0.2], note(), monkeypatch)  # built before the first was timed
    launch = first.bind((), (), ())
    launch([])
    assert (first.choice, first.remembered) == (1, False)
    assert [k.launches for k in first.variants] == [1, 2, 1]  # type: ignore[attr-defined]
    early.bind((), (), ())([])
    assert (early.choice, early.remembered, [k.launches for k in early.variants]) == (1, True, [0, 1, 0])  # type: ignore[attr-defined]
    again = tuned_of([0.3, 0.1, 0.2], note(), monkeypatch)
    assert (again.choice, again.remembered) == (1, True)
    assert again.times_ms == pytest.approx({"v0": 0.3, "v1": 0.1, "v2": 0.2})
    again.bind((), (), ())([])
    assert [k.launches for k in again.variants] == [0, 1, 0]  # type: ignore[attr-defined]
    kept = note().known(["v1"])
    assert kept is not None and (kept.name, kept.kernel) == ("v1", "k0_exp")


def test_a_schedule_that_is_not_there_is_timed_anew(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choices(tmp_path / "c").put(CHOICE)
    found = tuned_of([0.3, 0.1], Note(choices(tmp_path / "c"), KEY, "k"), monkeypatch)
    assert found.choice is None
    found.bind((), (), ())([])
    assert found.choice == 1 and choices(tmp_path / "c").get(KEY) != CHOICE


def test_without_a_note_nothing_is_kept(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tuned_of([0.3, 0.1], None, monkeypatch)
    found.bind((), (), ())([])
    assert (found.choice, found.remembered) == (1, False)


def test_an_interrupt_while_timing_keeps_nothing_and_the_kernel_can_be_timed_later(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tuned_of([0.3, 0.1], Note(choices(tmp_path / "c"), KEY, "k"), monkeypatch)
    clock = tune._time_ms

    def stopped(go: Any, slots: Any) -> float:
        raise KeyboardInterrupt

    launch = found.bind((), (), ())
    monkeypatch.setattr(tune, "_time_ms", stopped)
    with pytest.raises(KeyboardInterrupt):
        launch([])
    assert found.choice is None and choices(tmp_path / "c").get(KEY) is None
    monkeypatch.setattr(tune, "_time_ms", clock)
    launch([])
    assert found.choice == 1


# ------------------------------------------------------------------------------------------------------------ the option
def test_the_option_says_where_choices_come_from(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = {"cache_dir": str(tmp_path / "c")}
    assert choices_for(Options.make(None, {**folder, "tuned": "off"}), "Card X 9.0") is None
    own = choices_for(Options.make(None, folder), "Card X 9.0")
    assert own is not None and own is choices_for(Options.make(None, folder), "Card X 9.0")
    own.put(Choice(KEY, "k", (("gluon", 1.0),), "2026-11-30"))
    path = tmp_path / "mine.txt"
    path.write_text(f"{CHOICE}\nnonsense\n")
    path.chmod(0o644)
    before = path.read_bytes()
    with pytest.warns(UserWarning, match="passes over 1 of the lines of .*mine.txt"):
        both = choices_for(Options.make(None, {**folder, "tuned": path}), "Card X 9.0")
    assert both is not None and both.get(KEY) == CHOICE and both.get(OTHER) is None
    both.put(Choice(OTHER, "k1", (("gluon", 1.0),), "2026-11-30"))
    assert path.read_bytes() == before and choices(tmp_path / "c").get(OTHER) is not None


def test_a_file_that_is_not_there_or_cannot_be_read_is_a_bad_option(tmp_path: pathlib.Path) -> None:
    for value in ("remembr", str(tmp_path), 3, None, ""):
        with pytest.raises(BadOption, match="tuned is"):
            Options.make(None, {"tuned": value})
    with pytest.raises(BadOption) as said:
        Options.make(None, {"tuned": "remembr"})
    assert "did you mean 'remember'" in str(said.value.hint)
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "gone", tmp_path / "fifo"):
        with pytest.raises(BadOption, match="cannot be read"):
            read_file(str(path))
