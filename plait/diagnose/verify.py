"""verify: a compiled program against eager and float64, over several seeds and classes of values; where it departs, why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from plait.diagnose.draws import OwnDropouts, draws_dropouts_alone
from plait.diagnose.findings import Findings, Judged
from plait.diagnose.locate import NOWHERE, Place, first_departure
from plait.diagnose.program import Outcome, Program, judge, raises_in_eager
from plait.diagnose.text import verification_json, verification_text
from plait.diagnose.values import Case, cases
from plait.diagnose.watch import Watch
from plait.errors import UserError
from plait.options import Options
from plait.oracle.compare import worst_of

Say = Callable[[str], None]


class Verification(Findings):
    """What plait.verify returns: `str` is the page, `right` the answer."""

    def __str__(self) -> str:
        return verification_text(self)

    def to_json(self) -> str:
        """The same facts; `version` rises when a field changes its meaning."""
        return verification_json(self)


def verify(
    fn: Callable[..., Any],
    *args: Any,
    train: bool | None = None,
    seeds: int = 3,
    options: Mapping[str, Any] | None = None,
) -> Verification:
    """Judge `fn(*args)` compiled by plait against eager and float64: results, gradients, arguments after the call.

    `train`: gradients too (default: when an argument wants one). `seeds`: how many sets of ordinary values, of which `args`
    are the first. Raises UserError where the program itself raises."""
    return verify_calls(fn, [args], train=train, seeds=seeds, options=options)


def verify_calls(
    fn: Callable[..., Any],
    calls: Sequence[Sequence[Any]],
    *,
    train: bool | None = None,
    seeds: int = 3,
    options: Mapping[str, Any] | None = None,
    name: str = "",
    until_wrong: bool = False,
    say: Say = lambda line: None,
) -> Verification:
    """verify for several calls, one after another; `until_wrong`: no more than is wrong for the first time."""
    if seeds < 1:
        raise UserError(f"seeds is {seeds!r}", hint="a whole number from 1")
    wants = any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves(list(calls)))
    program = Program(fn, wants if train is None else train)
    if program.train:
        calls = [with_gradients(program, args) for args in calls]
    chosen, notes = settings(program, calls, options)
    given = Options.make(None, options)
    if chosen != given and draws_dropouts_alone(program, calls, given):
        chosen, program.drawing = given, OwnDropouts
        notes = ["its dropouts are judged with the numbers that plait draws"]
    watch = Watch(chosen, say)
    run = watch.compiled(program.fn)
    judged: list[Judged] = []
    place: Place | None = None
    for number, case in ((k, c) for k, args in enumerate(calls) for c in cases(args, seeds)):
        label = case.name if len(calls) == 1 else f"call {number}, {case.name}"
        say(f"judging {label} ...")
        found = replace(_judged(program, run, case), name=label)
        judged.append(found)
        if found.status == "FAIL" and place is None:
            say("looking for the place ...")
            place = _located(program, run, watch, case)
        if found.status == "FAIL" and until_wrong:
            break
    fallbacks = [f for s in watch.seen for f in s.record.fallbacks]
    words = tuple(dict.fromkeys(f"{f.scope} {f.op}".strip() + f": {f.reason}" for f in fallbacks))
    shown = name or str(getattr(program.fn, "__name__", type(program.fn).__name__))
    return Verification(shown, tuple(judged), len(watch.seen), words, place, tuple(notes))


def settings(
    program: Program, calls: Sequence[Sequence[Any]], options: Mapping[str, Any] | None
) -> tuple[Options, list[str]]:
    """Options under which results can be compared, and what that changes; UserError where eager raises."""
    given = Options.make(None, options)
    for args in calls:
        found = program.run(program.fn, args)
        if found.error:
            raise raises_in_eager(found.error, found.where)
    if given.rng == "plait" and any(program.draws(args) for args in calls):
        return replace(given, rng="eager"), ['it draws random numbers: judged with rng="eager"']
    return given, []


def with_gradients(program: Program, args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments, with gradients asked of all floats where neither they nor a module want any."""
    owned = [] if program.module is None else list(program.module.parameters())
    if any(isinstance(t, Tensor) and t.requires_grad for t in [*pytree.tree_leaves(list(args)), *owned]):
        return tuple(args)

    def wanting(t: Any) -> Any:
        return t.detach().clone().requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t

    return tuple(pytree.tree_map(wanting, list(args)))


def is_wrong(program: Program, run: Callable[..., Any], case: Case) -> bool:
    """Whether one run fails."""
    return _judged(program, run, case).status == "FAIL"


def _judged(program: Program, run: Callable[..., Any], case: Case) -> Judged:
    eager = program.run(program.fn, case.args, case.seed)
    got = program.run(run, case.args, case.seed)
    exact = None if eager.error else program.exact(case.args, case.seed)
    verdicts = judge(program, got, eager, exact)
    if exact is not None and worst_of(verdicts) != "PASS" and not got.error:
        # what the inputs' own rounding does to the result is asked only where it matters: it takes two more runs
        verdicts = judge(program, got, eager, exact, program.noise(case.args, exact, case.seed))
    by_value, by_place = _counted(case, eager, exact)
    note = f"eager raises {eager.error.partition(':')[0]}" if eager.error else ""
    if exact is None and not eager.error:
        note = "float64 cannot run it: judged against eager alone"
    return Judged(case.name, worst_of(verdicts), by_value, by_place, tuple(verdicts), note)


def _counted(case: Case, eager: Outcome, exact: Outcome | None) -> tuple[int, int]:
    truth = eager if exact is None else exact
    by_value = by_place = 0
    changed = _changed(case, eager)
    sides = (
        (o.outputs, o.grads, [pytree.tree_leaves(list(o.args or ()))[k] for k in changed], o.buffers)
        for o in (eager, truth)
    )
    for e, x in zip(*map(pytree.tree_leaves, sides), strict=False):
        if not isinstance(e, Tensor) or e.layout is not torch.strided:
            continue
        finite = e.numel()
        if e.is_floating_point() and isinstance(x, Tensor) and x.shape == e.shape:
            finite = int((e.detach().isfinite() & x.detach().isfinite()).sum())
        by_value += finite
        by_place += e.numel() - finite
    return by_value, by_place


def _changed(case: Case, eager: Outcome) -> list[int]:
    """Places of the arguments that the program writes to."""
    pairs = zip(pytree.tree_leaves(list(case.args)), pytree.tree_leaves(list(eager.args or ())), strict=False)
    return [
        k
        for k, (x, y) in enumerate(pairs)
        if isinstance(x, Tensor) and not torch.equal(x.detach().nan_to_num(), y.detach().nan_to_num())
    ]


def _located(program: Program, run: Callable[..., Any], watch: Watch, case: Case) -> Place:
    watch.recording = True
    for s in watch.seen:
        s.calls.clear()
    try:
        program.run(run, case.args, case.seed)
        found = first_departure(watch.seen, watch.options)
    finally:
        watch.recording = False
    return _CAPTURE if found is NOWHERE and _departs_as_captured(program, watch, case) else found


_CAPTURE = Place(
    level="capture",
    words="no graph departs on its own inputs, and node by node in eager they depart as well: the program was captured, or "
    "forward and backward were split, as something else",
)


def _departs_as_captured(program: Program, watch: Watch, case: Case) -> bool:
    """Whether the graphs as they were captured, run in eager, are wrong too."""
    captured = Watch(watch.options, watch.say, choose=lambda seen: None)
    return is_wrong(program, captured.compiled(program.fn), case)
