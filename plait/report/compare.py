"""What changed between two reports of a program: its totals, its steps, and the neighbours that share a kernel or do not.

Operators are the same when they are the same ATen operator, written in the same words in the same module, the k-th such in
both: neither numbers of kernels nor numbers of lines take part. Steps with equal operators are the same step. Of the rest,
those that have operators in common are one change: merged, split, regrouped, or other members.

What is worse (Changes.worse): more launches; over 1 % more traffic, predicted time or memory at the peak; more fallbacks or
graph breaks; of a step, more spills, a failure that it had not, or over 5 % more measured time, for which a report has no spread.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from plait.report.changes import Changes, Difference, Operator, PairChange, Step, StepChange
from plait.report.compare_text import render
from plait.report.facts import Facts, GraphFacts, Kernel, Refusal, Side
from plait.report.summary import Row

MORE, SLOWER = 1.01, 1.05
"""Ratios above which a total, and a measured time, are worse."""


class Comparison(Changes):
    """What report.compare returns: `str` is the page, `worse` what got worse, in words."""

    def __str__(self) -> str:
        return render(self)


def compare_reports(old: Facts, new: Facts, old_name: str = "before", new_name: str = "after") -> Comparison:
    """What is different in the second report."""
    steps: list[StepChange] = []
    pairs: list[PairChange] = []
    unchanged = 0
    for a, b in _matched_graphs(old.graphs, new.graphs):
        found, same = _compare_steps(a, b)
        steps += found
        unchanged += same
        pairs += _compare_pairs(a, b) if a is not None and b is not None else ()
    return Comparison(
        program=new.program if new.program == old.program else f"{old.program}, {new.program}",
        target=new.target if new.target == old.target else f"{old.target}, {new.target}",
        notes=tuple(_notes(old, new)),
        totals=tuple(_compare_totals(old, new)),
        steps=tuple(sorted(steps, key=_weight)),
        pairs=tuple(sorted(pairs, key=lambda p: (p.change != "refused", p.change == "reason", -p.bytes_at_stake))),
        unchanged=unchanged,
        old_name=old_name,
        new_name=new_name,
    )


def _notes(old: Facts, new: Facts) -> Iterator[str]:
    if old.program != new.program:
        yield f"the programs have two names: {old.program}, {new.program}"
    if old.target != new.target:
        yield f"they are of two devices: {old.target}, {new.target}"
    if old.train != new.train:
        yield f"only {'the first' if old.train else 'the second'} is of training"
    if old.predicted != new.predicted:
        yield f"nothing ran of {'the first' if old.predicted else 'the second'}: its times are predictions alone"
    if old.totals.input_bytes != new.totals.input_bytes:
        yield "the inputs are not of one size"


def _weight(change: StepChange) -> tuple[bool, float]:
    """What is worse first, then by how much time is at stake."""
    moved = [abs((d.new or 0) - (d.old or 0)) for d in change.differences if d.unit == "us"]
    return not change.worse, -max(moved, default=0.0)


# -------------------------------------------------------------------------------------------------------------- totals
def _compare_totals(old: Facts, new: Facts) -> Iterator[Difference]:
    a, b = old.totals, new.totals
    yield _grown("launches", a.launches, b.launches, most=1.0)
    yield Difference("kernels", a.kernels, b.kernels)
    yield Difference("ATen calls", a.calls, b.calls)
    yield _grown("traffic", a.after.total, b.after.total, "B")
    yield _grown("predicted time", a.predicted_us, b.predicted_us, "us")
    yield _grown("peak memory", a.peak_bytes, b.peak_bytes, "B")
    yield _grown("fallbacks", a.fallbacks, b.fallbacks, most=1.0)
    yield _grown("graph breaks", len(old.breaks), len(new.breaks), most=1.0)
    seconds = [sum(g.compile_seconds for g in r.graphs) for r in (old, new)]
    yield Difference("compile time", seconds[0], seconds[1], "s")


def _grown(what: str, old: float | None, new: float | None, unit: str = "", most: float = MORE) -> Difference:
    return Difference(what, old, new, unit, old is not None and new is not None and new > old * most)


# -------------------------------------------------------------------------------------------------------------- graphs
def _matched_graphs(
    old: Sequence[GraphFacts], new: Sequence[GraphFacts]
) -> list[tuple[GraphFacts | None, GraphFacts | None]]:
    """Graphs of one kind: by their operators, then by their first line, then in order."""
    keys: list[Callable[[GraphFacts], Hashable]] = [
        lambda g: (g.kind, frozenset(_identities(g).values())),
        lambda g: (g.kind, _words(g.line)),
        lambda g: g.kind,
    ]
    left, right = list(old), list(new)
    found: list[tuple[GraphFacts | None, GraphFacts | None]] = []
    for key in keys:
        waiting: dict[Hashable, list[GraphFacts]] = {}
        for b in right:
            waiting.setdefault(key(b), []).append(b)
        for a in list(left):
            if waiting.get(key(a)):
                b = waiting[key(a)].pop(0)
                found.append((a, b))
                left.remove(a)
                right.remove(b)
    return found + [(a, None) for a in left] + [(None, b) for b in right]


def _words(line: str) -> str:
    """The code of "file.py:12 code": a program may have moved in its file."""
    return line.partition(" ")[2] or line


def _identities(graph: GraphFacts | None) -> dict[int, Hashable]:
    """Operator's number -> what it is called in both reports."""
    seen: dict[Hashable, int] = {}
    out: dict[int, Hashable] = {}
    for o in graph.operators if graph is not None else ():
        key = (o.aten, _words(o.line), o.module, o.backward, o.recomputed)
        seen[key] = seen.get(key, 0) + 1
        out[o.number] = (*key, seen[key])
    return out


