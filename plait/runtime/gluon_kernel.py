"""Launching a Gluon kernel: descriptors of the tensors that it copies tiles from, then pointers and numbers.

A descriptor is made on the host for a tensor's address and its view's sizes, and kept, so that a launch on the same tensors
costs no more than a plain one. Descriptors want 16-byte aligned addresses: tensors that have none go to the plain kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from plait.emit.gluon import CAPABILITY, Descriptor, GluonSource
from plait.frontend.context import from_dtype
from plait.ir import index as ix
from plait.ir.index import Expr
from plait.options import triton_is_interpreted
from plait.runtime.kernel import Kernel, Launch, Messages, Slots
from plait.runtime.sizes import Sizes

_MOST_KEPT = 64  # descriptors of one parameter


class Maker(Protocol):
    """What makes descriptors: the part that knows Triton (runtime/build)."""

    def describe(self, d: Descriptor, base: Base, shape: Sequence[int]) -> Any:
        """A descriptor as Triton's entry takes it."""
        ...

    def expand(self, compiled: Any, made: Sequence[Any]) -> tuple[Callable[..., Any], list[list[Any]]]:
        """The compiled kernel's launcher, and the arguments it takes for each descriptor."""
        ...


class Base:
    """An address in a tensor, under the names that descriptors ask for."""

    def __init__(self, pointer: int, dtype: torch.dtype, keeps: torch.Tensor | None = None) -> None:
        self.pointer, self.dtype, self.keeps = pointer, dtype, keeps

    def data_ptr(self) -> int:
        """The address."""
        return self.pointer


def can_run(device: str) -> bool:
    """Whether kernels for Hopper run on a device."""
    if not device.startswith("cuda") or triton_is_interpreted() or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(torch.device(device))[0] == CAPABILITY


class GluonKernel:
    """See kernel.Kernel. `function` is the jitted function of `source`; `plain` serves tensors that are not aligned."""

    told = None  # it checks no indices

    def __init__(
        self, source: GluonSource, function: Any, device: str, watched: Callable[[], bool], maker: Maker
    ) -> None:
        self.source, self.function, self.watched, self.maker = source, function, watched, maker
        self.device = torch.device(device)
        self.options = {"num_warps": source.num_warps, **dict(source.options)}
        self.plain: Kernel | None = None
        self.binary: Any = None  # what `compile` made, for tools

    def compile(self, size_hint: Callable[[Expr], int]) -> None:
        """Compile for sizes like the hinted ones; raises what Triton raises."""
        made = [
            self.maker.describe(d, Base(0, from_dtype(d.dtype)), [max(1, size_hint(n)) for n in d.shape])
            for d in self.source.descriptors
        ]
        args: list[Any] = [
            size_hint(ix.sym(a.name)) if a.kind == "symbol" else from_dtype(a.dtype) for a in self.source.args
        ]
        with torch.cuda.device(self.device):
            compiled = self.binary = self.function.warmup(*made, *args, grid=(1,), **self.options)
            load = getattr(compiled, "_init_handles", None)
            if load is not None:
                load()  # a kernel that wants more than the device has must fail now, not at its first launch

    def bind(self, buffers: tuple[int, ...], symbols: Sequence[int], messages: Messages) -> Launch:
        """See kernel.Kernel."""
        values = dict(zip(self.source.numbers, symbols, strict=True))
        sizes = Sizes(values)
        blocks = sizes.one(self.source.programs)
        if blocks == 0:
            return lambda slots: None
        views = [
            _View(d, buffers[d.buffer], [sizes.one(n) for n in d.shape], self.maker) for d in self.source.descriptors
        ]
        pointers = [buffers[a.index] for a in self.source.args if a.kind == "buffer"]
        numbers = [values[a.name] for a in self.source.args if a.kind == "symbol"]
        plain = None if self.plain is None else self.plain.bind(buffers, symbols, messages)
        return _Bound(self, views, pointers, numbers, blocks, plain)


class _View:
    """One descriptor parameter at one call site: descriptors by address."""

    def __init__(self, d: Descriptor, slot: int, shape: list[int], maker: Maker) -> None:
        self.d, self.slot, self.shape, self.maker = d, slot, shape, maker
        self.made: dict[int, Any] = {}
        self.dtype = from_dtype(d.dtype)

    def at(self, pointer: int, keeps: torch.Tensor | None = None) -> Any:
        """The descriptor of a tensor at an address."""
        found = self.made.get(pointer)
        if found is None:
            if len(self.made) >= _MOST_KEPT:
                self.made = {}
            address = pointer + self.d.offset * self.d.dtype.nbytes
            found = self.made[pointer] = self.maker.describe(self.d, Base(address, self.dtype, keeps), self.shape)
        return found


class _Bound:
    """A launch on fixed slots: by Triton's entry the first time and while somebody watches, then straight."""

    def __init__(
        self,
        kernel: GluonKernel,
        views: list[_View],
        pointers: list[int],
        numbers: list[int],
        blocks: int,
        plain: Launch | None,
    ) -> None:
        self.kernel, self.views, self.pointers, self.numbers = kernel, views, pointers, numbers
        self.blocks, self.plain = blocks, plain
        self.compiled: Any = None
        self.ready = False
        self.kept: dict[tuple[int, ...], tuple[Callable[..., Any], list[Any]]] = {}
        d = kernel.device
        self.index = torch.cuda.current_device() if d.index is None else d.index

    def __call__(self, slots: Slots) -> None:
        viewed = [slots[v.slot] for v in self.views]
        tensors = [slots[p] for p in self.pointers]
        at = (*(t.data_ptr() for t in viewed), *(t.data_ptr() for t in tensors))
        if any(p & 15 for p in at):
            if self.plain is None:
                raise RuntimeError("a tensor is not 16-byte aligned")
            self.plain(slots)
            return
        if not self.ready or self.kernel.watched():
            made = [v.at(p) for v, p in zip(self.views, at, strict=False)]
            self.compiled = self.kernel.function[(self.blocks,)](*made, *tensors, *self.numbers, **self.kernel.options)
            runner = self.compiled.run
            # scratch memory is Triton's own business
            self.ready = not runner.global_scratch_size and not runner.profile_scratch_size
            return
        known = self.kept.get(at)
        if known is None:
            known = self._straight(at)
        start, arguments = known
        start(self.blocks, 1, 1, torch._C._cuda_getCurrentRawStream(self.index), *arguments)

    def _straight(self, at: tuple[int, ...]) -> tuple[Callable[..., Any], list[Any]]:
        """The launcher and its arguments behind the stream, for tensors at these addresses."""
        compiled, runner = self.compiled, self.compiled.run
        made = [v.at(p) for v, p in zip(self.views, at, strict=False)]
        start, described = self.kernel.maker.expand(compiled, made)
        arguments = [
            compiled.function,
            runner.launch_cooperative_grid,
            runner.launch_pdl,
            None,
            None,
            compiled.packed_metadata,
            None,
            None,
            None,
            *(x for one in described for x in one),
            *at[len(self.views) :],
            *self.numbers,
        ]
        if len(self.kept) >= _MOST_KEPT:
            self.kept = {}
        self.kept[at] = start, arguments
        return start, arguments
