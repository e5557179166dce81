"""The measuring process of `plait bench`: takes workloads one after another and writes one row each, as a line of JSON.

A process of its own, so that a kernel that crashes costs one row and not the run; the parent starts another for the rest.
Free of click and rich: `python -m plait.tools.bench_worker '{"suite": ...}'`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch

from plait.tools import bench_check, bench_programs, bench_timing
from plait.tools.backends import compiled_by
from plait.tools.bench_programs import Fn, Program
from plait.tools.bench_timing import Ceilings

MARK = "@plait "
INDUCTOR_MODES = {"inductor": None, "inductor-max": "max-autotune-no-cudagraphs"}


class Bench:
    """One run's settings, and the rows they give."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.suite: str = job["suite"]
        self.device: str = job["device"]
        self.peers: list[str] = job["peers"]
        self.seconds: float = job["seconds"]
        self.backend: str = job["backend"]
        self.options: dict[str, Any] = job["options"]
        self.train_steps: int = job["train_steps"]
        self.cache_dir = tempfile.mkdtemp(prefix="plait_bench_")
        given = job.get("ceilings")
        self.ceilings = Ceilings(*given) if given else bench_timing.measure_ceilings(self.device)
        self.warmed: set[str] = set()

    def compile(self, fn: Fn, who: str) -> Fn:
        """`fn` compiled by plait or a peer."""
        torch._dynamo.config.cache_size_limit = 64
        if who in INDUCTOR_MODES:
            return compiled_by(fn, "inductor", INDUCTOR_MODES[who])
        options = {**self.options, "cache_dir": self.cache_dir} if self.backend == "plait" else None
        return compiled_by(fn, self.backend, options=options)

    def warm_up(self, who: str, train: bool) -> None:
        """Load a compiler's own code before its first measured compilation."""
        key = f"{who} {train}"
        if key in self.warmed:
            return
        self.warmed.add(key)
        x = torch.ones(257, 3, device=self.device, requires_grad=train)
        with torch.set_grad_enabled(train):
            out = self.compile(lambda t: (t * 2).sum(-1), who)(x)
        if train:
            out.sum().backward()

    def first_call(self, program: Program, who: str) -> tuple[Fn, float]:
        """The compiled program and the seconds that its first step took."""
        start = time.perf_counter()
        compiled = self.compile(program.fn, who)
        program.step(compiled)()
        self.synchronize()
        return compiled, time.perf_counter() - start

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def row(self, name: str) -> dict[str, Any]:
        """Measure one workload."""
        torch._dynamo.reset()
        program = bench_programs.load(self.suite, name, self.device)
        row: dict[str, Any] = {"name": name, "device": self.device, "train": program.train}
        row["floor_ms"] = self.ceilings.floor_ms(program.bytes_moved, program.flops) or None
        if self.device == "cuda":
            torch.cuda.empty_cache()
        with torch.set_grad_enabled(program.train):
            contenders: dict[str, Fn] = {}
            try:
                contenders["plait"] = self.measure_plait(program, row)
            except Exception as error:  # a failing workload is a row, not the end of the run
                row["error"] = _first_line(error)
                traceback.print_exc()
            self.add_peers(program, contenders, row)
            _say("phase", "timing")
            calls = {who: program.step(fn) for who, fn in contenders.items()}
            for who, call in calls.items():
                row[f"{_key(who)}_peak_mb"] = bench_timing.peak_mb(call, self.device)
            for who, timing in bench_timing.time_all(calls, self.device, self.seconds).items():
                row[f"{_key(who)}_ms"] = timing.median
                row[f"{_key(who)}_quartiles_ms"] = [timing.low, timing.high]
        return row

    def measure_plait(self, program: Program, row: dict[str, Any]) -> Fn:
        """Compile cold and warm, judge the results, and note what was compiled."""
        from plait.runtime import report

        self.warm_up("plait", program.train)
        self.cache_dir = tempfile.mkdtemp(prefix="plait_bench_")
        torch._dynamo.reset()
        report.reset()
        _say("phase", "compiling")
        compiled, row["plait_compile_s"] = self.first_call(program, "plait")
        records = report.all()
        row["plait_kernels"] = sum(r.kernels for r in records)
        row["plait_externs"] = sum(r.externs for r in records)
        row["fallbacks"] = [f"{f.scope} {f.op}: {f.reason}" for f in report.fallbacks()]
        stages = Counter[str]()
        for r in records:
            stages.update(r.seconds)
        row["plait_compile_stages_s"] = dict(stages)
        torch._dynamo.reset()
        _say("phase", "compiling again, with a warm cache")
        compiled, row["plait_compile_warm_s"] = self.first_call(program, "plait")
        _say("phase", "judging the results")
        models = program.train and program.module is not None
        twin = bench_check.Twin.of(program, lambda fn: self.compile(fn, "plait")) if models else None
        verdicts = bench_check.check_program(program, compiled, twin)
        row["max_error"] = max(v.max_error for v in verdicts)
        row["verdict"] = max((v.status for v in verdicts), key=["PASS", "WARN", "FAIL"].index)
        wrong = [str(v) for v in verdicts if v.status == "FAIL"]
        if wrong:
            row["error"] = f"wrong result: {wrong[0]}"[:600]
        if self.train_steps and self.suite == "models" and twin is not None:
            _say("phase", "following the loss")
            verdict, row["losses"] = bench_check.check_loss_curve(program, twin, self.train_steps)
            row["losses_verdict"] = str(verdict)
            if verdict.status == "FAIL":
                row["error"] = f"loss curve: {verdict}"[:600]
        return compiled

    def add_peers(self, program: Program, contenders: dict[str, Fn], row: dict[str, Any]) -> None:
        """Eager, Inductor and hand-written peers; one that fails is noted and left out."""
        for who in self.peers:
            if who == "eager":
                contenders["eager"] = program.fn
                continue
            try:
                _say("phase", f"compiling with {who}")
                self.warm_up(who, program.train)
                with _fresh_inductor_cache():
                    contenders[who], row[f"{_key(who)}_compile_s"] = self.first_call(program, who)
            except Exception as error:  # a peer's trouble is not ours: it is recorded beside the others' times
                row[f"{_key(who)}_error"] = _first_line(error)
        contenders.update(program.hand)


def _fresh_inductor_cache() -> Any:
    from torch._inductor import utils

    make: Callable[[], Any] | None = getattr(utils, "fresh_cache", None) or getattr(utils, "fresh_inductor_cache", None)
    return make() if make is not None else nullcontext()


def _key(who: str) -> str:
    return who.replace("-", "_")


def _first_line(error: BaseException) -> str:
    text = next((r.strip() for r in str(error).splitlines() if r.strip()), "")
    return f"{type(error).__name__}: {text}"[:400]


def _say(kind: str, value: Any) -> None:
    print(MARK + json.dumps({"kind": kind, "value": value}), flush=True)


def main(argument: str) -> int:
    """Do the job given as JSON; progress and rows go to standard output as marked lines."""
    job = json.loads(argument)
    if job.get("threads"):
        torch.set_num_threads(job["threads"])
    bench = Bench(job)
    _say("machine", bench_timing.describe_machine(bench.device))
    _say("ceilings", asdict(bench.ceilings))
    for name in job["names"]:
        _say("start", name)
        try:
            row = bench.row(name)
        except Exception as error:  # likewise: the run goes on with the next workload
            traceback.print_exc()
            row = {"name": name, "device": bench.device, "error": _first_line(error)}
        _say("row", row)
        if bench.device == "cuda" and "CUDA error" in row.get("error", ""):
            return 3  # the device context is lost: the parent starts another process
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
