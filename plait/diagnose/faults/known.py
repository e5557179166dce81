"""A fault as a value, and the small programs that show faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Change = Callable[[Any, str], Any]

LEVELS = {
    "joint": "capture",
    "import": "import",
    "rewrite": "rewriting",
    "tile": "tile program",
    "code": "code",
    "script": "call",
}
"""Site of a fault (ir/fault.py) -> the level that it makes wrong, as verify calls it."""


@dataclass(frozen=True)
class Sample:
    """A program that is right without a fault. `make(device)` gives its arguments; with `train` gradients are judged too."""

    name: str
    fn: Callable[..., Any]
    make: Callable[[str], list[Any]]
    train: bool = False


@dataclass(frozen=True)
class KnownFault:
    """A miscompilation. `words`: what it stands for, in one sentence; `change` spoils what passes `site`, see ir/fault.py."""

    name: str
    words: str
    sample: Sample
    site: str
    change: Change

    @property
    def level(self) -> str:
        """The level that is wrong."""
        return LEVELS[self.site]
