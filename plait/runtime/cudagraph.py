"""CUDA graphs: a run that was seen a few times is recorded, and then replayed with one launch.

Arguments whose address stays the same from call to call (parameters, caches) are used where they are; the others are
copied into the recording's own memory before a replay. Results are copied out, so that they are the caller's for good.
What cannot be recorded runs as before, and `why_not` says why. Only inference graphs are recorded: a training graph's
results are mostly saved activations, and copying those out costs more than launches do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from plait.frontend.externs import resolve
from plait.runtime import tensors
from plait.runtime.kernel import raise_fault
from plait.runtime.locks import Lock
from plait.runtime.steps import (
    AllocStep,
    CopyStep,
    EagerStep,
    ExternStep,
    InputOut,
    ItemOut,
    LoopStep,
    NoneOut,
    ScalarOut,
    Script,
    ValueOut,
    ViewOut,
)

Run = Callable[[list[Any]], list[Any]]
_SEEN_FIRST = 2  # runs before a recording: they show which addresses vary, and warm libraries up
_MOST_RECORDINGS = 4  # for one set of sizes; each holds the memory of a whole run


def why_not_recordable(script: Script) -> str | None:
    """The reason in the script itself, or None."""
    if torch.device(script.device).type != "cuda":
        return "not a CUDA graph"
    if any(how[0] == "slot" for how in script.bindings.values()):
        return "sizes depend on data"
    if any(isinstance(r, ItemOut) for r in script.returns):
        return "a result is read on the host"
    if any(i.dtype is not None for i in script.inputs):
        return "a Python number is an argument"
    for step in script.steps:
        if isinstance(step, EagerStep):
            return f"a group runs in eager: {step.reason}"
        if isinstance(step, AllocStep) and torch.device(step.device).type != "cuda":
            return "memory of the host is used"
        if isinstance(step, LoopStep):
            return "a loop runs the blocks of a value"
        if isinstance(step, ExternStep):
            op = resolve(step.target)
            if torch.Tag.nondeterministic_seeded in getattr(op, "tags", ()):
                return f"{step.target} draws random numbers"
            if not step.target.startswith(("aten.", "prims.")):
                return f"{step.target} may have effects"
            if _names_host(step.template):
                return f"{step.target} makes a tensor in the host's memory"
    return None


def _names_host(template: Any) -> bool:
    if not isinstance(template, tuple):
        return False
    if len(template) == 2 and template[0] == "device" and isinstance(template[1], str):
        return not template[1].startswith("cuda")
    return any(map(_names_host, template))


def overwritten(script: Script) -> set[int]:
    """Positions of arguments that the script writes into."""
    position = {i.slot: i.position for i in script.inputs}
    for step in script.steps:
        if isinstance(step, ExternStep) and step.inplace is not None:
            # the result is the operand: writing into it again is writing into the argument
            base = position.get(step.operands[step.inplace].slot)
            if base is not None:
                position.update({out: base for out in step.outs if out is not None})
    written = set()
    for step in script.steps:
        slot = None
        if isinstance(step, CopyStep):
            slot = step.target.slot
        elif isinstance(step, ExternStep) and step.inplace is not None:
            slot = step.operands[step.inplace].slot
        if slot in position:
            written.add(position[slot])
    return written


@dataclass
class _Recording:
    """A captured graph. `fixed` are (index into the tensor arguments, address); `moved` the varying ones' own memory."""

    graph: torch.cuda.CUDAGraph
    fixed: tuple[tuple[int, int], ...]
    moved: tuple[tuple[int, torch.Tensor], ...]
    results: list[Any]  # tensors in the graph's memory, to be copied out; or how else each result comes about
    stream: int


