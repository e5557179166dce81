"""Measuring: interleaved timing of several contenders, peak memory, and a machine's ceilings.

Contenders take turns (round robin), so that a change of clock speed or a busy neighbour hits all of them; each result is
dropped before the next call, so that every contender allocates as a real program does. Reported are medians with quartiles.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]
_FLUSH_BYTES = 1 << 30  # a quarter of a millisecond of reading
LEAST_ROUNDS, MIN_ROUNDS, MAX_ROUNDS = 3, 10, 60


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds a call: the median, and the quartiles around it."""

    median: float
    low: float
    high: float
    samples: int

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        """From at least two samples in milliseconds."""
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high, len(samples))


def time_all(calls: dict[str, Call], device: str, seconds: float) -> dict[str, Timing]:
    """Time every call, round robin, for about `seconds` in all, MIN_ROUNDS rounds or more unless that takes far too long."""
    timer = _CudaTimer() if device == "cuda" else _CpuTimer()
    once: dict[str, float] = {}
    for name, call in calls.items():
        timer(call, 3)  # clocks, allocators and lazy initialisation
        once[name] = min(timer(call, 3))
    # short calls are repeated within a round: about 10 ms each, so that a round is not all switching
    repeat = {name: max(1, min(50, int(10 / max(ms, 1e-3)))) for name, ms in once.items()}
    round_ms = sum(repeat[n] * once[n] for n in calls)
    rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(seconds * 1000 / max(round_ms, 1e-3))))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    begin = time.perf_counter()
    for n in range(rounds):
        if n >= LEAST_ROUNDS and time.perf_counter() - begin > 4 * seconds:
            break  # a busy machine: fewer rounds, which `samples` says, rather than a wait without end
        for name, call in calls.items():
            samples[name].append(statistics.median(timer(call, repeat[name])))
    return {name: Timing.of(s) for name, s in samples.items()}


class _CpuTimer:
    def __call__(self, call: Call, times: int) -> list[float]:
        out = []
        for _ in range(times):
            start = time.perf_counter()
            result = call()
            out.append((time.perf_counter() - start) * 1e3)
            del result
        return out


class _CudaTimer:
    """Events around each call. A buffer much larger than the L2 cache is read in between, so that no call finds its inputs
    there, nor lines that others wrote and that it would have to write back; that also keeps the device busy while the host
    prepares the launch, as a real stream of work does."""

    def __init__(self) -> None:
        self.flush = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")

    def __call__(self, call: Call, times: int) -> list[float]:
        make: Any = torch.cuda.Event
        start = [make(enable_timing=True) for _ in range(times)]
        stop = [make(enable_timing=True) for _ in range(times)]
        for a, b in zip(start, stop):
            self.flush.sum()
            a.record()
            result = call()
            b.record()
            del result
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in zip(start, stop)]


# ---------------------------------------------------------------------------------------------------------- memory


def peak_mb(call: Call, device: str) -> float | None:
    """Most memory one call holds beyond what was there before it, in MiB. On the CPU a best effort: the growth of the
    process's resident high-water mark, which memory kept for reuse does not raise. None where it cannot be read."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = call()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        del result
        return (peak - before) / 2**20
    try:
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")
        before = _status_kb("VmRSS")
        result = call()
        peak = _status_kb("VmHWM")
        del result
    except (OSError, ValueError):
        return None
    return max(0, peak - before) / 1024


def _status_kb(field: str) -> int:
    with open("/proc/self/status") as f:
        for row in f:
            if row.startswith(field + ":"):
                return int(row.split()[1])
    raise ValueError(f"no {field} in /proc/self/status")


# ---------------------------------------------------------------------------------------------------------- ceilings


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this machine was measured to do: copying (bytes read plus written a second) and a large matrix product."""

    bytes_per_s: float
    flops_per_s: float

    def floor_ms(self, bytes_moved: int, flops: int) -> float:
        """No program can be faster than its slower resource."""
        return max(bytes_moved / self.bytes_per_s, flops / self.flops_per_s) * 1e3


def measure_ceilings(device: str) -> Ceilings:
    """About a second of copying and multiplying."""
    timer = _CudaTimer() if device == "cuda" else _CpuTimer()
    size, n, dtype = (1 << 30, 8192, torch.bfloat16) if device == "cuda" else (1 << 28, 1536, torch.float32)
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy = min(timer(lambda: target.copy_(source), 8))
    a = torch.randn(n, n, device=device, dtype=dtype)
    out = torch.empty_like(a)
    product = min(timer(lambda: torch.mm(a, a, out=out), 8))
    return Ceilings(2 * size / copy * 1e3, 2 * n**3 / product * 1e3)


def describe_machine(device: str) -> dict[str, Any]:
    """The facts a number needs beside it."""
    about: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else _cpu_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if device == "cuda":
        about["cuda"] = torch.version.cuda
    return about


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            names = [row.partition(":")[2].strip() for row in f if row.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