# --------------------------------------------------------------------------------------------------------------- steps
@dataclass(frozen=True, slots=True)
class _Known:
    """A step with the identities of its operators: all of them, and those that count as its own."""

    graph: str
    kernel: Kernel
    every: Mapping[Hashable, Operator]
    own: frozenset[Hashable]

    @classmethod
    def of(cls, graph: GraphFacts, kernel: Kernel, ids: Mapping[int, Hashable]) -> _Known:
        every = {
            ids.get(m.operator, (m.aten, _words(m.line), m.module)): Operator(m.name, m.aten, m.line)
            for m in kernel.members
        }
        own = {ids[m.operator] for m in kernel.members if m.counted and m.operator in ids}
        named = every or {("made by plait", kernel.name.partition("_")[2]): Operator(kernel.name, "", "")}
        return cls(graph.name, kernel, named, frozenset(own or named))

    @property
    def step(self) -> Step:
        k = self.kernel
        return Step(self.graph, k.number, k.name, k.kind, Row(k, [k]).title, k.lines, tuple(self.every.values()))


def _known(graph: GraphFacts | None) -> list[_Known]:
    ids = _identities(graph)
    return [_Known.of(graph, k, ids) for k in graph.kernels] if graph is not None else []


def _compare_steps(old: GraphFacts | None, new: GraphFacts | None) -> tuple[list[StepChange], int]:
    """The steps that changed, and how many did not."""
    left, right = _known(old), _known(new)
    found: list[StepChange] = []
    same = 0
    for a, b in _equal(left, right):
        left.remove(a)
        right.remove(b)
        differences = tuple(_step_differences(a.kernel, b.kernel))
        if differences:
            found.append(StepChange("changed", (a.step,), (b.step,), differences=differences))
        same += not differences
    found += [_change(mine, theirs) for mine, theirs in _touching(left, right)]
    return found, same


def _equal(left: Sequence[_Known], right: Sequence[_Known]) -> list[tuple[_Known, _Known]]:
    """Steps with the same operators; of those whose operators more steps have, only where there are as many."""
    sides: list[dict[Hashable, list[_Known]]] = [{}, {}]
    for side, steps in zip(sides, (left, right), strict=True):
        for s in steps:
            side.setdefault(frozenset(s.every), []).append(s)
    return [
        pair
        for key, mine in sides[0].items()
        if len(mine) == len(sides[1].get(key, ()))
        for pair in zip(mine, sides[1][key], strict=True)
    ]


