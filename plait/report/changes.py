"""What changed between two reports, as plain values: compare finds it, compare_text prints it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Difference:
    """One fact before and after. `unit`: B, us, s, or "" for counts and words; None: not known there."""

    what: str
    old: Any
    new: Any
    unit: str = ""
    worse: bool = False


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator of a step."""

    name: str
    aten: str
    line: str


@dataclass(frozen=True, slots=True)
class Step:
    """A step of one of the reports."""

    graph: str
    number: int
    name: str
    kind: str
    title: str
    lines: tuple[str, ...]
    operators: tuple[Operator, ...]


@dataclass(frozen=True, slots=True)
class StepChange:
    """`change`: merged, split, regrouped, appeared, vanished, members (one step has gained or lost operators) or changed (the
    same operators). `differences`: between the sums of both sides where there are several steps."""

    change: str
    old: tuple[Step, ...]
    new: tuple[Step, ...]
    gained: tuple[Operator, ...] = ()
    lost: tuple[Operator, ...] = ()
    differences: tuple[Difference, ...] = ()

    @property
    def worse(self) -> tuple[Difference, ...]:
        """What of it is."""
        return tuple(d for d in self.differences if d.worse)


@dataclass(frozen=True, slots=True)
class PairChange:
    """Neighbours. `old` and `new`: "fused", the reason of a refusal, or "" where that report has no such neighbours. `change`: refused
    (it was not), allowed (it is not any more), reason."""

    change: str
    graph: str
    producer: Operator
    consumer: Operator
    old: str
    new: str
    sentence: str
    bytes_at_stake: float


@dataclass(frozen=True, slots=True)
class Changes:
    """All that is different. `worse`: what got worse, in words."""

    program: str
    target: str
    notes: tuple[str, ...]
    totals: tuple[Difference, ...]
    steps: tuple[StepChange, ...]
    pairs: tuple[PairChange, ...]
    unchanged: int
    old_name: str = field(default="before", compare=False)
    new_name: str = field(default="after", compare=False)

    @property
    def worse(self) -> tuple[str, ...]:
        """Empty where nothing is."""
        out = [d.what for d in self.totals if d.worse]
        for s in self.steps:
            side = s.new or s.old
            out += [f"{d.what} of {side[0].graph} {side[0].name}" for d in s.worse]
        return tuple(out)

    def facts(self) -> dict[str, Any]:
        """As plain values (plait/tools/schemas/compare_1.json)."""
        return plain("report", self, self.worse)


def plain(of: str, comparison: Any, worse: tuple[str, ...]) -> dict[str, Any]:
    """A comparison as plain values: what of, the names of both sides, what got worse, and its fields."""
    found = asdict(comparison)
    names = {"old": found.pop("old_name"), "new": found.pop("new_name")}
    return {"of": of, **names, "worse": list(worse), **found}
