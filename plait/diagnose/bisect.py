"""bisect: the decision of the compiler that makes a program wrong, or slow, and the smallest program that shows it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from plait.diagnose.folder import Progress, signature, write_folder
from plait.diagnose.locate import first_departure, graph_verdicts
from plait.diagnose.program import Program
from plait.diagnose.reduce import reduced
from plait.diagnose.search import Culprit, find_slow, find_wrong, sentence
from plait.diagnose.trials import ALL, Case
from plait.diagnose.values import cases
from plait.diagnose.verify import Say, is_wrong, settings, with_gradients
from plait.diagnose.watch import Call, Seen, Watch
from plait.options import Options
from plait.report.words import count as counted

VERSION = 1
"""Of the JSON form."""
HOME = "plait_bisect"


@dataclass(frozen=True)
class Bisection:
    """What plait.bisect returns. `fault`: wrong, slow, or "" when there is none. `number` of `total` decisions of `graph` is
    the one, in words `decision`; None where it is none of them. `operators` of the smallest program that shows it, of
    those of the graph, and the decision's number there; `folder` holds it."""

    program: str
    fault: str
    graph: str = ""
    number: int | None = None
    total: int = 0
    kind: str = ""
    decision: str = ""
    before: str = ""
    after: str = ""
    operators: tuple[int, int] = (0, 0)
    number_there: int | None = None
    folder: str = ""
    words: str = ""

    def __str__(self) -> str:
        if not self.fault or not self.kind:
            return f"{self.program}: {self.words}\n"
        at = "no decision" if self.number is None else f"decision {self.number} of {self.total}"
        lines = [f"{self.program}: {self.fault} by {at} of {self.graph}", f"  {self.decision}"]
        if self.number is None:
            lines.append(f"  {self.after}")
        else:
            lines += [
                f"  with {k}: {words}" for k, words in ((self.number - 1, self.before), (self.number, self.after))
            ]
        small, all_of_it = self.operators
        there = "" if self.number_there is None else f", where it is decision {self.number_there}"
        lines.append(f"smallest program: {small} of {all_of_it} operators{there}")
        lines.append(f"run it: python {self.folder}/run.py")
        return "\n".join(lines) + "\n"

    def to_json(self) -> str:
        """The same facts; `version` rises when a field changes its meaning."""
        body = {k: getattr(self, k) for k in self.__dataclass_fields__}
        return json.dumps({"schema": "plait.bisect", "version": VERSION, **body}, indent=1)


def bisect(
    fn: Callable[..., Any],
    *args: Any,
    slow: bool = False,
    train: bool | None = None,
    seeds: int = 3,
    options: Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
) -> Bisection:
    """Find the rewrite, opened product, merge or schedule that makes `fn(*args)` wrong (`slow`: that costs most time), and write
    the smallest program that shows it into `folder` (default: plait_bisect/NAME). A search that was broken off goes on."""
    return bisect_calls(fn, [args], slow=slow, train=train, seeds=seeds, options=options, folder=folder)


def bisect_calls(
    fn: Callable[..., Any],
    calls: Sequence[Sequence[Any]],
    *,
    slow: bool = False,
    train: bool | None = None,
    seeds: int = 3,
    options: Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
    name: str = "",
    say: Say = lambda line: None,
) -> Bisection:
    """bisect for several calls."""
    wants = any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves(list(calls)))
    program = Program(fn, wants if train is None else train)
    if program.train:
        calls = [with_gradients(program, args) for args in calls]
    chosen, _ = settings(program, calls, options)
    shown = name or str(getattr(program.fn, "__name__", type(program.fn).__name__))
    home = (
        Path(folder)
        if folder is not None
        else Path(HOME) / "".join(c if c.isalnum() else "_" for c in Path(shown).stem)
    )
    watch = Watch(chosen, say)
    run = watch.compiled(program.fn)
    search = _Search(shown, watch, home, say)
    if slow:
        for args in calls:
            _recorded(program, run, watch, tuple(args), 0)
            found = search.slow()
            if found.fault:
                return found
        return Bisection(shown, "", words="every decision is worth taking, or costs less than a tenth")
    count = 0
    for args in calls:
        for case in cases(args, seeds):
            say(f"judging {case.name} ...")
            count += 1
            if is_wrong(program, run, case):
                _recorded(program, run, watch, case.args, case.seed)
                return search.wrong()
    return Bisection(shown, "", words=f"right in {counted(count, 'run')}: nothing to bisect")


