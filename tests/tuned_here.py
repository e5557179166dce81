"""`plait` as on a machine with a card: kernels in Triton's interpreter, built under several schedules, and timed on a clock of our own.

As a program (TRITON_INTERPRET=1): `python tests/tuned_here.py LOG tune FILE ...` runs that command, and writes into LOG a line
for each build and each timing. TUNED_HERE says what happens meanwhile: "stop=N" sends this process Ctrl-C when timing N begins, "sleep=S" makes
each build take that long, "fail=NAME" makes that source's fail.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
import triton_interpreter  # noqa: F401  (its libdevice)

from plait import compiler
from plait.errors import BuildFailed
from plait.plan.device import SPECS
from plait.runtime import assemble, build, tune
from plait.runtime.choices import Note


def install(log: str) -> None:
    """Put the clock in, and tell the compiler that schedules are worth timing."""
    wishes = dict(w.split("=") for w in os.environ.get("TUNED_HERE", "").split())
    assemble.triton_is_interpreted = lambda: False  # type: ignore[attr-defined]
    compiler.spec_of = lambda device: SPECS["h200"]  # type: ignore[attr-defined]
    assemble._TUNE_FROM_NS = 0.0  # type: ignore[misc]
    torch.cuda.is_current_stream_capturing = lambda: False
    made = build._build_triton_one
    seen = {"timing": 0}

    def say(line: str) -> None:
        with open(log, "a", encoding="utf-8") as out:
            out.write(line + "\n")

    def built(source: Any, *rest: Any) -> Any:
        say(f"build {source.name}")
        time.sleep(float(wishes.get("sleep", 0)))
        if source.name == wishes.get("fail"):
            return BuildFailed("as the test wants it")
        return made(source, *rest)

    def measured(self: tune.Tuned, launches: Any, slots: Any) -> None:
        seen["timing"] += 1
        say(f"time {self.note.kernel if isinstance(self.note, Note) else '?'}")
        if seen["timing"] == int(wishes.get("stop", 0)):
            os.kill(os.getpid(), signal.SIGINT)
        measure(self, launches, slots)

    def clock(go: Any, slots: Any) -> float:
        go(slots)
        seen["clock"] = seen.get("clock", 0) + 1
        return 1.0 / seen["clock"]  # what is timed last is fastest

    measure = tune.Tuned._measure
    tune.Tuned._measure = measured  # type: ignore[method-assign]
    tune._time_ms, build._build_triton_one = clock, built


if __name__ == "__main__":
    install(sys.argv[1])
    from plait.tools.cli import main

    main(sys.argv[2:])
