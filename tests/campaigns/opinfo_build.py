"""The operator database through the whole compiler: every sample is captured, planned, built by g++, run and judged.

`python -m tests.campaigns.opinfo_build [--dtype float32|int64] [--train] [--only NAME] [--every N] [--limit N] [--jobs N]`
prints what is wrong, and the totals: operators that run through a plait kernel in every sample (native), in some (part), in
none (aten), and those with a wrong value or a failure of plait's own. Operators run in processes of their own kind: one that
dies costs one operator.
"""

from __future__ import annotations

import argparse
import collections
import json
import queue
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.campaigns.opinfo_judge import Outcome, run_entry

_RESULT = "RESULT "
_SECONDS = 900.0  # for one operator
STATES = ("native", "part", "aten", "empty", "wrong", "broke")


def entries(only: str = "", every: int = 1) -> dict[int, Any]:
    """Operators of the database by their place in it, thinned out."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {i: op for i, op in enumerate(op_db) if i % every == 0 and only in op.name}


def has_form(op: Any, dtype: torch.dtype, train: bool) -> bool:
    """Whether the database has samples of that type, and gradients if they are wanted."""
    return dtype in op.dtypes and (op.supports_autograd or not train)


@dataclass
class Totals:
    """What all operators came to."""

    title: str
    outcomes: list[Outcome] = field(default_factory=list)

    def count(self, state: str) -> int:
        """Operators in a state."""
        return sum(o.state == state for o in self.outcomes)

    def complaints(self) -> list[str]:
        """Operators with a wrong value or a failure, with the first few."""
        return [o.line() for o in self.outcomes if o.wrong or o.broke]

    def text(self) -> str:
        """The reasons for eager, most frequent first, and the totals line."""
        eager = sum((o.eager for o in self.outcomes), collections.Counter())
        lines = [f"  eager {count} x {reason}" for reason, count in eager.most_common(12)]
        counts = ", ".join(f"{self.count(s)} {s}" for s in STATES)
        samples, native = sum(o.samples for o in self.outcomes), sum(o.native for o in self.outcomes)
        lines.append(f"{self.title}: {counts} of {len(self.outcomes)} operators; {native} of {samples} samples native")
        return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------ the worker
def work(dtype: torch.dtype, train: bool, limit: int | None) -> None:
    """Operators whose places come in on standard input, one a line; one line of JSON each on standard output."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    all_entries = entries()
    for line in sys.stdin:
        done = run_entry(all_entries[int(line)], dtype, train=train, limit=limit)
        print(_RESULT + json.dumps(vars(done)), flush=True)


class _Worker:
    """A process that runs operators, started again when it dies."""

    def __init__(self, flags: Sequence[str]) -> None:
        self.command = [sys.executable, "-m", "tests.campaigns.opinfo_build", "--worker", *flags]
        self.process: subprocess.Popen[str] | None = None

    def run(self, place: int, name: str) -> Outcome:
        """One operator."""
        if self.process is None:
            self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True
            )
        process = self.process
        assert process.stdin is not None and process.stdout is not None
        late = threading.Timer(_SECONDS, process.kill)
        late.start()
        try:
            process.stdin.write(f"{place}\n")
            process.stdin.flush()
            for line in process.stdout:
                if line.startswith(_RESULT):
                    found = json.loads(line.removeprefix(_RESULT))
                    return Outcome(**(found | {"eager": collections.Counter(found["eager"])}))
        except BrokenPipeError:
            pass
        finally:
            late.cancel()
        code, self.process = process.wait(), None
        self.errors.seek(0)
        tail = " | ".join(self.errors.read().strip().splitlines()[-3:])
        return Outcome(name, broke=[f"the process died, status {code}: {tail[:400]}"])

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait()


# ------------------------------------------------------------------------------------------------------------ the parent
def campaign(
    dtype: str = "float32",
    *,
    train: bool = False,
    only: str = "",
    every: int = 1,
    limit: int | None = None,
    jobs: int = 1,
    tell: Callable[[str], None] = lambda line: None,
) -> Totals:
    """Every operator of the database that has the form, on `jobs` processes."""
    totals = Totals(f"{dtype} {'training' if train else 'forward'}")
    kept = {i: op for i, op in entries(only, every).items() if has_form(op, getattr(torch, dtype), train)}
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for i in kept:
        todo.put(i)
    flags = ["--dtype", dtype, *(["--train"] if train else []), *(["--limit", str(limit)] if limit else [])]
    lock = threading.Lock()

    def serve() -> None:
        worker = _Worker(flags)
        while True:
            try:
                place = todo.get_nowait()
            except queue.Empty:
                break
            done = worker.run(place, kept[place].name)
            with lock:
                totals.outcomes.append(done)
                tell(done.line())
        worker.close()

    threads = [threading.Thread(target=serve) for _ in range(jobs)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return totals


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; exit 1 when anything is wrong or broke."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--dtype", default="float32")
    p.add_argument("--train", action="store_true")
    p.add_argument("--only", default="")
    p.add_argument("--every", type=int, default=1)
    p.add_argument("--limit", type=int, default=None)
    p.add_argument("--jobs", type=int, default=1)
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    a = p.parse_args(arguments)
    if a.worker:
        work(getattr(torch, a.dtype), a.train, a.limit)
        return 0
    totals = campaign(
        a.dtype,
        train=a.train,
        only=a.only,
        every=a.every,
        limit=a.limit,
        jobs=a.jobs,
        tell=lambda line: print(line, flush=True),
    )
    print(totals.text(), flush=True)
    return 1 if totals.complaints() else 0


if __name__ == "__main__":
    sys.exit(main())
