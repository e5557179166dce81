"""plait.bisect: planted faults are found at their decision, the search goes on where it was broken off, and the folder runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import planted
import pytest
import torch
from click.testing import CliRunner

import plait
from plait.diagnose import search
from plait.diagnose.folder import read_inputs
from plait.diagnose.replay import replay
from plait.diagnose.trials import ALL, Case
from plait.tools.cli import main

OPTIONS = {"cache_dir": "0"}


def summed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.tanh(x).sum(-1) * 2
    return torch.cumsum(rows, 0), torch.exp(x[0, :9]).sum()


def columns(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * 2 + 1
    return (y * y).sum(-1), torch.relu(y)


def tanh_alone(x: torch.Tensor) -> torch.Tensor:
    return torch.sort(torch.tanh(x) * torch.sigmoid(x), -1).values


@pytest.mark.parametrize("plant", [planted.wrong_code, planted.wrong_tiles], ids=["code", "tiles"])
def test_the_merge_that_makes_it_wrong(plant: Any, tmp_path: Path) -> None:
    """exp and tanh are wrong in one kernel only: right until the decision that puts both into one."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        x = torch.randn(16, 40).t()
        found = plait.bisect(planted.scored, x, seeds=1, options=OPTIONS, folder=tmp_path)
        assert replay(tmp_path) == 1
    assert any(i.stride() == x.stride() and torch.equal(i, x) for i in read_inputs(tmp_path) if i.shape == x.shape)
    assert (found.fault, found.kind, found.before) == ("wrong", "merge", "right")
    assert "tanh(scores / total)" in found.decision
    assert found.number is not None and found.number <= found.total
    small, whole = found.operators
    assert small <= 4 < whole
    assert {p.name for p in tmp_path.iterdir()} == {
        *("run.py", "one_file.py", "graph.py", "graph.txt", "options.json", "inputs.json", "inputs.bin"),
        *("found.json", "decisions.txt", "progress.json"),
    }
    assert "torch.ops.aten.tanh" in (tmp_path / "graph.py").read_text()


def test_the_rule_that_makes_it_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    planted.wrong_rule(monkeypatch)
    found = plait.bisect(summed, torch.randn(3, 400000), seeds=1, options=OPTIONS, folder=tmp_path)
    assert (found.fault, found.kind) == ("wrong", "rewrite")
    assert found.decision.startswith("rewrite split_reductions of sum (test_bisect.py:")
    assert found.operators[0] <= 2


def test_code_that_is_wrong_without_any_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.wrong_tanh(monkeypatch)
    found = plait.bisect(tanh_alone, torch.randn(20, 8), seeds=1, options=OPTIONS, folder=tmp_path)
    assert (found.kind, found.number) == ("code", None)
    assert "tanh (test_bisect.py:" in found.decision
    assert found.operators == (1, found.operators[1])
    assert replay(tmp_path) == 1
    monkeypatch.undo()
    assert replay(tmp_path) == 0


def test_the_schedule_that_makes_it_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.slow_schedule(monkeypatch)
    found = plait.bisect(columns, torch.randn(512, 4096), slow=True, options=OPTIONS, folder=tmp_path)
    assert (found.fault, found.kind) == ("slow", "schedule")
    assert found.decision.startswith("schedule form=swept tile=p0:16")
    assert found.before.endswith(" us") and found.after.endswith(" us")


def test_a_right_program_has_nothing_to_bisect(tmp_path: Path) -> None:
    found = plait.bisect(columns, torch.randn(8, 16), seeds=1, options=OPTIONS, folder=tmp_path / "none")
    assert found.fault == ""
    assert "nothing to bisect" in str(found)
    assert not (tmp_path / "none").exists()


def test_a_search_that_was_broken_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    planted.wrong_code(monkeypatch)
    x = torch.randn(40, 16)
    asked: list[int] = []
    judge = Case.is_wrong

    def counted(self: Case, trial: Any) -> bool:
        asked.append(trial.fuel)
        return judge(self, trial)

    monkeypatch.setattr(Case, "is_wrong", counted)
    with monkeypatch.context() as broken:
        broken.setattr(search, "_first_fault", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            plait.bisect(planted.scored, x, seeds=1, options=OPTIONS, folder=tmp_path)
    known = json.loads((tmp_path / "progress.json").read_text())["answers"]
    assert len(known) >= 2
    first, asked[:] = list(asked), []
    found = plait.bisect(planted.scored, x, seeds=1, options=OPTIONS, folder=tmp_path)
    assert found.kind == "merge"
    # with everything and with nothing; then smaller programs, for the rest was known
    assert asked[:3] == [ALL, 0, ALL]
    assert first[:2] == [ALL, 0] and f"wrong {first[2]}" in known


def test_the_folder_runs_on_its_own_and_so_does_the_command(tmp_path: Path) -> None:
    text = "import torch\ndef f(x):\n    return torch.sort(torch.tanh(x) + 1).values\n"
    (tmp_path / "prog.py").write_text(text + "def make():\n    return f, [torch.randn(9, 5)]\n")
    run = [str(tmp_path / "prog.py"), "--seeds", "1", "--folder", str(tmp_path / "found")]
    clean = CliRunner().invoke(main, ["bisect", *run])
    assert clean.exit_code == 0, clean.output
    with pytest.MonkeyPatch.context() as patch:
        planted.wrong_tanh(patch)
        wrong = CliRunner().invoke(main, ["bisect", *run, "--option", "cache_dir=0", "--json", str(tmp_path / "j")])
    assert wrong.exit_code == 1, wrong.output
    assert "wrong by no decision" in wrong.stdout
    assert json.loads((tmp_path / "j").read_text())["schema"] == "plait.bisect"
    done = subprocess.run(
        [sys.executable, str(tmp_path / "found" / "run.py")],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(plait.__file__).parents[1]), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )
    # the fault was planted in this process: the folder's own run is right, and says so
    assert done.returncode == 0, done.stderr
    assert "compiled: right" in done.stdout
    assert CliRunner().invoke(main, ["bisect", str(tmp_path / "none.py")]).exit_code == 2
