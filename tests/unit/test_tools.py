"""The command line: exit codes, messages, files written; the bench's parent process with its children replaced."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from plait.errors import UserError
from plait.tools import bench
from plait.tools.cli import main
from plait.tools.demo import MAX_SENTENCES, read_sentences
from plait.tools.table import number, plain_table


def _plait(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


def test_the_package_is_a_command() -> None:
    done = subprocess.run([sys.executable, "-m", "plait", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Usage: python -m plait" in done.stdout, done.stderr


@pytest.mark.parametrize("words", [["--help"], ["demo", "-h"], ["bench", "-h"], ["doctor", "-h"], ["cache", "-h"]])
def test_help(words: list[str]) -> None:
    done = _plait(*words)
    assert done.exit_code == 0
    assert "Usage" in done.output


@pytest.mark.parametrize(
    "text, says",
    [
        (None, "cannot read"),
        (b"one line only\n", "two are needed"),
        (b"", "0 sentences"),
        (b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_demo_answers_a_bad_file_in_one_line(tmp_path: Path, text: bytes | None, says: str) -> None:
    path = tmp_path / "text.txt"
    if text is not None:
        path.write_bytes(text)
    done = _plait("demo", str(path))
    assert done.exit_code == 2
    assert says in done.output
    assert "Traceback" not in done.output


def test_sentences_are_trimmed_counted_and_limited(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("  one   two \n\n three\n")
    assert read_sentences(str(path)) == ["one two", "three"]
    path.write_text("x\n" * (MAX_SENTENCES + 1))
    with pytest.raises(UserError, match="more than"):
        read_sentences(str(path))
    assert 50 <= len(read_sentences(None)) <= 80


@pytest.mark.parametrize(
    "words", [["--peers", "nobody"], ["--suite", "nothing"], ["--device", "abacus"], ["--option", "nonsense"]]
)
def test_bench_refuses_a_wrong_command_line(words: list[str]) -> None:
    done = _plait("bench", *words)
    assert done.exit_code == 2, done.output


def test_bench_selects_by_expression() -> None:
    job = bench.Job(only="norm$|^soft")
    assert job.select(["rmsnorm", "softmax", "norms"]) == ["rmsnorm", "softmax"]
    with pytest.raises(UserError, match="matches no workload"):
        bench.Job(only="nothing").select(["rmsnorm"])
    with pytest.raises(UserError, match="regular expression"):
        bench.Job(only="(").select(["rmsnorm"])


ROW = {"name": "a", "device": "cpu", "plait_ms": 2.0, "eager_ms": 4.0, "verdict": "PASS", "plait_kernels": 1}


def _run_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcomes: list[Any]) -> tuple[int, dict[str, Any]]:
    def rows(job: bench.Job, names: list[str], result: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for o in outcomes:
            if isinstance(o, BaseException):
                raise o
            yield o

    monkeypatch.setattr(bench, "workload_names", lambda suite: ["a", "b"])
    monkeypatch.setattr(bench, "_rows", rows)
    path = tmp_path / "out" / "rows.json"
    code = bench.run(bench.Job(json_path=str(path)))
    return code, json.loads(path.read_text())


def test_bench_exit_codes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, written = _run_with(monkeypatch, tmp_path, [ROW])
    assert (code, written["rows"]) == (0, [ROW])
    assert {"date", "machine", "commit", "rows"} <= set(written)
    assert "2.00x" in capsys.readouterr().out
    code, written = _run_with(monkeypatch, tmp_path, [ROW, {"name": "b", "device": "cpu", "error": "broke"}])
    assert code == 1
    assert len(written["rows"]) == 2


def test_bench_shows_an_earlier_run(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"date": "2026-01-02T03:04:05Z", "commit": "abc", "machine": {}, "rows": [ROW]}))
    assert "2.00x" in _plait("bench", "--show", str(path)).output
    done = _plait("bench", "--show", str(path), "--markdown")
    assert done.output.splitlines()[0].startswith("| workload | plait ms | eager ms |")
    assert "2026-01-02" in done.output
    path.write_text("{}")
    assert _plait("bench", "--show", str(path)).exit_code == 2


def test_bench_keeps_its_rows_when_interrupted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, written = _run_with(monkeypatch, tmp_path, [ROW, KeyboardInterrupt()])
    assert (code, written["rows"]) == (130, [ROW])


class _FakeWorker:
    """Dies in the middle of its second workload, the first time."""

    started: list[list[str]] = []

    def __init__(self, job: bench.Job, names: list[str], ceilings: Any) -> None:
        self.names, self.returncode = list(names), 0
        self.started.append(self.names)

    def messages(self) -> Iterator[tuple[str, Any]]:
        for n in self.names:
            yield "start", n
            yield "phase", "timing"
            if n == "crashes":
                self.returncode = -11
                return
            yield "row", {"name": n}

    def how_it_ended(self) -> str:
        return f"process died ({self.returncode})"

    def last_words(self) -> str:
        return "Segmentation fault"

    def close(self) -> None: ...


def test_a_process_that_dies_costs_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_Worker", _FakeWorker)
    rows = list(bench._rows(bench.Job(), ["first", "crashes", "last"], {}))
    assert [r["name"] for r in rows] == ["first", "crashes", "last"]
    assert rows[1]["error"] == "process died (-11) while timing: Segmentation fault"
    assert "error" not in rows[2]
    assert _FakeWorker.started[-1] == ["last"]


def test_a_process_that_says_nothing_for_too_long_is_given_up() -> None:
    worker = bench._Worker(bench.Job(timeout=0.01), ["l2norm"], None)
    assert list(worker.messages()) == []
    assert worker.how_it_ended() == "no progress for 0.01 s"


def test_bench_measures_a_real_workload(tmp_path: Path) -> None:
    """Through the real child process: a small workload, and one whose backend does not exist."""
    path = tmp_path / "rows.json"
    words = ["--only", "swiglu_mlp_m1$", "--peers", "eager", "--seconds", "0.2", "--json", str(path)]
    assert _plait("bench", *words).exit_code == 0
    (row,) = json.loads(path.read_text())["rows"]
    wanted = {"name", "device", "plait_ms", "eager_ms", "floor_ms", "plait_kernels", "plait_compile_s"}
    assert wanted | {"plait_peak_mb", "max_error", "fallbacks"} <= set(row)
    assert row["verdict"] != "FAIL"
    assert 0 < row["plait_compile_stages_s"]["total"] <= row["plait_compile_s"]
    assert _plait("bench", *words, "--backend", "no_such_backend").exit_code == 1
    (row,) = json.loads(path.read_text())["rows"]
    assert "no_such_backend" in row["error"]
    assert row["eager_ms"] > 0


def test_cache_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "c"))
    assert _plait("cache", "path").output.strip() == str(tmp_path / "c")
    assert json.loads(_plait("cache", "stats", "--json").output)["entries"] == 0
    from plait.tools.cache_commands import the_cache

    the_cache().put("key one", b"x" * 2_000_000)
    the_cache().put("key two", b"y" * 2_000_000)
    assert json.loads(_plait("cache", "stats", "--json").output)["entries"] == 2
    assert _plait("cache", "verify").output == "2 sound, 0 bad\n"
    assert _plait("cache", "prune", "--limit-mb", "3").output == "1 entries removed\n"
    assert _plait("cache", "clear").output == "1 entries removed\n"
    monkeypatch.setenv("PLAIT_CACHE", "0")
    assert _plait("cache", "stats").exit_code == 1


def test_doctor_reports_in_both_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    from plait.tools import doctor

    fine = doctor.Finding("a", doctor.OK, "good")
    bad = doctor.Finding("b", doctor.BAD, "missing", "install it")
    monkeypatch.setattr(doctor, "CHECKS", (lambda: fine, lambda: bad))
    done = _plait("doctor")
    assert done.exit_code == 1
    assert "remedy: install it" in done.output
    monkeypatch.setattr(doctor, "CHECKS", (lambda: fine,))
    done = _plait("doctor", "--json")
    assert done.exit_code == 0
    assert json.loads(done.output)["findings"][0]["state"] == "ok"


def test_doctor_names_a_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from plait.tools import doctor

    monkeypatch.setenv("CXX", "no-such-compiler")
    assert doctor.check_compiler().state == doctor.BAD
    assert doctor.check_openmp().state == doctor.BAD


def test_plain_table() -> None:
    text = plain_table(["name", "ms"], [["a", "1.5"], ["longer", "20"]])
    assert text.splitlines() == ["name     ms", "------  ---", "a       1.5", "longer   20"]
    assert [number(v) for v in (None, 1234, 0.12345, float("nan"), 12)] == ["-", "1234", "0.123", "nan", "12"]
