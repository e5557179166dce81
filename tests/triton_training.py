"""Training steps of attention through every level for a GPU, both passes run by Triton's interpreter and judged by float64.

As a program (TRITON_INTERPRET=1) it runs every case and prints one JSON line each: {"case": name, "error": text or ""}.
"""

from __future__ import annotations

import json
import pathlib
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from plait.compiler import all_levels
from plait.frontend.capture import capture
from plait.frontend.externs import decompositions
from plait.frontend.fx_import import import_fx
from plait.frontend.joint import rewrites_for
from plait.options import Options
from plait.oracle.compare import FAIL, compare
from plait.plan.device import SPECS
from plait.plan.layout import Layouts
from plait.runtime.assemble import assemble
from plait.runtime.link import link
from plait.tile.program import Dot
from tests.attention_variants import VARIANTS, Sizes, arguments, training_step, widened

CASES = ("causal", "window", "softcap")
SIZES = Sizes(b=1, h=2, m=144, n=144, d=16)
OPTIONS = replace(Options.make(None, {}), backend="triton", strict=True)


def noting(seen: dict[str, list[int]]) -> Any:
    """A compile function that notes how many products each kernel has."""

    def one(graph: fx.GraphModule, example: Sequence[Any], kind: str) -> Any:
        whole = all_levels(import_fx(graph, example), SPECS["h200"], OPTIONS)
        parts = [p.program for launch in whole.launches for p in launch.parts]
        seen[kind] = sorted(sum(isinstance(s, Dot) for s in p.walk()) for p in parts)
        script = link(whole.graph, whole.plan.reading, whole.launches, Layouts(whole.graph))
        return assemble(graph, whole, script, OPTIONS)

    return one


def run(name: str) -> str:
    """What is wrong with a case, or nothing."""
    torch.manual_seed(7)
    fn, seen = VARIANTS[name][0], dict[str, list[int]]()

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return capture(gm, inputs, noting(seen), decompositions(), rewrites_for(OPTIONS))

    args = [x.requires_grad_(x.is_floating_point()) for x in arguments(name, SIZES)]
    g = torch.randn_like(fn(*args))
    got = training_step(torch.compile(fn, backend=backend, dynamic=False), args, g)
    if seen != {"forward": [2], "backward": [3, 4]}:
        return f"products a kernel: {seen}"
    for a, b, c in zip(got, training_step(fn, args, g), training_step(fn, widened(args), g), strict=True):
        verdict = compare(a, b, c)
        if verdict.status is FAIL:
            return str(verdict)
    return ""


def report(cases: Sequence[str], run: Callable[[str], str]) -> None:
    """Run cases in the interpreter, a line of JSON each."""
    import triton_interpreter  # noqa: F401  # what the interpreter lacks

    for name in cases:
        try:
            error = run(name)
        except Exception:
            error = traceback.format_exc()[-1500:]
        print(json.dumps({"case": name, "error": error}), flush=True)


if __name__ == "__main__":
    report(CASES, run)
