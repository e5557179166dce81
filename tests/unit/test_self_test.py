"""plait verify --self-test: known faults are caught, and what would let one pass unseen is an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from click.testing import CliRunner, Result

import plait
from plait.diagnose import selftest, verify
from plait.diagnose.faults import graphs, samples
from plait.diagnose.faults.known import LEVELS, KnownFault
from plait.diagnose.faults.table import KNOWN
from plait.diagnose.selftest import HEAD, SelfTest, Tried, self_test
from plait.diagnose.watch import Watch
from plait.ir import fault
from plait.ir.fault import Planted, passed, planted
from plait.options import Options
from plait.oracle.compare import compare, sharing, why_shared_otherwise
from plait.oracle.draws import Draws
from plait.oracle.eval_graph import evaluation
from plait.runtime.cache import cache_for
from plait.runtime.choices import choices_for
from plait.tools.cli import main

SOME = [
    next(k for k in KNOWN if k.name == name)
    for name in (
        "use lost in the gradient",
        "comparison turned, NaN lost",
        "part of a split sum lost",
        "sum held in bf16",
        "remainder not stored",
        "two results are one",
    )
]
SCHEMA = json.loads((Path(plait.__file__).parent / "tools/schemas/self_test_1.json").read_text())
OPTIONS = {"cache_dir": "0"}


def _named(name: str) -> KnownFault:
    return next(k for k in KNOWN if k.name == name)


def _run(*args: str) -> Result:
    return CliRunner().invoke(main, ["verify", *args])


def test_one_fault_of_each_level_is_caught_at_its_level() -> None:
    found = self_test(SOME, on=["cpu"], options=OPTIONS)
    assert found.right, str(found)
    assert found.total() == "caught 6 of 6"
    assert [t.place.level for t in found.tried if t.place is not None] == list(LEVELS.values())
    assert found.tried[1].values == "NaN"
    jsonschema.validate(json.loads(found.to_json()), SCHEMA)


@pytest.mark.long
@pytest.mark.parametrize("known", KNOWN, ids=lambda k: k.name)
def test_every_fault_is_caught(known: KnownFault) -> None:
    found = self_test([known], on=["cpu"], options=OPTIONS)
    assert found.right, str(found)
    assert found.tried[0].place is not None


def test_the_table_is_of_different_faults_and_fits_a_hundred_columns() -> None:
    assert len(KNOWN) >= 20
    assert len({k.name for k in KNOWN}) == len(KNOWN) == len({k.words for k in KNOWN})
    assert {k.level for k in KNOWN} == set(LEVELS.values())
    for k in KNOWN:
        row = Tried(k.name, k.words, k.level, "cpu", k.sample.name, "error", note="x" * 300)
        assert all(len(line) <= 100 for line in (HEAD, *str(row).splitlines()))
        assert len(k.name) <= 30 and len(k.sample.name) <= 21, "columns stay apart"


def test_a_fault_that_is_not_planted_is_an_error_of_the_self_test() -> None:
    never = replace(_named("denormals flushed"), change=lambda value, about: None)
    nothing = replace(never, site="rewrite", change=graphs.nodes(graphs.mask_dropped, after="no such rewrite"))
    found = self_test([never, nothing], on=["cpu"], options=OPTIONS)
    assert [t.status for t in found.tried] == ["error", "error"]
    assert all("could not be planted" in t.note for t in found.tried)
    assert not found.right and found.total() == "caught 0 of 2"


def test_a_fault_that_breaks_the_compiler_or_the_program_is_an_error() -> None:
    def broken(value: Any, about: str) -> Any:
        raise ValueError("no such thing")

    found = self_test([replace(_named("denormals flushed"), change=broken)], on=["cpu"], options=OPTIONS)
    assert found.tried[0].status == "error"
    assert "raises" in found.tried[0].note


def test_a_program_that_is_wrong_by_itself_is_an_error() -> None:
    sample = replace(samples.SCALED, name="not captured", fn=lambda x: x + torch.compiler.is_compiling())
    found = self_test([replace(_named("denormals flushed"), sample=sample)], on=["cpu"], options=OPTIONS)
    assert found.tried[0].status == "error"
    assert "wrong without the fault" in found.tried[0].note


# -------------------------------------------------------------------------------------------------------------- the seam
def test_nothing_passes_otherwise_without_a_fault() -> None:
    value = object()
    assert passed("tile", value) is value
    with planted(Planted("code", lambda v, about: None)):
        assert passed("tile", value) is value
        assert passed("code", value) is value


def test_what_is_built_with_a_fault_is_kept_by_nobody(tmp_path: Path) -> None:
    options = Options.make(None, {"cache_dir": str(tmp_path)})
    assert cache_for(options).folder == str(tmp_path)
    with planted(Planted("code", lambda v, about: None)):
        assert cache_for(options).folder is None
        assert choices_for(options, "cpu") is None
    assert cache_for(options).folder == str(tmp_path)


def test_a_fault_is_gone_when_the_run_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(value: Any, about: str) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        self_test([replace(_named("denormals flushed"), change=stopped)], on=["cpu"], options=OPTIONS)
    assert not fault.is_planted()
    assert plait.verify(samples.SCALED.fn, *samples.SCALED.make("cpu"), seeds=1, options=OPTIONS).right


def test_no_part_of_the_compiler_plants_a_fault() -> None:
    """Only the self-test begins one; a watch carries it to autograd's threads."""
    root = Path(plait.__file__).parent
    callers = {
        str(p.relative_to(root)) for p in root.rglob("*.py") if "planted(" in p.read_text().replace("is_planted(", "")
    }
    assert callers == {"ir/fault.py", "diagnose/selftest.py", "diagnose/watch.py"}


