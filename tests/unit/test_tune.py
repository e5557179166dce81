"""plait tune and remembered choices from the command line, on a machine without a card (tests/tuned_here.py)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

from plait.runtime import assemble, follow
from plait.runtime import tune as runtime_tune
from plait.runtime.cache import Cache
from plait.runtime.choices import Choices, Note, parse_choices
from plait.runtime.follow import doing, watching
from plait.runtime.gluon_kernel import GluonKernel
from plait.tools import tune
from plait.tools.cli import main
from plait.tools.tune import Spent, Tuning
from tests.terminal import Terminal

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "plait" / "tools" / "schemas" / "tune_1.json").read_text())
PROGRAM = """
import torch
def make():
    def f(x):
        a = torch.sort(torch.softmax(x * 2, -1), -1).values
        return torch.sort(torch.softmax(a * 3 + 1, -1), -1).values.square()
    return f, [torch.randn(8, 32)]
"""


@dataclass
class Done:
    code: int
    out: str
    err: str
    log: list[str]  # what was built and timed

    def said(self, kind: str) -> list[str]:
        return [line.split()[1] for line in self.log if line.split()[0] == kind]


@dataclass
class Place:
    """A machine: its cache, and a program."""

    home: Path
    program: str = PROGRAM

    def start(self, *words: str, meanwhile: str = "") -> subprocess.Popen[str]:
        (self.home / "program.py").write_text(self.program)
        env = {k: v for k, v in os.environ.items() if not k.startswith("PLAIT_")} | {
            "TRITON_INTERPRET": "1",
            "PLAIT_BACKEND": "triton",
            "PLAIT_STRICT": "1",
            "PLAIT_CACHE": str(self.home / "cache"),
            "TUNED_HERE": meanwhile,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        }
        command = [sys.executable, str(ROOT / "tests" / "tuned_here.py"), "log", *words]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=self.home, env=env, stdout=pipe, stderr=pipe, text=True)

    def run(self, *words: str, meanwhile: str = "") -> Done:
        log = self.home / "log"
        log.write_text("")
        child = self.start(*words, meanwhile=meanwhile)
        out, err = child.communicate(timeout=240)
        return Done(child.returncode, out, err, log.read_text().splitlines())

    def tune(self, *words: str, meanwhile: str = "") -> tuple[Done, dict[str, Any]]:
        done = self.run("tune", "program.py", "--json", "-", *words, meanwhile=meanwhile)
        found: dict[str, Any] = json.loads(done.out)
        jsonschema.Draft202012Validator.check_schema(SCHEMA)
        validator = jsonschema.Draft202012Validator(SCHEMA)
        validator.validate(found)
        assert not validator.is_valid({**found, "more": 1})
        return done, found


def states(found: dict[str, Any]) -> list[str]:
    return [k["state"] for k in found["kernels"]]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Place, Done, dict[str, Any]]:
    """A machine on which everything has been tuned once, and what was said."""
    place = Place(tmp_path_factory.mktemp("tuned"))
    return place, *place.tune("--out", "out.txt")


def test_every_kernel_gets_its_choice_and_the_file_says_it(tuned: tuple[Place, Done, dict[str, Any]]) -> None:
    place, done, found = tuned
    assert (done.code, done.err, states(found), found["stopped"]) == (0, "", ["timed"] * 3, "")
    assert done.said("time") == [k["name"] for k in found["kernels"]] and found["done"] == 3
    for k in found["kernels"]:
        assert k["chosen"] == min(k["times"], key=lambda t: t["us"])["schedule"] and len(k["times"]) > 1
    assert len(done.said("build")) == sum(len(k["times"]) for k in found["kernels"])
    kept = Path(found["kept_in"]).read_bytes()
    choices, bad = parse_choices(kept)
    assert bad == 0 and {c.kernel: c.name for c in choices.values()} == {
        k["name"]: k["chosen"] for k in found["kernels"]
    }
    assert (place.home / "out.txt").read_bytes() == kept


def test_a_second_process_builds_only_what_was_chosen_and_times_nothing(
    tuned: tuple[Place, Done, dict[str, Any]],
) -> None:
    place, before, first = tuned
    done, found = place.tune()
    assert (done.code, states(found), done.said("time")) == (0, ["remembered"] * 3, [])
    assert len(before.said("build")) > 6 and len(done.said("build")) == 3
    for k, was in zip(found["kernels"], first["kernels"], strict=True):
        assert k["chosen"] == was["chosen"] == k["times"][0]["schedule"]
        for t in was["times"]:  # three digits are kept
            assert {n["schedule"]: n["us"] for n in k["times"]}[t["schedule"]] == pytest.approx(t["us"], abs=6e-4)


def test_explain_says_that_times_are_remembered(tuned: tuple[Place, Done, dict[str, Any]]) -> None:
    place, _, first = tuned
    done = place.run("explain", "program.py", "--json", "-")
    assert done.code == 0 and done.said("time") == []
    kernels = [k for k in json.loads(done.out)["graphs"][0]["kernels"] if k["kind"] == "kernel"]
    assert len(kernels) == 3
    for k, was in zip(kernels, first["kernels"], strict=True):
        assert k["variants"] and all(v["remembered"] for v in k["variants"])
        assert [v["name"] for v in k["variants"] if v["chosen"]] == [was["chosen"]]
        assert k["measured_us"] == pytest.approx(next(v["measured_us"] for v in k["variants"] if v["chosen"]))


def test_another_machine_takes_the_exported_file(tuned: tuple[Place, Done, dict[str, Any]], tmp_path: Path) -> None:
    given = (tuned[0].home / "out.txt").read_text()
    lines = given.splitlines(keepends=True)
    (tmp_path / "given.txt").write_text("".join(lines[:3]))  # two of the three
    done, found = Place(tmp_path).tune("--option", "tuned=given.txt", "--out", "whole.txt")
    assert (done.code, sorted(states(found))) == (0, ["remembered", "remembered", "timed"])
    assert len(done.said("time")) == 1 and (tmp_path / "given.txt").read_text() == "".join(lines[:3])
    kept = parse_choices(Path(found["kept_in"]).read_bytes())[0]
    assert [c.kernel for c in kept.values()] == done.said("time")
    whole = parse_choices((tmp_path / "whole.txt").read_bytes())[0]
    assert set(whole) == set(parse_choices(given.encode())[0])


def test_where_the_chosen_build_fails_the_others_are_built_and_timed(
    tuned: tuple[Place, Done, dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "given.txt").write_text((tuned[0].home / "out.txt").read_text())
    k4 = tuned[2]["kernels"][2]
    lost = k4["name"] + f"_v{[t['schedule'] for t in k4['times']].index(k4['chosen'])}"
    done, found = Place(tmp_path).tune("--option", "tuned=given.txt", meanwhile=f"fail={lost}")
    assert (done.code, states(found), done.said("time")) == (0, ["remembered", "remembered", "timed"], [k4["name"]])
    assert found["kernels"][2]["chosen"] not in (None, k4["chosen"])
    assert len(done.said("build")) == 3 + len(k4["times"])


def test_of_gluon_s_choice_a_plain_build_stands_beside_it_and_of_others_only_they(tmp_path: Path) -> None:
    gluon, plain = object.__new__(GluonKernel), PlainKernel()
    forms = assemble._Forms(SimpleNamespace(name="k"), (1, 2, 3), ("gluon", "default", "wide"))  # type: ignore[arg-type]
    for name, wanted in (("gluon", ("gluon", "default")), ("default", ("default",)), ("wide", ("wide",))):
        note = Note(Choices(Cache(None), "Card X 9.0"), "0" * 32, "k")
        assert assemble._wanted(forms, note) == forms == assemble._wanted(forms, None)
        note.keep(name, {n: 2.0 - (n == name) for n in forms.names})
        found = assemble._wanted(forms, note)
        assert found.names == wanted
        kernel = assemble._chosen(found, [gluon, plain][-len(wanted) :], note)  # type: ignore[list-item]
        assert isinstance(kernel, runtime_tune.Tuned) and kernel.remembered and kernel.choice == 0
        assert len(kernel.times_ms) == 3 and (name != "gluon" or gluon.plain is plain)


class PlainKernel:
    """Never launched."""


def test_a_choice_of_other_sources_does_not_apply(tuned: tuple[Place, Done, dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "given.txt").write_text((tuned[0].home / "out.txt").read_text())
    other = Place(tmp_path, PROGRAM.replace("randn(8, 32)", "randn(16, 32)"))
    done, found = other.tune("--option", "tuned=given.txt")
    assert states(found) == ["timed"] * 3 and len(done.said("build")) > 6


def test_ctrl_c_keeps_what_is_done_and_the_next_run_goes_on(tmp_path: Path) -> None:
    place = Place(tmp_path)
    done, found = place.tune("--out", "out.txt", meanwhile="stop=2")
    assert (done.code, found["stopped"], found["done"]) == (130, "interrupt", 1)
    assert states(found) == ["timed", "open", "open"]
    assert len(parse_choices((tmp_path / "out.txt").read_bytes())[0]) == 1
    done, found = place.tune()
    assert (done.code, found["stopped"], states(found)) == (0, "", ["remembered", "timed", "timed"])
    assert len(done.said("time")) == 2


@pytest.mark.long
@pytest.mark.parametrize("after", [0.0, 2.0])
def test_ctrl_c_at_any_moment_ends_it_without_a_traceback(after: float, tmp_path: Path) -> None:
    """From the moment that the file is loaded: before, there is nothing to keep."""
    place = Place(tmp_path, PROGRAM + "open('loaded', 'w').close()\n")
    child = place.start("tune", "program.py", meanwhile="sleep=1")
    end = time.monotonic() + 120
    while not (tmp_path / "loaded").exists() and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(after)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=120)
    assert child.returncode == 130, err
    assert "Traceback" not in err and "error" not in err, err


def test_the_budget_ends_it_before_the_next_build(tmp_path: Path) -> None:
    place = Place(tmp_path)
    done = place.run("tune", "program.py", "--budget", "0.01", "--json", "facts.json")
    found = json.loads((tmp_path / "facts.json").read_text())
    assert (done.code, found["stopped"], found["done"], done.log) == (0, "budget", 0, [])
    assert "stopped at the budget of 0.01 s: the same command goes on from here" in done.out
    done, found = place.tune("--budget", "600")
    assert (found["stopped"], states(found), found["budget"]) == ("", ["timed"] * 3, 600)


@pytest.mark.long
def test_training_is_tuned_with_its_backward(tmp_path: Path) -> None:
    place = Place(tmp_path, PROGRAM.replace("torch.sort(torch.softmax(a * 3 + 1, -1), -1).values.square()", "a * 3"))
    done, found = place.tune("--train")
    assert done.code == 0 and set(states(found)) == {"timed"}, done.err
    assert len({k["graph"] for k in found["kernels"]}) == 2


def test_a_program_for_the_cpu_has_nothing_to_tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "program.py").write_text(PROGRAM)
    done = CliRunner().invoke(main, ["tune", str(tmp_path / "program.py")])
    assert done.exit_code == 0 and re.fullmatch(r"(compiling, \d+ s\n)*", done.stderr)
    assert done.stdout == "program.py has no kernel that is built in several ways: there is nothing to tune\n"
    done = CliRunner().invoke(main, ["tune", str(tmp_path / "program.py"), "--json", "-"])
    found = json.loads(done.stdout)
    jsonschema.Draft202012Validator(SCHEMA).validate(found)
    assert (done.exit_code, found["kernels"], found["device"]) == (0, [], None)


@pytest.mark.parametrize(
    "words, what",
    [
        (["--option", "tuned=off"], "tuned=off: nothing would be remembered"),
        (["--option", "cache_dir=0"], "there is no disk cache"),
        (["--option", "tuned=no/such"], "tuned is 'no/such'"),
        (["--out", "no/where"], "cannot write no/where"),
        (["--budget", "0"], "'--budget'"),
    ],
)
def test_what_cannot_be_kept_is_said_before_the_program_runs(
    words: list[str], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    Path("program.py").write_text("raise AssertionError('it ran')")
    done = CliRunner().invoke(main, ["tune", "program.py", *words])
    lines = done.stderr.splitlines()
    assert done.exit_code == 2 and not done.stdout and len(lines) == 2, done.stderr
    assert what in lines[0] and lines[1].startswith("  hint: ") and "it ran" not in done.stderr


# ------------------------------------------------------------------------------------------------------------- progress
@pytest.mark.parametrize("live", [False, True])
def test_what_stands_still_is_named_and_nothing_else(live: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "STALL_SECONDS", 0.2)
    shown = Terminal(live)
    progress = Tuning(None, shown)  # type: ignore[arg-type]
    with progress.shown(), watching(progress):
        with doing("building", "k1_slow"):
            time.sleep(0.7)
        with doing("timing", "k2_fast"):
            pass
        time.sleep(0.05)
    assert re.search(r"nothing has moved for \d s: building k1_slow\n", shown.text) and "k2_fast" not in shown.text
    assert ("\r" in shown.text) == live and (progress.built, progress.timed) == (1, 1)
    assert (
        1 < shown.text.count("nothing has moved") < 5
    )  # after a while, then after twice as long: not every time it looks


def test_progress_counts_and_guesses_what_is_left() -> None:
    progress = Tuning(60, None)
    with watching(progress):
        progress.expects(4)
        assert progress.left() is None
        with doing("building", "k1"):
            time.sleep(0.1)
    left = progress.left()
    assert left is not None and 0.29 < left < 20
    assert re.fullmatch(r"0 of 0 kernels done, 1 of 4 built, \d s, about \d+ s left \(budget 60 s\)", progress.line())
    assert follow._watches == ()


def test_nothing_begins_after_the_budget_or_an_interrupt() -> None:
    spent, stopped = Tuning(1e-9, None), Tuning(None, None)
    stopped.interrupted = True
    for progress, raised in ((spent, Spent), (stopped, KeyboardInterrupt)):
        with pytest.raises(raised), watching(progress), doing("timing", "k1"):
            raise AssertionError("it began")
        assert follow._watches == ()
