"""Executable: runs a Script over built kernels, with as little Python a step as can be.

For each set of sizes seen (one, when shapes are static) every step becomes a closure with its numbers worked out; a call
then only walks the closures over its own list of slots. Nothing is shared between calls but read-only closures, so an
Executable may run on several threads at once. Steps that need data-dependent sizes are closed when the sizes are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from plait.errors import InternalError
from plait.frontend.context import from_dtype
from plait.ir.names import place
from plait.plan.layout import room
from plait.runtime import pool, tensors
from plait.runtime.calls import Attributes, Fetch, eager_group, extern_call, fetch_view
from plait.runtime.cudagraph import Graphed
from plait.runtime.kernel import Kernel, Launch, Slots
from plait.runtime.locks import Lock
from plait.runtime.sizes import Binder, Number, Sizes, names_in
from plait.runtime.steps import (
    AllocStep,
    CopyStep,
    EagerStep,
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
from plait.runtime.triton_kernel import TritonKernel
from plait.runtime.tune import is_settled

__all__ = [
    "AllocStep",
    "CopyStep",
    "EagerStep",
    "Executable",
    "ExternStep",
    "FreeStep",
    "InputOut",
    "InputSlot",
    "ItemOut",
    "KernelStep",
    "NoneOut",
    "OperandView",
    "ReturnSpec",
    "ScalarOut",
    "Script",
    "SlotOut",
    "Step",
    "ValueOut",
    "ViewOut",
]

_NOTHING = float("nan")
_KEPT_SIZES = 64  # sets of sizes whose closures are kept
Layout = tuple[tuple[int, ...], tuple[int, ...]]
_is_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled  # asked once a call


class Executable:
    """A compiled graph. Call it with the arguments, or, in AOT autograd's boxed way, `run` it with a list it may empty.

    `constants` fill the last positions; `attributes` finds subgraphs for externs that take one. With `graphs`, runs are
    recorded as CUDA graphs where that can be done. `loops` run the blocks of LoopSteps. With `filled` (set before the first call), fresh memory holds NaN (integers: -1),
    so that what reads it before it is written cannot be right by luck."""

    def __init__(
        self,
        script: Script,
        kernels: Sequence[Kernel],
        constants: Sequence[Any] = (),
        attributes: Attributes = None,
        pool_bytes: int | None = None,
        graphs: bool = False,
        loops: Sequence[Executable] = (),
    ) -> None:
        self.script, self.kernels, self.constants, self.attributes = script, kernels, tuple(constants), attributes
        self.binder = Binder(script.bindings)
        self.pool = pool.default_pool() if pool_bytes is None else pool.Pool(pool_bytes)
        self.graphs, self.filled, self.loops = graphs, False, tuple(loops)
        self.kept = _KEPT_SIZES  # may be raised before the first call: a loop's body has one set a block
        self._closed: dict[tuple[Number, ...], _Closed] = {}
        self._lock = Lock()

    def __call__(self, *args: Any) -> list[Any]:
        return self.run(list(args))

    def run(self, args: list[Any]) -> list[Any]:
        """Run once. `args` is emptied, so that an argument nobody else holds dies after its last use."""
        if self.constants:
            args.extend(self.constants)
        if len(args) != self.script.arity:
            raise InternalError(f"{self.script.name} takes {self.script.arity} arguments, got {len(args)}")
        key = self.binder.key(args)
        closed = self._closed.get(key)
        if closed is None:
            closed = self._close(key, args)
        run = closed.run if closed.graphed is None else closed.graphed.call
        if closed.guard is not None:
            with closed.guard():
                return run(args)
        return run(args)

    def why_not_graphed(self) -> list[str]:
        """Why runs are not replayed as CUDA graphs, for each set of sizes where they are not."""
        found = [c.graphed.why_not for c in self._closed.values() if c.graphed is not None]
        return [reason for reason in found if reason]

    def _close(self, key: tuple[Number, ...], args: Sequence[Any]) -> _Closed:
        made = _Closed(self, args)
        with self._lock:
            while len(self._closed) >= self.kept:
                self._closed.pop(next(iter(self._closed)))
            self._closed[key] = made
        return made

    run._boxed_call = True  # type: ignore[attr-defined]


class _Closed:
    """A Script's steps as closures for one set of sizes.

    Slots beyond the script's hold the arguments that are returned as they came, and, last, the late symbols."""

    def __init__(self, owner: Executable, args: Sequence[Any]) -> None:
        script = owner.script
        self.owner = owner
        self.early = owner.binder.bind(args)
        self.sizes = Sizes(self.early)
        self.layouts: dict[int, Layout] = {}
        self.inputs: list[tuple[int, int]] = []
        self.prepare: list[Callable[[Slots, Sequence[Any]], None]] = []
        self.guard: Callable[[], Any] | None = _device_guard(script.device)
        self._passed: dict[int, int] = {}
        for i in script.inputs:
            self._input(i, args[i.position])
        late = set(owner.binder.late)
        self.late_slot = script.slots + sum(isinstance(r, InputOut) for r in script.returns)
        self.slots = self.late_slot + 1
        waiting = owner.binder.waiting_slots()
        self.steps: list[Launch] = []
        self.told: dict[int, str] = {}  # place in `steps` -> what a profiler is told
        freed: list[int] = []
        for step in script.steps:
            if isinstance(step, FreeStep):
                if not freed:
                    self.steps.append(_free(freed := []))
                freed.append(step.slot)
                continue
            freed = []
            if isinstance(step, KernelStep | ExternStep | LoopStep):
                self.told[len(self.steps)] = _told(step)
            # a group's nodes may speak of any symbol
            if late and (isinstance(step, EagerStep) or not names_in(_numbers_of(step)).isdisjoint(late)):
                self.steps.append(self._closed_at_run(step))
            else:
                self.steps.append(self._step(step, self.sizes))
            self.steps += [self._bind_late(slot) for slot in _filled_by(step) if slot in waiting]
        self.returns = [self._return(r, late) for r in script.returns]
        self.graphed: Graphed | None = None
        if owner.graphs:
            faults = [k.told for k in owner.kernels if isinstance(k, TritonKernel) and k.told is not None]
            self.graphed = Graphed(script, self.run, faults)

    def run(self, args: list[Any]) -> list[Any]:
        """Walk the steps once; empties `args`."""
        slots: Slots = [None] * self.slots
        for slot, position in self.inputs:
            slots[slot] = args[position]
        for prepare in self.prepare:
            prepare(slots, args)
        args.clear()
        if _is_profiled():
            self._walk_told(slots)
        else:
            for step in self.steps:
                step(slots)
        return [result(slots) for result in self.returns]

    def _walk_told(self, slots: Slots) -> None:
        """Walk the steps, each kernel and call as a range of its own for the profiler (and NVTX, where that listens)."""
        for k, step in enumerate(self.steps):
            with torch.autograd.profiler.record_function(self.told[k]) if k in self.told else nullcontext():
                step(slots)

    # ------------------------------------------------------------------------------------------------ arguments
    def _input(self, i: InputSlot, arg: Any) -> None:
        if i.dtype is not None:
            dtype, device = from_dtype(i.dtype), self.owner.script.device

            def scalar(slots: Slots, args: Sequence[Any]) -> None:
                given = args[i.position]
                slots[i.slot] = (
                    given if isinstance(given, torch.Tensor) else torch.tensor(given, dtype=dtype, device=device)
                )

            self.prepare.append(scalar)
            return
        self.inputs.append((i.slot, i.position))
        if i.strides is not None:
            strides = self.sizes.all(i.strides)
            self.layouts[i.slot] = (tuple(arg.shape), strides)
            self.prepare.append(lambda slots, args: tensors.lay_out(slots, i.slot, strides))
        elif isinstance(arg, torch.Tensor) and arg.layout is torch.strided:
            self.layouts[i.slot] = (tuple(arg.shape), arg.stride())
            if arg.is_neg() or arg.is_conj():
                # kernels read memory: a lazily negated or conjugated argument is made real first
                self.prepare.append(lambda slots, args: _resolve(slots, i.slot))

    # ------------------------------------------------------------------------------------------------ late sizes
    def _bind_late(self, slot: int) -> Launch:
        binder, early, place = self.owner.binder, self.early, self.late_slot

        def bind(slots: Slots) -> None:
            slots[place] = binder.bind_slot(slot, slots[slot], slots[place] or early)

        return bind

    def _closed_at_run(self, step: KernelStep | AllocStep | ExternStep | CopyStep | EagerStep | LoopStep) -> Launch:
        place = self.late_slot
        return lambda slots: self._step(step, Sizes(slots[place] or self.early))(slots)

    # ------------------------------------------------------------------------------------------------ steps
    def _step(
        self, step: KernelStep | AllocStep | ExternStep | CopyStep | EagerStep | LoopStep, sizes: Sizes
    ) -> Launch:
        if isinstance(step, KernelStep):
            kernel = self.owner.kernels[step.kernel]
            return kernel.bind(step.buffers, sizes.all(step.symbols), step.messages)
        if isinstance(step, AllocStep):
            return self._filled(step, self._alloc(step, sizes)) if self.owner.filled else self._alloc(step, sizes)
        if isinstance(step, ExternStep):
            operands = [self._fetch(o, sizes) for o in step.operands]
            return extern_call(step, sizes, operands, self.owner.attributes)
        if isinstance(step, CopyStep):
            target, source = self._fetch(step.target, sizes), self._fetch(step.source, sizes)
            return lambda slots: _copy(target(slots), source(slots))
        if isinstance(step, LoopStep):
            return self._loop(step, sizes)
        return eager_group(step, sizes.symbols)

    def _loop(self, step: LoopStep, sizes: Sizes) -> Launch:
        operands, run = [self._fetch(o, sizes) for o in step.operands], self.owner.loops[step.loop].run

        def blocks(slots: Slots) -> None:
            into = [slots[s].zero_() for s in step.into]
            given = [get(slots) for get in operands]
            for block in range(step.count):
                run([*given, *into, block])

        return blocks

    def _fetch(self, view: OperandView, sizes: Sizes) -> Fetch:
        return fetch_view(view, sizes, self.layouts.get(view.slot))

    def _filled(self, step: AllocStep, alloc: Launch) -> Launch:
        """Memory in which nothing is that a program could want; what takes over a value's memory still reads it."""
        slot, reuse = step.slot, step.reuse

        def fill(slots: Slots) -> None:
            alloc(slots)
            made = slots[slot]
            if reuse is None or slots[reuse] is None or made.data_ptr() != slots[reuse].data_ptr():
                made.fill_(_NOTHING if made.is_floating_point() or made.is_complex() else -1)

        return fill

    def _alloc(self, step: AllocStep, sizes: Sizes) -> Launch:
        shape, strides = sizes.all(step.shape), sizes.all(step.strides)
        slot, reuse, dtype, device = step.slot, step.reuse, from_dtype(step.dtype), torch.device(step.device)
        if sizes is self.sizes:
            self.layouts[slot] = (shape, strides)
        if reuse is not None:
            kernel, fresh = self.owner.kernels[step.kernel], self._alloc(replace(step, reuse=None), sizes)

            def take_over(slots: Slots) -> None:
                # a kernel that is being timed runs several times on the same values
                if is_settled(kernel) and tensors.is_forgotten(slots, reuse):
                    slots[slot] = tensors.view(slots[reuse], shape, strides, 0)
                else:
                    fresh(slots)

            return take_over
        elems = room(shape, strides)
        if device.type == "cpu" and self.owner.pool.wants(nbytes := elems * dtype.itemsize):
            make = self.owner.pool.maker(dtype, shape, strides, nbytes)

            def from_pool(slots: Slots) -> None:
                slots[slot] = make()

            return from_pool
        empty = tensors.empty_on(device)
        if elems > math.prod(shape):  # rows that lie apart

            def alloc_roomy(slots: Slots) -> None:
                slots[slot] = tensors.roomy(empty, shape, strides, dtype, elems)

            return alloc_roomy

        def alloc(slots: Slots) -> None:
            slots[slot] = empty(shape, strides, dtype)

        return alloc

    # ------------------------------------------------------------------------------------------------ results
    def _return(self, r: ReturnSpec, late: set[str]) -> Fetch:
        if isinstance(r, SlotOut):
            slot = r.slot
            return lambda slots: slots[slot]
        if isinstance(r, ViewOut):
            view = OperandView(r.slot, r.shape, r.strides, r.offset)
            given = any(slot == r.slot for slot, _ in self.inputs)
            make = tensors.tracked_view if given else tensors.view
            if late and not names_in(_numbers_of(view)).isdisjoint(late):
                return lambda slots: fetch_view(view, Sizes(slots[self.late_slot] or self.early), None, make)(slots)
            return fetch_view(view, self.sizes, None, make)
        if isinstance(r, InputOut):
            extra = self.owner.script.slots + len(self._passed)
            self._passed[extra] = r.position
            self.inputs.append((extra, r.position))
            return lambda slots: slots[extra]
        if isinstance(r, ScalarOut):
            return lambda slots: Sizes(slots[self.late_slot] or self.early).formula(r.value)
        if isinstance(r, ItemOut):
            return lambda slots: slots[r.slot].item()
        value = r.value if isinstance(r, ValueOut) else None
        return lambda slots: value


