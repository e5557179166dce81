"""Attention under masks by numbers of the rows (tests/attention_rows) through every level for a GPU, run by Triton's interpreter
and judged by float64.

As a program (TRITON_INTERPRET=1) it runs every case and prints one JSON line each: {"case": name, "error": text or ""}.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from plait.frontend.capture import capture
from plait.frontend.externs import decompositions
from plait.frontend.joint import rewrites_for
from plait.oracle.compare import FAIL, compare
from tests.attention_rows import RANGES, ROWS, arguments
from tests.attention_variants import Sizes, widened
from tests.triton_training import OPTIONS, noting, report

CASES = ("by_position", "causal_by_length", "window_by_position", "since_start", "between_of_rows")
SIZES = Sizes(b=2, h=2, m=80, n=72, d=16)


def run(name: str) -> str:
    """What is wrong with a case, or nothing."""
    sizes = replace(SIZES, b=1, h=1) if name in RANGES else SIZES
    fn, args, seen = {**ROWS, **RANGES}[name][0], arguments(name, sizes), dict[str, list[int]]()

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return capture(gm, inputs, noting(seen), decompositions(), rewrites_for(OPTIONS))

    with torch.no_grad():
        got = torch.compile(fn, backend=backend, dynamic=False)(*args)
    if list(seen.values()) != [[2]]:
        return f"products a kernel: {seen}"
    verdict = compare(got, fn(*args), fn(*widened(args)))
    return str(verdict) if verdict.status is FAIL else ""


if __name__ == "__main__":
    report(sys.argv[1:] or CASES, run)
