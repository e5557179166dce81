"""Dropouts of a training step judged with the numbers that plait itself draws: the program in eager is given the same ones.

A training graph draws the masks of its dropouts from one seed, number by number (frontend/draws.py), and draws them again in
the backward. Where these are all the random numbers of a program, its eager and float64 runs can take them too, and what is
judged is what users run. Any other program that draws is judged with rng="eager".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

import plait.frontend.draws  # noqa: F401 (defines the operators)
from plait.diagnose.program import Program
from plait.diagnose.watch import Watch
from plait.options import Options
from plait.oracle.compare import compare_many, worst_of


class OwnDropouts(TorchFunctionMode):
    """Makes every dropout inside the block the next draw of one seed. `count`: how many there were."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.seeds: dict[torch.device, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is F.dropout:
            return self._dropped(*_named(("input", "p", "training", "inplace"), (None, 0.5, True, False), args, given))
        if func is torch.dropout:
            return self._dropped(*_named(("input", "p", "train", ""), (None, 0.5, True, False), args, given))
        return func(*args, **given)

    def _dropped(self, x: Tensor, p: float, train: bool, inplace: bool) -> Tensor:
        if not train or not 0 < p < 1:
            return F.dropout(x, p, train, inplace)
        if x.device not in self.seeds:
            self.seeds[x.device] = torch.ops.plait.seed(x.device)
        u: Tensor = torch.ops.plait.uniform(self.seeds[x.device], self.count, list(x.shape))
        self.count += 1
        if inplace:  # which torch traces as a bernoulli of 1 - p
            return x.mul_((u < 1 - p).to(x.dtype).div_(1 - p))
        return x * (u >= p) * (1.0 / (1.0 - p))


def _named(names: Sequence[str], defaults: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The values of a call's parameters, in order."""
    return [args[k] if k < len(args) else kwargs.get(n, d) for k, (n, d) in enumerate(zip(names, defaults))]


def draws_dropouts_alone(program: Program, calls: Sequence[Sequence[Any]], options: Options) -> bool:
    """Whether every random number of a program is a dropout that plait draws by one seed: in eager and as captured there are
    equally many, which give the same results (of gradients nothing is asked: they are what is judged), and nothing else asks
    torch's generators. Runs each call twice, and compiles no kernel."""
    if not program.train or options.rng != "plait":
        return False
    watch = Watch(options, choose=lambda seen: None)
    run = watch.compiled(program.fn)
    return all(_draws_alone(program, args, watch, run) for args in calls)


def _draws_alone(program: Program, args: Sequence[Any], watch: Watch, run: Callable[..., Any]) -> bool:
    watch.seen.clear()
    own = OwnDropouts()
    eager, captured = program.run(program.fn, args, within=own), program.run(run, args)
    if eager.error or captured.error:
        return False
    if worst_of(compare_many(captured.outputs, eager.outputs, eager.outputs)) == "FAIL":
        return False
    drawn = [d for d in (_draws(s.gm.graph.nodes) for s in watch.seen if s.kind == "forward") if d]
    if len(drawn) != 1 or drawn[0] != set(range(own.count)):
        return False
    theirs = _states_after(lambda: program.run(program.fn, args, within=OwnDropouts()))
    return theirs == _states_after(lambda: [torch.ops.plait.seed(d) for d in own.seeds])


def _draws(nodes: Iterable[Any]) -> set[int]:
    """Numbers of the draws in a graph."""
    return {n.args[1] for n in nodes if n.target is torch.ops.plait.uniform.default}


def _states_after(call: Callable[[], Any]) -> list[bytes]:
    """What is left of torch's generators after a call."""
    torch.manual_seed(0)
    call()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(k) for k in range(count))]
    return [s.numpy().tobytes() for s in states]
