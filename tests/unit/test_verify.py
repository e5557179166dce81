"""plait.verify: clean programs are right, planted faults are found at their kernel and operator, and the command's exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import planted
import pytest
import torch
from click.testing import CliRunner, Result

import plait
from plait.diagnose.values import CLASSES, cases
from plait.errors import UserError
from plait.tools.cli import main

OPTIONS = {"strict": True, "cache_dir": "0"}


def scored(x: torch.Tensor) -> torch.Tensor:
    scores = torch.exp(x)
    total = scores.sum(-1, keepdim=True)
    return torch.tanh(scores / total)


def summed(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x).sum() * 2


def stepped(x: torch.Tensor, w: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.softmax(x @ w, -1)
    count.add_(1)
    return y, y.argmax(-1)


def test_a_clean_program_is_right_and_says_what_was_judged() -> None:
    torch.manual_seed(0)
    found = plait.verify(stepped, torch.randn(20, 8), torch.randn(8, 12), torch.zeros(3), options=OPTIONS)
    assert found.right
    assert found.place is None
    assert [r.name for r in found.runs] == ["as given", "seed 1", "seed 2", *CLASSES]
    assert all(r.status in ("PASS", "WARN") for r in found.runs)
    # results, labels, and the argument that is written to
    assert {r.by_value + r.by_place for r in found.runs} == {20 * 12 + 20 + 3}
    assert next(r for r in found.runs if r.name == "NaN").by_place > 0
    assert len(str(found).splitlines()) <= 12


def test_gradients_parameters_and_buffers_are_judged() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.GELU())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    found = plait.verify(model, torch.randn(7, 6), train=True, seeds=1, options=OPTIONS)
    assert found.runs[0].status != "FAIL", str(found)
    names = {v.name for v in found.runs[0].verdicts}
    assert {"grad of 0.weight", "grad of 1.bias", "buffer0"} <= names
    assert found.graphs == 2
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_an_argument_that_wants_a_gradient_is_asked_for_it() -> None:
    x = torch.randn(5, 6, requires_grad=True)
    found = plait.verify(scored, x, seeds=1, options=OPTIONS)
    assert found.right, str(found)
    assert "grad of arg0" in {v.name for v in found.runs[0].verdicts}


def test_random_numbers_are_eagers() -> None:
    found = plait.verify(
        lambda x: torch.nn.functional.dropout(x, 0.5) + 1, torch.randn(64, 8), seeds=1, options=OPTIONS
    )
    assert found.right, str(found)
    assert "random" in found.notes[0]


@pytest.mark.parametrize(
    ("plant", "level", "words"),
    [
        (planted.wrong_code, "code", "the tile program is right, its code is wrong"),
        (planted.wrong_tiles, "tile program", "the tile program is wrong"),
    ],
    ids=["code", "tiles"],
)
def test_a_faulty_kernel_is_named_with_its_operator(plant: Any, level: str, words: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        found = plait.verify(scored, torch.randn(40, 16), seeds=1, options=OPTIONS)
    assert not found.right
    place = found.place
    assert place is not None
    assert (place.level, place.operator, place.kernel) == (level, "aten.tanh", 0)
    assert place.line.endswith("return torch.tanh(scores / total)")
    assert words in str(found)
    assert len(str(found).splitlines()) <= 25


def test_a_faulty_rule_is_told_from_a_faulty_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.wrong_rule(monkeypatch)
    found = plait.verify(summed, torch.randn(300, 4000), seeds=1, options=OPTIONS)
    assert found.place is not None
    assert found.place.level == "rewriting"
    assert "aten.sum" in found.place.operator


def _nan_aware(x: torch.Tensor) -> torch.Tensor:
    found = torch.exp(x)
    return found if torch.compiler.is_compiling() else torch.where(x.isnan(), torch.ones_like(x), found)


def test_a_class_that_fails_alone_fails() -> None:
    found = plait.verify(_nan_aware, torch.randn(50, 50), seeds=1, options=OPTIONS)
    assert [r.name for r in found.runs if r.status == "FAIL"] == ["NaN"]


def test_values_keep_what_they_may_not_change() -> None:
    x, k = torch.rand(30, 4) + 1, torch.arange(5)
    made = {c.name: c.args for c in cases((x, k), 2)}
    assert all(torch.equal(args[1], k) for args in made.values())
    assert bool((made["seed 1"][0] > 0).all())
    assert not torch.equal(made["seed 1"][0], x)
    assert bool(made["infinities"][0].isinf().any())
    assert bool(made["NaN"][0].isnan().any())
    assert bool((made["denormal"][0].abs() < torch.finfo(torch.float32).tiny).all())
    assert bool((made["zero rows"][0] == 0).all(-1).any())
    assert [c.name for c in cases((k,), 3)] == ["as given"]


# ------------------------------------------------------------------------------------------------------- the command
def _file(folder: Path, text: str) -> str:
    path = folder / "prog.py"
    path.write_text(text)
    return str(path)


def _run(*args: str) -> Result:
    return CliRunner().invoke(main, ["verify", *args])


GOOD = """
import torch
def make():
    return (lambda x: torch.relu(x) * 2), [torch.randn(4, 5)]
"""


def test_the_command_exits_0_and_writes_json(tmp_path: Path) -> None:
    found = _run(_file(tmp_path, GOOD), "--seeds", "1", "--json", "-", "--option", "strict=1")
    assert found.exit_code == 0, found.output
    facts = json.loads(found.stdout[found.stdout.index("{") :])
    assert facts["schema"] == "plait.verify"
    assert facts["right"] is True
    assert facts["runs"][0]["values"] == "as given"


def test_the_command_exits_1_for_a_wrong_program(tmp_path: Path) -> None:
    text = "import torch\ndef f(x):\n    return x + torch.compiler.is_compiling()\n"
    found = _run(_file(tmp_path, text + "def make():\n    return f, [torch.randn(4, 5)]\n"), "--seeds", "1")
    assert found.exit_code == 1, found.output
    assert "wrong in" in found.stdout
    assert "no graph departs on its own inputs" in found.stdout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\n", "defines no make()"),
        ("def make():\n    return 3\n", "does not return (fn, args)"),
        ("import torch\ndef make():\n    return (lambda x: x @ x), [torch.ones(2, 3)]\n", "raises in eager"),
        (GOOD.replace("torch.randn(4, 5)", "1 / 0"), "ZeroDivisionError"),
    ],
)
def test_a_file_at_fault_is_one_line_and_2(tmp_path: Path, text: str, words: str) -> None:
    found = _run(_file(tmp_path, text))
    assert found.exit_code == 2
    assert words in found.stderr
    assert "Traceback" not in found.stderr
    assert len(found.stderr.strip().splitlines()) <= 2


def test_no_file(tmp_path: Path) -> None:
    assert _run(str(tmp_path / "none.py")).exit_code == 2


def test_seeds_are_counted_from_one() -> None:
    with pytest.raises(UserError, match="seeds"):
        plait.verify(scored, torch.ones(2, 2), seeds=0)
