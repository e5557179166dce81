"""The value of an intermediate inside a fused kernel, named as the user names it.

The program is run again while every graph's inputs are kept. Where its kernels are here, the one in question is then taken
apart: the graph evaluator forms the value from what the kernel really read. What the compiler has rewritten out of
existence, or planned for another device, is the value that eager has on the graph's own inputs.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from plait.diagnose.kernels import Kernels, run_watched
from plait.diagnose.locate import stands_for
from plait.diagnose.program import copies
from plait.diagnose.reduce import Values
from plait.diagnose.reproduce import graph_text, kernel_text, subject_of, write_file
from plait.diagnose.watch import Call, Seen, Watch
from plait.errors import PlaitError, UserError
from plait.frontend.origins import origin_of
from plait.frontend.saved import as_wanted
from plait.options import Options

_ASSIGNED = re.compile(r"^\S+:\d+ (?P<names>[\w\s,()]+?)(?::[^=]+)?=(?!=)")


class Member(Protocol):
    """An operator of a kernel, as a report has it."""

    @property
    def name(self) -> str: ...
    @property
    def aten(self) -> str: ...
    @property
    def fx(self) -> tuple[str, ...]: ...
    @property
    def line(self) -> str: ...


@dataclass
class Inside:
    """A program that can be run again: `drive` runs it under a given way to compile it. `target`: the device that its kernels
    were planned for, None for this one."""

    options: Options
    drive: Callable[[Callable[[Any], Callable[..., Any]]], None]
    target: str | None
    _seen: list[Seen] = field(default_factory=list)

    def tap(self, graph: int, step: int, members: Sequence[Member], name: str) -> Tensor | tuple[Tensor, ...]:
        """The value called `name` in a step of a graph; several where several are called so. UserError with the names that
        are there when none is."""
        seen, call = self._recorded(graph)
        nodes = {n.name: n for n in seen.gm.graph.nodes}
        known = _names(members, nodes)
        chosen = known.get(name) or known.get(name.removeprefix("aten."))
        if not chosen:
            near = difflib.get_close_matches(name, known, n=5, cutoff=0.5) or list(known)[:12]
            raise UserError(f"kernel {step} of graph {graph} has no value {name!r}", hint=f"values: {', '.join(near)}")
        found = tuple(self._value(seen, call, step, nodes[x]) for x in chosen)
        return found[0] if len(found) == 1 else found

    def reproduce(self, graph: int, step: int | None, path: str | Path, values: bool) -> Path:
        """Write the file that runs a step of a graph, or all of it (None), on its own. Raises UserError."""
        subject = subject_of(*self._recorded(graph), self.options, self.target)
        text = graph_text(subject, values) if step is None else kernel_text(subject, step, values)
        return write_file(path, text)

    def _recorded(self, graph: int) -> tuple[Seen, Call]:
        if not self._seen:
            watch = Watch(self.options, choose=None if self.target is None else lambda seen: None)
            watch.recording = True
            self.drive(watch.compiled)
            self._seen = watch.seen
        if graph < len(self._seen) and self._seen[graph].record.status == "eager":
            hint = "the report says why, and strict=True raises it"
            raise UserError(f"{self._seen[graph].title} runs in eager: it has no kernels", hint=hint)
        if graph >= len(self._seen) or not self._seen[graph].calls:
            raise UserError(
                f"graph {graph} did not run", hint="only graphs of the calls that were explained can be looked into"
            )
        return self._seen[graph], self._seen[graph].calls[0]

    def _value(self, seen: Seen, call: Call, step: int, node: fx.Node) -> Tensor:
        found = self._from_kernel(seen, call, step, node)
        if found is not None:
            return found
        values = Values(seen.gm)
        torch.set_rng_state(call.rng)
        with torch.no_grad():
            values.run(*as_wanted(seen.gm, seen.examples, copies(call.before)), enable_io_processing=False)
        value: Tensor = values.values[node.name]
        return value

    def _from_kernel(self, seen: Seen, call: Call, step: int, node: fx.Node) -> Tensor | None:
        """The value from the kernel's own inputs, in the type that eager has; None where no node of the kernel is it."""
        compiled, executable, wanted = seen.compiled, seen.executable, node.meta.get("val")
        if compiled is None or executable is None or not isinstance(wanted, Tensor):
            return None
        target = next((n for n, name in stands_for(compiled.graph).items() if name == node.name), None)
        if target is None:
            return None
        torch.set_rng_state(call.rng)
        _, ran = run_watched(executable, compiled, copies(call.before))
        try:
            kernels = Kernels(compiled, executable, call.before, self.options)
            for r in ran:
                for _, group, _, read, wrote in kernels.parts(r) if kernels.step_of(r) == step else ():
                    if target in kernels.members(group):
                        value = wrote[target] if target in wrote else kernels.evaluate([target], read, "eager")[target]
                        if list(value.shape) == [int(n) for n in wanted.shape]:
                            return value.to(dtype=wanted.dtype, device=wanted.device)
        except (KeyError, PlaitError):
            return None
        return None


def _names(members: Sequence[Member], nodes: dict[str, fx.Node]) -> dict[str, list[str]]:
    """Every name that a kernel's values have -> the FX nodes that hold them, in order. A variable is the last value formed on
    its line; an operator its own last."""
    order = {name: k for k, name in enumerate(nodes)}
    last: dict[str, str] = {}  # line -> its last FX node in the program
    for n in nodes.values():
        if n.op == "call_function" and (line := origin_of(n).line):
            last[line] = n.name
    out: dict[str, list[str]] = {}

    def add(name: str, at: str) -> None:
        if name and at not in out.setdefault(name, []):
            out[name].append(at)

    for m in members:
        mine = sorted((x for x in m.fx if x in order), key=order.__getitem__)
        mine = [x for x in mine if isinstance(nodes[x].meta.get("val"), Tensor)]
        if not mine:
            continue
        at = mine[-1]
        if last.get(m.line) == at:
            place = m.line.split(" ", 1)[0]
            assigned = _ASSIGNED.match(m.line)
            for name in (assigned["names"] if assigned else "").split(","):
                add(name.strip(" ()"), at)
            add(place, at)
            add(place.rpartition(":")[2], at)
        for name in (m.name, m.aten.removeprefix("aten.")):
            add(name, at)
        for x in mine:
            add(x, x)
    for found in out.values():
        found.sort(key=order.__getitem__)
    return out
