"""What a device can do: the constants of the time model, each with where it comes from. Vendor knowledge lives here only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """Ceilings of a device. `bytes_per_ns`: copy bandwidth (read + written). `cache_bytes_per_ns`: bandwidth of re-reads that
        hit the last-level cache. `ops_per_ns`: simple f32 operations. `launch_ns`: one kernel boundary. `units`: multiprocessors
        or cores. `row_elems`: elements of a row a block keeps on chip. `half_flops_per_ns`, `float_flops_per_ns`: the vendor's
    matrix products of 16-bit and of f32 operands. `measured`: date and method. `descriptors`: a copy engine moves whole tiles.
    `row_bytes`: rows of values between kernels may begin at multiples of so many bytes; 0: there is no use in that."""

    name: str
    kind: str  # "cpu" | "cuda"
    bytes_per_ns: float
    cache_bytes_per_ns: float
    ops_per_ns: float
    launch_ns: float
    units: int
    row_elems: int
    half_flops_per_ns: float
    float_flops_per_ns: float
    measured: str
    descriptors: bool = False
    row_bytes: int = 128


SPECS: dict[str, DeviceSpec] = {
    "h200": DeviceSpec(
        "h200",
        "cuda",
        4270,
        12000,
        25000,
        3000,
        132,
        16384,
        650000,
        50000,
        "2026-11-30, one card: copy, products",
        True,
    ),
    "h100": DeviceSpec(
        "h100", "cuda", 3000, 11000, 25000, 3000, 132, 16384, 600000, 50000, "vendor data sheet x 0.9", True
    ),
    "a100": DeviceSpec("a100", "cuda", 1750, 4500, 9000, 3500, 108, 16384, 250000, 18000, "vendor data sheet x 0.9"),
    "l40s": DeviceSpec("l40s", "cuda", 770, 3500, 40000, 3500, 142, 16384, 300000, 70000, "vendor data sheet x 0.9"),
    "b200": DeviceSpec(
        "b200", "cuda", 7000, 18000, 35000, 3000, 148, 16384, 1500000, 65000, "vendor data sheet x 0.9", True
    ),
    "cpu": DeviceSpec(
        "cpu", "cpu", 13, 60, 30, 3000, 2, 1 << 17, 120, 120, "2026-11-29, copy on two cores", row_bytes=0
    ),
}


def spec_for(kind: str, capability: str = "") -> DeviceSpec:
    """The spec of a device kind ("cpu", "cuda") and, on CUDA, its name in lower case; unknown cards count as an H100."""
    if kind == "cpu":
        return SPECS["cpu"]
    return next((s for key, s in SPECS.items() if s.kind == "cuda" and key in capability.lower()), SPECS["h100"])


@dataclass(frozen=True, slots=True)
class Limits:
    """What a multiprocessor of a CUDA device holds at once, and what its binaries are called. `arch`: compute capability times
    ten. `threads`, `blocks`, `registers` (32 bit), `shared` (bytes, of which each block also takes `reserved`). From the
    vendor's programming guide."""

    arch: int
    threads: int
    blocks: int
    registers: int
    shared: int
    reserved: int = 1024

    @property
    def most_shared(self) -> int:
        """Bytes of shared memory that a block can have."""
        return self.shared - self.reserved

    def occupancy(self, warps: int, registers: int, shared: int) -> float:
        """Share of the multiprocessor's warps that are resident, for blocks that take this much."""
        per_warp = -(-max(registers, 1) * 32 // 256) * 256  # registers are given out by 256 a warp
        fits = [self.blocks, self.threads // (32 * warps), self.registers // (per_warp * warps)]
        fits.append(self.shared // (shared + self.reserved))
        return min(fits) * warps * 32 / self.threads


LIMITS: dict[str, Limits] = {
    "h200": Limits(90, 2048, 32, 65536, 228 << 10),
    "h100": Limits(90, 2048, 32, 65536, 228 << 10),
    "a100": Limits(80, 2048, 32, 65536, 164 << 10),
    "l40s": Limits(89, 1536, 24, 65536, 100 << 10),
    "b200": Limits(100, 2048, 32, 65536, 228 << 10),
}
