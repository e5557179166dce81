"""A device's ceilings, and the least time that they allow."""

from __future__ import annotations

from plait.plan.device import DeviceSpec
from plait.report.facts import Ceilings, Flops, Traffic


def ceilings_of(spec: DeviceSpec) -> Ceilings:
    """Of a device, a microsecond; on a CPU all work is arithmetic."""
    tensor_core = spec.half_flops_per_ns * 1e3 if spec.kind == "cuda" else 0.0
    return Ceilings(spec.bytes_per_ns * 1e3, spec.float_flops_per_ns * 1e3, tensor_core, spec.launch_ns / 1e3)


def roofline_us(c: Ceilings, traffic: Traffic, flops: Flops) -> float:
    """The least time for this traffic and work."""
    return max(_terms(c, traffic, flops))


def bound_of(c: Ceilings, traffic: Traffic, flops: Flops) -> str:
    """What most of a call's time is: launch, memory or compute."""
    memory, work = _terms(c, traffic, flops)
    if c.launch_us > max(memory, work):
        return "launch"
    return "memory" if memory >= work else "compute"


def _terms(c: Ceilings, traffic: Traffic, flops: Flops) -> tuple[float, float]:
    tensor_core = flops.tensor_core / c.tensor_core_per_us if flops.tensor_core else 0.0
    return traffic.total / c.bytes_per_us, tensor_core + flops.arithmetic / c.arithmetic_per_us
