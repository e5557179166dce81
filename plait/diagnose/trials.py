"""A captured graph compiled with so much fuel, and whether it is wrong or how long it takes, on inputs that were recorded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from plait.compiler import Compiled, compile_graph
from plait.diagnose.program import copies
from plait.diagnose.timing import medians_us
from plait.errors import PlaitError
from plait.frontend.saved import as_wanted
from plait.ir.fuel import Taken, Tank
from plait.options import Options
from plait.oracle.compare import Verdict, compare_many, reference
from plait.runtime import report
from plait.runtime.executable import Executable

ALL = 1 << 30


@dataclass(frozen=True)
class Trial:
    """One compilation: how much fuel it was given, the decisions that it took, and what came of it."""

    fuel: int
    taken: tuple[Taken, ...]
    compiled: Compiled
    executable: Executable


@dataclass
class Case:
    """A captured graph with the inputs of one call."""

    gm: fx.GraphModule
    examples: tuple[Any, ...]
    inputs: tuple[Any, ...]
    kind: str
    options: Options
    rng: Tensor = field(default_factory=torch.get_rng_state)
    _truth: tuple[list[Any], list[Any], list[Any], list[Any]] | None = None

    def eager(self, *args: Any) -> list[Any]:
        """The graph as it was captured, node by node."""
        given = as_wanted(self.gm, self.examples, args)
        return pytree.tree_leaves([fx.Interpreter(self.gm).run(*given, enable_io_processing=False)])

    def compile(self, fuel: int, **changes: Any) -> Trial | None:
        """The graph compiled with `fuel`; None where it does not compile, and so is not wrong."""
        options = replace(self.options, fuel=fuel, strict=False, dump=(), explain=False, **changes)
        try:
            with warnings.catch_warnings(), report.compiling(self.kind) as record:
                warnings.simplefilter("ignore")  # kernels that are left to eager are so on purpose
                made = compile_graph(self.gm, self.examples, options, kind=self.kind)
        except PlaitError:
            return None
        tank: Tank = record.details["fuel"]
        assert isinstance(made, Executable)
        return Trial(fuel, tuple(tank.taken), record.details["compiled"], made)

    # ------------------------------------------------------------------------------------------------- right or wrong
    def truth(self) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """Results and arguments after the call, in eager and in float64; worked out once."""
        if self._truth is None:
            args = copies(self.inputs)
            torch.set_rng_state(self.rng)
            eager = self.eager(*args)
            try:
                torch.set_rng_state(self.rng)
                exact, after = reference(lambda _, *a: self.eager(*a), [None, *copies(self.inputs)], with_args=True)
                self._truth = eager, args, exact, list(after[1:])
            except Exception:  # torch's own double precision cannot run it: eager is the only reference
                self._truth = eager, args, eager, args
        return self._truth

    def verdicts(self, trial: Trial) -> list[Verdict]:
        """One run of a trial, judged."""
        eager, eager_args, exact, exact_args = self.truth()
        args = copies(self.inputs)
        torch.set_rng_state(self.rng)
        try:
            got = pytree.tree_leaves(list(trial.executable.run(list(args))))
        except Exception as error:  # eager runs it: a compiled graph that raises is wrong
            return [Verdict("FAIL", f"raises {type(error).__name__}: {error}", "run")]
        return compare_many(got, eager, exact, name="result ") + compare_many(
            args, eager_args, exact_args, name="argument "
        )

    def is_wrong(self, trial: Trial | None) -> bool:
        """Whether it departs from eager by more than the verdict rule allows."""
        return trial is not None and any(v.status == "FAIL" for v in self.verdicts(trial))

    # ------------------------------------------------------------------------------------------------- how long
    def times_us(self, trials: Sequence[Trial], rounds: int = 9) -> list[float]:
        """Median microseconds of a run of each, measured in turn."""
        runs = [self._run_again(t) for t in trials]
        return medians_us(runs, any(t.compiled.graph.device.startswith("cuda") for t in trials), rounds)

    def _run_again(self, trial: Trial) -> Callable[[], Any]:
        args = copies(self.inputs)
        return lambda: trial.executable.run(list(args))
