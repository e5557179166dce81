"""What was compiled in this process, and what was not: one record a graph, one a fallback. Free of torch at import.

The record of the graph being compiled is `current()`; stages add to it. Bounded lists under one lock.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from plait.runtime.locks import Lock

_LIMIT = 4096  # a process that recompiles for ever must not grow for ever


class PlaitFallbackWarning(UserWarning):
    """Something runs in eager that plait was asked to compile."""


@dataclass(frozen=True, slots=True)
class Fallback:
    """Why something runs in eager. `scope`: "graph", "group" or "extern"; `line` is the user's."""

    reason: str
    scope: str = "graph"
    op: str = ""
    line: str = ""
    graph: str = ""
    artifact: str = ""


@dataclass
class CompileRecord:
    """One compiled graph. `seconds` by stage; `details` holds what tools want beside it (plan text, kernel sources)."""

    name: str
    kind: str = "inference"
    kernels: int = 0
    externs: int = 0
    nodes: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    fallbacks: list[Fallback] = field(default_factory=list)
    left_out: tuple[str, ...] = ()  # for want of the option budget
    details: dict[str, Any] = field(default_factory=dict)
    status: str = "compiling"  # then "compiled" or "eager"

    @property
    def total_seconds(self) -> float:
        """Wall time of the whole compilation."""
        return self.seconds.get("total", 0.0)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the block to `seconds[name]`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def line(self) -> str:
        """One line for people."""
        text = f"plait: {self.name} ({self.kind}): {self.kernels} kernels, {self.externs} ATen calls, {self.total_seconds:.2f} s"
        if self.left_out:
            text += f"; the budget was used up, left out: {', '.join(self.left_out)}"
        return text + (f", {len(self.fallbacks)} in eager: {self.fallbacks[0].reason}" if self.fallbacks else "")


_lock = Lock()
_numbers = itertools.count()
_current: contextvars.ContextVar[CompileRecord | None] = contextvars.ContextVar("plait_record", default=None)
FALLBACKS: list[Fallback] = []
"""Everything that runs in eager in this process, oldest first (under the module's lock; read a copy with `fallbacks()`)."""
_records: list[CompileRecord] = []
_spent = [0.0]  # seconds that compilations took
_warned: set[str] = set()


@contextlib.contextmanager
def compiling(kind: str) -> Iterator[CompileRecord]:
    """Open a record for one graph; it is `current()` inside, and kept afterwards."""
    record = CompileRecord(f"graph{next(_numbers)}", kind)
    token = _current.set(record)
    try:
        with record.stage("total"):
            yield record
        if record.status == "compiling":
            record.status = "compiled"
    finally:
        _current.reset(token)
        if record.status == "compiling":
            record.status = "failed"
        with _lock:
            _spent[0] += record.total_seconds
            _records.append(record)
            del _records[:-_LIMIT]


def current() -> CompileRecord:
    """The record of the graph being compiled here; a detached one outside `compiling`."""
    return _current.get() or CompileRecord("none")


def compiled(levels: Any) -> None:
    """Keep every level of the graph being compiled (compiler.Compiled), for tools, and count its launches."""
    record = current()
    record.details["compiled"] = levels
    record.kernels = sum(1 for step in levels.launches if step.parts)
    record.externs = len(levels.launches) - record.kernels
    record.nodes = len(levels.graph.nodes())


def add_fallback(entry: Fallback, *, warn: bool = True) -> None:
    """Count a fallback and warn once a process for each reason."""
    record = _current.get()
    if record is not None:
        record.fallbacks.append(entry)
    with _lock:
        FALLBACKS.append(entry)
        del FALLBACKS[:-_LIMIT]
        first = entry.reason not in _warned
        _warned.add(entry.reason)
    if warn and first:
        where = "".join(f"\n  at {t}" for t in (entry.line,) if t) + (
            f"\n  see {entry.artifact}" if entry.artifact else ""
        )
        what = f"{entry.scope} {entry.op}".strip()
        warnings.warn(f"plait runs this {what} in eager: {entry.reason}{where}", PlaitFallbackWarning, stacklevel=2)


def warn_once(message: str) -> None:
    """A warning that is given once a process (until `reset`)."""
    with _lock:
        if message in _warned:
            return
        _warned.add(message)
    warnings.warn(message, UserWarning, stacklevel=3)


def all() -> list[CompileRecord]:
    """Every record since the start or the last `reset`, oldest first."""
    with _lock:
        return list(_records)


def last() -> CompileRecord | None:
    """The record of the graph compiled last."""
    with _lock:
        return _records[-1] if _records else None


def spent_seconds() -> float:
    """What compilations have taken since the start or the last `reset`, without the one that runs."""
    with _lock:
        return _spent[0]


def fallbacks() -> list[Fallback]:
    """A copy of FALLBACKS."""
    with _lock:
        return list(FALLBACKS)


def reset() -> None:
    """Forget records, fallbacks and which warnings were given."""
    with _lock:
        _records.clear()
        _spent[0] = 0.0
        FALLBACKS.clear()
        _warned.clear()


def trace(name: str, payload: Callable[[], str]) -> None:
    """A structured-trace artifact ("plait_graph", "plait_plan", "plait_kernels"), which tlparse shows; built only when
    someone records traces."""
    from torch._logging import _internal

    _internal.trace_structured_artifact(name, "string", payload)
