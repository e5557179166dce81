"""Built kernels behind one face: `bind` fixes what a call site knows and gives the function that launches.

A launch takes the run's slots. It keeps no state between calls, so that one kernel can run on several threads at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

Slots = list[Any]
Launch = Callable[[Slots], None]
Messages = tuple[tuple[str, ...], ...]

DIVISION_BY_ZERO = 999


class Kernel(Protocol):
    """Anything that can be launched on slots."""

    def bind(self, buffers: tuple[int, ...], symbols: Sequence[int], messages: Messages) -> Launch:
        """The launch on these slots with these sizes."""
        ...


def raise_fault(code: int, messages: Messages) -> None:
    """What eager raises for a kernel's nonzero return code (1000 * part + the code of the failed Check)."""
    if code == DIVISION_BY_ZERO:
        # what ATen says, in its words, so that programs which look at the text find it
        raise RuntimeError("ZeroDivisionError")
    part, check = divmod(code, 1000)
    known = messages[part] if part < len(messages) else ()
    raise IndexError(
        known[check - 1] if 0 < check <= len(known) else f"index out of range (check {check} of part {part})"
    )


class CppKernel:
    """A function of a shared library: int f(void* const* buffers, const int64_t* symbols, int threads). `keeps` is the
    library, which must stay loaded while the function can be called."""

    def __init__(self, function: Any, keeps: Any, threads: int | None = None) -> None:
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
        function.restype = ctypes.c_int
        self.function, self.keeps, self.threads = function, keeps, threads

    def bind(self, buffers: tuple[int, ...], symbols: Sequence[int], messages: Messages) -> Launch:
        """See Kernel."""
        function, fixed = self.function, self.threads
        pointers = ctypes.c_void_p * len(buffers)
        sizes = (ctypes.c_int64 * max(1, len(symbols)))(*symbols)  # only read by the kernel, so all threads share it
        get_threads = torch.get_num_threads

        def launch(slots: Slots) -> None:
            code = function(
                pointers(*[slots[b].data_ptr() for b in buffers]), sizes, get_threads() if fixed is None else fixed
            )
            if code:
                raise_fault(code, messages)

        return launch
