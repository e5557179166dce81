"""Remembered choices on a card: a second process takes them without timing, and builds nothing else."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

PROGRAM = """
import torch
def make():
    def f(x, w):
        a = torch.softmax(x * 2, -1)
        return torch.nn.functional.gelu(a @ w), (x + 1).square().sum(0)
    return f, [torch.randn(n, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (8192, 4096)]
"""


def tune(home: pathlib.Path, *words: str) -> dict[str, Any]:
    """What `plait tune` says, in a process of its own."""
    (home / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "plait", "tune", str(home / "program.py"), "--train", "--json", "-", *words]
    env = {**os.environ, "PLAIT_CACHE": str(home / "cache"), "PLAIT_STRICT": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_second_process_takes_what_the_first_has_found(tmp_path: pathlib.Path) -> None:
    first = tune(tmp_path, "--out", str(tmp_path / "out.txt"))
    assert first["kernels"] and {k["state"] for k in first["kernels"]} <= {"timed", "remembered"}  # equal kernels: once
    assert any(k["state"] == "timed" for k in first["kernels"]) and not first["errors"]
    second = tune(tmp_path)
    assert {k["state"] for k in second["kernels"]} == {"remembered"}
    assert [k["chosen"] for k in second["kernels"]] == [k["chosen"] for k in first["kernels"]]
    assert second["built"] < first["built"]
    (tmp_path / "other").mkdir()
    third = tune(tmp_path / "other", "--option", f"tuned={tmp_path / 'out.txt'}")
    assert {k["state"] for k in third["kernels"]} == {"remembered"} and third["built"] == second["built"]


def test_the_budget_stops_it_and_the_next_run_goes_on(tmp_path: pathlib.Path) -> None:
    first = tune(tmp_path, "--budget", "0.01")
    assert (first["stopped"], first["done"]) == ("budget", 0)
    assert tune(tmp_path)["stopped"] == ""
