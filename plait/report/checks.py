"""Assertions on a report, for test suites: each failure says what was found, why, and what would change it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence

from plait.ir.names import module_under, names_of, place
from plait.report.facts import Facts, GraphFacts, Kernel, Member, Refusal
from plait.report.words import bytes_text, count

_UNITS = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}


def assert_fused(facts: Facts, names: Sequence[str]) -> None:
    """Some kernel holds operators of all names, and no neighbours of two of them are apart."""
    _two(names)
    apart = _parted(facts, names)
    if apart is not None:
        raise AssertionError(f"not fused: {', '.join(names)}\n{_said(*apart)}")
    if any(k.kind == "kernel" and all(_holds(k, n) for n in names) for _, k in facts.steps()):
        return
    raise AssertionError(f"not fused: {', '.join(names)}\n{_where(facts, names)}")


def assert_not_fused(facts: Facts, names: Sequence[str]) -> None:
    """No kernel holds operators of all names."""
    _two(names)
    for n in names:
        _known(facts, n)
    for g, k in facts.steps():
        if k.kind == "kernel" and all(_holds(k, n) for n in names):
            raise AssertionError(f"fused: {', '.join(names)}\n  {_step(g, k)}")


def assert_kernels(facts: Facts, at_most: int) -> None:
    """Launches of all graphs."""
    t = facts.totals
    if t.launches > at_most:
        rows = "".join(f"\n  {_step(g, k)}" for g, k in facts.steps())
        raise AssertionError(
            f"{t.launches} launches ({count(t.kernels, 'kernel')}, {count(t.calls, 'ATen call')}), at most {at_most} "
            f"expected{rows}{_worst(facts)}"
        )


def assert_no_fallback(facts: Facts) -> None:
    """Nothing fell back to eager."""
    found = [(g, f) for g in facts.graphs for f in g.fallbacks]
    if found or any(g.status != "compiled" for g in facts.graphs):
        rows = "".join(
            f"\n  {g.name}: {f.scope} {f.op}: {f.reason}{f' at {f.line}' if f.line else ''}" for g, f in found
        )
        raise AssertionError(f"{count(max(len(found), 1), 'fallback')} to eager{rows}")


def assert_traffic(facts: Facts, at_most: float | str) -> None:
    """Bytes of all graphs."""
    limit, total = nbytes(at_most), facts.totals.after.total
    if total > limit:
        largest = sorted(facts.steps(), key=lambda s: -s[1].after.total)[:5]
        rows = "".join(f"\n  {bytes_text(k.after.total):>8} {_step(g, k)}" for g, k in largest)
        raise AssertionError(
            f"{bytes_text(total)} of traffic, at most {bytes_text(limit)} expected{rows}{_worst(facts)}"
        )


def nbytes(text: float | str) -> float:
    """A number of bytes from a number or from text such as "64 MB"."""
    if not isinstance(text, str):
        return float(text)
    m = re.fullmatch(r"\s*([\d.]+)\s*([a-zA-Z]*)\s*", text)
    if m is None or (m[2] or "b").lower() not in _UNITS:
        raise ValueError(f"not a number of bytes: {text!r}")
    return float(m[1]) * _UNITS[(m[2] or "b").lower()]


# ---------------------------------------------------------------------------------------------------------------- names
def matches(m: Member, name: str) -> bool:
    """Whether an operator is meant: by name, by its module's path (or one that it lies under), by its region, or by its line."""
    return name in names_of(m.name, m.aten, m.parts, m.line, m.regions) or module_under(m.module, name) is not None


def _holds(k: Kernel, name: str) -> bool:
    return name == k.name or any(matches(m, name) for m in k.members)


def _known(facts: Facts, name: str) -> None:
    """Raise when nothing is called so."""
    if any(_holds(k, name) for _, k in facts.steps()):
        return
    every = sorted(
        {n for _, k in facts.steps() for m in k.members for n in (m.name, m.module, place(m.line), *m.regions) if n}
    )
    near = difflib.get_close_matches(name, every, n=3) or every[:12]
    raise AssertionError(f"nothing here is called {name!r}; there is {', '.join(near)}")


def _two(names: Sequence[str]) -> None:
    if len(names) < 2:
        raise TypeError("two names at least: which operators share a kernel?")


# -------------------------------------------------------------------------------------------------------------- reasons
def _parted(facts: Facts, names: Sequence[str]) -> tuple[GraphFacts, Refusal] | None:
    """The costliest refusal between steps of which one holds one name and the other another, neither holding all."""
    for n in names:
        _known(facts, n)
    for g in facts.graphs:
        steps = {k.number: k for k in g.kernels}
        whole = {k.number for k in g.kernels if k.kind == "kernel" and all(_holds(k, n) for n in names)}
        for r in g.refusals:
            a, b = steps.get(r.producer.step), steps.get(r.consumer.step)
            if a is None or b is None or a.number in whole or b.number in whole:
                continue
            pairs = [(x, y) for x in names for y in names if x != y and _holds(a, x) and _holds(b, y)]
            if pairs:
                return g, r
    return None


def _said(g: GraphFacts, r: Refusal) -> str:
    lines = "".join(f"\n  {s.name}: {s.line or 'line not known'}" for s in (r.producer, r.consumer))
    return f"  {g.name} ({g.kind}): {r.reason}: {r.sentence}{lines}\n  to change it: {r.unlock}"


def _where(facts: Facts, names: Sequence[str]) -> str:
    """Where each name is, when no refusal tells them apart: they are no neighbours."""
    rows = [f"  {n} is in {', '.join(_step(g, k) for g, k in list(_homes(facts, n))[:4])}" for n in names]
    return "\n".join([*rows, "  they are no neighbours there"])


def _homes(facts: Facts, name: str) -> Iterator[tuple[GraphFacts, Kernel]]:
    return ((g, k) for g, k in facts.steps() if _holds(k, name))


def _step(g: GraphFacts, k: Kernel) -> str:
    where = f" at {place(k.lines[0])}" if k.lines else ""
    return f"{g.name} step {k.number} {k.name}{where}"


def _worst(facts: Facts) -> str:
    """The costliest refusals, which is where launches and traffic come from."""
    found = [(g, r) for g in facts.graphs for r in g.refusals]
    found.sort(key=lambda x: -x[1].bytes_at_stake)
    return "".join(f"\nnot fused: {r.sentence}" for _, r in found[:3])
