"""Plan -> Script: slots for values, allocation before use, release after the last, views for ATen calls, returns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from plait.errors import InternalError
from plait.ir import index as ix
from plait.ir.graph import Graph, Node, Output, Read, Shape
from plait.ir.loop import Loop, loop_of
from plait.ir.names import places
from plait.plan.inline import Reading
from plait.plan.layout import Layouts, Strided, is_product, same_strides
from plait.plan.plan import Group
from plait.plan.reinplace import in_place
from plait.runtime.steps import (
    AllocStep,
    CopyStep,
    ExternStep,
    FreeStep,
    InputOut,
    InputSlot,
    ItemOut,
    KernelStep,
    LoopStep,
    NoneOut,
    OperandView,
    ReturnSpec,
    ScalarOut,
    Script,
    SlotOut,
    Step,
    ValueOut,
    ViewOut,
)
from plait.tile.lower import Lowered
from plait.tile.overwrite import overwritable


@dataclass(frozen=True)
class Launch:
    """One step of the plan: an ATen call, or kernel number `kernel` with its parts as lowered."""

    groups: tuple[Group, ...]
    kernel: int = -1
    parts: tuple[Lowered, ...] = ()
    name: str = ""


def link(
    graph: Graph, reading: Reading, launches: Sequence[Launch], layouts: Layouts, overwrite: bool = False
) -> Script:
    """The script of a planned graph. `overwrite`: results may be written over operands that nobody needs any more, by
    kernels whose code does not count on memory of its own."""
    linker = _Linker(graph, reading, layouts)
    script = linker.run(launches)
    return replace(script, steps=tuple(linker.overwriting(script))) if overwrite else script


class _Linker:
    def __init__(self, graph: Graph, reading: Reading, layouts: Layouts) -> None:
        self.graph, self.reading, self.layouts = graph, reading, layouts
        self.slot_of: dict[Node, int] = {}
        self.steps: list[Step] = []
        self.handed_out: set[int] = set()
        self.loops = 0
        self.arguments = {i.node for i in graph.inputs}
        self.replaces: dict[int, list[int]] = {}  # a kernel's result -> operands in whose place it may be written

    def run(self, launches: Sequence[Launch]) -> Script:
        inputs = tuple(self.bind(i.node, i.position, i.layout is None) for i in self.graph.inputs)
        order = [n for launch in launches for g in launch.groups for n in g.nodes]
        self.in_place = in_place(self.graph, self.reading, order, self.layouts)
        for launch in launches:
            if launch.groups[0].kind == "extern":
                call = launch.groups[0].nodes[0]
                loop = loop_of(call)
                if loop is None:
                    self.call(call)
                else:
                    self.loop(call, loop)
            else:
                self.kernel(launch)
        for k, o in enumerate(self.graph.outputs):
            if o.writes_to is not None and k not in self.in_place.outputs:
                self.write_back(o)
        returns = tuple(self.returned(r) for r in self.graph.returns)
        bindings = {name: self.binding(b) for name, b in self.graph.bindings.items()}
        return Script(
            arity=self.graph.arity + len(self.graph.constants),
            slots=len(self.slot_of),
            inputs=inputs,
            steps=tuple(self.with_frees(returns)),
            returns=returns,
            bindings=bindings,
            device=self.graph.device,
        )

    # ---------------------------------------------------------------- slots
    def slot(self, n: Node) -> int:
        found = self.slot_of.get(n)
        if found is None:
            raise InternalError(f"{n} is read before it is in memory")
        return found

    def new_slot(self, n: Node) -> int:
        self.slot_of[n] = len(self.slot_of)
        return self.slot_of[n]

    def bind(self, n: Node, position: int, scalar: bool) -> InputSlot:
        return InputSlot(position, self.new_slot(n), n.dtype if scalar else None, self.graph.padded.get(n))

    def binding(self, b: tuple[object, ...]) -> tuple[object, ...]:
        """Data-dependent sizes name a slot instead of a node."""
        if b[0] != "extern":
            return b
        call, item, dim = b[1], b[2], b[3]
        assert isinstance(call, Node)
        return ("slot", self.result_slot(call, item), dim)

    def result_slot(self, call: Node, item: object) -> int:
        if item in (0, None) and call in self.slot_of:
            return self.slot_of[call]
        for n, s in self.slot_of.items():
            if n.kind == "project" and n.reads[0].source is call and n.attr("item") == item:
                return s
        raise InternalError(f"result {item} of {call} has no slot")

    # ---------------------------------------------------------------- steps
    def kernel(self, launch: Launch) -> None:
        for g in launch.groups:
            for n in g.stored:
                strides = self.layouts.strides(n)
                self.steps.append(AllocStep(self.new_slot(n), n.shape, strides, n.dtype, self.graph.device))
        buffers = tuple(self.slot(n) for part in launch.parts for n in part.tensors)
        for part in launch.parts:
            for out, read in overwritable(part.program):
                self.replaces.setdefault(self.slot(part.tensors[out]), []).append(self.slot(part.tensors[read]))
        symbols = tuple(e for part in launch.parts for e in part.program.numbers)
        messages = tuple(part.program.messages for part in launch.parts)
        nodes = self.reading.with_inline(n for g in launch.groups for n in g.nodes)
        where = places(o.line for n in sorted(nodes, key=lambda n: n.serial) for o in self.graph.origins.get(n, ()))
        self.steps.append(KernelStep(launch.kernel, buffers, symbols, messages, launch.name, where))

    def call(self, n: Node) -> None:
        operands = tuple(self.operand(r) for r in n.reads)
        outs: list[int | None] = []
        projects = {p.attr("item"): p for p in self.graph.nodes() if p.kind == "project" and p.reads[0].source is n}
        for item, out in enumerate(n.attr("outs")):
            if item in projects:
                outs.append(self.new_slot(projects[item]))
            elif item == 0 and isinstance(out[0], tuple):
                outs.append(self.new_slot(n))
                if n in self.graph.padded:
                    strides = self.layouts.strides(n)
                    self.steps.append(AllocStep(self.slot(n), n.shape, strides, n.dtype, self.graph.device))
            else:
                outs.append(None)
        origin = next((o.line for o in self.graph.origins.get(n, ()) if o.line), "")
        self.steps.append(
            ExternStep(
                n.attr("target"),
                n.attr("template"),
                operands,
                tuple(outs),
                n.attr("role"),
                0 if n in self.in_place.calls else None,
                origin,
                _expected(n),
                n in self.graph.padded,
            )
        )

    def loop(self, n: Node, loop: Loop) -> None:
        projects = {p.attr("item"): p for p in self.graph.nodes() if p.kind == "project" and p.reads[0].source is n}
        operands = tuple(self.operand(r) for r in n.reads)
        into: list[int] = []
        for item, (shape, dtype, strides) in enumerate(n.attr("outs")):
            into.append(self.new_slot(projects[item]))
            self.steps.append(AllocStep(into[-1], shape, strides, dtype, self.graph.device))
        origin = next((o.line for o in self.graph.origins.get(n, ()) if o.line), "")
        self.steps.append(LoopStep(self.loops, loop.count, operands, tuple(into), origin))
        self.loops += 1

    def operand(self, r: Read) -> OperandView:
        view = self.view(r)
        strides = self.layouts.strides(r.source)
        whole = view is None or (
            view.shape == r.source.shape and same_strides(view.shape, view.strides, strides) and not view.offset.terms
        )
        if view is None or whole:
            return OperandView(self.slot(r.source), whole=True)
        return OperandView(self.slot(r.source), view.shape, view.strides, view.offset)

    def view(self, r: Read) -> Strided | None:
        return self.layouts.view(r)

    def write_back(self, o: Output) -> None:
        target = next(i for i in self.graph.inputs if i.position == o.writes_to)
        assert target.layout is not None
        source = self.operand(o.read)
        written = OperandView(self.slot(target.node), whole=True)
        if o.at is not None:
            strides = target.layout.strides
            offset = sum((a * s for a, s in zip(o.at, strides, strict=True)), ix.ZERO)
            written = OperandView(self.slot(target.node), o.read.domain or (), strides, offset)
        self.steps.append(CopyStep(written, source))

    def returned(self, r: tuple[object, ...]) -> ReturnSpec:
        kind = r[0]
        if kind == "tensor":
            assert isinstance(r[1], int)
            o = self.graph.outputs[r[1]]
            v = self.operand(o.read)
            # strides of axes of extent 1 matter to nobody but the user who looks at them
            own = o.read.source not in self.arguments and v.slot not in self.handed_out
            if own and v.whole and self.layouts.strides(o.read.source) == o.strides:
                self.handed_out.add(v.slot)  # a second result in the same memory is a tensor of its own
                return SlotOut(v.slot)
            return ViewOut(v.slot, o.read.domain or (), o.strides, v.offset)
        if kind == "item":
            assert isinstance(r[1], int)
            return ItemOut(self.slot(self.graph.outputs[r[1]].read.source))
        if kind == "input":
            assert isinstance(r[1], int)
            return InputOut(r[1])
        if kind == "scalar":
            return ScalarOut(r[1])
        if kind == "value":
            return ValueOut(r[1])
        return NoneOut()

    def with_frees(self, returns: tuple[ReturnSpec, ...]) -> list[Step]:
        """Steps with each slot released after its last use, inputs too (the backward's are saved activations, which die
        there); returned slots are the user's."""
        kept = {r.slot for r in returns if isinstance(r, (SlotOut, ViewOut, ItemOut))}
        kept |= {b[1] for b in (self.binding(b) for b in self.graph.bindings.values()) if b[0] == "slot"}  # type: ignore[misc]
        last: dict[int, int] = {}
        for k, step in enumerate(self.steps):
            for s in _slots(step):
                last[s] = k
        out: list[Step] = []
        for k, step in enumerate(self.steps):
            out.append(step)
            out.extend(FreeStep(s) for s in dict.fromkeys(_slots(step)) if last[s] == k and s not in kept)
        return out

    def overwriting(self, script: Script) -> list[Step]:
        """The steps, with results in the place of operands that die where they are made: values of the graph's own."""
        own = {s.slot for s in script.steps if isinstance(s, AllocStep)}
        own |= {self.slot_of[n] for n in self.slot_of if is_product(n)}
        own |= {self.slot_of[i.node] for i in self.graph.inputs if i.private}
        taken: dict[int, tuple[int, int]] = {}
        for k, step in enumerate(script.steps):
            if not isinstance(step, KernelStep):
                continue
            dying = {s.slot for s in itertools.takewhile(_is_free, script.steps[k + 1 :]) if isinstance(s, FreeStep)}
            for s in step.buffers:
                free = dying & own - {old for old, _ in taken.values()}
                for old in self.replaces.get(s, ()):
                    if old in free and step.buffers.count(old) == 1:
                        taken[s] = old, step.kernel
                        break
        return [
            replace(s, reuse=taken[s.slot][0], kernel=taken[s.slot][1])
            if isinstance(s, AllocStep) and s.slot in taken
            else s
            for s in script.steps
        ]


def _is_free(step: Step) -> bool:
    return isinstance(step, FreeStep)


def _expected(n: Node) -> tuple[tuple[Shape, Shape] | None, ...]:
    """Shape and strides that readers of each result rely on."""
    return tuple((o[0], o[2]) if len(o) == 3 and isinstance(o[0], tuple) else None for o in n.attr("outs"))


def _slots(step: Step) -> list[int]:
    if isinstance(step, AllocStep):
        return [step.slot]
    if isinstance(step, KernelStep):
        return list(step.buffers)
    if isinstance(step, ExternStep):
        return [*(v.slot for v in step.operands), *(s for s in step.outs if s is not None)]
    if isinstance(step, CopyStep):
        return [step.target.slot, step.source.slot]
    if isinstance(step, LoopStep):
        return [*(v.slot for v in step.operands), *step.into]
    return []
