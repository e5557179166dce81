"""The option budget: what is left out once it is used up, that results stay right, and that nothing changes before."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import plait
from plait.compiler import all_levels
from plait.errors import BadOption
from plait.frontend.externs import decompositions
from plait.frontend.fx_import import import_fx
from plait.ir.budget import budgeted, leaves_out
from plait.options import Options
from plait.oracle.compare import compare
from plait.plan.device import SPECS
from plait.plan.reasons import Why
from plait.report.report import Report
from plait.runtime import assemble, build, report


def program(x: Tensor, w: Tensor) -> Tensor:
    y = torch.softmax(torch.relu(x @ w), -1) * 2
    return y - y.mean(0, keepdim=True)


@pytest.fixture
def given() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(256, 128), torch.randn(128, 256)


def explained(given: tuple[Tensor, Tensor], **options: Any) -> Report:
    torch._dynamo.reset()
    return plait.explain(program, *given, options={"strict": True, **options})


def steps_of(found: Report) -> list[str]:
    """Names say what kernels are made of."""
    return [k.name for _, k in found.steps()]


def test_with_none_left_the_cheapest_decisions_are_taken_and_told(
    given: tuple[Tensor, Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch._dynamo.reset()
    run = plait.compile(program, budget=0, strict=True, explain=True, cache_dir=str(tmp_path))
    got = run(*given)
    exact = program(*(t.double() for t in given))
    assert compare(got, program(*given), exact).status == "PASS"
    record = report.last()
    assert record is not None and record.externs == 1, "the product stays a call"
    said = capsys.readouterr().out
    assert "the budget was used up, left out: 1 open product" in said
    assert any("full C++ optimisation" in words for words in record.left_out)
    assert any(words.endswith(("fusion", "fusions")) for words in record.left_out)


def test_the_report_names_the_pairs_that_were_not_looked_at(given: tuple[Tensor, Tensor]) -> None:
    found = explained(given, budget=0)
    pairs = [r for g in found.graphs for r in g.refusals if r.reason == Why.BUDGET.value]
    assert pairs and all("budget" in r.unlock for r in pairs)
    number = next(int(w.split()[0]) for w in found.graphs[0].left_out if "fusion" in w)
    assert number >= len(pairs)
    assert "the budget was used up in" in str(found)


def test_before_it_is_used_up_nothing_changes(given: tuple[Tensor, Tensor]) -> None:
    without, with_much = explained(given), explained(given, budget=1e6)
    assert steps_of(without) == steps_of(with_much)
    assert [g.left_out for g in with_much.graphs] == [()]


def test_it_is_one_budget_for_all_compilations_until_reset(given: tuple[Tensor, Tensor]) -> None:
    torch._dynamo.reset()
    plait.compile(program, budget=1e6)(*given)
    spent = report.spent_seconds()
    assert spent > 0
    torch._dynamo.reset()
    assert report.spent_seconds() == 0
    with budgeted(10.0, spent=9.5) as budget:
        assert budget is not None and not leaves_out("fusion")
        budget.clock = lambda: budget.start + 0.6
        assert leaves_out("fusion") and leaves_out("fusion", 2) and not leaves_out("fusion", 0)
        assert budget.words() == ("3 fusions",)
    assert not leaves_out("fusion"), "without a budget nothing is"


def test_a_cached_file_is_taken_as_it_is(given: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    """What is fully optimised already costs nothing."""
    f = torch.nn.functional.gelu
    torch._dynamo.reset()
    plait.compile(f, cache_dir=str(tmp_path), strict=True)(given[0])
    torch._dynamo.reset()
    plait.compile(f, cache_dir=str(tmp_path), strict=True, budget=0)(given[0])
    record = report.last()
    assert record is not None and record.left_out == ()


def test_other_builds_for_a_card_are_not_begun_and_the_plain_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    sources: Any = [SimpleNamespace(name=n) for n in ("wide", "plain", "other", "tall")]
    monkeypatch.setattr(build, "same_kernels", lambda s: list(range(len(s))))
    monkeypatch.setattr(build, "_build_triton_one", lambda s, device, hint: begun.append(s.name) or s)
    monkeypatch.setattr(build, "workers", lambda: 1)

    with budgeted(1e6, 0.0) as much:
        build.build_triton(sources, "cuda", None, {0, 3})
    assert sorted(begun) == ["other", "plain", "tall", "wide"] and begun[:2] == ["plain", "other"] and much is not None
    begun.clear()
    with budgeted(0.0, 0.0) as none:
        made = build.build_triton(sources, "cuda", None, {0, 3})
    assert begun == ["plain", "other"] and none is not None and none.words() == ("2 timed alternatives",)
    assert [getattr(m, "message", "") for m in made] == [build.LEFT_OUT, "", "", build.LEFT_OUT]


def test_the_best_of_some_builds_is_not_remembered_as_the_best_of_all() -> None:
    forms: Any = assemble._Forms(SimpleNamespace(name="k"), (1, 2, 3), ("plain", "wide", "tall"))  # type: ignore[arg-type]
    built: Any = [object(), object(), build.BuildFailed(build.LEFT_OUT)]
    note: Any = SimpleNamespace(known=lambda names: None)
    some, every = assemble._chosen(forms, built, note), assemble._chosen(forms, [*built[:2], object()], note)
    assert isinstance(some, assemble.Tuned) and some.note is None and len(some.variants) == 2
    assert isinstance(every, assemble.Tuned) and every.note is note


@pytest.mark.parametrize("value", [-1, "soon", True, float("inf"), float("nan")])
def test_what_is_no_number_of_seconds_is_refused(value: object) -> None:
    with pytest.raises(BadOption, match="budget"):
        Options.make(None, {"budget": value})
    assert Options.make(None, {"budget": "2.5"}).budget == 2.5 and Options.make(None, {"budget": None}).budget is None


def test_the_end_may_come_at_any_question() -> None:
    """Whatever is asked first after the end, what is compiled is a whole plan whose programs pass their checks."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = torch.softmax(q @ k.transpose(-1, -2) * 0.1, -1) @ v
        y = y / y.abs().sum(1, keepdim=True)
        return torch.softmax(y - y.mean(-1, keepdim=True), -1)

    args = [torch.randn(4, 256, 64) for _ in range(3)]
    graph = import_fx(make_fx(attend, decomposition_table=decompositions())(*args), args)
    seen: list[list[str]] = []
    for limit in (0, 1, 2, 3, 5, 8, 13, 21, 34, 1000):
        with budgeted(float(limit), 0.0) as budget:
            assert budget is not None
            budget.start, budget.clock = 0.0, map(float, itertools.count(1)).__next__
            made = all_levels(graph, SPECS["cpu"], Options())
        assert sum(len(launch.groups) for launch in made.launches) == len(made.plan.groups)
        seen.append([launch.name for launch in made.launches if launch.parts])
    free = [launch.name for launch in all_levels(graph, SPECS["cpu"], Options()).launches if launch.parts]
    assert seen[-1] == free and seen[0] != free
    assert len({tuple(names) for names in seen}) > 2, "it ended in several places"
