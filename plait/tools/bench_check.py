"""Whether a measured program is also right: outputs, gradients and loss curves against eager and float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.oracle.compare import Verdict, compare
from plait.oracle.reference import reference
from plait.tools.bench_programs import Fn, Program, copy_without_dropout

_JUDGED = 1 << 22  # elements of one output that are judged one by one; of larger ones a sample and the worst places


@dataclass(frozen=True, slots=True)
class Twin:
    """A copy of a training model without dropout, its step, and that step compiled: whole models take minutes to compile, so
    all that is asked of the copy is asked of one."""

    module: nn.Module
    fn: Fn
    compiled: Fn

    @classmethod
    def of(cls, program: Program, compile_fn: Callable[[Fn], Fn]) -> Twin:
        """The compiled copy of a program's model."""
        module, fn = copy_without_dropout(program)
        return cls(module, fn, compile_fn(fn))


def check_program(program: Program, compiled: Fn, twin: Twin | None) -> list[Verdict]:
    """Judge one step of `compiled`, the compiled form of `program.fn`; of a training model, of its `twin`."""
    if program.drop and program.undropped is not None:
        return [_check_dropping(program, compiled)]
    if twin is not None:
        return _check_training_model(program, twin)
    with torch.set_grad_enabled(program.train):
        got = program.step(compiled)()
        eager = program.step(program.fn)()
        exact = reference(_as_function(program), _owned(program) + program.args, all_double=True)
    return judge_all(got, eager, exact)


def _owned(program: Program) -> tuple[Any, ...]:
    """The module as an argument of its own, so that the reference runs over a copy of it in double."""
    return () if program.train or program.module is None or program.over is None else (program.module,)


def _as_function(program: Program) -> Fn:
    """The step as a function of its arguments alone (the module first), which is what the float64 reference runs."""
    over = program.over
    if not program.train and over is not None:
        return lambda module, *args: over(module)(*args)
    if not program.train:
        return program.fn

    def step(*args: Any) -> Any:
        leaves = [a for a in pytree.tree_leaves(args) if isinstance(a, Tensor) and a.requires_grad]
        return program.forward_backward(program.fn, args, leaves)

    return step


def _check_dropping(program: Program, compiled: Fn) -> Verdict:
    """Kept elements must be right, dropped ones zero, and their share what was asked for (within 6 sigma)."""
    assert program.undropped is not None
    with torch.no_grad():
        got = compiled(*program.args)
        kept = got != 0
        zero = torch.zeros((), device=got.device)
        eager = program.undropped(*program.args)
        exact = reference(program.undropped, program.args, all_double=True)
    verdict = judge(got, torch.where(kept, eager, zero.to(eager.dtype)), torch.where(kept, exact, zero.double()))
    share, sigma = 1 - float(kept.double().mean()), (program.drop * (1 - program.drop) / got.numel()) ** 0.5
    if abs(share - program.drop) > 6 * sigma:
        return Verdict("FAIL", f"dropped {share:.5f} of the elements, asked for {program.drop}", "dropout")
    return verdict


def _check_training_model(program: Program, twin: Twin) -> list[Verdict]:
    leaves = list(twin.module.parameters())
    got = program.forward_backward(twin.compiled, program.args, leaves)
    eager = program.forward_backward(twin.fn, program.args, leaves)
    over = program.over
    assert over is not None

    def step(module: nn.Module, *args: Any) -> Any:
        return program.forward_backward(over(module), args, list(module.parameters()))

    return judge_all(got, eager, reference(step, (twin.module, *program.args), all_double=True))


def judge_all(got: Any, eager: Any, exact: Any) -> list[Verdict]:
    """Judge nested outputs leaf by leaf."""
    ours, form = pytree.tree_flatten(got)
    theirs, their_form = pytree.tree_flatten(eager)
    if form != their_form:
        return [Verdict("FAIL", f"structure {form}, eager has {their_form}")]
    return [judge(g, e, x, f"out{k}") for k, (g, e, x) in enumerate(zip(ours, theirs, pytree.tree_leaves(exact)))]


def judge(got: Any, eager: Any, exact: Any, name: str = "out") -> Verdict:
    """The project's verdict; of a very large output on every k-th element and around the worst places, found on its device."""
    large = isinstance(got, Tensor) and got.numel() > _JUDGED and got.shape == eager.shape and got.dtype == eager.dtype
    if not large:
        return compare(got, eager, exact, name=name)
    g, e, x = (t.detach().reshape(-1) for t in (got, eager, exact))
    step = g.numel() // _JUDGED * 2 + 1
    places = [torch.arange(0, g.numel(), step, device=g.device)]
    for t in (g, e):
        worst = int((t.double() - x.double()).abs().nan_to_num(posinf=0.0).argmax())
        places.append(torch.arange(max(0, worst - 512), min(g.numel(), worst + 512), device=g.device))
    index = torch.cat(places)
    return compare(g[index], e[index], x[index], name=name)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def loss_curve(program: Program, module: nn.Module, fn: Fn, steps: int) -> Tensor:
    """Losses of `steps` AdamW steps on batches that every caller draws alike."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    (ids,) = program.args
    losses = []
    with _seeded(11):
        batches = [torch.randint(0, int(ids.max()), ids.shape).to(ids.device) for _ in range(steps)]
    for batch in batches:
        loss = fn(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return torch.stack(losses)


def check_loss_curve(program: Program, twin: Twin, steps: int) -> tuple[Verdict, dict[str, Any]]:
    """Train the model's compiled twin, and copies in eager and in float64; judge the compiled losses. Also the losses, for the
    record. The twin's weights change: it is the last thing to ask of it."""
    curves = {}
    for kind in ("eager", "float64"):
        module, fn = copy_without_dropout(program)
        curves[kind] = loss_curve(program, module.double() if kind == "float64" else module, fn, steps)
    curves["compiled"] = loss_curve(program, twin.module, twin.compiled, steps)
    verdict = compare(curves["compiled"], curves["eager"], curves["float64"], name="losses")
    return verdict, {kind: [round(float(v), 6) for v in c] for kind, c in curves.items()}
