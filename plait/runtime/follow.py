"""Who follows the work: steps of compilations, and of the timing of kernels, as they begin and end. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol


class Watch(Protocol):
    """Who follows the work on graphs and their kernels. Called from whichever thread does it; `begins` may raise to stop."""

    def expects(self, builds: int) -> None:
        """So many sources are about to be built."""
        ...

    def begins(self, kind: str, name: str) -> None:
        """A step begins: "building" or "timing" of a kernel, or another of a compilation's, such as "planning"."""
        ...

    def ends(self, kind: str, name: str) -> None:
        """It is over."""
        ...

    def made(self, kernel: Any) -> None:
        """A kernel with several builds (tune.Tuned) stands."""
        ...


_watches: tuple[Watch, ...] = ()


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Tell `watch` of all that is done meanwhile, in this process."""
    global _watches
    _watches = (*_watches, watch)
    try:
        yield
    finally:
        _watches = tuple(w for w in _watches if w is not watch)


def expects(builds: int) -> None:
    """Tell who follows of builds to come."""
    for w in _watches:
        w.expects(builds)


def has_made(kernel: Any) -> None:
    """Tell who follows of a kernel with several builds."""
    for w in _watches:
        w.made(kernel)


@contextmanager
def doing(kind: str, name: str = "") -> Iterator[None]:
    """Tell who follows of a step: of a kernel, or of a whole graph's compilation where it has no name."""
    with ExitStack() as begun:
        for w in _watches:
            w.begins(kind, name)
            begun.callback(w.ends, kind, name)
        yield
