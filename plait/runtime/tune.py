"""Choose by measurement: a kernel built under several schedules keeps the one that is fastest on the real tensors.

At the first launch each variant runs a few times on the call's own buffers (kernels only write results, so running them
again changes nothing; one that writes over what it reads does so only when it `is_settled`), interleaved, and the fastest
median stays. The choice and all times are kept for reports.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Sequence

import torch

from plait.runtime.kernel import Kernel, Launch, Messages, Slots

_ROUNDS = 5
_LAUNCHES = 4  # between two events: a launch alone would time the launching


class Tuned:
    """See kernel.Kernel. `variants` are equal but for their schedule, the default first; `names` are their schedules."""

    def __init__(self, variants: Sequence[Kernel], names: Sequence[str]) -> None:
        self.variants, self.names = tuple(variants), tuple(names)
        self.times_ms: dict[str, float] = {}
        self.choice: int | None = None
        self._lock = threading.Lock()

    def bind(self, buffers: tuple[int, ...], symbols: Sequence[int], messages: Messages) -> Launch:
        """See kernel.Kernel."""
        launches = [v.bind(buffers, symbols, messages) for v in self.variants]

        def launch(slots: Slots) -> None:
            chosen = self.choice
            if chosen is None:
                chosen = self._choose(launches, slots)
            launches[chosen](slots)

        return launch

    def _choose(self, launches: Sequence[Launch], slots: Slots) -> int:
        if torch.cuda.is_current_stream_capturing():
            return 0
        with self._lock:
            if self.choice is None:
                times: list[list[float]] = [[] for _ in launches]
                for go in launches:
                    go(slots)
                for _ in range(_ROUNDS):
                    for go, found in zip(launches, times, strict=True):
                        found.append(_time_ms(go, slots))
                medians = [statistics.median(t) for t in times]
                self.times_ms = dict(zip(self.names, medians, strict=True))
                best = min(range(len(medians)), key=medians.__getitem__)
                # the default stays unless another is clearly faster
                self.choice = best if medians[best] < 0.985 * medians[0] else 0
            return self.choice


def is_settled(kernel: Kernel) -> bool:
    """Whether a launch of a kernel runs it once."""
    return not isinstance(kernel, Tuned) or kernel.choice is not None


def _time_ms(go: Launch, slots: Slots) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(_LAUNCHES):
        go(slots)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / _LAUNCHES