def _recorded(program: Program, run: Callable[..., Any], watch: Watch, args: Sequence[Any], seed: int) -> None:
    watch.recording = True
    for s in watch.seen:
        s.calls.clear()
    try:
        program.run(run, args, seed)
    finally:
        watch.recording = False


class _Search:
    def __init__(self, program: str, watch: Watch, home: Path, say: Say) -> None:
        self.program, self.watch, self.home, self.say = program, watch, home, say

    def wrong(self) -> Bisection:
        """The first graph that departs on its own inputs, and the decision in it."""
        for seen in self.watch.seen:
            for call in seen.calls:
                if seen.executable is not None and any(v.status == "FAIL" for v in graph_verdicts(seen, call)):
                    case = self.case(seen, call)
                    culprit = find_wrong(case, self.progress(case, "wrong"), self.say)
                    if culprit is not None:
                        return self.written("wrong", seen, case, culprit)
        place = first_departure(self.watch.seen, self.watch.options)
        return Bisection(self.program, "wrong", words=f"wrong, by no decision of one graph: {place}")

    def slow(self) -> Bisection:
        """The decision that costs most, of all graphs."""
        found: list[tuple[Culprit, Seen, Case]] = []
        for seen in self.watch.seen:
            if seen.executable is not None and seen.calls:
                case = self.case(seen, seen.calls[0])
                culprit = find_slow(case, self.progress(case, "slow"), self.say)
                if culprit is not None:
                    found.append((culprit, seen, case))
        if not found:
            return Bisection(self.program, "")
        culprit, seen, case = max(found, key=lambda f: f[0].cost_us)
        return self.written("slow", seen, case, culprit)

    def case(self, seen: Seen, call: Call) -> Case:
        """A graph with the inputs of one of its calls."""
        return Case(seen.gm, seen.examples, call.before, seen.kind, self.options(), call.rng)

    def options(self) -> Options:
        """Those of the program."""
        return self.watch.options

    def progress(self, case: Case, fault: str) -> Progress:
        """Answers of an earlier search for the same."""
        full = case.compile(ALL)
        return Progress(self.home, signature(case, () if full is None else full.taken, fault))

    def written(self, fault: str, seen: Seen, case: Case, culprit: Culprit) -> Bisection:
        """Make the program small, find the decision there again, and write the folder."""
        self.say("making the program smaller ...")
        find = find_wrong if fault == "wrong" else find_slow

        def shows(smaller: Case) -> bool:
            again = find(smaller, None, lambda line: None)
            return again is not None and again.decision.kind == culprit.decision.kind

        small = reduced(case, culprit.trial, culprit.decision.fx, shows)
        there = find(small, None, lambda line: None) if small is not case else culprit
        if there is None:  # only the whole shows it
            small, there = case, culprit
        full = small.compile(ALL)
        decision = sentence(culprit.decision)
        facts = {
            "fault": fault,
            "number": there.number,
            "decision": decision,
            "before": there.before,
            "after": there.after,
        }
        write_folder(self.home, small, there.trial, () if full is None else full.taken, facts)
        return Bisection(
            program=self.program,
            fault=fault,
            graph=seen.title,
            number=culprit.number,
            total=culprit.total,
            kind=culprit.decision.kind,
            decision=decision,
            before=culprit.before,
            after=culprit.after,
            operators=(_operators(small), _operators(case)),
            number_there=there.number,
            folder=str(self.home),
        )


def _operators(case: Case) -> int:
    return sum(n.op == "call_function" for n in case.gm.graph.nodes)
