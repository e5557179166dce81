"""One program in its three forms (eager, compiled, float64), run on copies of the same arguments: what each gives."""

from __future__ import annotations

import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.errors import PlaitError, UserError
from plait.oracle.compare import (
    Shares,
    Verdict,
    compare_many,
    copy_of,
    noise_of,
    reference,
    sharing,
    why_shared_otherwise,
)
from plait.oracle.draws import Draws

Fn = Callable[..., Any]
_NOT_THE_USERS = (Path(torch.__file__).parent, Path(__file__).parents[1])


@dataclass(frozen=True)
class Outcome:
    """What one run gave. `grads` in the order of the leaves; `args` and `buffers` after the run. `error`: what it raised, `where`: at the user's line."""

    outputs: Any = None
    grads: tuple[Any, ...] = ()
    args: Any = None
    buffers: tuple[Tensor, ...] = ()
    shares: Shares = ()
    error: str = ""
    where: str = ""


@dataclass
class Program:
    """A callable with what it owns. `train`: gradients too, of every float argument and parameter that wants one, from results
    that are weighted (a plain sum has gradients that many programs send to zero)."""

    fn: Fn
    train: bool = False
    module: nn.Module | None = field(init=False)
    drawn: Draws = field(default_factory=Draws)  # in the last run in eager: float64 is given the same numbers
    drawing: Callable[[], AbstractContextManager[Any]] = (
        nullcontext  # around the program itself, in eager and in float64
    )

    def __post_init__(self) -> None:
        self.fn = getattr(self.fn, "_torchdynamo_orig_callable", None) or getattr(self.fn, "_orig_mod", None) or self.fn
        owner = getattr(self.fn, "__self__", None)
        self.module = self.fn if isinstance(self.fn, nn.Module) else owner if isinstance(owner, nn.Module) else None

    def run(
        self, call: Fn, args: Sequence[Any], seed: int = 0, within: AbstractContextManager[Any] | None = None
    ) -> Outcome:
        """Run `call` (the program itself, or it compiled) on copies; its module is left as it was."""
        within = within or (self.drawing() if call is self.fn else nullcontext())
        given = copies(args)
        with self._restored():
            torch.manual_seed(seed)
            try:
                with within, self.drawn.recorded() if call is self.fn else nullcontext():
                    outputs, grads = self._step(call, self.module, given)
            except PlaitError:
                raise
            except Exception as error:  # whatever a program raises on these values is what is compared
                return Outcome(error=f"{type(error).__name__}: {_first_line(error)}", where=user_frame(error) or "")
            buffers = () if self.module is None else tuple(b.detach().clone() for b in self.module.buffers())
        # a result may be a buffer of the module, which has its old contents again
        outputs, grads = pytree.tree_map(_detached, (outputs, grads))
        return Outcome(outputs, grads, given, buffers, sharing(outputs, given))

    def exact(self, args: Sequence[Any], seed: int = 0) -> Outcome | None:
        """The run in float64; None where the program has no such form."""

        def step(owner: Any, *given: Any) -> Any:
            torch.manual_seed(seed)
            with self.drawing(), self.drawn.again():
                return self._step(self._call_of(owner), owner, given)

        try:
            (outputs, grads), after = reference(step, [self.module, *copies(args)], with_args=True)
        except Exception:  # the reference is torch's own double precision: what it cannot run has no reference
            return None
        buffers = () if after[0] is None else tuple(b.detach().clone() for b in after[0].buffers())
        return Outcome(outputs, grads, after[1:], buffers)

    def noise(self, args: Sequence[Any], exact: Outcome, seed: int = 0) -> tuple[list[float], list[float]]:
        """How far results and gradients move when the inputs do by half an ulp."""

        def step(owner: Any, *given: Any) -> Any:
            torch.manual_seed(seed)
            with self.drawing(), self.drawn.again():
                return self._step(self._call_of(owner), owner, given)

        results = (exact.outputs, exact.grads)
        try:
            found = noise_of(step, [self.module, *copies(args)], results)
        except Exception:  # as above
            found = [0.0] * len(pytree.tree_leaves(results))
        count = len(pytree.tree_leaves(exact.outputs))
        return found[:count], found[count:]

    def draws(self, args: Sequence[Any]) -> bool:
        """Whether it takes random numbers from torch's generators."""
        torch.manual_seed(0)
        before = _generators()
        given = copies(args)
        with self._restored(), nullcontext() if self.train else torch.no_grad():
            self.fn(*given)
        return any(not torch.equal(x, y) for x, y in zip(before, _generators(), strict=True))

    def leaves(self, args: Any) -> list[str]:
        """Names of what gets a gradient, in order."""
        named = [f"arg{k}" for k, a in enumerate(pytree.tree_leaves(args)) if _wants_grad(a)]
        owned = [] if self.module is None else [n for n, p in self.module.named_parameters() if p.requires_grad]
        return named + owned

    # ------------------------------------------------------------------------------------------------------------
    def _call_of(self, owner: nn.Module | None) -> Fn:
        if owner is None:
            return self.fn
        return types.MethodType(self.fn.__func__, owner) if isinstance(self.fn, types.MethodType) else owner

    def _step(self, call: Fn, owner: nn.Module | None, args: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
        if not self.train:
            with torch.no_grad():
                return call(*args), ()
        leaves = [a for a in pytree.tree_leaves(args) if _wants_grad(a)]
        leaves += [] if owner is None else [p for p in owner.parameters() if p.requires_grad]
        outputs = call(*args)
        outs = [t for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
        if not outs:
            raise UserError("no result of the program has a gradient", hint="verify it without train")
        grads = torch.autograd.grad(outs, leaves, [_weights(t, k) for k, t in enumerate(outs)], allow_unused=True)
        return outputs, tuple(grads)

    @contextmanager
    def _restored(self) -> Iterator[None]:
        state = [] if self.module is None else [*self.module.parameters(), *self.module.buffers()]
        kept = [t.detach().clone() for t in state]
        try:
            yield
        finally:
            with torch.no_grad():
                for t, old in zip(state, kept, strict=True):
                    if not torch.equal(t.detach(), old):
                        t.copy_(old)


def judge(program: Program, got: Outcome, eager: Outcome, exact: Outcome | None, noise: Any = None) -> list[Verdict]:
    """Verdicts on results, gradients, arguments and buffers after the run, and shared memory."""
    if eager.error or got.error:
        same = got.error.partition(":")[0] == eager.error.partition(":")[0]
        words = f"raises {got.error}" if got.error else "raises nothing"
        return [
            Verdict("PASS" if same else "FAIL", "" if same else f"{words}, eager {eager.error or 'nothing'}", "run")
        ]
    of_results, of_grads = noise if noise is not None else (None, None)
    # where float64 cannot run the program, eager's own values are the only reference
    truth = exact if exact is not None else eager
    verdicts = compare_many(got.outputs, eager.outputs, truth.outputs, strides=True, noise=of_results)
    names = program.leaves(eager.args)
    for k, (g, e, x) in enumerate(zip(got.grads, eager.grads, truth.grads, strict=True)):
        found = compare_many([g], [e], [x], noise=None if of_grads is None else [of_grads[k]])
        verdicts += [replace(v, name=f"grad of {names[k]}") for v in found]
    verdicts += compare_many(got.args, eager.args, truth.args, strides=True, name="arg")
    verdicts += compare_many(got.buffers, eager.buffers, truth.buffers, name="buffer")
    other = why_shared_otherwise(got.shares, eager.shares)
    return verdicts if other is None else [*verdicts, Verdict("FAIL", other, "aliasing")]


def copies(args: Sequence[Any]) -> list[Any]:
    """Copies with the same strides; one tensor given twice is one copy given twice."""
    made: dict[int, Tensor] = {}

    def copy(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) not in made:
            made[id(x)] = copy_of(x)
        return made[id(x)]

    return list(pytree.tree_map(copy, list(args)))


def user_frame(error: BaseException) -> str | None:
    """The innermost line outside torch and plait."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not any(Path(frame.filename).is_relative_to(home) for home in _NOT_THE_USERS):
            return f"{Path(frame.filename).name}:{frame.lineno} {frame.line or ''}".strip()
    return None


def raises_in_eager(error: str, where: str | None) -> UserError:
    """What is said of a program that does not run without plait."""
    hint = "the program must run without plait first; --debug shows the traceback"
    return UserError(f"the program raises in eager: {error}", origin=where or None, hint=hint)


def _wants_grad(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _weights(t: Tensor, number: int) -> Tensor:
    """Sixteenths between -1 and 1 in no order, which every float type holds: drawn numbers would not be the same in double."""
    places = torch.arange(t.numel(), device=t.device) * 7919 + number
    return ((2 * (places % 16) - 15).to(t.dtype) / 16).view(t.shape)


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def _generators() -> list[Tensor]:
    on_cards = (
        [torch.cuda.get_rng_state(k) for k in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return [torch.get_rng_state(), *on_cards]


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:200]