def _told(step: KernelStep | ExternStep | LoopStep) -> str:
    """plait::k3_softmax_mul model.py:12-15."""
    if isinstance(step, KernelStep):
        return f"plait::{step.name} {step.where}".strip()
    if isinstance(step, LoopStep):
        return f"plait::loop of {step.count} {place(step.origin)}".strip()
    return f"plait::{step.target.removesuffix('.default')} {place(step.origin)}".strip()


def _free(several: list[int]) -> Launch:
    def free(slots: Slots) -> None:
        for slot in several:
            slots[slot] = None

    return free


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.detach().copy_(source)


def _resolve(slots: Slots, slot: int) -> None:
    slots[slot] = slots[slot].resolve_conj().resolve_neg()


def _filled_by(step: Step) -> tuple[int, ...]:
    if isinstance(step, ExternStep):
        return tuple(s for s in step.outs if s is not None)
    return (step.slot,) if isinstance(step, AllocStep) else ()


def _numbers_of(step: Step | OperandView) -> list[Any]:
    """The parts of a step that may hold Exprs."""
    if isinstance(step, CopyStep):
        return [*_numbers_of(step.target), *_numbers_of(step.source)]
    if isinstance(step, ExternStep):
        return [step.template, step.expects, *[n for o in step.operands for n in _numbers_of(o)]]
    if isinstance(step, KernelStep):
        return [step.symbols]
    if isinstance(step, LoopStep):
        return [n for o in step.operands for n in _numbers_of(o)]
    if isinstance(step, (FreeStep, EagerStep)):
        return []
    return [step.shape, step.strides, *((step.offset,) if isinstance(step, OperandView) and step.offset else ())]


def _device_guard(device: str) -> Callable[[], Any] | None:
    """A context for a device that is not the only one."""
    found = torch.device(device)
    if found.type != "cuda" or torch.cuda.device_count() < 2:
        return None
    return lambda: torch.cuda.device(found)
