"""The option `budget`: once compiling has taken so many seconds, what is left is decided the cheapest way, and noted.

Wherever a stage could spend time to make the result faster (open products, judge merges, try other builds, optimise), it asks
`left_out`. Until the budget is used up the answer is no, so that nothing changes; afterwards it is yes, and what was left
out is counted for the report. What is begun is finished.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Budget:
    """Of one compilation. `spent`: seconds that compilations before it took of the same budget; `left_out`: what was not done for
    want of time, and how many times (by its singular)."""

    limit: float
    spent: float = 0.0
    clock: Callable[[], float] = time.monotonic
    left_out: dict[str, int] = field(default_factory=dict)
    start: float = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        self.start = self.clock()

    def is_used_up(self) -> bool:
        """Whether nothing more may be spent than has to be."""
        return self.spent + self.clock() - self.start >= self.limit

    def leaves_out(self, what: str, number: int = 1) -> bool:
        """Whether the budget is used up; then so many of `what` are noted. Called for what would be done otherwise."""
        if not number or not self.is_used_up():
            return False
        self.note(what, number)
        return True

    def note(self, what: str, number: int) -> None:
        """So many of `what` were left out."""
        if number:
            with self._lock:
                self.left_out[what] = self.left_out.get(what, 0) + number

    def words(self) -> tuple[str, ...]:
        """What was left out: "3 fusions"."""
        return tuple(f"{n} {what}{'s' if n > 1 else ''}" for what, n in self.left_out.items())


_budget: contextvars.ContextVar[Budget | None] = contextvars.ContextVar("plait_budget", default=None)


@contextmanager
def budgeted(limit: float | None, spent: float) -> Iterator[Budget | None]:
    """Compile under a budget (None: without one) of which other compilations have spent some seconds."""
    budget = None if limit is None else Budget(limit, spent)
    token = _budget.set(budget)
    try:
        yield budget
    finally:
        _budget.reset(token)


def current() -> Budget | None:
    """The budget of the compilation that runs here; other threads are handed it."""
    return _budget.get()


def leaves_out(what: str, number: int = 1) -> bool:
    """See Budget.leaves_out; without a budget nothing is left out."""
    budget = _budget.get()
    return budget is not None and budget.leaves_out(what, number)


def is_used_up() -> bool:
    """See Budget.is_used_up; without a budget it never is."""
    budget = _budget.get()
    return budget is not None and budget.is_used_up()
