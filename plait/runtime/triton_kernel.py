"""Launching a Triton kernel: by Triton's own entry the first time, then straight through the compiled kernel's launcher.

The straight way is taken when every pointer is 16-byte aligned, as it was when that kernel was compiled; sizes are fixed
by `bind`. Where the program checks indices, the kernel reports into one pinned int32 of the host, which costs nothing
unless a check fails; it is looked at around each launch, so a failure shows at the next launch after it happened, as
asynchronous device errors do in eager.

Kernels that make tensor descriptors need a little memory for them, taken from torch's allocator at each launch, and read
some buffers that must begin at a multiple of 16 bytes: one that does not is copied first.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from plait.emit.triton import TritonSource
from plait.frontend.context import from_dtype
from plait.ir import index as ix
from plait.ir.index import Expr
from plait.options import triton_is_interpreted
from plait.runtime.kernel import Launch, Messages, Slots
from plait.runtime.sizes import Sizes


class TritonKernel:
    """See kernel.Kernel. `function` is the @triton.jit function of `source`; `watched` says whether
    somebody hooks launches (a profiler), which only Triton's own entry serves; `providing` calls a function while Triton
    can have scratch memory."""

    def __init__(
        self,
        source: TritonSource,
        function: Any,
        device: str,
        watched: Callable[[], bool],
        providing: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self.source, self.function, self.watched, self.providing = source, function, watched, providing
        buffers = [a.name for a in source.args if a.kind == "buffer"]
        self.strict = tuple(k for k, name in enumerate(buffers) if name in source.aligned)
        self.device = torch.device(device)
        self.direct = self.device.type == "cuda" and not triton_is_interpreted()
        self.options = {"num_warps": source.num_warps, "num_stages": source.num_stages, **dict(source.options)}
        self.binary: Any = None  # what `compile` made, for tools
        self.fault: torch.Tensor | None = None
        if source.has_fault:
            # real memory of the host, whichever mode or default device a compilation runs under
            with unset_fake_temporarily():
                self.fault = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=self.direct)

    @property
    def told(self) -> tuple[torch.Tensor, tuple[str, ...]] | None:
        """Where failed checks are reported, and what their codes mean."""
        return None if self.fault is None else (self.fault, self.source.messages)

    def compile(self, size_hint: Callable[[Expr], int]) -> None:
        """Compile for aligned pointers and sizes like the hinted ones; raises what Triton raises."""
        if not self.direct:
            return
        args: list[Any] = []
        for a in self.source.args:
            if a.kind == "symbol":
                args.append(size_hint(ix.sym(a.name)))
            elif a.kind == "draw":
                args.append(0)
            else:
                args.append(torch.int32 if a.kind == "fault" else from_dtype(a.dtype))
        with torch.cuda.device(self.device):
            made = self.binary = self.function.warmup(*args, grid=(1,), **self.options)
            load = getattr(made, "_init_handles", None)
            if load is not None:
                load()  # a kernel that wants more than the device has must fail now, not at its first launch

    def bind(self, buffers: tuple[int, ...], symbols: Sequence[int], messages: Messages) -> Launch:
        """See kernel.Kernel. `buffers` and `symbols` are those of all parts in order, as the C++ kernels take them."""
        values = dict(zip(self.source.numbers, symbols, strict=True))
        starts = self._starts()
        pointers = [buffers[starts[a.part] + a.index] for a in self.source.args if a.kind == "buffer"]
        numbers = [values[a.name] for a in self.source.args if a.kind in ("symbol", "draw")]
        blocks = Sizes(values).one(self.source.programs)
        if blocks == 0:
            return lambda slots: None
        said = self.source.messages or tuple(itertools.chain.from_iterable(messages))
        run = self._by_triton(pointers, numbers, blocks, said)
        return self._straight(pointers, numbers, blocks, said, run) if self.direct else run

    def _starts(self) -> dict[int, int]:
        """Where each part's buffers begin among all."""
        counts: dict[int, int] = {}
        for a in self.source.args:
            if a.kind == "buffer":
                counts[a.part] = counts.get(a.part, 0) + 1
        return {part: sum(n for other, n in counts.items() if other < part) for part in counts}

    def _by_triton(
        self, pointers: list[int], numbers: list[int], blocks: int, messages: tuple[str, ...]
    ) -> Callable[[Slots], Any]:
        """By Triton's own entry, which specialises on alignment anew."""
        launcher, options, fault, device = self.function[(blocks,)], self.options, self.fault, self.device
        strict, providing = self.strict, self.providing
        extra = () if fault is None else (fault,)

        def launch(slots: Slots) -> Any:
            tensors = [t if (t := slots[p]).device.type == device.type else t.to(device) for p in pointers]
            for k in strict:
                if tensors[k].data_ptr() & 15:
                    tensors[k] = _moved(tensors[k])
            if fault is not None:
                _raise_if(fault, messages)
            compiled = providing(lambda: launcher(*tensors, *numbers, *extra, **options))
            if fault is not None:
                _raise_if(fault, messages)
            return compiled

        return launch

    def _straight(
        self,
        pointers: list[int],
        numbers: list[int],
        blocks: int,
        messages: tuple[str, ...],
        run: Callable[[Slots], Any],
    ) -> Launch:
        fault, watched = self.fault, self.watched
        tail = [*numbers, *(() if fault is None else (fault.data_ptr(),))]
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        current_stream = torch._C._cuda_getCurrentRawStream
        compiled: Any = None
        start: Callable[..., Any] | None = None

        def launch(slots: Slots) -> None:
            nonlocal compiled, start
            tensors = [slots[p] for p in pointers]
            at = [t.data_ptr() for t in tensors]
            ready = compiled is not None and not watched()
            aligned = True
            for t, p in zip(tensors, at):
                if p & 15 or not t.is_cuda:
                    aligned = False
            if not (ready and aligned):
                made = run(slots)
                if aligned and compiled is None:
                    start = _starter(made, blocks, self.device)
                    compiled = made
                return
            if fault is not None:
                _raise_if(fault, messages)
            assert start is not None
            start(current_stream(index), *at, *tail)

        return launch


