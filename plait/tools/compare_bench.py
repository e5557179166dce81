"""What changed between two files of `plait bench`, row by row.

Slower (and faster): the quartiles of the two do not overlap, and the medians are more than 2 % apart; more than 5 % where a row
has no quartiles. Worse (the exit code): slower, a worse verdict, an error or fallbacks that were not there, over 5 % more memory at
the peak. Kernels and seconds to compile are told, and not judged: the one is paid for in time, the other is measured once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any

from plait.errors import UserError
from plait.report.changes import Difference, plain
from plait.report.compare_text import LINES, WIDTH
from plait.report.words import clipped, count
from plait.tools.table import number, plain_table

SPREAD, UNKNOWN_SPREAD, MEMORY = 1.02, 1.05, 1.05
_RANK = {"PASS": 0, "WARN": 1, "FAIL": 2, "ERROR": 3}
_COMPILE = 1.25  # seconds to compile that are worth a word: so many times, and so many seconds, apart
_COMPILE_SECONDS = 0.5
_MB = 1.0


@dataclass(frozen=True, slots=True)
class RowChange:
    """A workload that is in both files. `speed`: slower, faster, same, or unknown where one has no time; `ratio`: of plait's
    medians, new by old; `eager_ratio`: of eager's, which tells the machine from the compiler."""

    name: str
    device: str
    speed: str
    ratio: float | None
    eager_ratio: float | None
    differences: tuple[Difference, ...]

    def of(self, what: str) -> Difference | None:
        """One of its differences."""
        return next((d for d in self.differences if d.what == what), None)

    @property
    def is_worse(self) -> bool:
        """Anything of it."""
        return any(d.worse for d in self.differences)

    @property
    def is_shown(self) -> bool:
        """It has changed beyond what one measurement differs from the next."""
        return self.speed in ("slower", "faster") or any(
            d.what not in ("time", "compile time") for d in self.differences
        )


@dataclass(frozen=True, slots=True)
class BenchComparison:
    """Two files of rows."""

    machine: str
    notes: tuple[str, ...]
    rows: tuple[RowChange, ...]
    only_old: tuple[str, ...]
    only_new: tuple[str, ...]
    plait_ratio: float | None
    eager_ratio: float | None
    old_name: str
    new_name: str

    @property
    def worse(self) -> tuple[str, ...]:
        """Empty where nothing is."""
        return tuple(f"{d.what} of {r.name}" for r in self.rows for d in r.differences if d.worse)

    def facts(self) -> dict[str, Any]:
        """As plain values (schemas/compare_1.json)."""
        return plain("bench", self, self.worse)


def compare_bench(old: Mapping[str, Any], new: Mapping[str, Any], old_name: str, new_name: str) -> BenchComparison:
    """What is different in the second file. Raises UserError for rows that are none."""
    before, after = _rows(old, old_name), _rows(new, new_name)
    changes = [_change(before[key], after[key]) for key in before if key in after]
    if not changes:
        raise UserError(f"no workload is in both {old_name} and {new_name}", hint="compare two runs of one suite")
    order = {"slower": 0, "faster": 2}
    return BenchComparison(
        machine=str(_machine(new).get("device", "?")),
        notes=tuple(_notes(old, new)),
        rows=tuple(sorted(changes, key=lambda r: (not r.is_worse, order.get(r.speed, 1), -(r.ratio or 1.0)))),
        only_old=tuple(name for name, device in before if (name, device) not in after),
        only_new=tuple(name for name, device in after if (name, device) not in before),
        plait_ratio=_geomean([r.ratio for r in changes]),
        eager_ratio=_geomean([r.eager_ratio for r in changes]),
        old_name=old_name,
        new_name=new_name,
    )


def _notes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for what in ("device", "torch", "python", "threads"):
        a, b = (_machine(x).get(what) for x in (old, new))
        if a is not None and b is not None and a != b:
            yield f"{what} differs: {a}, {b}"


