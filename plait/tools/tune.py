"""The work of `plait tune`: run a program once with every kernel of several builds driven to its choice, under a budget, in sight.

Each choice is kept as soon as it is made (runtime/choices.py), so that a run that is stopped, by its budget or by Ctrl-C, loses nothing, and
the next one only does what is left.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from plait.errors import UserError
from plait.options import Options
from plait.runtime.progress import Progress
from plait.tools.explain import load, say_to_people, silent
from plait.tools.files import can_write, write_file
from plait.tools.group import FINE, STOPPED
from plait.tools.plain import as_json
from plait.tools.table import number, plain_table

if TYPE_CHECKING:
    from plait.runtime.choices import Choice
    from plait.runtime.tune import Tuned

STALL_SECONDS = 30.0  # without anything begun or ended, until the watchdog speaks, and again each time it doubles
_MOST_ROWS = 12


class Spent(BaseException):
    """The budget is over. Not an Exception: nothing on the way out may take it for a failure of the program's."""


@dataclass
class _Kernel:
    graph: str
    tuned: Tuned

    @property
    def name(self) -> str:
        note = self.tuned.note
        return "" if note is None else note.kernel

    def choice(self) -> Choice | None:
        """What is known by now."""
        note = self.tuned.note
        return None if note is None else note.known(self.tuned.names)


class Tuning(Progress):
    """See runtime.follow.Watch: counts, and stops what goes on when the budget is spent or somebody interrupts."""

    def __init__(self, budget: float | None, out: TextIO | None) -> None:
        super().__init__(out, STALL_SECONDS)
        self.budget = budget
        self.kernels: list[_Kernel] = []
        self.interrupted = False

    # ---------------------------------------------------------------- what is told
    def begins(self, kind: str, name: str) -> None:
        """See Watch."""
        if self.interrupted:
            raise KeyboardInterrupt
        if self.is_spent():
            raise Spent
        super().begins(kind, name)

    def made(self, kernel: Tuned) -> None:
        """See Watch."""
        from plait.runtime import report

        with self._lock:
            self.kernels.append(_Kernel(report.current().name, kernel))

    # ---------------------------------------------------------------- what is known
    @property
    def timed(self) -> int:
        """Kernels that were timed."""
        return self._ended["timing"]

    def is_spent(self) -> bool:
        """Whether the budget is."""
        return self.budget is not None and self.seconds() >= self.budget

    def done(self) -> int:
        """Kernels whose choice is made."""
        return sum(k.tuned.choice is not None for k in self.kernels)

    def left(self) -> float | None:
        """Seconds, if the rest takes as long as what was done; None where that is not known."""
        builds, timings = self.builds - self.built, len(self.kernels) - self.done()
        if (builds and not self.built) or not (self.built or self.timed):
            return None
        each = self._took["timing"] / self.timed if self.timed else 0.1
        return (super().left() or 0.0) + timings * each

    def line(self) -> str:
        """Where it is."""
        left, spent = self.left(), self.seconds()
        if not self.builds and not self.kernels:
            return f"compiling, {spent:.0f} s"
        text = f"{self.done()} of {len(self.kernels)} kernels done, {self.built} of {self.builds} built, {spent:.0f} s"
        if left is not None:
            text += f", about {left:.0f} s left"
        return text + (f" (budget {self.budget:g} s)" if self.budget is not None else "")


def run(
    file: str,
    *,
    train: bool,
    budget: float | None,
    out_path: str | None,
    json_path: str | None,
    options: Mapping[str, Any],
    debug: bool = False,
) -> int:
    """Tune a file; the exit code."""
    can_write(json_path)
    can_write(out_path)
    _can_keep(Options.make(None, options), out_path)
    if json_path != "-":
        say_to_people(f"loading {file} ...")
    progress = Tuning(budget, None if json_path == "-" else sys.stderr)
    with silent(debug):
        fn, calls = load(file)
        drive = _driver(fn, calls, train, options)
        stopped = _driven(drive, progress)
    _write_out(progress, out_path)
    facts = _facts(Path(file).name, progress, stopped, out_path)
    if json_path is not None and json_path != "-":
        write_file(json_path, as_json("tune", facts) + "\n")
    print(as_json("tune", facts) if json_path == "-" else _text(facts))
    return STOPPED if stopped == "interrupt" else FINE


def _can_keep(options: Options, out_path: str | None) -> None:
    if options.tuned == "off":
        raise UserError("tuned=off: nothing would be remembered", hint="tune without the option tuned, or name a file")
    from plait.runtime.cache import cache_for

    if out_path is None and not cache_for(options).usable:
        hint = "set PLAIT_CACHE to a folder of your own, or write the choices with --out FILE"
        raise UserError("there is no disk cache to keep choices in", hint=hint)