def scratch_memory(size: int, device: torch.device) -> torch.Tensor:
    """Bytes for the descriptors of one launch."""
    return torch.empty(size, dtype=torch.uint8, device=device)


def _moved(t: torch.Tensor) -> torch.Tensor:
    """A copy, laid out alike, in memory of its own (which begins at a multiple of 16 bytes)."""
    return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device).copy_(t)


def _starter(compiled: Any, blocks: int, device: torch.device) -> Callable[..., Any]:
    """start(stream, *arguments) of a compiled kernel, past Triton's Python."""
    function, metadata, launcher = compiled.function, compiled.packed_metadata, compiled.run
    fields = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl", "launch")
    known: list[Any] = [getattr(launcher, f, None) for f in fields]
    if None not in known and known[1] == 0:
        bare: Callable[..., Any] = known[4]
        scratch_bytes, cooperative, dependent = known[0] * blocks, known[2], known[3]

        def start(stream: int, *arguments: int) -> None:
            # freed when this returns: what takes it next runs behind this launch
            scratch = scratch_memory(scratch_bytes, device) if scratch_bytes else None
            bare(
                blocks,
                1,
                1,
                stream,
                function,
                cooperative,
                dependent,
                scratch,
                None,
                metadata,
                None,
                None,
                None,
                *arguments,
            )

        return start
    return lambda stream, *arguments: launcher(blocks, 1, 1, stream, function, metadata, None, None, None, *arguments)


def _raise_if(fault: torch.Tensor, messages: tuple[str, ...]) -> None:
    """Raise for a check that failed in a launch before now, once."""
    code = ctypes.c_int32.from_address(fault.data_ptr()).value
    if code:
        fault.zero_()
        raise IndexError(messages[code - 1] if code <= len(messages) else f"index out of range (check {code})")
