"""A re-entrant lock that a forked child gets afresh: a thread that held it in the parent does not exist in the child."""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType


class Lock:
    """`with lock:`, as threading.RLock."""

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _all.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Forget who holds it."""
        self._lock = threading.RLock()


_all: weakref.WeakSet[Lock] = weakref.WeakSet()


def _renew_all() -> None:
    for lock in list(_all):
        lock.renew()


os.register_at_fork(after_in_child=_renew_all)