# ------------------------------------------------------------------------------------------------------------ the command
@pytest.fixture
def two_faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(selftest, "KNOWN", SOME[4:])
    monkeypatch.setattr(selftest, "devices", lambda: ["cpu"])
    every = selftest.self_test
    monkeypatch.setattr(selftest, "self_test", lambda **given: every(SOME[4:], **given))
    yield


@pytest.mark.usefixtures("two_faults")
def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    found = _run("--self-test", "--json", str(path), "--option", "cache_dir=0")
    assert found.exit_code == 0, found.output
    lines = found.stdout.splitlines()
    assert lines[1].split() == HEAD.split() and lines[-1] == "caught 2 of 2"
    assert lines[2].split()[-1] == "code" and all(len(line) <= 100 for line in lines)
    told = json.loads(path.read_text())
    jsonschema.validate(told, SCHEMA)
    assert [f["name"] for f in told["faults"]] == [k.name for k in SOME[4:]]


@pytest.mark.usefixtures("two_faults")
def test_a_verify_that_sees_nothing_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = verify.judge
    monkeypatch.setattr(verify, "judge", lambda *a, **k: [replace(v, status="PASS") for v in judge(*a, **k)])
    found = _run("--self-test", "--json", "-", "--option", "cache_dir=0")
    assert found.exit_code == 1, found.output
    told = json.loads(found.stdout)
    jsonschema.validate(told, SCHEMA)
    assert {f["status"] for f in told["faults"]} == {"missed"}


def test_totals_are_of_what_was_caught() -> None:
    rows = tuple(Tried("a", "b", "code", "cpu", "p", s) for s in ("caught", "missed"))
    assert SelfTest(rows, 0.0).total() == "caught 1 of 2" and not SelfTest(rows, 0.0).right


# ------------------------------------------------------------------------------------------ what verify did not see at first
def test_numbers_that_plait_draws_are_judged_where_they_can_be() -> None:
    found = plait.verify(samples.DROPOUT.fn, *samples.DROPOUT.make("cpu"), seeds=1, options=OPTIONS)
    assert found.right, str(found)
    assert "numbers that plait draws" in found.notes[0]
    other = self_test(
        [_named("other seed in the backward"), _named("noise of another size")], on=["cpu"], options=OPTIONS
    )
    assert other.right, str(other)


def test_one_run_is_given_the_numbers_of_another() -> None:
    def draw(x: torch.Tensor) -> torch.Tensor:
        return torch.rand_like(x) + torch.nn.functional.dropout(x, 0.5) + torch.randint(9, x.shape)

    x, drawn = torch.ones(40), Draws()
    with drawn.recorded():
        first = draw(x)
    with drawn.again():
        second = draw(x.double())
    assert compare(first, second.float(), second).status == "PASS"
    with drawn.again(), pytest.raises(RuntimeError, match="another draw"):
        torch.randn(40)


def test_results_that_are_one_tensor_are_seen() -> None:
    x, y = torch.ones(3), torch.zeros(3)
    apart, together = sharing([x, y, y.clone()], [y]), sharing([x, y, y], [y])
    assert apart == (((), 0), ((0,), 1), ((), 2))
    assert why_shared_otherwise(apart, apart) is None
    assert "shared with arguments" in str(why_shared_otherwise(together, apart))
    assert "in one memory" in str(why_shared_otherwise(sharing([x, x], []), sharing([x, y], [])))


def test_fresh_memory_of_a_watched_graph_holds_nothing_right() -> None:
    watch = Watch(Options.make(None, {**OPTIONS, "strict": True}))
    with planted(Planted("code", _named("remainder not stored").change)):
        run = Watch(watch.options).compiled(samples.SCALED.fn)
        got = run(*samples.SCALED.make("cpu"))
    assert got.flatten()[96:].isnan().all() and got.flatten()[:96].isfinite().all()


def test_a_value_that_is_an_overwritten_argument_is_what_it_was() -> None:
    """The evaluator gave the argument's memory for a copy of it, and so its new contents."""
    watch = Watch(Options.make(None, OPTIONS))
    watch.compiled(samples.KEPT.fn)(*samples.KEPT.make("cpu"))
    graph = watch.seen[0].compiled.graph  # type: ignore[union-attr]
    x, statistic = samples.KEPT.make("cpu")
    before = statistic.clone()
    with torch.no_grad():
        returned = evaluation(graph, [statistic, x], dtype_mode="eager").returned()
    assert torch.equal(statistic, before + 1)
    assert torch.equal(returned[2], before)
