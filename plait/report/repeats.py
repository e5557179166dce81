"""Repeated blocks: a model's layers are the same few steps over and over, and are shown once with a count."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from plait.report.facts import GraphFacts
from plait.report.summary import rows

_LEAST = {1: 3}  # a single step has to come three times in a row, a longer block twice


@dataclass(frozen=True, slots=True)
class Repeat:
    """Items start .. start + period * count are `count` equal blocks of `period` items."""

    start: int
    period: int
    count: int


def repeated_steps(graph: GraphFacts) -> tuple[Repeat, ...]:
    """Among a graph's steps: equal are those that share a row of the table."""
    row_of = {k.number: at for at, row in enumerate(rows(graph)) for k in row.steps}
    return repeats([row_of[k.number] for k in graph.kernels])


def repeated_operators(graph: GraphFacts) -> tuple[Repeat, ...]:
    """Among the operators that eager runs (not those that are formed again): equal are calls of one line that move as much."""
    return repeats([(o.aten, o.name, o.line, o.before) for o in graph.operators if not o.recomputed])


def repeats(keys: Sequence[Hashable]) -> tuple[Repeat, ...]:
    """Blocks that follow themselves, from the left; of those that begin at one item the one that covers most, the shortest of
    equals. One that begins within another and covers more than twice as much comes before it: a layer's first steps often look
    like what is before it."""
    best = _best(keys)
    out: list[Repeat] = []
    at = 0
    while at < len(keys):
        found = best[at]
        if found is None:
            at += 1
            continue
        inside = range(at + 1, min(at + _covers(found), len(keys)))
        later = next((k for k in inside if _covers(best[k]) > 2 * _covers(found)), None)
        if later is None:
            out.append(found)
        at = at + _covers(found) if later is None else later
    return tuple(out)


def _covers(found: Repeat | None) -> int:
    return found.period * found.count if found is not None else 0


def _best(keys: Sequence[Hashable]) -> list[Repeat | None]:
    """For every item the block that begins there and covers most. Takes the square of the length."""
    names: dict[Hashable, int] = {}
    numbers = [names.setdefault(k, len(names)) for k in keys]
    best: list[Repeat | None] = [None] * len(keys)
    for period in range(1, len(keys) // 2 + 1):
        least = _LEAST.get(period, 2)
        run = 0  # items from here on that are equal to those a period later
        for at in reversed(range(len(keys) - period)):
            run = run + 1 if numbers[at] == numbers[at + period] else 0
            count = run // period + 1
            if count >= least and period * count > _covers(best[at]):
                best[at] = Repeat(at, period, count)
    return best
