"""One kernel of a compiled graph on the inputs that it really had: as it ran, by the graph evaluator, by the tile evaluator, and
cut short after one of its operators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from plait.compiler import Compiled
from plait.diagnose.program import copies
from plait.emit.cpp import CppKernel
from plait.emit.triton import emit_triton
from plait.errors import BuildFailed, CheckFailed, LowerFailed, PlaitError
from plait.ir.bindings import sym_values
from plait.ir.graph import Node, topological
from plait.options import Options
from plait.oracle.compare import Verdict, compare
from plait.oracle.eval_graph import Evaluation, Value
from plait.oracle.eval_tile import flat_view, run_tile
from plait.oracle.semantics import TORCH
from plait.plan.layout import Layouts
from plait.plan.plan import Group
from plait.runtime.build import Built, CppSources, build_cpp, build_triton, f8_saturates
from plait.runtime.cache import cache_for
from plait.runtime.executable import Executable
from plait.runtime.kernel import Kernel, Launch, Messages, Slots
from plait.runtime.sizes import Sizes
from plait.tile.flat import Env
from plait.tile.lower import Lowered, lower

_VALUELESS = frozenset(("const", "index", "input"))


@dataclass
class Ran:
    """One launch as it ran: the tensors of its buffers before (those it reads) and after (those it wrote), by buffer."""

    kernel: int
    read: dict[int, Tensor] = field(default_factory=dict)
    wrote: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Watched:
    """A kernel that keeps what it reads and writes."""

    kernel: Kernel
    number: int
    roles: tuple[str, ...]
    ran: list[Ran]

    def bind(self, buffers: tuple[int, ...], symbols: Sequence[int], messages: Messages) -> Launch:
        """See runtime.kernel.Kernel."""
        go = self.kernel.bind(buffers, symbols, messages)

        def launch(slots: Slots) -> None:
            found = Ran(self.number)
            for k, b in enumerate(buffers):
                if self.roles[k] == "in":
                    found.read[k] = copies([slots[b]])[0]
            go(slots)
            for k, b in enumerate(buffers):
                if self.roles[k] != "in":
                    found.wrote[k] = copies([slots[b]])[0]
            self.ran.append(found)

        return launch


def run_watched(executable: Executable, compiled: Compiled, args: Sequence[Any]) -> tuple[list[Any], list[Ran]]:
    """Run a graph once; its results, and every launch in order."""
    ran: list[Ran] = []
    kernels: list[Any] = list(executable.kernels)
    for launch in compiled.launches:
        if launch.parts and kernels[launch.kernel] is not None:
            roles = tuple(b.role for p in launch.parts for b in p.program.buffers if b.role != "scratch")
            kernels[launch.kernel] = Watched(kernels[launch.kernel], launch.kernel, roles, ran)
    made = Executable(executable.script, kernels, executable.constants, executable.attributes)
    made.filled = executable.filled
    return made.run(list(args)), ran


class Kernels:
    """The kernels of one compiled graph, at the sizes of one call."""

    def __init__(
        self,
        compiled: Compiled,
        executable: Executable,
        args: Sequence[Any],
        options: Options,
        noise: float | None = None,
    ) -> None:
        self.compiled, self.options, self.noise = compiled, options, noise
        self.graph = compiled.graph
        self.symbols: Mapping[str, int | float] = executable.binder.bind([*args, *executable.constants])
        self.sizes = Sizes(self.symbols)
        self.layouts = Layouts(self.graph)
        reading = compiled.plan.reading
        self.env = Env(self.layouts.strides, reading.inline, options.numerics, self.graph.symbols, reading.reads)

    # ---------------------------------------------------------------------------------------------- evaluation
    def parts(self, ran: Ran) -> Iterator[tuple[int, Group, Lowered, dict[Node, Tensor], dict[Node, Tensor]]]:
        """Each part of a launch: its place, group and program, and the values that it read and wrote."""
        step = next(s for s in self.compiled.launches if s.parts and s.kernel == ran.kernel)
        first = 0
        for k, (group, part) in enumerate(zip(step.groups, step.parts, strict=True)):
            read = {n: ran.read[first + i] for i, n in enumerate(part.tensors) if first + i in ran.read}
            wrote = {n: ran.wrote[first + i] for i, n in enumerate(part.tensors) if first + i in ran.wrote}
            first += len(part.tensors)
            yield k, group, part, read, wrote

    def step_of(self, ran: Ran) -> int:
        """The number of a launch among the steps of its graph, as explain counts them."""
        return next(k for k, s in enumerate(self.compiled.launches) if s.parts and s.kernel == ran.kernel)

    def evaluate(self, nodes: Sequence[Node], given: Mapping[Node, Tensor], mode: str) -> dict[Node, Tensor]:
        """Values of nodes by the graph evaluator, from those of a kernel's inputs."""
        run = Evaluation(replace(self.graph, bindings={}, constants={}, inputs=()), (), mode, {})
        run.symbols.update(sym_values(self.symbols))
        for n, x in given.items():
            wide = x.detach().cpu()
            wide = wide.double() if mode == "float64" and n.dtype.is_float else wide
            run.values[n] = Value(wide, wide)
        with torch.no_grad():
            for n in topological(nodes, run.values):
                run.values[n] = run.compute(n)
        return {n: run.values[n].rounded for n in nodes}

    def members(self, group: Group) -> list[Node]:
        """What a kernel computes, in order, with the inline nodes that it evaluates on the way."""
        return sorted(
            (n for n in self.compiled.plan.reading.with_inline(group.nodes) if n.op not in _VALUELESS),
            key=lambda n: n.serial,
        )

    def judge(self, got: Mapping[Node, Tensor], given: Mapping[Node, Tensor]) -> dict[Node, Verdict]:
        """Values against the evaluator's, node by node."""
        eager, exact = (self.evaluate(list(got), given, mode) for mode in ("eager", "float64"))
        return {n: compare(x.cpu(), eager[n], exact[n], noise=self.noise) for n, x in got.items()}

    # ---------------------------------------------------------------------------------------------- tiles and code
    def by_tiles(self, part: Lowered, given: Mapping[Node, Tensor]) -> dict[Node, Tensor]:
        """What a kernel's program writes, run by the tile evaluator. Raises CheckFailed where it goes out of bounds."""
        buffers, out = self._memory(part, given)
        symbols = {s: int(self.symbols[s]) for s in part.program.symbols}
        run_tile(part.program, [flat_view(b) for b in buffers], symbols)
        return out

    def by_code(self, part: Lowered, kernel: Kernel, given: Mapping[Node, Tensor]) -> dict[Node, Tensor]:
        """What a built kernel writes."""
        buffers, out = self._memory(part, given, self.graph.device)
        launch = kernel.bind(tuple(range(len(buffers))), self.sizes.all(part.program.numbers), (part.program.messages,))
        launch(list(buffers))
        return out

    def _memory(
        self, part: Lowered, given: Mapping[Node, Tensor], device: str = "cpu"
    ) -> tuple[list[Tensor], dict[Node, Tensor]]:
        buffers: list[Tensor] = []
        out: dict[Node, Tensor] = {}
        for n, b in zip(part.tensors, part.program.buffers, strict=False):
            if b.role == "in":
                buffers.append(given[n].to(device))
                continue
            strides = self.sizes.all(self.layouts.strides(n))
            flat = torch.zeros(max(self.sizes.one(b.elems), 1), dtype=TORCH[n.dtype], device=device)
            buffers.append(flat)
            out[n] = flat.as_strided(self.sizes.all(n.shape), strides)
        return buffers, out

    def cut_after(self, group: Group, node: Node, like: Lowered) -> Lowered | None:
        """The kernel that computes one of its members and no more; under its own schedule where that fits."""
        assert group.alignment is not None
        for schedule in (like.program.schedule, None):
            try:
                return lower(
                    group.alignment,
                    [node],
                    self.env,
                    self.compiled.spec,
                    self.graph.hint,
                    name=f"until_{node.op}_{node.serial}",
                    schedule=schedule,
                )
            except (LowerFailed, CheckFailed, KeyError, StopIteration):
                continue
        return None

    def build(self, parts: Sequence[Lowered]) -> list[Built]:
        """Kernels of one part each."""
        if self.graph.device.startswith("cuda"):
            sources = [emit_triton([p.program], p.program.name, f8_saturates=f8_saturates()) for p in parts]
            return build_triton(sources, self.graph.device, None)
        texts = CppSources([CppKernel(p.program.name, (p.program,)) for p in parts])
        return build_cpp(texts, cache_for(self.options), self.options.threads, self.options.level.cxx)

    # ---------------------------------------------------------------------------------------------- the first operator
    def first_wrong(self, group: Group, part: Lowered, given: Mapping[Node, Tensor], *, code: bool) -> Node | None:
        """The first member that is wrong where the kernel is cut short after it: by its machine code or by the tile
        evaluator. None where every cut is right."""
        cuts = [(n, c) for n in self.members(group) if (c := self.cut_after(group, n, part)) is not None]
        cuts = [
            (n, c) for n, c in cuts if all(b.role != "in" or t in given for t, b in zip(c.tensors, c.program.buffers))
        ]
        built: Sequence[Built | None] = self.build([c for _, c in cuts]) if code else [None] * len(cuts)
        for (n, cut), kernel in zip(cuts, built, strict=True):
            if isinstance(kernel, BuildFailed):
                continue
            try:
                got = self.by_tiles(cut, given) if kernel is None else self.by_code(cut, kernel, given)
            except PlaitError:
                return n
            if any(v.status == "FAIL" for v in self.judge(got, given).values()):
                return n
        return None
