"""A pool for large CPU tensors: a block comes back when the last tensor over it dies.

Fresh pages cost more than the kernel that fills them, so memory of dead outputs is kept for the next call, up to a limit.
Blocks come in size classes (four a doubling); each is an anonymous mapping, aligned to 2 MiB where it is that large and
marked for huge pages; private, so that a forked child never writes into its parent's outputs. A tensor's storage keeps a `_Block` alive through a numpy array; when the block dies, whichever
thread that is on, its mapping goes back. A forked child starts with no free blocks.
"""

from __future__ import annotations

import collections
import mmap
import os
import threading
import weakref
from typing import Any

import numpy as np
import torch

from plait.runtime.locks import Lock

SMALLEST = 256 << 10  # below this the allocator's own reuse is as good
_HUGE = 2 << 20
_PAGE = mmap.PAGESIZE


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


class Pool:
    """Free mappings by size class, at most `limit` bytes of them; the oldest of the largest go first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._forget()
        self._me = weakref.ref(self)
        os.register_at_fork(after_in_child=_after_fork(self._me))

    def _forget(self) -> None:
        self._lock = threading.RLock()  # a block may die while this thread holds the lock
        self._free: dict[int, collections.deque[_Mapping]] = {}
        self.kept = 0
        self.hits = self.misses = 0

    def wants(self, nbytes: int) -> bool:
        """Whether a tensor of this size is worth a block."""
        return SMALLEST <= nbytes <= self.limit

    def take(self, nbytes: int) -> torch.UntypedStorage:
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
        return torch.from_numpy(np.asarray(block)).untyped_storage()

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
            self._free.clear()
            self.kept = 0


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