def _machine(data: Mapping[str, Any]) -> Mapping[str, Any]:
    found = data.get("machine")
    return found if isinstance(found, Mapping) else {}


def _rows(data: Mapping[str, Any], path: str) -> dict[tuple[str, str], Mapping[str, Any]]:
    rows = data.get("rows")
    if not isinstance(rows, list):
        raise UserError(f"{path}: it has no list of rows", hint="plait bench --json FILE writes one")
    out = {}
    for k, r in enumerate(rows):
        if not isinstance(r, Mapping) or not isinstance(r.get("name"), str):
            raise UserError(f"{path}: rows[{k}] has no name", hint="plait bench --json FILE writes such a file")
        _check_numbers(r, path)
        out[r["name"], str(r.get("device", ""))] = r
    return out


def _check_numbers(row: Mapping[str, Any], path: str) -> None:
    for key in ("plait_ms", "eager_ms", "plait_kernels", "plait_externs", "plait_compile_s", "plait_peak_mb"):
        value = row.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UserError(
                f"{path}: {key} of {row['name']} is no number: {value!r:.40}", hint="plait bench --json FILE"
            )


# ---------------------------------------------------------------------------------------------------------------- rows
def _change(old: Mapping[str, Any], new: Mapping[str, Any]) -> RowChange:
    speed = _speed(old, new)
    found = [
        Difference("time", old.get("plait_ms"), new.get("plait_ms"), "ms", speed == "slower"),
        *_verdicts(old, new),
        *(
            d
            for d in (_of(old, new, k, w) for k, w in (("plait_kernels", "kernels"), ("plait_externs", "ATen calls")))
            if d
        ),
    ]
    more, fewer = (_beside(x, y) for x, y in ((new, old), (old, new)))
    if more or fewer:
        found.append(Difference("fallbacks", fewer, more, worse=bool(more)))
    a, b = old.get("plait_peak_mb"), new.get("plait_peak_mb")
    if a is not None and b is not None and abs(b - a) > _MB and not 1 / MEMORY <= b / max(a, 1e-9) <= MEMORY:
        found.append(Difference("peak memory", a, b, "MB", b > a))
    a, b = old.get("plait_compile_s"), new.get("plait_compile_s")
    if a and b and abs(b - a) > _COMPILE_SECONDS and not 1 / _COMPILE <= b / a <= _COMPILE:
        found.append(Difference("compile time", a, b, "s"))
    ratio, eager = (_ratio(old.get(k), new.get(k)) for k in ("plait_ms", "eager_ms"))
    return RowChange(new["name"], str(new.get("device", "")), speed, ratio, eager, tuple(found))


