"""A pool for large CPU tensors: a block comes back when the last tensor over it dies.

Fresh pages cost more than the kernel that fills them, so memory of dead outputs is kept for the next call, up to a limit.
Blocks come in size classes (four a doubling); each is an anonymous mapping, aligned to 2 MiB where it is that large and
marked for huge pages; private, so that a forked child never writes into its parent's outputs. A tensor's storage keeps a `_Block` alive through a numpy array; when the block dies, whichever
thread that is on, its mapping goes back. A forked child starts with no free blocks.

Wrapping a mapping as a tensor takes a tenth of a millisecond where a kernel has just emptied the processor's caches. So the last
tensors of each size class are *watched*: one whose storage nobody else refers to is given out again as it is.
"""

from __future__ import annotations

import collections
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from plait.runtime import tensors
from plait.runtime.locks import Lock

SMALLEST = 256 << 10  # below this the allocator's own reuse is as good
_HUGE = 2 << 20
_PAGE = mmap.PAGESIZE
_MOST_WATCHED = 8  # tensors of a size class, so that looking for a free one takes no time


class _Mapping:
    """Memory from the system: `size` usable bytes at `address`."""

    __slots__ = ("address", "array", "raw", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        align = _HUGE if size >= _HUGE else _PAGE
        self.raw = mmap.mmap(-1, size + (align if align > _PAGE else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        base = np.frombuffer(self.raw, dtype=np.uint8)
        skip = -base.ctypes.data % align
        self.array = base[skip : skip + size]
        self.address = int(self.array.ctypes.data)
        if align == _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            self.raw.madvise(mmap.MADV_HUGEPAGE)


class _Block:
    """One use of a mapping, as long as any tensor over it lives. numpy reads the interface and holds the block."""

    __slots__ = ("__array_interface__", "mapping", "pool")

    def __init__(self, mapping: _Mapping, nbytes: int, pool: weakref.ref[Pool]) -> None:
        self.mapping, self.pool = mapping, pool
        self.__array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (mapping.address, False),
            "version": 3,
        }

    def __del__(self) -> None:
        pool = self.pool()
        if pool is not None:
            pool.give_back(self.mapping)


@dataclass(slots=True, eq=False)
class _Watched:
    """A tensor over all of a block's storage. `kind`: bytes, dtype and whether it was made in inference mode."""

    base: torch.Tensor
    kind: tuple[int, torch.dtype, bool]
    address: int  # of the data, which sharing with other processes changes

    def is_free(self) -> bool:
        """Whether nothing but `base` refers to the storage, and it is what it was."""
        count = tensors.references
        return count is not None and count(self.base) == 1 and self.base.data_ptr() == self.address


class Pool:
    """Free mappings by size class, at most `limit` bytes of them; the oldest of the largest go first. Those that are watched,
    free or not, are at most half of `limit` besides."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._forget()
        self._me = weakref.ref(self)
        os.register_at_fork(after_in_child=_after_fork(self._me))

    def _forget(self) -> None:
        self._lock = threading.RLock()  # a block may die while this thread holds the lock
        self._free: dict[int, collections.deque[_Mapping]] = {}
        self._watched: dict[int, collections.deque[_Watched]] = {}
        self.kept = self.watched = 0
        self.hits = self.misses = 0

    def wants(self, nbytes: int) -> bool:
        """Whether a tensor of this size is worth a block."""
        return SMALLEST <= nbytes <= self.limit

    def take(self, nbytes: int) -> torch.Tensor:
        """Uninitialised memory of exactly `nbytes`, which comes back when nothing refers to it any more."""
        size = size_class(nbytes)
        with self._lock:
            found = self._free.get(size)
            mapping = found.pop() if found else None
            if mapping is not None:
                self.kept -= size
                self.hits += 1
            else:
                self.misses += 1
        block = _Block(mapping or _Mapping(size), nbytes, self._me)
        return torch.from_numpy(np.asarray(block))

    def maker(
        self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], nbytes: int
    ) -> Callable[[], torch.Tensor]:
        """A function that makes uninitialised tensors of that layout, which spans `nbytes`."""
        size = size_class(nbytes)
        kinds = {inference: (nbytes, dtype, inference) for inference in (False, True)}

        def make() -> torch.Tensor:
            kind = kinds[torch.is_inference_mode_enabled()]
            with self._lock:
                base = self._idle(size, kind)
                return tensors.view(self._base(kind) if base is None else base, shape, strides, 0)

        return make

    def _idle(self, size: int, kind: tuple[int, torch.dtype, bool]) -> torch.Tensor | None:
        for w in self._watched.get(size, ()):
            if w.kind == kind and w.is_free():
                self.hits += 1
                return w.base
        return None

    def _base(self, kind: tuple[int, torch.dtype, bool]) -> torch.Tensor:
        """A new tensor over a block, which is watched from now on."""
        nbytes, dtype, _ = kind
        size = size_class(nbytes)
        watched = self._watched.setdefault(size, collections.deque())
        idle = None if self._free.get(size) else next((w for w in watched if w.is_free()), None)
        if idle is not None:  # of another kind: its mapping will do
            watched.remove(idle)
            self.watched -= size
            del idle
        base = tensors.over(self.take(nbytes), dtype)
        if tensors.references is not None and self.watched + size <= self.limit // 2:
            watched.append(_Watched(base, kind, base.data_ptr()))
            self.watched += size
            if len(watched) > _MOST_WATCHED:
                watched.popleft()
                self.watched -= size
        return base

    def give_back(self, mapping: _Mapping) -> None:
        """Called by a block's death."""
        with self._lock:
            if mapping.size > self.limit:
                return
            self._free.setdefault(mapping.size, collections.deque()).append(mapping)
            self.kept += mapping.size
            while self.kept > self.limit:
                largest = max(size for size, free in self._free.items() if free)
                self.kept -= self._free[largest].popleft().size

    def clear(self) -> None:
        """Return every free block to the system."""
        with self._lock:
            self._watched.clear()
            self._free.clear()
            self.kept = self.watched = 0


def size_class(nbytes: int) -> int:
    """The least block size that holds `nbytes`: four sizes a doubling, whole pages."""
    step = max(_PAGE, 1 << max(0, (nbytes - 1).bit_length() - 3))
    return -(-nbytes // step) * step


def _after_fork(me: weakref.ref[Pool]) -> Any:
    def forget() -> None:
        pool = me()
        if pool is not None:
            pool._forget()

    return forget


_default: Pool | None = None
_default_lock = Lock()


def default_pool(limit: int = 1 << 30) -> Pool:
    """The process's pool; `limit` counts when it is first made."""
    global _default
    with _default_lock:
        if _default is None:
            _default = Pool(limit)
        return _default
