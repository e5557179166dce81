"""Levels of optimisation: what each spends time on while compiling. What they cost is measured in docs/options.md.

Every level gives right results; a lower one only does less. Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Level:
    """`fuse`: operators share kernels. `open_products`: products may share them too, instead of being library calls; the plan is
    searched several times for that. `tries`: on a GPU, other builds of a kernel (schedules, Gluon) are timed beside the plain
    one. `cxx`: the C++ compiler's own level. `cuda_graphs`: inference is recorded where that can be done."""

    name: str
    fuse: bool = True
    open_products: bool = True
    tries: bool = True
    cxx: str = "-O3"
    cuda_graphs: bool = False


CHEAPEST_CXX = "-O1"  # of kernels that are to run fast at all: without the optimiser they take five times as long

LEVELS: dict[str, Level] = {
    level.name: level
    for level in (
        Level("O0", fuse=False, open_products=False, tries=False, cxx="-O0"),
        Level("O1", open_products=False, tries=False, cxx=CHEAPEST_CXX),
        Level("O2"),
        Level("O3", cuda_graphs=True),
    )
}
DEFAULT = "O2"

ALIASES: dict[str, str] = {
    "fast-compile": "O1",
    "default": DEFAULT,
    "none": DEFAULT,
    "reduce-overhead": DEFAULT,
    "max": "O3",
    "max-autotune": "O3",
    "max-autotune-no-cudagraphs": "O3",
}
"""Other names: plait's own words, and torch.compile's modes."""

GRAPHS: dict[str, bool] = {"reduce-overhead": True, "max-autotune-no-cudagraphs": False}
"""What a name says of CUDA graphs beside its level."""