def _speed(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    ratio = _ratio(old.get("plait_ms"), new.get("plait_ms"))
    if ratio is None:
        return "unknown"
    spreads = [_quartiles(r) for r in (old, new)]
    if spreads[0] is None or spreads[1] is None:
        return "slower" if ratio > UNKNOWN_SPREAD else "faster" if ratio < 1 / UNKNOWN_SPREAD else "same"
    if ratio > SPREAD and spreads[1][0] > spreads[0][1]:
        return "slower"
    return "faster" if ratio < 1 / SPREAD and spreads[1][1] < spreads[0][0] else "same"


def _quartiles(row: Mapping[str, Any]) -> tuple[float, float] | None:
    found = row.get("plait_quartiles_ms")
    if isinstance(found, list) and len(found) == 2 and all(isinstance(x, int | float) for x in found):
        return found[0], found[1]
    return None


def _verdicts(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Difference]:
    """The verdict on results, with an error as the worst of them, and that on the curve of losses."""
    a, b = (str("ERROR" if "error" in r else r.get("verdict", "-")) for r in (old, new))
    if a != b:
        yield Difference("verdict", a, b, worse=_RANK.get(b, 0) > _RANK.get(a, 0))
    a, b = (str(r.get("losses_verdict", "-")) for r in (old, new))
    if a != b and "-" not in (a, b):
        first, second = (x.partition(" ")[0].strip(":") for x in (a, b))
        if first != second:
            yield Difference("losses", first, second, worse=_RANK.get(second, 0) > _RANK.get(first, 0))


def _of(old: Mapping[str, Any], new: Mapping[str, Any], key: str, what: str) -> Difference | None:
    a, b = old.get(key), new.get(key)
    return Difference(what, a, b) if a is not None and b is not None and a != b else None


def _beside(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    known = other.get("fallbacks") or []
    return [str(f) for f in one.get("fallbacks") or [] if f not in known]


def _ratio(old: float | None, new: float | None) -> float | None:
    return new / old if old and new else None


def _geomean(ratios: Sequence[float | None]) -> float | None:
    known = [r for r in ratios if r]
    return exp(sum(map(log, known)) / len(known)) if known else None


# ---------------------------------------------------------------------------------------------------------------- page
def render(found: BenchComparison, *, everything: bool = False) -> str:
    """The page: slower rows first; rows that are as before only where `everything` is asked for."""
    shown = [r for r in found.rows if everything or r.is_shown]
    head = [f"{found.machine}: {found.old_name} -> {found.new_name}", *(f"note: {n}" for n in found.notes)]
    if found.plait_ratio is not None:
        eager = f"; eager {found.eager_ratio:.2f}x" if found.eager_ratio is not None else ""
        timed = sum(r.ratio is not None for r in found.rows)
        head.append(f"plait takes {found.plait_ratio:.2f}x the time, geometric mean of {count(timed, 'row')}{eager}")
    tail = []
    alike = len(found.rows) - len([r for r in found.rows if r.is_shown])
    if alike:
        tail.append(f"{count(alike, 'row')} as before, within the spread" + ("" if everything else " (--all)"))
    for what, names in ((found.old_name, found.only_old), (found.new_name, found.only_new)):
        if names:
            tail.append(f"only in {what}: {', '.join(names)}")
    tail.append(f"worse: {', '.join(found.worse)}" if found.worse else "nothing got worse")
    room = None if everything else LINES - len(head) - len(tail) - 2
    lines = [*head, *_table(shown, room), *tail]
    return "\n".join(lines if everything else [clipped(line, WIDTH) for line in lines]) + "\n"


def _table(rows: Sequence[RowChange], room: int | None) -> list[str]:
    if not rows:
        return []
    cut = room is not None and len(rows) > room
    shown = rows[: (room or 0) - 1] if cut else rows
    cells = [_cells(r) for r in shown]
    text = plain_table(["workload", "", "old ms", "new ms", "ratio", "eager"], [c[:-1] for c in cells]).splitlines()
    width = max(map(len, text))
    text = [
        f"{line:<{width}}  {c[-1]}".rstrip() for line, c in zip(text, [["", "also"], ["", "----"], *cells], strict=True)
    ]
    return text + ([f"and {len(rows) - len(shown)} more (--all)"] if cut else [])


def _cells(r: RowChange) -> list[str]:
    time = r.of("time")
    assert time is not None
    rest = [f"{d.what} {d.old} -> {d.new}" for d in r.differences if d.what in ("verdict", "losses")]
    rest += [f"{d.what} {d.old} -> {d.new}" for d in r.differences if d.what in ("kernels", "ATen calls")]
    compiling = r.of("compile time")
    rest += [f"compile {number(compiling.old, 2)} -> {number(compiling.new, 2)} s"] if compiling else []
    memory, fallbacks = r.of("peak memory"), r.of("fallbacks")
    rest += [f"{number(memory.old)} -> {number(memory.new)} MB"] if memory else []
    rest += [f"fallbacks -{len(fallbacks.old)} +{len(fallbacks.new)}"] if fallbacks else []
    return [
        r.name,
        r.speed if r.speed in ("slower", "faster") else "",
        number(time.old),
        number(time.new),
        "-" if r.ratio is None else f"{r.ratio:.2f}x",
        "-" if r.eager_ratio is None else f"{r.eager_ratio:.2f}x",
        "; ".join(rest),
    ]
