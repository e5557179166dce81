"""`plait bench`: the parent process. Starts measuring processes, collects their rows, writes JSON after each, prints a table.

Free of torch, click and rich (rich only decorates the table where it is installed).
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plait.errors import UserError
from plait.tools.plain import as_json
from plait.tools.table import number, print_table

PEERS = ("eager", "inductor", "inductor-max")
SUITES = ("kernels", "models")
MARK = "@plait "


@dataclass
class Job:
    """What to measure, and how."""

    suite: str = "kernels"
    device: str = "cpu"
    peers: tuple[str, ...] = ("eager", "inductor")
    json_path: str | None = None
    only: str | None = None
    seconds: float = 5.0
    backend: str = "plait"
    options: dict[str, Any] = field(default_factory=dict)
    train_steps: int = 20
    threads: int | None = None
    timeout: float = 900.0
    commit: str | None = None

    def __post_init__(self) -> None:
        if self.suite not in SUITES:
            raise UserError(f"no suite {self.suite!r}", hint=f"suites: {', '.join(SUITES)}")
        if self.device not in ("cpu", "cuda"):
            raise UserError(f"no device {self.device!r}", hint="devices: cpu, cuda")
        for p in self.peers:
            if p not in PEERS:
                raise UserError(f"no peer {p!r}", hint=f"peers: {', '.join(PEERS)}")

    def select(self, names: Sequence[str]) -> list[str]:
        """The workloads that --only asks for."""
        try:
            chosen = [n for n in names if self.only is None or re.search(self.only, n)]
        except re.error as error:
            hint = "a name, or names with | between them"
            raise UserError(f"--only {self.only!r} is no regular expression: {error}", hint=hint) from error
        if not chosen:
            raise UserError(f"--only {self.only!r} matches no workload of {self.suite}", hint=", ".join(names))
        return chosen


def run(job: Job) -> int:
    """Measure; 0 when every workload was measured and right, 1 when one failed, 130 after Ctrl-C (rows so far are kept)."""
    if job.json_path:
        _make_folder(job.json_path)
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": {},
        "commit": job.commit or _commit(),
        "command": _command(job),
        "rows": [],
    }
    names = job.select(workload_names(job.suite))
    interrupted = False
    try:
        for row in _rows(job, names, result):
            result["rows"].append(row)
            if job.json_path:
                write_json(job.json_path, result)
            print(f"[{len(result['rows'])}/{len(names)}] {_summary(row)}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        interrupted = True
        print(f"stopped; {len(result['rows'])} of {len(names)} rows kept", file=sys.stderr)
    if job.json_path:
        write_json(job.json_path, result)
    print_rows(result)
    if interrupted:
        return 130
    return 1 if any("error" in r for r in result["rows"]) else 0


def workload_names(suite: str) -> list[str]:
    """Names of a suite, in order, asked of a process that may import torch."""
    code = f"from plait.tools import bench_programs as b; print(*b.{suite[:-1]}_names())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"the {suite} cannot be loaded: {done.stderr.strip().splitlines()[-1]}", hint="plait doctor")
    return done.stdout.split()


def _rows(job: Job, names: list[str], result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each name, in order, whatever happens to the processes that measure them."""
    left = list(names)
    ceilings: list[float] | None = None
    while left:
        current: str | None = None
        phase = "starting"
        worker = _Worker(job, left, ceilings)
        try:
            for kind, value in worker.messages():
                if kind == "start":
                    current, phase = value, "starting"
                elif kind == "phase":
                    phase = value
                elif kind == "machine":
                    result["machine"] = value
                elif kind == "ceilings":
                    ceilings = [value["bytes_per_s"], value["flops_per_s"]]
                    result["ceilings"] = value
                elif kind == "row":
                    left.remove(value["name"])
                    current = None
                    yield value
        finally:
            worker.close()
        if left and current is None and worker.returncode != 3:
            words = f"the measuring process ended with {worker.returncode}: {worker.last_words()}"
            raise UserError(words, hint="plait doctor")
        if current is not None:
            left.remove(current)
            yield {
                "name": current,
                "device": job.device,
                "error": f"{worker.how_it_ended()} while {phase}: {worker.last_words()}",
            }


class _Worker:
    """One measuring process; its chatter goes to a file, of which the last line is quoted when it dies."""

    def __init__(self, job: Job, names: list[str], ceilings: list[float] | None) -> None:
        given = {
            "suite": job.suite,
            "device": job.device,
            "peers": list(job.peers),
            "seconds": job.seconds,
            "backend": job.backend,
            "options": job.options,
            "train_steps": job.train_steps,
            "threads": job.threads,
            "names": names,
            "ceilings": ceilings,
        }
        self.log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # lives as long as the process
        command = [sys.executable, "-m", "plait.tools.bench_worker", json.dumps(given)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True)
        self.timeout = job.timeout
        self.returncode: int | None = None
        self.given_up = False

    def messages(self) -> Iterator[tuple[str, Any]]:
        """What the process reports; a silence of more than the time limit ends it."""
        assert self.process.stdout is not None
        timer = self._give_up_later()
        try:
            for line in self.process.stdout:
                if line.startswith(MARK):
                    timer.cancel()
                    timer = self._give_up_later()
                    message = json.loads(line[len(MARK) :])
                    yield message["kind"], message["value"]
        finally:
            timer.cancel()
        self.returncode = self.process.wait()

    def _give_up_later(self) -> threading.Timer:
        def give_up() -> None:
            self.given_up = True
            self.process.kill()

        timer = threading.Timer(self.timeout, give_up)
        timer.start()
        return timer

    def how_it_ended(self) -> str:
        """In words, for a row that never came."""
        if self.given_up:
            return f"no progress for {self.timeout:g} s"
        return f"process died ({self.returncode})"

    def last_words(self) -> str:
        """The last line that the process wrote to its error stream."""
        self.log.seek(0)
        # a warning's text, not the line of source that Python shows below it
        rows = [r.strip() for r in self.log.read().splitlines() if r.strip() and not r.startswith("  ")]
        return rows[-1][:300] if rows else "no message"

    def close(self) -> None:
        """End the process if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.returncode = self.process.wait()


def write_json(path: str, result: dict[str, Any]) -> None:
    """Replace the file in one step, so that a run that is stopped leaves a whole one."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_text(as_json("bench", result) + "\n")
        temporary.replace(target)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", hint="name a file in a folder of your own") from error