def _driver(fn: Any, calls: Any, train: bool, options: Mapping[str, Any]) -> Callable[[], None]:
    from plait.report.run import run_calls

    return lambda: run_calls(fn, calls, train, Options.make(None, options))


def _driven(drive: Callable[[], None], progress: Tuning) -> str:
    """Why it stopped before the end: "budget", "interrupt", or nothing."""
    from plait.runtime.follow import watching

    def interrupt(number: int, frame: FrameType | None) -> None:
        progress.interrupted = True
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    on_main = threading.current_thread() is threading.main_thread()
    if on_main:
        signal.signal(signal.SIGINT, interrupt)
    try:
        with progress.shown(), watching(progress):
            drive()
    except Spent:
        return "budget"
    except BaseException:
        # an interrupt may come out as anything: torch and Triton catch much on the way
        if not progress.interrupted:
            raise
    finally:
        if on_main:
            signal.signal(signal.SIGINT, before)
    return "interrupt" if progress.interrupted else ""


# ---------------------------------------------------------------------------------------------------------------- answer
def _write_out(progress: Tuning, out_path: str | None) -> None:
    if out_path is None:
        return
    from plait.runtime.choices import file_text

    found = {c.key: c for k in progress.kernels if (c := k.choice()) is not None}
    devices = {k.tuned.note.choices.device for k in progress.kernels if k.tuned.note is not None}
    write_file(out_path, file_text(", ".join(sorted(devices)) or "no device", found.values()))


def _facts(program: str, progress: Tuning, stopped: str, out_path: str | None) -> dict[str, Any]:
    notes = [k.tuned.note for k in progress.kernels if k.tuned.note is not None]
    return {
        "program": program,
        "device": notes[0].choices.device if notes else None,
        "kernels": [_kernel_facts(k) for k in progress.kernels],
        "done": progress.done(),
        "built": progress.built,
        "seconds": round(progress.seconds(), 3),
        "budget": progress.budget,
        "stopped": stopped,
        "kept_in": notes[0].choices.path if notes else None,
        "errors": sorted({n.choices.stats.last_error for n in notes if n.choices.stats.errors}),
        "bad_lines": max((n.choices.stats.bad_lines for n in notes), default=0),
        "out": out_path,
    }


def _kernel_facts(k: _Kernel) -> dict[str, Any]:
    t = k.tuned
    state = "open" if t.choice is None else "remembered" if t.remembered else "timed"
    chosen = None if t.choice is None else t.names[t.choice]
    times = [{"schedule": name, "us": ms * 1e3} for name, ms in t.times_ms.items()]
    return {"graph": k.graph, "name": k.name, "state": state, "chosen": chosen, "times": times}


def _text(facts: Mapping[str, Any]) -> str:
    kernels = facts["kernels"]
    if not kernels and not facts["stopped"]:
        return f"{facts['program']} has no kernel that is built in several ways: there is nothing to tune"
    counted = {s: sum(k["state"] == s for k in kernels) for s in ("timed", "remembered", "open")}
    head = f"{facts['program']}: {facts['done']} of {len(kernels)} kernels have a choice"
    head += f" ({counted['timed']} timed now, {counted['remembered']} known already), {facts['seconds']:.1f} s"
    lines = [head + (f", on {facts['device']}" if facts["device"] else "")]
    rows = [_row(k) for k in kernels if k["state"] == "timed"]
    rows.sort(key=lambda row: -row[0])
    if rows:
        head_row = ("kernel", "us", "us of the slowest", "schedule")
        lines.append(plain_table(head_row, [cells for _, cells in rows[:_MOST_ROWS]], indent="  "))
    if len(rows) > _MOST_ROWS:
        lines.append(f"  and {len(rows) - _MOST_ROWS} more (--json has all)")
    why = {"budget": f"stopped at the budget of {facts['budget']} s", "interrupt": "stopped"}
    if facts["stopped"]:
        lines.append(f"{why[facts['stopped']]}: the same command goes on from here")
    if facts["kept_in"]:
        lines.append(f"kept in {facts['kept_in']}")
    lines += [f"not all could be kept: {error}" for error in facts["errors"]]
    if facts["bad_lines"]:
        lines.append(f"{facts['bad_lines']} lines of that file could not be read and were passed over")
    if facts["out"]:
        lines.append(f"written to {facts['out']}")
    return "\n".join(lines)


def _row(kernel: Mapping[str, Any]) -> tuple[float, tuple[str, ...]]:
    times = {t["schedule"]: t["us"] for t in kernel["times"]}
    own, most = times[kernel["chosen"]], max(times.values())
    return most - own, (kernel["name"], number(own), number(most), kernel["chosen"])
