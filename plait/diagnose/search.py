"""The search for one decision among those that a compilation takes: the first that makes it wrong, or the one that costs most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree

from plait.diagnose.folder import Progress
from plait.diagnose.program import copies
from plait.diagnose.trials import ALL, Case, Trial
from plait.ir.fuel import Taken, told
from plait.oracle.compare import compare_many
from plait.oracle.eval_graph import evaluation

_GRID = 16  # amounts of fuel that are timed at first
_SLOWER = 1.1  # a decision that takes less than this times as long is no find
Say = Callable[[str], None]


@dataclass(frozen=True)
class Culprit:
    """A decision: the `number`-th of `total`, None where it is none of them (the code of one kernel, or the import). `trial` is
    the compilation that shows it; `before` and `after` are words or times."""

    number: int | None
    total: int
    decision: Taken
    trial: Trial
    before: str
    after: str
    cost_us: float = 0.0


_SENTENCES = {
    "rewrite": "rewrite {name} of {words}",
    "open": "opening the product {words}",
    "merge": "merge: one kernel for {words}",
    "recompute": "merge: {words} is formed again in the kernel of each reader",
    "launch": "one launch for {words}",
    "schedule": "schedule {words}",
    "variants": "schedules: {words}",
    "code": "the code of {words}",
    "import": "import: {words}",
}


def sentence(t: Taken) -> str:
    """A decision in words."""
    return _SENTENCES.get(t.name, _SENTENCES[t.kind]).format(name=t.name, words=t.words)


# --------------------------------------------------------------------------------------------------------------- wrong
def find_wrong(case: Case, progress: Progress | None, say: Say) -> Culprit | None:
    """The first decision with which the graph is wrong; None where it is right with all of them."""
    full = case.compile(ALL)
    if full is None or not case.is_wrong(full):
        return None
    total = len(full.taken)
    zero = case.compile(0)
    if zero is not None and case.is_wrong(zero):
        return _without_fuel(case, zero, total)

    def wrong(fuel: int) -> bool:
        known = progress.get(f"wrong {fuel}") if progress is not None else None
        if known is None:
            say(f"{fuel} of {total} decisions ...")
            known = case.is_wrong(case.compile(fuel))
            if progress is not None:
                progress.put(f"wrong {fuel}", known)
        return bool(known)

    right, bad = 0, total
    while bad - right > 1:
        middle = (right + bad) // 2
        if wrong(middle):
            bad = middle
        else:
            right = middle
    trial = case.compile(bad)
    assert trial is not None
    return Culprit(bad, total, trial.taken[-1], trial, "right", _first_fault(case, trial))


def _first_fault(case: Case, trial: Trial) -> str:
    bad = next(v for v in case.verdicts(trial) if v.status == "FAIL")
    return f"{bad.name.strip()}: {bad.message}"


def _without_fuel(case: Case, zero: Trial, total: int) -> Culprit:
    """Wrong with no decision at all: the import, or the code of a single operator."""
    fault = _first_fault(case, zero)
    if _is_misread(case, zero):
        taken = Taken("import", "frontend", "the Graph means something else than the captured program")
        return Culprit(None, total, taken, zero, "", fault)
    steps = [s for s in zero.compiled.launches if s.parts]
    right, bad = 0, len(steps)
    trial = zero
    while bad - right > 1:
        middle = (right + bad) // 2
        tried = case.compile(0, groups=tuple(range(middle)))
        if tried is not None and case.is_wrong(tried):
            bad, trial = middle, tried
        else:
            right = middle
    step = steps[bad - 1]
    graph = zero.compiled.graph
    nodes = [n for g in step.groups for n in g.nodes]
    fx = tuple(dict.fromkeys(o.fx for n in nodes for o in graph.origins.get(n, ())))
    taken = Taken("code", step.name, f"{told(graph, nodes)}, alone in its kernel", fx)
    return Culprit(None, total, taken, trial, "", fault)


def _is_misread(case: Case, trial: Trial) -> bool:
    graph = trial.compiled.graph
    constants = dict(zip(graph.constants.values(), trial.executable.constants, strict=True))
    torch.set_rng_state(case.rng)
    got = evaluation(graph, copies(case.inputs), constants=constants).returned()
    eager, _, exact, _ = case.truth()
    verdicts = compare_many(pytree.tree_leaves(list(got)), [_on_cpu(x) for x in eager], exact)
    return any(v.status == "FAIL" for v in verdicts)


def _on_cpu(x: object) -> object:
    return x.cpu() if isinstance(x, torch.Tensor) else x


# ---------------------------------------------------------------------------------------------------------------- slow
def find_slow(case: Case, progress: Progress | None, say: Say) -> Culprit | None:
    """The decision that costs most time, of those after the amount of fuel with which the graph is fastest; None where all
    of them are worth taking."""
    full = case.compile(ALL)
    if full is None or not full.taken:
        return None
    total = len(full.taken)
    trials = {total: full}
    points = sorted({round(k * total / _GRID) for k in range(_GRID + 1)} | {total - 1})
    times = _timed(case, trials, points, progress, say)
    best = min(times, key=times.__getitem__)
    after = [p for p in sorted(times) if p >= best]
    rises = {(a, b): times[b] - times[a] for a, b in zip(after, after[1:], strict=False)}
    if not rises:
        return None
    low, high = max(rises, key=rises.__getitem__)
    while high - low > 1:
        middle = (low + high) // 2
        say(f"between {low} and {high} of {total} decisions ...")
        found = _measured(case, trials, [low, middle, high])
        if middle not in found:
            break
        low, high = (low, middle) if found[middle] - found[low] > found[high] - found[middle] else (middle, high)
    found = _measured(case, trials, [low, high], rounds=21)
    if len(found) < 2 or found[high] < _SLOWER * found[low]:
        return None
    trial = trials[high]
    words = (f"{found[low]:.1f} us", f"{found[high]:.1f} us")
    return Culprit(high, total, trial.taken[-1], trial, *words, found[high] - found[low])


def _timed(
    case: Case, trials: dict[int, Trial], points: list[int], progress: Progress | None, say: Say
) -> dict[int, float]:
    known = progress.get("times") if progress is not None else None
    if known is not None:
        return {int(k): float(v) for k, v in known.items()}
    say(f"timing {len(points)} of {max(points)} decisions ...")
    times = _measured(case, trials, points)
    if progress is not None:
        progress.put("times", {str(k): v for k, v in times.items()})
    return times


def _measured(case: Case, trials: dict[int, Trial], points: list[int], rounds: int = 9) -> dict[int, float]:
    """Times with so much fuel, interleaved; what does not compile is left out."""
    for p in points:
        if p not in trials and (made := case.compile(p)) is not None:
            trials[p] = made
    there = [p for p in points if p in trials]
    return dict(zip(there, case.times_us([trials[p] for p in there], rounds), strict=True))