def _make_folder(path: str) -> None:
    """Raises UserError, before anything is measured, where there is no folder for a file and none can be made."""
    folder = Path(path).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        hint = "name a file in a folder of your own"
        raise UserError(f"cannot write {path}: {folder}: {error.strerror}", hint=hint) from error


def _commit() -> str:
    """The commit that is measured, marked where the tree differs from it; "unknown" outside a checkout."""
    here = Path(__file__).resolve().parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")


def _command(job: Job) -> str:
    words = ["plait bench", f"--suite {job.suite}", f"--device {job.device}", f"--peers {','.join(job.peers)}"]
    words += [f"--only '{job.only}'"] if job.only else []
    words += [f"--option {k}={v}" for k, v in job.options.items()]
    return " ".join(words)


# ---------------------------------------------------------------------------------------------------------- table


def _hand_columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    known = {"plait", "floor", *(p.replace("-", "_") for p in PEERS)}
    found = {k[:-3] for r in rows for k in r if k.endswith("_ms") and not k.endswith("quartiles_ms")}
    return sorted(found - known)


def show(path: str, markdown: bool) -> int:
    """Print the table of a file that a run has written; with `markdown`, for a document."""
    try:
        result = json.loads(Path(path).read_text())
        result["rows"], result["commit"], result["date"]  # a KeyError here says that it is another kind of file
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise UserError(f"{path} is no file of bench rows: {why}", hint="plait bench --json FILE writes one") from error
    if not markdown:
        print_rows(result)
        return 0
    head, body = _cells(result["rows"])
    for row in [head, ["---", *["---:"] * (len(head) - 1)], *body]:
        print(f"| {' | '.join(row)} |")
    print(f"\n{_origin(result)}, {result['date'][:10]}, `{result.get('command', '?')}`")
    return 0


def _origin(result: dict[str, Any]) -> str:
    machine = result.get("machine", {})
    commit = result["commit"][:10]
    return f"median ms a step; {machine.get('device', '?')}, torch {machine.get('torch', '?')}, commit {commit}"


def print_rows(result: dict[str, Any]) -> None:
    """One line a workload: times in ms, the gain over the best peer, kernels, compile seconds, error and verdict."""
    rows = result["rows"]
    if not rows:
        return
    head, body = _cells(rows)
    print_table(head, body)
    print(_origin(result))
    for r in rows:
        if "error" in r:
            print(f"{r['name']}: {r['error'][:300]}")
    print(_geomean_line(rows))


def _cells(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    peers = [p.replace("-", "_") for p in PEERS if any(f"{p.replace('-', '_')}_ms" in r for r in rows)] + _hand_columns(
        rows
    )
    head = [
        "workload",
        "plait ms",
        *(f"{p} ms" for p in peers),
        "floor",
        "vs best",
        "kernels",
        "cold s",
        "warm s",
        "verdict",
    ]
    body = []
    for r in rows:
        best = min((r[f"{p}_ms"] for p in peers if f"{p}_ms" in r), default=None)
        gain = f"{best / r['plait_ms']:.2f}x" if best and "plait_ms" in r else "-"
        cells = [
            r["name"],
            number(r.get("plait_ms")),
            *(number(r.get(f"{p}_ms")) for p in peers),
            number(r.get("floor_ms")),
        ]
        cells += [gain, number(r.get("plait_kernels")), number(r.get("plait_compile_s"), 2)]
        cells += [number(r.get("plait_compile_warm_s"), 2), "ERROR" if "error" in r else r.get("verdict", "-")]
        body.append(cells)
    return head, body


def _geomean_line(rows: Sequence[dict[str, Any]]) -> str:
    from math import exp, log

    parts = []
    for peer in ("eager", "inductor", "inductor_max"):
        gains = [r[f"{peer}_ms"] / r["plait_ms"] for r in rows if f"{peer}_ms" in r and "plait_ms" in r]
        if gains:
            slower = sum(g < 0.98 for g in gains)
            parts.append(f"{exp(sum(map(log, gains)) / len(gains)):.2f}x {peer} (slower on {slower} of {len(gains)})")
    return "plait, geometric mean: " + ", ".join(parts) if parts else "nothing to compare"


def _summary(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['name']}: ERROR {row['error'][:120]}"
    times = ", ".join(
        f"{k[:-3]} {number(v)}" for k, v in row.items() if k.endswith("_ms") and not k.endswith("quartiles_ms") and v
    )
    return f"{row['name']}: {times} ms, {row.get('verdict', '-')}"
