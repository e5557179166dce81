"""plait verify --self-test: is a wrong program seen to be wrong? Known faults are planted, one at a time, in programs that are right.

Every program is judged without its fault first, and must be right; then with it, and must be wrong. A fault that could not be
planted, and a program that raises, are errors of the self-test itself, never a pass. Which level verify names is noted beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from plait.diagnose.faults.known import KnownFault, Sample
from plait.diagnose.faults.table import KNOWN
from plait.diagnose.locate import Place
from plait.diagnose.verify import Verification, verify_calls
from plait.ir.fault import Planted, planted
from plait.report.finite import json_text

VERSION = 1
"""Of the JSON form: raised when a field changes its meaning or goes."""
CAUGHT, MISSED, ERROR = "caught", "missed", "error"
HEAD = f"{'fault':30s} {'wrong at':12s} {'program':21s} {'caught by':20s} {'named':12s}".rstrip()
_SEEN = {
    "grad": "gradient",
    "arg": "argument",
    "buffer": "buffer",
    "aliasing": "aliasing",
}  # first letters of verdicts' names
Say = Callable[[str], None]


@dataclass(frozen=True)
class Tried:
    """What came of one fault. `level`: where it was planted; `seen_in`: what failed (result, gradient, argument, buffer, aliasing),
    on the first class of `values` that did; `place`: what verify names; `note`: of an error or a miss, why."""

    name: str
    words: str
    level: str
    device: str
    program: str
    status: str
    seen_in: str = ""
    values: str = ""
    place: Place | None = None
    note: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        """A row of the table, of at most 100 columns; of what was not caught, a second one says why."""
        by = f"{self.seen_in}, {self.values}" if self.status == CAUGHT else self.status.upper()
        named = self.place.level if self.place is not None else ""
        row = f"{self.name:30s} {self.level:12s} {self.program:21s} {by:20s} {named or '-':12s}".rstrip()
        return row + (f"\n  {' '.join(self.note.split())}"[:101] if self.note else "")


@dataclass(frozen=True)
class SelfTest:
    """All of them, in order."""

    tried: tuple[Tried, ...]
    seconds: float

    @property
    def right(self) -> bool:
        """Whether every fault was caught."""
        return all(t.status == CAUGHT for t in self.tried)

    def __str__(self) -> str:
        return "\n".join([HEAD, *map(str, self.tried), self.total()])

    def total(self) -> str:
        """The last line."""
        return f"caught {sum(t.status == CAUGHT for t in self.tried)} of {len(self.tried)}"

    def to_json(self) -> str:
        """The same facts; `version` rises when a field changes its meaning."""
        body = {
            "schema": "plait.self_test",
            "version": VERSION,
            "right": self.right,
            "caught": sum(t.status == CAUGHT for t in self.tried),
            "seconds": self.seconds,
            "faults": [{**asdict(t), "place": None if t.place is None else asdict(t.place)} for t in self.tried],
        }
        return json_text(body)


def devices() -> list[str]:
    """Where programs run here: on the processor, and on a card if there is one."""
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def self_test(
    faults: Sequence[KnownFault] = KNOWN,
    *,
    on: Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
    say: Say = lambda line: None,
    show: Callable[[Tried], None] = lambda tried: None,
) -> SelfTest:
    """Plant each fault on each device (default: all there are) and verify. `options` of plait; `say` hears of progress, `show` gets
    each outcome as it comes."""
    start = time.perf_counter()
    tried: list[Tried] = []
    try:
        for t in _each(faults, devices() if on is None else on, dict(options or {}), say):
            show(t)
            tried.append(t)
    finally:
        torch._dynamo.reset()  # which forgets what was compiled: no program is left wrong
    return SelfTest(tuple(tried), time.perf_counter() - start)


def _each(faults: Sequence[KnownFault], on: Sequence[str], options: dict[str, Any], say: Say) -> Iterator[Tried]:
    for device in on:
        controls: dict[str, str] = {}
        for k, known in enumerate(faults, 1):
            say(f"{k} of {len(faults)} on {device}: {known.name} ...")
            start = time.perf_counter()
            sample = known.sample
            if sample.name not in controls:
                controls[sample.name] = _why_not_right(sample, device, options)
            why = controls[sample.name]
            found = _tried(known, device, ERROR, note=why) if why else _try(known, device, options)
            yield replace(found, seconds=time.perf_counter() - start)


def _verified(sample: Sample, device: str, options: dict[str, Any]) -> Verification:
    # a build that fails must not be judged in eager's place
    given = {"strict": True, **options}
    return verify_calls(sample.fn, [sample.make(device)], train=sample.train, seeds=1, options=given, until_wrong=True)


def _why_not_right(sample: Sample, device: str, options: dict[str, Any]) -> str:
    """Of a program without a fault: "" where it is judged right."""
    try:
        found = _verified(sample, device, options)
    except Exception as error:  # whatever it is, nothing can be said of the fault then
        return f"without the fault it raises {type(error).__name__}: {error}"
    bad = [v for r in found.runs for v in r.verdicts if v.status == "FAIL"]
    return "" if found.right else f"it is judged wrong without the fault: {bad[0]}"


def _try(known: KnownFault, device: str, options: dict[str, Any]) -> Tried:
    fault = Planted(known.site, known.change)
    try:
        with planted(fault):
            found = _verified(known.sample, device, options)
    except Exception as error:  # a fault that stops the compiler is none that verify could see
        return _tried(known, device, ERROR, note=f"with the fault it raises {type(error).__name__}: {error}")
    raised = [v for r in found.runs for v in r.verdicts if v.status == "FAIL" and v.name == "run"]
    if raised:
        return _tried(known, device, ERROR, note=f"with the fault it {raised[0].message}")
    if not fault.changed:
        came = (
            f"none of the {fault.reached} values that came by is one that it changes"
            if fault.reached
            else "nothing came by"
        )
        return _tried(known, device, ERROR, note=f"it could not be planted: {came}")
    for run in found.runs:
        bad = [v for v in run.verdicts if v.status == "FAIL"]
        if not bad:
            continue
        name = bad[0].name.strip()
        seen = next((word for first, word in _SEEN.items() if name.startswith(first)), "result")
        return _tried(known, device, CAUGHT, seen_in=seen, values=run.name, place=found.place)
    return _tried(known, device, MISSED, note="verify judges it right with the fault")


def _tried(known: KnownFault, device: str, status: str, **found: Any) -> Tried:
    return Tried(known.name, known.words, known.level, device, known.sample.name, status, **found)
