"""A comparison as a page of at most LINES lines: totals, steps, pairs; equal changes of repeated layers are one entry with a count."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from plait.ir.names import place, places
from plait.report.changes import Changes, Difference, Operator, PairChange, StepChange
from plait.report.words import bytes_text, clipped, count, figure, listed, us_text

WIDTH, LINES = 100, 25
_ENTRY = 3  # lines of one change at most, where not everything is shown
_PAIR_LINES = 7
_ALWAYS = ("launches", "traffic", "predicted time", "peak memory", "compile time")
_HEADS = {
    "merged": "merged",
    "split": "split",
    "regrouped": "regrouped",
    "appeared": "appeared",
    "vanished": "vanished",
    "members": "other members",
    "changed": "changed",
}


def render(found: Changes, *, everything: bool = False) -> str:
    """The page, without colours. `everything`: as long as it takes."""

    def clip(line: str) -> str:
        return line if everything else clipped(line, WIDTH)

    head = [clip(f"{found.program} on {found.target}: {found.old_name} -> {found.new_name}")]
    head += [clip(f"note: {n}") for n in found.notes]
    head += _totals(found.totals)
    words = f"worse: {', '.join(found.worse)}" if found.worse else "nothing got worse"
    last = [clip(words)]
    if not found.steps and not found.pairs:
        last.insert(0, f"no change in {count(found.unchanged, 'step')} or in what was refused")
    left = LINES - len(head) - len(last)
    pairs = _section(_pair_head(found.pairs), _pair_entries(found.pairs), None if everything else _PAIR_LINES)
    steps = _section(_step_head(found), _step_entries(found.steps), None if everything else left - len(pairs))
    if not everything:
        pairs = _section(_pair_head(found.pairs), _pair_entries(found.pairs), left - len(steps))
    return "\n".join([*head, *steps, *pairs, *last]) + "\n"


def _section(head: str, entries: Sequence[list[str]], most: int | None) -> list[str]:
    """A head and as many whole entries as there is room for, and how many there are beside them."""
    if not entries:
        return []
    lines = [head]
    for k, entry in enumerate(entries):
        shown = entry if most is None else _cut(entry)
        more = most is not None and k + 1 < len(entries)
        if most is not None and len(lines) + len(shown) + more > most:
            lines.append(f"  and {len(entries) - k} more (--all)")
            break
        lines += shown
    return lines


def _cut(entry: list[str]) -> list[str]:
    return entry if len(entry) <= _ENTRY else [*entry[: _ENTRY - 1], clipped(entry[_ENTRY - 1] + " ...", WIDTH)]


# -------------------------------------------------------------------------------------------------------------- totals
def _totals(totals: Sequence[Difference]) -> list[str]:
    shown = [d for d in totals if d.what in _ALWAYS or d.old != d.new]
    cells = [
        (d.what, amount(d.old, d.unit), amount(d.new, d.unit), _ratio(d), "worse" if d.worse else "") for d in shown
    ]
    widths = [max(len(c[k]) for c in cells) for k in range(4)]
    return [
        f"  {a:<{widths[0]}}  {b:>{widths[1]}} -> {c:>{widths[2]}}  {d:>{widths[3]}}  {e}".rstrip()
        for a, b, c, d, e in cells
    ]


def _ratio(d: Difference) -> str:
    if not d.old or not d.new or d.old == d.new or isinstance(d.old, str):
        return ""
    return f"{d.new / d.old:.2f}x"


def amount(value: Any, unit: str) -> str:
    """A figure with its unit; a dash for what is not known."""
    if value is None:
        return "-"
    if unit == "B":
        return bytes_text(value)
    if unit in ("us", "s"):
        return f"{us_text(value) if unit == 'us' else figure(value)} {unit}"
    return str(value)


# --------------------------------------------------------------------------------------------------------------- steps
def _step_head(found: Changes) -> str:
    kinds: dict[str, int] = {}
    for s in found.steps:
        kinds[_HEADS[s.change]] = kinds.get(_HEADS[s.change], 0) + 1
    return f"Steps: {', '.join(f'{n} {k}' for k, n in kinds.items())}, {found.unchanged} as before"


@dataclass(slots=True)
class _Alike:
    """Changes that read the same but for numbers."""

    words: str
    first: StepChange
    all: list[StepChange] = field(default_factory=list)


def _step_entries(steps: Sequence[StepChange]) -> list[list[str]]:
    found: dict[str, _Alike] = {}
    for s in steps:
        words = _which(s)
        key = f"{s.change} {words} {[(d.what, d.worse) for d in s.differences]} {_fixed(s)}"
        found.setdefault(key, _Alike(words, s)).all.append(s)
    return [_step_entry(a) for a in found.values()]


def _fixed(s: StepChange) -> list[tuple[Any, Any]]:
    return [(d.old, d.new) for d in s.differences if d.unit != "us" and d.what != "traffic"]


def _step_entry(alike: _Alike) -> list[str]:
    times = f"{len(alike.all)}x " if len(alike.all) > 1 else ""
    facts = "; ".join(_facts(alike.all))
    text = f"{times}{_HEADS[alike.first.change]}: {alike.words}" + (f": {facts}" if facts else "")
    return _wrapped(text)


def _which(s: StepChange) -> str:
    lines = list(dict.fromkeys(x for side in (s.old, s.new) for step in side for x in step.lines))
    where = f" ({places(lines, 3)})" if lines else ""
    if s.change in ("changed", "members"):
        title = s.new[0].title
        moved = [
            f"{sign} {listed((o.name for o in side), 4)}" for sign, side in (("+", s.gained), ("-", s.lost)) if side
        ]
        return title + where + ("".join(f", {m}" for m in moved))
    sides = [" | ".join(step.title for step in side) for side in (s.old, s.new) if side]
    return " -> ".join(sides) + where


def _facts(changes: Sequence[StepChange]) -> Iterable[str]:
    """What differs, of all of them together where it can be added up."""
    for k, d in enumerate(changes[0].differences):
        if d.what == "schedule":
            yield _schedules(d.old, d.new)
            continue
        old, new = d.old, d.new
        if d.unit == "us" or d.what == "traffic":
            old, new = (_sum([getattr(c.differences[k], side) for c in changes]) for side in ("old", "new"))
        # what a change is called already says on which side there is nothing
        if amount(old, d.unit) == amount(new, d.unit):
            continue  # a difference beyond the digits that are shown
        both = f"{amount(old, d.unit) or 'none'} -> {amount(new, d.unit) or 'none'}"
        shown = amount(new, d.unit) if d.old is None else amount(old, d.unit) if d.new is None else both
        yield f"{d.what} {shown}" + (" (worse)" if d.worse else "")


def _sum(values: Sequence[Any]) -> float | None:
    return None if any(v is None for v in values) else sum(values)


def _schedules(old: Sequence[str], new: Sequence[str]) -> str:
    """Only what differs: "schedule warps=4 -> 8"."""
    if len(old) != len(new):
        return f"schedules of {count(len(old), 'part')} -> {count(len(new), 'part')}"
    words: dict[str, None] = {}
    for a, b in zip(old, new, strict=True):
        x, y = (dict(token.partition("=")[::2] for token in text.split()) for text in (a, b))
        for name in dict.fromkeys([*x, *y]):
            if x.get(name) != y.get(name):
                words[f"{name}={x.get(name, '-')} -> {y.get(name, '-')}"] = None
    return f"schedule {', '.join(words)}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent="  ", subsequent_indent="      ", break_long_words=True, break_on_hyphens=False
    )


# --------------------------------------------------------------------------------------------------------------- pairs
def _pair_head(pairs: Sequence[PairChange]) -> str:
    kinds = {"refused": "newly refused", "allowed": "no longer refused", "reason": "refused for another reason"}
    found = [(words, sum(p.change == k for p in pairs)) for k, words in kinds.items()]
    return f"Pairs: {', '.join(f'{n} {words}' for words, n in found if n)}"


def _pair_entries(pairs: Sequence[PairChange]) -> list[list[str]]:
    found: dict[str, list[PairChange]] = {}
    for p in pairs:
        sides = f"{_side(p.producer)} | {_side(p.consumer)}"
        states = f"{p.old or 'no neighbours'} -> {p.new or 'no neighbours'}"
        found.setdefault(f"{sides}: {states}", []).append(p)
    out = []
    for words, alike in found.items():
        times = f"{len(alike)}x " if len(alike) > 1 else ""
        nbytes = sum(p.bytes_at_stake for p in alike)
        out.append(_wrapped(f"{times}{words}" + (f" ({bytes_text(nbytes)} at stake)" if nbytes else "")))
    return out


def _side(o: Operator) -> str:
    return o.name + (f" {place(o.line)}" if o.line else "")
