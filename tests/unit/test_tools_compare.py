"""`plait compare`: pages, JSON and exit codes, from reports and from rows; without torch, and soon."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from click.testing import CliRunner, Result

import plait
from plait.report.json_form import plain
from plait.report.json_read import read_facts
from plait.report.report import Report
from plait.report.words import clipped
from plait.tools.cli import main

SCHEMA = Path(plait.__file__).parent / "tools" / "schemas" / "compare_1.json"


def _l2(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a = x * x
    b = y * y
    c = a + b
    return torch.sqrt(c)


def _layers(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = torch.exp(x - x.sum(1, keepdim=True))
    return x


def _explained(fn: Callable[..., Any], *args: Any, **options: Any) -> Report:
    return plait.explain(fn, *args, target="h100", options=options or None)


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    pair = torch.randn(1000, 1000), torch.randn(1000, 1000)
    wide = torch.randn(64, 512)
    return {
        "free": _explained(_l2, *pair),
        "apart": _explained(_l2, *pair, forbid=["sqrt"]),
        "layers": _explained(_layers, wide),
        "layers_apart": _explained(_layers, wide, forbid=["exp"]),
    }


def _compare(*words: str) -> Result:
    return CliRunner().invoke(main, ["compare", *words])


@pytest.fixture
def files(tmp_path: Path, reports: dict[str, Report], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, report in reports.items():
        report.to_json(f"{name}.json")
    return tmp_path


def _told(*words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_compare(*words, "--json").stdout)
    jsonschema.validate(found, json.loads(SCHEMA.read_text()), cls=jsonschema.Draft202012Validator)
    return found


# ------------------------------------------------------------------------------------------------------------- reports
def test_a_report_is_read_back_as_it_was(reports: dict[str, Report]) -> None:
    for report in reports.values():
        assert plain(read_facts(plain(report))) == plain(report)


def test_a_kernel_that_was_split_and_the_pair_that_is_refused(files: Path) -> None:
    done = _compare("free.json", "apart.json")
    assert done.exit_code == 1, done.output
    lines = done.output.splitlines()
    here = "test_tools_compare.py"
    first = _l2.__code__.co_firstlineno
    assert lines[0] == "_l2 on h100: free.json -> apart.json"
    assert "  launches              1 ->       2  2.00x  worse" in lines
    assert "  traffic         12.0 MB -> 20.0 MB  1.67x  worse" in lines
    assert "Steps: 1 split, 0 as before" in lines
    places = f"({here}:{first + 1}-{first + 4})"
    assert f"  split: mul x2, add, sqrt -> mul x2, add | sqrt {places}: traffic 12.0 MB ->" in lines
    assert "Pairs: 1 newly refused" in lines
    pair = f"add {here}:{first + 3} | sqrt {here}:{first + 4}: fused -> forbidden by user ("
    assert pair in " ".join(done.output.split())
    assert lines[-1] == "worse: launches, traffic, predicted time"


def test_the_other_way_round_nothing_is_worse(files: Path) -> None:
    done = _compare("apart.json", "free.json")
    assert done.exit_code == 0 and done.output.endswith("nothing got worse\n"), done.output
    assert "merged: mul x2, add | sqrt -> mul x2, add, sqrt" in done.output
    assert "forbidden by user -> fused" in done.output


def test_equal_reports(files: Path) -> None:
    done = _compare("layers.json", "layers.json")
    assert done.exit_code == 0 and "no change in" in done.output
    told = _told("layers.json", "layers.json")
    assert not told["steps"] and not told["pairs"] and not told["worse"]
    assert told["unchanged"] == len(json.loads(Path("layers.json").read_text())["graphs"][0]["kernels"])


def test_repeated_layers_are_told_once_and_pages_are_short(files: Path) -> None:
    page = _compare("layers.json", "layers_apart.json").output
    assert "3x exp" in page or "2x exp" in page or "x sub" in page, page
    for words in (["layers.json", "layers_apart.json"], ["layers_apart.json", "layers.json"]):
        lines = _compare(*words).output.splitlines()
        assert len(lines) <= 25 and max(map(len, lines)) <= 100 and "\x1b" not in "".join(lines)


def test_lines_that_moved_change_nothing(files: Path) -> None:
    text = Path("apart.json").read_text()
    first = _l2.__code__.co_firstlineno
    for at in range(first + 4, first, -1):
        text = text.replace(f".py:{at} ", f".py:{at + 30} ")
    Path("moved.json").write_text(text)
    told = _told("apart.json", "moved.json")
    assert not told["steps"] and not told["pairs"] and told["unchanged"] == 2


def _edited(path: str, change: Callable[[dict[str, Any]], Any]) -> str:
    data = json.loads(Path(path).read_text())
    change(data)
    Path("edited.json").write_text(json.dumps(data))
    return "edited.json"


def _set(**facts: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["graphs"][0]["kernels"][0].update(facts)


RESOURCES = {"registers": 64, "spills": 0, "shared": 0, "occupancy": 1.0}


@pytest.mark.parametrize(
    "before, after, says, code",
    [
        ({"resources": RESOURCES}, {"resources": RESOURCES | {"spills": 16}}, "spills 0 B -> 16 B (worse)", 1),
        ({"resources": RESOURCES}, {"resources": RESOURCES | {"registers": 96}}, "registers 64 -> 96", 0),
        ({"measured_us": 10.0}, {"measured_us": 10.6}, "measured 10.0 us -> 10.6 us (worse)", 1),
        ({"measured_us": 10.0}, {"measured_us": 9.0}, "measured 10.0 us -> 9.00 us", 0),
        ({"schedule": ["form=flat warps=4"]}, {"schedule": ["form=flat warps=8"]}, "schedule warps=4 -> 8", 0),
        ({}, {"failure": "does not compile: x"}, "failure none -> does not compile: x (worse)", 1),
        ({"predicted_us": 5.0}, {"predicted_us": 6.0}, "predicted 5.00 us -> 6.00 us", 0),
    ],
)
def test_what_a_step_may_change(files: Path, before: Any, after: Any, says: str, code: int) -> None:
    old = _edited("free.json", _set(**before))
    Path(old).rename("old.json")
    new = _edited("old.json", _set(**after))
    done = _compare("old.json", new)
    flat = " ".join(done.output.split())
    assert says in flat and "1 changed" in flat, done.output
    assert done.exit_code == code
    assert len(_told("old.json", new)["steps"]) == 1


def test_a_measured_time_within_five_percent_is_no_change(files: Path) -> None:
    Path(_edited("free.json", _set(measured_us=10.0))).rename("old.json")
    assert "no change" in _compare("old.json", _edited("old.json", _set(measured_us=10.4))).output


def test_fallbacks_and_breaks_are_worse(files: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        data["breaks"] = ["a call"]
        data["totals"]["fallbacks"] = 1

    done = _compare("free.json", _edited("free.json", change))
    assert done.exit_code == 1 and done.output.endswith("worse: fallbacks, graph breaks\n")


def test_operators_that_came_and_went(files: Path) -> None:
    """A step of one program and not of the other, and a step with one operator more."""

    def fewer(data: dict[str, Any]) -> None:
        graph = data["graphs"][0]
        graph["kernels"][0]["members"].pop()

    told = _told("free.json", _edited("free.json", fewer))
    (step,) = told["steps"]
    assert step["change"] == "members" and [o["name"] for o in step["lost"]] == ["sqrt"]
    told = _told("free.json", _edited("free.json", lambda data: data["graphs"][0]["kernels"].clear()))
    assert [s["change"] for s in told["steps"]] == ["vanished"]


def test_in_python(reports: dict[str, Report]) -> None:
    found = reports["free"].compare(reports["apart"])
    assert found.worse == ("launches", "traffic", "predicted time")
    assert str(found).startswith("_l2 on h100: before -> after\n")


# ---------------------------------------------------------------------------------------------------------------- rows
ROW = {
    "name": "a",
    "device": "cpu",
    "plait_ms": 10.0,
    "plait_quartiles_ms": [9.8, 10.2],
    "eager_ms": 20.0,
    "verdict": "PASS",
    "plait_kernels": 1,
    "plait_externs": 0,
    "fallbacks": [],
    "plait_compile_s": 2.0,
    "plait_peak_mb": 100.0,
}


def _bench(path: str, *rows: dict[str, Any], **changes: Any) -> str:
    machine = {"device": "CPU", "torch": "2.13"}
    body = {"schema": "plait.bench", "version": 1, "date": "2026", "machine": machine, "commit": "c", "command": "x"}
    Path(path).write_text(json.dumps({**body, "rows": list(rows), **changes}))
    return path


@pytest.mark.parametrize(
    "change, says, code",
    [
        ({"plait_ms": 10.5, "plait_quartiles_ms": [10.3, 10.6]}, "slower", 1),
        ({"plait_ms": 10.5, "plait_quartiles_ms": [10.1, 10.6]}, "1 row as before", 0),
        ({"plait_ms": 9.5, "plait_quartiles_ms": [9.4, 9.6]}, "faster", 0),
        ({"verdict": "FAIL"}, "verdict PASS -> FAIL", 1),
        ({"error": "it broke"}, "verdict PASS -> ERROR", 1),
        ({"plait_kernels": 2}, "kernels 1 -> 2", 0),
        ({"fallbacks": ["graph: x"]}, "fallbacks -0 +1", 1),
        ({"plait_peak_mb": 150.0}, "100 -> 150 MB", 1),
        ({"plait_compile_s": 4.0}, "1 row as before", 0),
    ],
)
def test_what_a_row_may_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], says: str, code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    done = _compare(_bench("old.json", ROW), _bench("new.json", ROW | change))
    assert says in done.output and done.exit_code == code, done.output
    assert max(map(len, done.output.splitlines())) <= 100
    assert bool(_told("old.json", "new.json")["worse"]) == bool(code)


def test_slower_rows_come_first_and_the_page_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = [ROW | {"name": f"row{k}"} for k in range(60)]
    after = copy.deepcopy(before)
    for k, row in enumerate(after[:40]):
        row["plait_ms"] = 5.0 if k != 33 else 15.0
        row["plait_quartiles_ms"] = [row["plait_ms"] - 0.1, row["plait_ms"] + 0.1]
    words = _bench("old.json", *before, ROW), _bench("new.json", *after, ROW | {"name": "b"})
    lines = _compare(*words).output.splitlines()
    assert len(lines) <= 25
    table = next(k for k, line in enumerate(lines) if line.startswith("workload"))
    assert lines[table + 2].split()[:5] == ["row33", "slower", "10", "15", "1.50x"]
    assert "only in old.json: a" in lines and "only in new.json: b" in lines
    assert lines[-1] == "worse: time of row33"
    assert len(_compare(*words, "--all").output.splitlines()) > 60
    without = [{k: v for k, v in r.items() if k != "plait_quartiles_ms"} for r in (ROW, ROW | {"plait_ms": 10.4})]
    assert _compare(_bench("old.json", without[0]), _bench("new.json", without[1])).exit_code == 0


# -------------------------------------------------------------------------------------------------------------- faults
@pytest.mark.parametrize(
    "text, says",
    [
        (None, "cannot read"),
        ("{", "is not JSON"),
        ("[]", "holds no object"),
        ("{}", "does not say what it is"),
        ('{"schema": "plait.verify", "version": 1}', "is of plait.verify, which cannot be compared"),
        ('{"schema": "plait.report/9", "version": 9}', "version 9"),
        ('{"schema": "plait.report/1", "version": 1}', "the report lacks 'program'"),
        ('{"schema": "plait.bench", "version": 1, "rows": 3}', "of plait bench"),
    ],
)
def test_files_at_fault(files: Path, text: str | None, says: str) -> None:
    if text is not None:
        Path("bad.json").write_text(text)
    for words in (["free.json", "bad.json"], ["bad.json", "free.json"]):
        done = _compare(*words)
        assert done.exit_code == 2 and says in done.output, done.output
        assert "bad.json" in done.output and len(done.output.strip().splitlines()) <= 2


def test_a_place_in_the_file_is_named(files: Path) -> None:
    bad = _edited("free.json", _set(predicted_us="soon"))
    done = _compare("free.json", bad)
    assert done.exit_code == 2
    assert "edited.json: the report.graphs[0].kernels[0].predicted_us is not a number: 'soon'" in done.output


def test_rows_at_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    good = _bench("old.json", ROW)
    for rows, says in (
        ([{"device": "cpu"}], "rows[0] has no name"),
        ([ROW | {"plait_ms": "1"}], "plait_ms of a is no number"),
        ([ROW | {"name": "z"}], "no workload is in both"),
    ):
        done = _compare(good, _bench("new.json", *rows))
        assert done.exit_code == 2 and says in done.output, done.output


def test_it_needs_no_torch_and_answers_at_once(files: Path) -> None:
    code = (
        "import sys, importlib.abc\n"
        "class No(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'triton'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, No())\n"
        "from plait.tools.cli import main\n"
        "main(['compare', *sys.argv[1:]])\n"
    )
    start = time.perf_counter()
    words = [sys.executable, "-c", code, str(files / "free.json"), str(files / "apart.json")]
    home = Path(plait.__file__).parents[1]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=home)
    assert done.returncode == 1 and "1 split" in done.stdout, done.stderr
    assert time.perf_counter() - start < 5  # of which a third of a second is ours; importing torch alone takes longer


def test_a_clipped_line_ends_with_whole_words_unless_one_alone_is_longer() -> None:
    assert clipped("four and twenty", 15) == "four and twenty"
    assert clipped("four and twenty", 14) == "four and ..."
    assert clipped("four and twenty", 12) == "four and ..."
    assert clipped("four and twenty", 11) == "four ..."
    assert clipped("a_name_that_is_long", 12) == "a_name_t ..."
    assert all(len(clipped("one two three four " * 3, width)) <= width for width in range(8, 60))
