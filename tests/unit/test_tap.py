"""report.kernel(n).tap: values inside fused kernels by the user's names, in eager's types."""

from __future__ import annotations

import pytest
import torch

import plait
from plait.errors import UserError
from plait.oracle.compare import compare
from plait.report.json_form import to_json
from plait.report.report import Report

torch.manual_seed(0)
Q, K, V = (torch.randn(1, 2, 16, 8) for _ in range(3))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-1, -2) * 0.3
    weights = torch.softmax(scores, -1)
    return weights @ v


def halves(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    total = torch.exp(wide).sum(-1, keepdim=True)
    small = (wide / total).half()
    both = torch.tanh(small) + torch.tanh(small * 2)
    return both * 2


@pytest.fixture(scope="module")
def report() -> Report:
    return plait.explain(attend, Q, K, V, options={"strict": True})


def _same(got: object, want: torch.Tensor) -> None:
    assert isinstance(got, torch.Tensor)
    assert got.dtype is want.dtype
    assert compare(got, want, want.double()).status != "FAIL"


def _step_with(report: Report, line: str) -> int:
    return next(k.number for k in report.graphs[0].kernels if any(line in m.line for m in k.members))


def test_a_variable_inside_a_kernel(report: Report) -> None:
    scores = Q @ K.transpose(-1, -2) * 0.3
    weights = torch.softmax(scores, -1)
    step = report.kernel(_step_with(report, "weights = "))
    _same(step.tap("weights"), weights)
    _same(step.tap("softmax"), weights)
    _same(report.kernel(_step_with(report, "scores = ")).tap("scores"), scores)
    place = next(m.line for m in step.facts.members if "weights" in m.line).split(" ")[0]
    _same(step.tap(place), weights)
    _same(step.tap(place.rpartition(":")[2]), weights)


def test_an_unknown_name_lists_the_near_ones(report: Report) -> None:
    step = report.kernel(_step_with(report, "weights = "))
    with pytest.raises(UserError, match="no value 'wieghts'") as told:
        step.tap("wieghts")
    assert "weights" in str(told.value)
    with pytest.raises(UserError, match="no step 99"):
        report.kernel(99)
    with pytest.raises(UserError, match="no graph 7"):
        report.kernel(0, graph=7)


def test_types_are_eagers_and_one_name_may_be_several_values() -> None:
    x = torch.randn(6, 10).half()
    report = plait.explain(halves, x, options={"strict": True})
    step = report.kernel(0)
    small = (x.float() / torch.exp(x.float()).sum(-1, keepdim=True)).half()
    _same(step.tap("small"), small)
    first, second = step.tap("tanh")
    _same(first, torch.tanh(small))
    _same(second, torch.tanh(small * 2))


def test_without_the_device_it_is_eagers_value_and_the_backward_has_graphs_of_its_own() -> None:
    report = plait.explain(attend, Q, K, V, target="h200")
    step = report.kernel(_step_with(report, "weights = "))
    _same(step.tap("weights"), torch.softmax(Q @ K.transpose(-1, -2) * 0.3, -1))
    model = torch.nn.Linear(8, 4)
    program = torch.nn.Sequential(model, torch.nn.Sigmoid())
    trained = plait.explain(program, torch.randn(3, 8), train=True)
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    forward = trained.graphs[0]
    at = next(k.number for k in forward.kernels if any("sigmoid" in m.name for m in k.members))
    assert trained.kernel(at).tap("sigmoid").shape == (3, 4)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True) if p.grad is not None)
    assert len(grads) == 2


def test_what_is_kept_for_tapping_is_no_fact(report: Report) -> None:
    assert '"_inside"' not in to_json(report)
    with pytest.raises(UserError, match="cannot run"):
        Report(report.program, report.target, False, False, report.graphs, report.totals).kernel(0).tap("x")
