"""From torch.compile to built kernels through the public entry: what runs where, what is said of it, and what is written."""

from __future__ import annotations

import json
import pathlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import plait
from plait.runtime import build, report


@pytest.fixture(autouse=True)
def _fresh(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    torch._dynamo.reset()
    build.compiler_identity.cache_clear()
    yield
    torch._dynamo.reset()
    build.compiler_identity.cache_clear()


def program(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = torch.tanh(torch.cdist(x, w.t())) * 2
    return h, h.sum(0)


def arguments() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, 5), torch.randn(5, 4)


def check(fn: Any) -> None:
    args = arguments()
    for got, want in zip(fn(*args), program(*args), strict=True):
        torch.testing.assert_close(got, want)


def test_kernels_run_and_are_found_again(tmp_path: pathlib.Path) -> None:
    check(plait.compile(program, strict=True, dump=f"all@{tmp_path}/dump", numerics="eager"))
    first = report.last()
    assert first.kernels >= 1
    assert first.externs == 1
    assert not report.fallbacks()
    assert first.line().startswith(f"plait: {first.name} (inference): {first.kernels} kernels, 1 ATen calls")
    names = sorted(p.name.partition(".")[2] for p in (tmp_path / "dump").iterdir())
    assert names == ["1.graph.txt", "2.plan.txt", "3.tile.txt", "4.source.cpp"]
    assert (
        next(iter(first.details["sources"].values())) in (tmp_path / "dump" / f"{first.name}.4.source.cpp").read_text()
    )
    torch._dynamo.reset()
    report.reset()
    check(plait.compile(program, strict=True, numerics="eager"))
    assert report.last().seconds["build"] < first.seconds["build"]


def test_evaluation_of_all_or_some_groups_is_counted() -> None:
    with pytest.warns(report.PlaitFallbackWarning, match="reference evaluation"):
        check(plait.compile(program, backend="eval"))
    assert {f.scope for f in report.fallbacks()} == {"group"}
    torch._dynamo.reset()
    with pytest.warns(report.PlaitFallbackWarning, match="not among the groups"):
        check(plait.compile(program, plan="none", groups="0"))
    assert {f.scope for f in report.fallbacks()} == {"group"}
    assert 0 < len(report.fallbacks()) < report.last().kernels


def test_no_compiler_runs_in_eager_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.warns(report.PlaitFallbackWarning, match="apt install"):
        check(plait.compile(program))
    assert [f.scope for f in report.fallbacks()] == ["graph"]
    torch._dynamo.reset()
    with pytest.raises(Exception, match="no C\\+\\+ compiler"):
        plait.compile(program, strict=True)(*arguments())


def test_training_through_the_entry_point() -> None:
    fn = torch.compile(program, backend=plait.backend, options={"strict": True})
    x, w = arguments()
    x.requires_grad_()
    w.requires_grad_()
    for _ in range(2):
        x.grad = w.grad = None
        (fn(x, w)[0].sum() + fn(x, w)[1].sum()).backward()
    want_x, want_w = (t.detach().clone().requires_grad_() for t in (x, w))
    (program(want_x, want_w)[0].sum() + program(want_x, want_w)[1].sum()).backward()
    torch.testing.assert_close(x.grad, want_x.grad)
    torch.testing.assert_close(w.grad, want_w.grad)
    assert {r.kind for r in report.all()} == {"forward", "backward"}


def test_bad_options_are_refused_where_they_are_written() -> None:
    with pytest.raises(plait.errors.BadOption, match="numerics"):
        plait.compile(program, numeric="eager")
    with pytest.raises(Exception, match="did you mean 'strict'"):
        torch.compile(program, backend=plait.backend, options={"stric": True})(*arguments())


def test_decorator_reset_and_configuration() -> None:
    @plait.compile(plan="none")
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert double(torch.ones(2)).tolist() == [2.0, 2.0]
    assert report.all()
    plait.backend.reset()
    assert not report.all()
    assert json.dumps(plait.backend.get_compiler_config())
