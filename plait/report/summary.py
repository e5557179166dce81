"""Facts gathered for people: repeated layers as one row with a count, refusals of one kind as one entry, most costly first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from plait.ir.names import place
from plait.report.facts import Facts, Flops, GraphFacts, Kernel, Refusal, Side, Traffic
from plait.report.words import listed, modules

_MOST_NAMES = 6
_LABEL_NAMES = 3
_MOVES = frozenset(("copy", "cast", "pieces"))


@dataclass
class Row:
    """Equal steps of a graph: repeated layers launch the same kernel on other tensors."""

    first: Kernel
    steps: list[Kernel] = field(default_factory=list)

    @property
    def us(self) -> float:
        """Of all of them, measured where that is known, else predicted."""
        return sum(time_us(k) for k in self.steps)

    @property
    def before(self) -> Traffic:
        """Of all of them in eager."""
        return sum((k.before for k in self.steps), Traffic())

    @property
    def after(self) -> Traffic:
        """Of all of them."""
        return sum((k.after for k in self.steps), Traffic())

    @property
    def flops(self) -> Flops:
        """Of all of them."""
        return sum((k.flops for k in self.steps), Flops())

    @property
    def operators(self) -> list[str]:
        """Names of the first one's operators in the program's order; where they are many, those that weigh most."""
        kept = self._heaviest(_MOST_NAMES)
        rest = len({m.name for m in self.first.members}) - len(kept)
        return [m.name for m in self.first.members if m.name in kept] + ([f"{rest} more"] if rest else [])

    def _heaviest(self, most: int) -> set[str]:
        weight = {m.name: 0.0 for m in self.first.members}
        for m in self.first.members:
            weight[m.name] += max(m.before.total, m.flops.counted + m.flops.special)
        return set(sorted(weight, key=lambda n: -weight[n])[:most])

    @property
    def label(self) -> str:
        """The title where there is little room: the operators that weigh most, each once."""
        kept = self._heaviest(_LABEL_NAMES)
        return ", ".join(dict.fromkeys(m.name for m in self.first.members if m.name in kept)) or self.first.name

    @property
    def title(self) -> str:
        """What the steps do, in the program's words."""
        k = self.first
        names = listed(self.operators, _MOST_NAMES + 1) or k.name
        if k.kind == "call":
            return f"{names} ({k.name.removesuffix('.default')})"
        return names + (" (copies alone)" if k.members and all(set(m.parts) <= _MOVES for m in k.members) else "")


def time_us(k: Kernel) -> float:
    """Measured where that is known, else predicted."""
    return k.measured_us if k.measured_us is not None else k.predicted_us or 0.0


def rows(graph: GraphFacts) -> list[Row]:
    """Steps by time, longest first."""
    found: dict[object, Row] = {}
    for k in graph.kernels:
        # the aten names too: one line of a library may hold products of several kinds
        key = (k.kind, re.sub(r"^k\d+_", "", k.name), k.lines, k.failure, tuple(sorted({m.name for m in k.members})))
        found.setdefault(key, Row(k)).steps.append(k)
    return sorted(found.values(), key=lambda r: (-r.us, r.first.number))


@dataclass
class Entry:
    """Refusals of one kind: a call with its neighbours, or a pair, over repeated layers. `pairs`: the numbers of each one's
    graph and of the refusal in it."""

    first: Refusal
    neighbours: list[str] = field(default_factory=list)
    pairs: list[tuple[int, int]] = field(default_factory=list)
    nbytes: float = 0.0
    call: str = ""
    kind: str = ""  # of the graph

    @property
    def count(self) -> int:
        """Of the pairs."""
        return len(self.pairs)

    @property
    def title(self) -> str:
        """Which operators."""
        r = self.first
        head = (
            f"{self.call}, beside {listed(self.neighbours, 4)}"
            if self.call
            else f"{r.producer.name} | {r.consumer.name}"
        )
        times = f" ({self.count} pairs)" if self.count > 1 and not self.call else ""
        return head + times + (", backward" if self.kind == "backward" else "")


def entries(graphs: Sequence[GraphFacts]) -> list[Entry]:
    """Refusals, most bytes at stake first."""
    found: dict[object, Entry] = {}
    for at, g in enumerate(graphs):
        kinds = {k.number: k.kind for k in g.kernels}
        for number, r in enumerate(g.refusals):
            call = next((s for s in (r.producer, r.consumer) if kinds.get(s.step) == "call"), None)
            if call is not None:
                # said of the call, whoever its neighbours are
                other = r.consumer if call is r.producer else r.producer
                entry = found.setdefault(
                    ("call", _side(call), call.op, g.kind), Entry(r, call=_side(call), kind=g.kind)
                )
                entry.neighbours.append(other.name)
            else:
                key = (_side(r.producer), _side(r.consumer), r.reason, g.kind)
                entry = found.setdefault(key, Entry(r, kind=g.kind))
            entry.pairs.append((at, number))
            entry.nbytes += r.bytes_at_stake
    return sorted(found.values(), key=lambda e: (-e.nbytes, e.first.producer.line, e.first.consumer.line))


def _side(side: Side) -> str:
    module = modules([side.module])
    return side.name + (f" at {place(side.line)}" if side.line else "") + (f" in {module}" if module else "")


def saved(facts: Facts) -> float | None:
    """How many times less traffic than eager."""
    after = facts.totals.after.total
    return facts.totals.before.total / after if after else None
