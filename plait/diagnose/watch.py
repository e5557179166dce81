"""Compile a program while keeping, of every captured graph, what is needed to run it again piece by piece."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from plait.api import backend_with
from plait.compiler import Compiled, compile_graph
from plait.diagnose.program import copies
from plait.frontend.capture import user_line
from plait.frontend.saved import as_traced, as_wanted
from plait.ir import fault
from plait.ir.fuel import Tank
from plait.options import Options
from plait.oracle.compare import Shares, sharing
from plait.runtime import report
from plait.runtime.executable import Executable
from plait.runtime.guarded import boxed

_NO_LIMIT = 1 << 20


@dataclass(frozen=True)
class Call:
    """One run of a compiled graph: copies of what it was given, what it made of that, and its results; `shares`: whose memory
    these are in."""

    before: tuple[Any, ...]
    after: tuple[Any, ...]
    results: tuple[Any, ...]
    rng: Tensor
    shares: Shares = ()


@dataclass
class Seen:
    """A captured graph. `executable` is None where the graph runs in eager, with the reason in `record`."""

    number: int
    kind: str
    line: str
    gm: Any
    examples: tuple[Any, ...]
    record: report.CompileRecord
    executable: Executable | None = None
    calls: list[Call] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"graph{self.number}"

    @property
    def title(self) -> str:
        """ "graph0 (forward) from model.py:7"."""
        return f"{self.name} ({self.kind})" + (f" from {self.line.split(' ', 1)[0]}" if self.line else "")

    @property
    def compiled(self) -> Compiled | None:
        found: Compiled | None = self.record.details.get("compiled")
        return found

    @property
    def tank(self) -> Tank | None:
        """Decisions that were counted."""
        found: Tank | None = self.record.details.get("fuel")
        return found

    def eager(self, *args: Any) -> list[Any]:
        """The captured graph in eager, node by node: torch may have given its module another way of calling since."""
        given = as_wanted(self.gm, self.examples, args)
        return pytree.tree_leaves([fx.Interpreter(self.gm).run(*given, enable_io_processing=False)])


class Watch:
    """A backend that keeps what it compiled; while `recording`, also what each graph is called with. `choose` may give a graph
    other options, or None: that graph runs in eager."""

    def __init__(
        self,
        options: Options,
        say: Callable[[str], None] = lambda line: None,
        choose: Callable[[Seen], Options | None] | None = None,
    ) -> None:
        self.options, self.say, self.choose = options, say, choose
        self.seen: list[Seen] = []
        self.recording = False
        self.fault = fault.current()  # a backward may be compiled on a thread of autograd's

    def compiled(self, fn: Any) -> Callable[..., Any]:
        """The program under this backend, compiled anew whatever was compiled of its code before."""
        torch._dynamo.reset()
        backend = functools.partial(backend_with, self.compile, self.options)
        made: Callable[..., Any] = torch.compile(fn, backend=backend)

        def call(*args: Any) -> Any:
            with torch._dynamo.config.patch(recompile_limit=_NO_LIMIT, accumulated_recompile_limit=_NO_LIMIT):
                return made(*args)

        return call

    def compile(self, gm: Any, inputs: Sequence[Any], options: Options, *, kind: str) -> Callable[..., Any]:
        """compiler.compile_graph, watched."""
        seen = Seen(len(self.seen), kind, user_line(gm.graph), gm, tuple(inputs), report.current())
        self.seen.append(seen)
        self.say(f"compiling {seen.title} ...")
        chosen = options if self.choose is None else self.choose(seen)
        if chosen is None:
            return self._watched(seen, boxed(as_traced(gm, inputs)))
        with fault.planted(self.fault):
            made = compile_graph(gm, inputs, chosen, kind=kind)
        assert isinstance(made, Executable)
        made.filled = True
        seen.executable = made
        return self._watched(seen, made.run)

    def _watched(self, seen: Seen, made: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        def run(args: list[Any]) -> Any:
            if not self.recording:
                return made(args)
            given = tuple(args)
            before, rng = tuple(copies(given)), torch.get_rng_state()
            results = made(args)
            after = tuple(copies(given))
            leaves = pytree.tree_leaves(list(results))
            seen.calls.append(Call(before, after, tuple(copies(leaves)), rng, sharing(leaves, given)))
            return results

        run._boxed_call = True  # type: ignore[attr-defined]
        return run
