"""Many lawful plans of one program, built and run: each by dice instead of the time model, with so much fuel, with operators kept apart
or forced together. Laws hold in all of them, so all must give the program's results."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from plait.diagnose.program import Outcome, Program, judge
from plait.diagnose.verify import with_gradients
from plait.diagnose.watch import Watch
from plait.errors import FusionRefused
from plait.options import Options
from plait.oracle.compare import PASS
from plait.plan.cost import CostModel

PLENTY = 1 << 20


@contextmanager
def by_dice(seed: int) -> Iterator[None]:
    """Inside, which merges pay is drawn: about half of the lawful ones do, now and then nearly all or nearly none."""
    rng = random.Random(seed)
    low = rng.choice((0.0, 0.0, 0.0, 0.9, -3.0))
    with mock.patch.object(CostModel, "time", lambda model, al: rng.uniform(low, 1.0) * 1000.0):
        yield


@dataclass(frozen=True)
class Way:
    """One way to plan. `dice`: merges are drawn."""

    options: Mapping[str, Any] = field(default_factory=dict)
    dice: int | None = None

    @property
    def name(self) -> str:
        said = [f"{k}={v}" for k, v in self.options.items()]
        return " ".join([*said, *([] if self.dice is None else [f"dice {self.dice}"])]) or "default"


@dataclass
class Compared:
    """What became of one way: `plans` as text, what is wrong with its results, or why it is not lawful."""

    way: Way
    plans: str = ""
    outcome: Outcome | None = None
    wrong: list[str] = field(default_factory=list)
    refused: str = ""


def ways(seed: int, fuel: int, names: Sequence[str], count: int) -> list[Way]:
    """`count` ways beside the default and no fusion at all."""
    rng = random.Random(seed)
    out = [Way(), Way({"plan": "none"})]
    for k in range(count):
        kind = ("dice", "fuel", "forbid", "force", "dice")[k % 5]
        some = rng.sample(list(names), min(len(names), rng.randint(1, 2)))
        if kind == "dice":
            out.append(Way(dice=rng.randrange(1 << 30)))
        elif kind == "fuel":
            out.append(Way({"fuel": rng.randint(0, max(fuel - 1, 0))}))
        elif kind == "forbid":
            out.append(Way({"forbid": (tuple(some),)}, dice=rng.choice((None, rng.randrange(1 << 30)))))
        else:
            out.append(Way({"force": (tuple(some),)}))
    return out


class Differential:
    """One program, to be compiled in several ways."""

    def __init__(self, made: tuple[Callable[..., Any], list[Any], bool]) -> None:
        fn, args, train = made
        self.program = Program(fn, train)
        self.args = with_gradients(self.program, args) if train else tuple(args)
        self.eager = self.program.run(fn, self.args)
        assert not self.eager.error, self.eager.error
        self.exact = self.program.exact(self.args)

    def first(self) -> tuple[int, list[str]]:
        """How many decisions a compilation takes, and the names of the operators in it."""
        watch = Watch(Options.make(None, {"fuel": PLENTY, "rng": "eager"}))
        self.program.run(watch.compiled(self.program.fn), self.args)
        assert watch.seen and all(s.executable is not None for s in watch.seen)
        nodes = [n for s in watch.seen for n in s.gm.graph.nodes if n.op == "call_function"]
        names = {str(n.target).removeprefix("aten.").partition(".")[0] for n in nodes}
        return max(len(s.tank.taken) for s in watch.seen if s.tank is not None), sorted(names)

    def run(self, way: Way) -> Compared:
        """Compile, run and judge one way."""
        out = Compared(way)
        watch = Watch(Options.make(None, {**way.options, "strict": True, "rng": "eager"}))
        with ExitStack() as stack:
            if way.dice is not None:
                stack.enter_context(by_dice(way.dice))
            try:
                out.outcome = self.program.run(watch.compiled(self.program.fn), self.args)
            except FusionRefused as refused:
                out.refused = refused.message
                return out
        out.plans = "\n\n".join(str(s.compiled.plan) for s in watch.seen if s.compiled is not None)
        verdicts = judge(self.program, out.outcome, self.eager, self.exact)
        if self.exact is not None and any(v.status != PASS for v in verdicts):
            verdicts = judge(
                self.program, out.outcome, self.eager, self.exact, self.program.noise(self.args, self.exact)
            )
        out.wrong = [str(v) for v in verdicts if v.status == "FAIL"]
        return out


def same_bits(a: Outcome, b: Outcome, which: Sequence[int] | None = None) -> list[str]:
    """Results (those numbered, or all) whose bits differ."""
    pairs = list(zip(pytree.tree_leaves(a.outputs), pytree.tree_leaves(b.outputs), strict=True))
    return [f"result {k}" for k, (x, y) in enumerate(pairs) if (which is None or k in which) and not _equal(x, y)]


def _equal(x: Any, y: Any) -> bool:
    if not isinstance(x, Tensor):
        return bool(x == y)
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return bool(torch.equal(x.contiguous().view(width), y.contiguous().view(width)))