def _touching(left: Iterable[_Known], right: Iterable[_Known]) -> list[tuple[list[_Known], list[_Known]]]:
    """The rest, put together where one has an operator of the other's."""
    found: list[tuple[list[_Known], list[_Known], set[Hashable]]] = []
    for at, steps in enumerate((left, right)):
        for s in steps:
            near = [f for f in found if not s.own.isdisjoint(f[2])]
            found = [f for f in found if s.own.isdisjoint(f[2])]
            sides: tuple[list[_Known], list[_Known]] = ([], [])
            for f in near:
                sides[0].extend(f[0])
                sides[1].extend(f[1])
            sides[at].append(s)
            found.append((*sides, set(s.own).union(*(f[2] for f in near))))
    return [(sorted(a, key=_number), sorted(b, key=_number)) for a, b, _ in found]


def _number(known: _Known) -> int:
    return known.kernel.number


_CHANGES = {(False, True): "appeared", (True, False): "vanished"}


def _change(old: list[_Known], new: list[_Known]) -> StepChange:
    many = (len(old) > 1, len(new) > 1)
    change = _CHANGES.get((bool(old), bool(new))) or (
        "regrouped" if all(many) else "merged" if many[0] else "split" if many[1] else "members"
    )
    before, after = ({k: o for s in side for k, o in s.every.items()} for side in (old, new))
    differences = _step_differences(old[0].kernel, new[0].kernel) if change == "members" else _sums(old, new)
    both = bool(old and new)
    return StepChange(
        change,
        tuple(s.step for s in old),
        tuple(s.step for s in new),
        gained=tuple(o for k, o in after.items() if k not in before) if both else (),
        lost=tuple(o for k, o in before.items() if k not in after) if both else (),
        differences=tuple(differences),
    )


def _step_differences(a: Kernel, b: Kernel) -> Iterator[Difference]:
    """Of two steps that are the same, or nearly."""
    if a.kind != b.kind:
        yield Difference("kind", _kind(a), _kind(b))
    if a.kind == b.kind == "call" and a.name != b.name:
        yield Difference("call", a.name, b.name)
    if a.failure != b.failure:
        yield Difference("failure", a.failure, b.failure, worse=bool(b.failure))
    if a.kind == b.kind and a.schedule != b.schedule:
        yield Difference("schedule", list(a.schedule), list(b.schedule))
    chosen = [next((v.name for v in k.variants if v.chosen), None) for k in (a, b)]
    if None not in chosen and chosen[0] != chosen[1]:
        yield Difference("schedule chosen", chosen[0], chosen[1])
    if a.mapping != b.mapping and a.kind == b.kind:
        yield Difference("mapping", a.mapping, b.mapping)
    if a.resources is not None and b.resources is not None:
        for what, unit in (("registers", ""), ("spills", "B"), ("shared", "B")):
            x, y = getattr(a.resources, what), getattr(b.resources, what)
            if x != y:
                yield Difference(what, x, y, unit, worse=what == "spills" and y > x)
    if not _near(a.after.total, b.after.total):
        yield Difference("traffic", a.after.total, b.after.total, "B")
    if not _near(a.predicted_us, b.predicted_us):
        yield Difference("predicted", a.predicted_us, b.predicted_us, "us")
    if a.measured_us is not None and b.measured_us is not None and not 1 / SLOWER <= _ratio(a, b) <= SLOWER:
        yield Difference("measured", a.measured_us, b.measured_us, "us", worse=b.measured_us > a.measured_us)


def _kind(k: Kernel) -> str:
    return "kernel" if k.kind == "kernel" else f"ATen call {k.name}"


def _ratio(a: Kernel, b: Kernel) -> float:
    return (b.measured_us or 0.0) / a.measured_us if a.measured_us else 1.0


def _near(x: float | None, y: float | None) -> bool:
    """The same but for the last digits."""
    if x is None or y is None or x != x or y != y:
        return (x is None or x != x) and (y is None or y != y)
    return abs(x - y) <= 1e-6 * max(abs(x), abs(y))


