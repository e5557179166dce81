"""Reproducers on a card: the form that was chosen among those that were timed runs again, as the same kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reproduced import run

import plait

pytestmark = pytest.mark.gpu


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * 0.125, -1) @ v


def small(x: torch.Tensor, y: torch.Tensor) -> Any:
    return torch.softmax(x, -1), torch.tanh(y) + 1, x.sum(0)


def big(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x @ w) * x.sum(-1, keepdim=True)


def _args(fn: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    if fn is attend:
        return [torch.randn(2, 8, 1024, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    if fn is small:
        return [torch.randn(64, 100, device="cuda"), torch.randn(77, device="cuda")]
    return [torch.randn(2048, 1024, device="cuda").bfloat16(), torch.randn(1024, 1024, device="cuda").bfloat16()]


@pytest.mark.parametrize("fn", [attend, small, big])
@pytest.mark.parametrize("train", [False, True])
def test_every_kernel_and_graph(fn: Any, train: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = plait.explain(fn, *_args(fn), train=train, options={"strict": True})
    for g, facts in enumerate(report.graphs):
        for step in (None, *(k.number for k in facts.kernels if k.kind == "kernel")):
            path = tmp_path / f"{g}_{step}.py"
            made = report.reproduce(path, graph=g) if step is None else report.kernel(step, g).reproduce(path)
            assert run(made) == 0
            said = capsys.readouterr().out
            assert "the recorded kernel (" in said and "NOT" not in said
            assert f"time on {torch.cuda.get_device_name()}" in said
