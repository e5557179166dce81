"""What the run.py of a bisection's folder does: the saved program with one decision fewer and with it, side by side."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from plait.diagnose.folder import read_inputs
from plait.diagnose.trials import Case, Trial
from plait.options import Options

_SLOWER = 1.1


def replay(folder: Path) -> int:
    """Print what each gives; 1 while the fault is there, 0 when it is gone."""
    found = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    case = load_case(folder)
    number = found["number"]
    print(f"{found['fault']}: {found['decision']}")
    if number is None:
        trials = [("compiled", case.compile(case.options.fuel or 0, groups=case.options.groups))]
    else:
        trials = [(f"with {n}", case.compile(n)) for n in (number - 1, number)]
    return _show_slow(case, trials) if found["fault"] == "slow" else _show_wrong(case, trials)


def load_case(folder: Path) -> Case:
    """The program of a folder."""
    spec = importlib.util.spec_from_file_location("plait_repro_graph", folder / "graph.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    gm = fx.symbolic_trace(module.Repro())
    inputs = tuple(read_inputs(folder))
    FakeTensorProp(gm).propagate(*inputs)
    given: dict[str, Any] = json.loads((folder / "options.json").read_text(encoding="utf-8"))
    return Case(gm, inputs, inputs, "inference", Options.make(None, given), torch.get_rng_state())


def _show_wrong(case: Case, trials: list[tuple[str, Trial | None]]) -> int:
    wrong = False
    for name, trial in trials:
        bad = [v for v in case.verdicts(trial) if v.status == "FAIL"] if trial is not None else []
        print(f"{name}: {'wrong: ' + bad[0].message if bad else 'right'}")
        wrong = bool(bad)
    return int(wrong)


def _show_slow(case: Case, trials: list[tuple[str, Trial | None]]) -> int:
    there = [(name, t) for name, t in trials if t is not None]
    times = case.times_us([t for _, t in there], rounds=21)
    for (name, _), us in zip(there, times, strict=True):
        print(f"{name}: {us:.1f} us")
    return int(len(times) == 2 and times[1] >= _SLOWER * times[0])
