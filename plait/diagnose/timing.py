"""Median times of several things that are measured in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

_BATCH_NS = 2e6  # that one measurement lasts at least


def medians_us(calls: Sequence[Callable[[], object]], on_card: bool, rounds: int = 9) -> list[float]:
    """Median microseconds of each call, interleaved."""
    runs = [_repeated(call, on_card) for call in calls]
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for run, times in zip(runs, found, strict=True):
            times.append(run())
    return [statistics.median(times) for times in found]


def _repeated(call: Callable[[], object], on_card: bool) -> Callable[[], float]:
    def batch(count: int) -> float:
        _wait(on_card)
        start = time.perf_counter_ns()
        for _ in range(count):
            call()
        _wait(on_card)
        return (time.perf_counter_ns() - start) / count

    for _ in range(3):
        once = batch(1)
    count = max(1, min(1000, round(_BATCH_NS / max(once, 1.0))))
    return lambda: batch(count) / 1e3


def _wait(on_card: bool) -> None:
    if on_card:
        torch.cuda.synchronize()