class Graphed:
    """Records and replays `run`, for one set of sizes. `faults` are the kernels' fault words with their messages."""

    def __init__(self, script: Script, run: Run, faults: Sequence[tuple[torch.Tensor, tuple[str, ...]]] = ()) -> None:
        self.script, self.plain, self.faults = script, run, faults
        self.why_not = why_not_recordable(script)
        self.overwritten = overwritten(script)
        self.recordings: list[_Recording] = []
        self._seen = 0
        self._last: list[int] = []
        self._varying: set[int] = set()
        self._lock = Lock()

    def call(self, args: list[Any]) -> list[Any]:
        """One run."""
        if self.why_not is not None or torch.cuda.is_current_stream_capturing():
            return self.plain(args)
        with self._lock:
            addresses = [a.data_ptr() if isinstance(a, torch.Tensor) else 0 for a in args]
            stream = torch.cuda.current_stream().cuda_stream
            for r in self.recordings:
                if r.stream == stream and all(addresses[k] == at for k, at in r.fixed):
                    return self._replay(r, args)
            self._look(args, addresses)
            if self._seen <= _SEEN_FIRST or self.why_not is not None:
                return self.plain(args)
            if len(self.recordings) >= _MOST_RECORDINGS:
                self.why_not = f"arguments keep moving ({_MOST_RECORDINGS} recordings)"
                self.recordings.clear()
                return self.plain(args)
            return self._record(args, addresses, stream)

    def _look(self, args: Sequence[Any], addresses: list[int]) -> None:
        self._seen += 1
        if any(isinstance(a, torch.Tensor) and not a.is_cuda for a in args):
            self.why_not = "an argument is in the host's memory"
        if self._last:
            self._varying |= {k for k, (a, b) in enumerate(zip(self._last, addresses, strict=True)) if a != b}
        self._last = addresses

    def _record(self, args: list[Any], addresses: list[int], stream: int) -> list[Any]:
        # one that is written into must be written where it is, so its address is part of the recording
        moved = sorted(k for k in self._varying - self.overwritten if isinstance(args[k], torch.Tensor))
        own = list(args)
        graph = torch.cuda.CUDAGraph()
        try:
            for k in moved:
                own[k] = _copied(args[k])
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                outs = self.plain(list(own))
            results = [self._result(k, out, own, outs) for k, out in enumerate(outs)]
        except Exception as error:  # whatever a library does not allow while recording: run as before, and say why
            torch.cuda.synchronize()
            self.why_not = (
                self.why_not or f"recording failed: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
            )
            return self.plain(args)
        fixed = tuple((k, at) for k, at in enumerate(addresses) if isinstance(args[k], torch.Tensor) and k not in moved)
        made = _Recording(graph, fixed, tuple((k, own[k]) for k in moved), results, stream)
        self.recordings.append(made)
        # recording computes nothing: the first replay is this call's run
        return self._replay(made, args)

    def _result(self, k: int, out: Any, own: Sequence[Any], outs: Sequence[Any]) -> Any:
        """How result `k` comes about at a replay: a function of the arguments, or a tensor to copy. Raises ValueError."""
        spec = self.script.returns[k]
        if isinstance(spec, InputOut):
            position = spec.position
            return lambda args: args[position]
        if isinstance(spec, (NoneOut, ScalarOut, ValueOut)):
            return lambda args: out
        home = out.untyped_storage().data_ptr()
        owners = [
            k for k, a in enumerate(own) if isinstance(a, torch.Tensor) and a.untyped_storage().data_ptr() == home
        ]
        if isinstance(spec, ViewOut) and len(owners) == 1:
            return _view_of_argument(out, own[owners[0]], owners[0])
        shared = [o for o in outs if isinstance(o, torch.Tensor) and o.untyped_storage().data_ptr() == home]
        if len(shared) > 1 or owners:
            raise ValueError("results share memory with each other or with arguments")
        if any(n > 1 and s == 0 for n, s in zip(out.shape, out.stride(), strict=True)):
            raise ValueError("a result is an expanded view")
        return out

    def _replay(self, r: _Recording, args: list[Any]) -> list[Any]:
        for k, own in r.moved:
            own.copy_(args[k])
        r.graph.replay()
        for fault, messages in self.faults:
            code = ctypes.c_int32.from_address(fault.data_ptr()).value
            if code:
                fault.zero_()
                raise_fault(code, (messages,))
        out = [_copied(x) if isinstance(x, torch.Tensor) else x(args) for x in r.results]
        args.clear()
        return out


def _view_of_argument(
    out: torch.Tensor, argument: torch.Tensor, position: int
) -> Callable[[Sequence[Any]], torch.Tensor]:
    """The same view of whatever argument a replay is given."""
    shape, strides, offset = tuple(out.shape), out.stride(), int(out.storage_offset() - argument.storage_offset())
    return lambda args: tensors.tracked_view(args[position], shape, strides, offset)


def _copied(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
