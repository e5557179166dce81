"""Where the work is: what is being done, how much of it is over, and a word when one step takes very long.

A Progress follows what `follow.doing` tells. Every compilation has one: shown on a terminal where somebody asked to see it, and silent
otherwise, but for a warning of the logger "plait" when a step has not ended for STALL_SECONDS.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from plait.runtime import report
from plait.runtime.follow import watching

if TYPE_CHECKING:
    from plait.runtime.tune import Tuned

STALL_SECONDS = 60.0  # that a step may take until a word is said, and again each time it doubles
_EVERY = 0.5  # seconds between two looks where somebody watches
_PLAIN_EVERY = 10.0  # and between two lines of progress where the stream is no terminal
_LOG = logging.getLogger("plait")


class Progress:
    """See follow.Watch. `out`: where lines of progress go (None: nowhere); `stall_seconds`: see STALL_SECONDS."""

    def __init__(self, out: TextIO | None, stall_seconds: float) -> None:
        self.out, self.stall_seconds = out, stall_seconds
        self.start = self.moved = time.monotonic()
        self.builds = 0
        self._ended: Counter[str] = Counter()
        self._took: dict[str, float] = {}
        self._now: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._width = 0

    # ---------------------------------------------------------------- what is told
    def expects(self, builds: int) -> None:
        """See Watch."""
        with self._lock:
            self.builds += builds

    def begins(self, kind: str, name: str) -> None:
        """See Watch."""
        with self._lock:
            self._now[kind, name] = self.moved = time.monotonic()

    def ends(self, kind: str, name: str) -> None:
        """See Watch."""
        with self._lock:
            self.moved = time.monotonic()
            took = self.moved - self._now.pop((kind, name), self.moved)
            self._took[kind] = self._took.get(kind, 0.0) + took
            self._ended[kind] += 1

    def made(self, kernel: Tuned) -> None:
        """See Watch."""

    # ---------------------------------------------------------------- what is known
    @property
    def built(self) -> int:
        """Builds that are over."""
        return self._ended["building"]

    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.start

    def left(self) -> float | None:
        """Seconds, if the rest of the builds take as long as those before (they run side by side); None where that is not known."""
        left = self.builds - self.built
        if not self.built or left <= 0:
            return None
        at_once = max(1, sum(kind == "building" for kind, _ in self._now))
        return left * self._took["building"] / self.built / at_once

    def line(self) -> str:
        """Where it is."""
        now = min(self._now, key=self._now.__getitem__, default=("compiling", ""))
        text = f"{self.built} of {self.builds} built" if self.builds else " ".join(filter(None, now))
        left = self.left()
        return f"{text}, {self.seconds():.0f} s" + (f", about {left:.0f} s left" if left is not None else "")

    def since(self) -> float:
        """When anything last began or ended."""
        return self.moved

    def stalled(self, still: float) -> str:
        """What to say of steps that have not moved for so many seconds."""
        now = sorted(self._now, key=self._now.__getitem__)
        what = ", ".join(f"{kind} {name}".strip() for kind, name in now[:3]) or "the program itself runs"
        return f"nothing has moved for {still:.0f} s: {what}"

    def warn(self, line: str) -> None:
        """Say it."""
        self._say(line)

    # ---------------------------------------------------------------- what is shown
    @contextmanager
    def shown(self) -> Iterator[None]:
        """On a terminal one line that changes, elsewhere a line now and then, and a word when nothing moves."""
        thread = threading.Thread(target=self._show, daemon=True, name="plait-progress")
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()
            self._clear()

    def _show(self) -> None:
        live = self.out is not None and self.out.isatty()
        said, next_line, patience = -1.0, _PLAIN_EVERY, self.stall_seconds
        every = self.stall_seconds / 4 if self.out is None else min(_EVERY, self.stall_seconds / 4)
        while not self._over.wait(every):
            with self._lock:
                since, line = self.since(), self.line()
                words = self.stalled(time.monotonic() - since)
            if since != said:
                said, patience = since, self.stall_seconds
            if time.monotonic() - since >= patience:
                patience *= 2
                self.warn(words)
            if live:
                self._draw(line)
            elif self.out is not None and self.seconds() >= next_line:
                next_line = self.seconds() + _PLAIN_EVERY
                self._say(line)

    def _say(self, line: str) -> None:
        self._clear()
        if self.out is not None:
            print(line, file=self.out, flush=True)

    def _draw(self, line: str) -> None:
        if self.out is not None:
            print("\r" + line.ljust(self._width), end="", file=self.out, flush=True)
            self._width = len(line)

    def _clear(self) -> None:
        if self.out is not None and self._width:
            print("\r" + " " * self._width + "\r", end="", file=self.out, flush=True)
            self._width = 0


class OfGraph(Progress):
    """Of one graph's compilation; `line_of` the user's first line of it."""

    def __init__(self, record: report.CompileRecord, out: TextIO | None, user_line: str) -> None:
        super().__init__(out, STALL_SECONDS)
        self.record, self.user_line = record, user_line

    def line(self) -> str:
        """See Progress."""
        return f"{self.record.name} ({self.record.kind}): {super().line()}"

    def since(self) -> float:
        """When the step began that has run longest, or the last one ended."""
        return min(self._now.values(), default=self.moved)

    def stalled(self, still: float) -> str:
        """See Progress: the graph, what is done, and the user's lines."""
        now = sorted(self._now, key=self._now.__getitem__)
        what = ", ".join(f"{kind} {name}".strip() for kind, name in now[:3]) or "compiling"
        lines = dict.fromkeys(line for _, name in now[:3] if (line := self._line_of(name)))
        at = "; ".join(lines) or self.user_line
        text = f"plait: {self.record.name} ({self.record.kind}) is still {what} after {still:.0f} s"
        return text + (f"\n  at {at}" if at else "")

    def warn(self, line: str) -> None:
        """Through the logger, unless somebody watches."""
        if self.out is not None:
            super().warn(line)
        else:
            _LOG.warning("%s", line)

    def _line_of(self, name: str) -> str:
        """The user's line of a kernel."""
        compiled: Any = self.record.details.get("compiled")
        for launch in compiled.launches if compiled is not None else ():
            if launch.name == name or name.startswith(f"{launch.name} and "):
                origins = (o for g in launch.groups for n in g.nodes for o in compiled.graph.origins.get(n, ()))
                return next((o.line for o in origins if o.line), "")
        return ""


_shown_by_command = False


@contextmanager
def showing() -> Iterator[None]:
    """Show the progress of compilations inside the block, where the error stream is a terminal."""
    global _shown_by_command
    before, _shown_by_command = _shown_by_command, True
    try:
        yield
    finally:
        _shown_by_command = before


@contextmanager
def following(record: report.CompileRecord, user_line: str, wanted: bool) -> Iterator[None]:
    """Follow the compilation inside the block, in sight where that is `wanted` (or `showing`) and the error stream a terminal."""
    seen = (wanted or _shown_by_command) and sys.stderr.isatty()
    mine = OfGraph(record, sys.stderr if seen else None, user_line)
    with mine.shown(), watching(mine):
        yield
