"""Levels: what each leaves out, that results are right at every one, and the names they go by."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.levels import ALIASES, LEVELS
from plait.options import Options
from plait.oracle.compare import compare
from plait.runtime import assemble, build, report


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * 0.125
    return torch.softmax(scores, -1) @ v


def flags_of(level: str, fn: Any, *args: Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, set[str]]:
    """The result, and with which levels of its own the C++ compiler was called."""
    seen: set[str] = set()
    real = build.compile_cpp

    def watched(source: str, flags: Sequence[str]) -> bytes:
        seen.update(f for f in flags if f.startswith("-O"))
        return real(source, flags)

    monkeypatch.setattr(build, "compile_cpp", watched)
    torch._dynamo.reset()
    out: Tensor = plait.compile(fn, mode=level, strict=True, cache_dir="0")(*args)
    return out, seen


@pytest.mark.parametrize(
    ("level", "kernels", "calls", "cxx"),
    [("O0", 3, 2, {"-O0"}), ("O1", 1, 2, {"-O1"}), ("O2", 1, 0, {"-O3"}), ("O3", 1, 0, {"-O3"})],
)
def test_what_a_level_leaves_out(
    level: str, kernels: int, calls: int, cxx: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 128, 64) for _ in range(3))
    got, flags = flags_of(level, attend, q, k, v, monkeypatch=monkeypatch)
    exact = attend(q.double(), k.double(), v.double())
    assert compare(got, attend(q, k, v), exact).status == "PASS"
    record = report.last()
    assert record is not None and flags == cxx
    assert (record.kernels, record.externs) == (kernels, calls)


def test_training_is_right_at_every_level() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))
    x = torch.randn(16, 32)

    def step(model: nn.Module, run: Any, x: Tensor) -> list[Tensor]:
        model.zero_grad()
        run(x).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    eager, exact = step(model, model, x), step(model.double(), model, x.double())
    model.float()
    for level in LEVELS:
        torch._dynamo.reset()
        got = step(model, plait.compile(model, mode=level, strict=True), x)
        for g, e, d in zip(got, eager, exact, strict=True):
            assert compare(g, e, d).status == "PASS", level


def test_a_forced_kernel_takes_its_product_in_at_a_level_that_opens_none() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        with plait.fuse("both"):
            return torch.relu(x @ w)

    torch._dynamo.reset()
    x, w = torch.randn(64, 64), torch.randn(64, 64)
    plait.compile(f, mode="O1", strict=True)(x, w)
    record = report.last()
    assert record is not None and (record.kernels, record.externs) == (1, 0)


def test_names_of_levels() -> None:
    for name in LEVELS:
        assert Options.make(name).level is LEVELS[name]
    for name, level in ALIASES.items():
        assert Options.make(name) == Options.make(name, {}) and Options.make(name).mode == level
    assert Options.make().mode == "O2" and not Options.make().records_graphs
    assert Options.make("max").records_graphs and not Options.make("max-autotune-no-cudagraphs").records_graphs
    assert Options.make("reduce-overhead").records_graphs
    assert not Options.make("reduce-overhead", {"cuda_graphs": False}).records_graphs
    assert not Options.make("O2", {"mode": "reduce-overhead"}).records_graphs, "the name that won counts"


def test_torch_compile_takes_levels_and_its_own_names() -> None:
    x = torch.randn(64)
    for name in ("O1", "reduce-overhead", "max-autotune"):
        torch._dynamo.reset()
        torch.compile(torch.sin, backend="plait", mode=name)(x)
        assert report.last() is not None


@pytest.mark.parametrize(("level", "forms"), [("O0", 1), ("O1", 1), ("O2", 2), ("O3", 2)])
def test_only_the_upper_levels_time_other_builds_on_a_card(
    level: str, forms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble, "triton_is_interpreted", lambda: False)
    monkeypatch.setattr(assemble, "alternatives", lambda program: [program.schedule])
    program = SimpleNamespace(name="k", symbols=(), schedule="form=flat")
    slow = SimpleNamespace(predicted_ns=1e6)
    launch: Any = SimpleNamespace(name="k", parts=(SimpleNamespace(program=program),), groups=(slow,))
    assert len(assemble._schedules(launch, Options.make(level))) == forms
    asked = []
    monkeypatch.setattr(assemble, "can_run", lambda device: bool(asked.append(device)))
    assert assemble._in_gluon(launch, "cuda", Options.make(level)) is None
    assert asked == ["cuda"] * (forms - 1), "Gluon is looked at where several builds are"
