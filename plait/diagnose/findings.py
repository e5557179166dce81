"""What verify found, as plain values: its text and its JSON read these alone."""

from __future__ import annotations

from dataclasses import dataclass

from plait.diagnose.locate import Place
from plait.oracle.compare import Verdict

VERSION = 1
"""Of the JSON form: raised when a field changes its meaning or goes."""


@dataclass(frozen=True)
class Judged:
    """One run. `by_value`: float elements that are finite in eager and float64, and all integers; `by_place`: those where
    eager or float64 has NaN or an infinity, which must be in the same places."""

    name: str
    status: str
    by_value: int
    by_place: int
    verdicts: tuple[Verdict, ...]
    note: str = ""


@dataclass(frozen=True)
class Findings:
    """`right` when no run failed; `place`: where the first one that did first departs."""

    program: str
    runs: tuple[Judged, ...]
    graphs: int
    fallbacks: tuple[str, ...]
    place: Place | None
    notes: tuple[str, ...] = ()

    @property
    def right(self) -> bool:
        """No run failed."""
        return all(r.status != "FAIL" for r in self.runs)