def _sums(old: Sequence[_Known], new: Sequence[_Known]) -> Iterator[Difference]:
    """Of several steps: traffic and times together; spills and failures by the most that one has."""
    sides = [[s.kernel for s in side] for side in (old, new)]
    traffic = [sum(k.after.total for k in side) if side else None for side in sides]
    yield Difference("traffic", traffic[0], traffic[1], "B")
    predicted = [_sum([k.predicted_us for k in side]) for side in sides]
    yield Difference("predicted", predicted[0], predicted[1], "us")
    measured = [_sum([k.measured_us for k in side]) for side in sides]
    if None not in measured:
        slower = (measured[1] or 0.0) > SLOWER * (measured[0] or 0.0)
        yield Difference("measured", measured[0], measured[1], "us", slower)
    spills = [max((k.resources.spills for k in side if k.resources), default=0) for side in sides]
    if spills[0] != spills[1]:
        yield Difference("spills", spills[0], spills[1], "B", spills[1] > spills[0])
    failures = ["; ".join(dict.fromkeys(k.failure for k in side if k.failure)) for side in sides]
    if failures[0] != failures[1]:
        yield Difference("failure", failures[0], failures[1], worse=bool(failures[1]))


def _sum(values: Sequence[float | None]) -> float | None:
    """None where one is not known, or there is none."""
    known = [v for v in values if v is not None]
    return sum(known) if known and len(known) == len(values) else None


# --------------------------------------------------------------------------------------------------------------- pairs
@dataclass(slots=True)
class _Pair:
    state: str
    producer: Side
    consumer: Side
    sentence: str = ""
    nbytes: float = 0.0


def _pairs(graph: GraphFacts) -> dict[tuple[Hashable, Hashable], _Pair]:
    """Neighbours, each once: refused where anything of the two is, for the reason that has most bytes at stake."""
    ids = _identities(graph)

    def one(side: Side) -> Hashable:
        return ids.get(side.operator, (side.name, side.op, _words(side.line), side.module))

    def key(producer: Side, consumer: Side) -> tuple[Hashable, Hashable]:
        return one(producer), one(consumer)

    out: dict[tuple[Hashable, Hashable], _Pair] = {}
    for f in graph.fusions:
        out.setdefault(key(f.producer, f.consumer), _Pair("fused", f.producer, f.consumer, "", f.bytes_at_stake))
    most: dict[tuple[Hashable, Hashable], Refusal] = {}
    for r in graph.refusals:
        k = key(r.producer, r.consumer)
        if k not in most or r.bytes_at_stake > most[k].bytes_at_stake:
            most[k] = r
    for k, r in most.items():
        out[k] = _Pair(r.reason, r.producer, r.consumer, r.sentence, r.bytes_at_stake)
    return out


def _compare_pairs(old: GraphFacts, new: GraphFacts) -> Iterator[PairChange]:
    before, after = _pairs(old), _pairs(new)
    steps = [[set(s.every) for s in _known(g)] for g in (old, new)]
    for key in dict.fromkeys([*before, *after]):
        a, b = before.get(key), after.get(key)
        was = a.state if a else _together(key, steps[0])
        now = b.state if b else _together(key, steps[1])
        refused = [s not in ("", "fused") for s in (was, now)]
        if was == now or not any(refused):
            continue  # a fusion that is new, or gone with its operators, is a change of the steps
        shown = b or a
        assert shown is not None
        change = "reason" if all(refused) else "refused" if refused[1] else "allowed"
        told = b if refused[1] else a
        yield PairChange(
            change,
            new.name,
            _operator(shown.producer),
            _operator(shown.consumer),
            was,
            now,
            told.sentence if told else "",
            shown.nbytes,
        )


def _together(pair: tuple[Hashable, Hashable], steps: Sequence[set[Hashable]]) -> str:
    """Of neighbours that no decision was about: other operators may have brought them into one kernel."""
    return "fused" if any(s.issuperset(pair) for s in steps) else ""


def _operator(side: Side) -> Operator:
    return Operator(side.name, side.op, side.line)
