"""Under a profiler every launch is a range that says what it computes, and from which of the user's lines."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def ranges(run: Any) -> list[str]:
    """Names of plait's ranges while `run` runs, in order of their start."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run()
    events = [e for e in seen.events() if e.name.startswith("plait::")]
    return [e.name for e in sorted(events, key=lambda e: e.time_range.start)]


def program(x: torch.Tensor) -> torch.Tensor:
    y = torch.softmax(x, -1)
    z = y * 2
    return torch.linalg.inv(z + torch.eye(16))


def test_launches_and_calls_say_members_and_lines() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(program, backend="plait", fullgraph=True)
    x = torch.randn(16, 16)
    compiled(x)
    first = program.__code__.co_firstlineno
    found = ranges(lambda: compiled(x))
    assert re.fullmatch(rf"plait::k0_\w*max\w* test_profiler\.py:{first + 1}-{first + 3}", found[0]), found
    assert found[1] == f"plait::aten.linalg_inv_ex test_profiler.py:{first + 3}", found


def test_backward_launches_are_ranges_too() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.softmax(x, -1).square(), backend="plait")
    x = torch.randn(16, 16, requires_grad=True)
    compiled(x).sum().backward()
    found = ranges(lambda: compiled(x).sum().backward())
    assert len(found) == 2 and all("test_profiler.py:" in name for name in found), found


def test_without_a_profiler_nothing_is_told(monkeypatch: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(program, backend="plait")
    x = torch.randn(16, 16)
    compiled(x)

    def refuse(*args: Any) -> None:
        raise AssertionError("a range without a profiler")

    monkeypatch.setattr(torch.autograd.profiler, "record_function", refuse)
    torch.testing.assert_close(compiled(x), program(x))
