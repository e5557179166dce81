"""Planted faults: the seam at which `plait verify --self-test` makes one compilation wrong on purpose.

Each level hands what it made through `passed`, which gives it back as it is: at the cost of one look-up, since no option, no
variable of the environment and no file can plant a fault, only `planted` around a call. While one is planted, nothing that is
built is written to the disk cache, and no choice among builds is remembered (`is_planted`); when the block is left, by whatever
way, it is gone.

Sites, in the order of the levels: "joint" (fx.Graph of forward and backward, before it is split), "import" (Graph), "rewrite"
(Graph, after the pass that `about` names), "tile" (Lowered), "code" (TileProgram, as the emitters alone see it), "script" (Script).
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
SITES = ("joint", "import", "rewrite", "tile", "code", "script")


@dataclass
class Planted:
    """A fault where it is planted. `change(value, about)` gives the wrong value, or None where there is nothing to spoil.
    `reached` counts values that came by, `changed` those that were spoilt."""

    site: str
    change: Callable[[Any, str], Any]
    reached: int = 0
    changed: int = 0


_planted: contextvars.ContextVar[Planted | None] = contextvars.ContextVar("plait_fault", default=None)


@contextmanager
def planted(fault: Planted | None) -> Iterator[None]:
    """Spoil what passes the fault's site inside the block, on this thread (None: nothing)."""
    assert fault is None or fault.site in SITES
    token = _planted.set(fault)
    try:
        yield
    finally:
        _planted.reset(token)


def current() -> Planted | None:
    """What is planted here, to plant it on another thread that compiles for this one."""
    return _planted.get()


def is_planted() -> bool:
    """Whether what is compiled here may be wrong on purpose."""
    return _planted.get() is not None


def passed(site: str, value: T, about: str = "") -> T:
    """The value as it is, or spoilt."""
    fault = _planted.get()
    if fault is None or fault.site != site:
        return value
    fault.reached += 1
    spoilt: T | None = fault.change(value, about)
    if spoilt is None:
        return value
    fault.changed += 1
    return spoilt
