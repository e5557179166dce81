"""Attention under masks of the tokens' numbers (tests/attention_segments) through every level for a GPU, forward alone and both
passes, run by Triton's interpreter and judged by float64. Blocks are short, so that there are several.

As a program (TRITON_INTERPRET=1) it runs every case and prints one JSON line each: {"case": name, "error": text or ""}.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from plait.compiler import all_levels
from plait.emit.triton import emit_triton
from plait.frontend.capture import capture
from plait.frontend.externs import decompositions
from plait.frontend.fx_import import import_fx
from plait.frontend.joint import rewrites_for
from plait.oracle.compare import FAIL, compare
from plait.plan.device import SPECS
from plait.plan.layout import Layouts
from plait.rewrite.passes import block_bounds
from plait.runtime.assemble import assemble
from plait.runtime.link import link
from plait.tile.program import Dot
from tests.attention_segments import SEGMENTS
from tests.attention_variants import Sizes, training_step, widened
from tests.triton_training import OPTIONS, report

FORWARD = ("in_no_order", "grouped_documents")
TRAINING = ("padded_and_causal",)
CASES = (*FORWARD, *TRAINING)
SIZES = Sizes(b=2, h=2, m=150, n=150, d=16)


def noting(bounded: list[bool]) -> Any:
    """A compile function that notes of each kernel with products whether numbers of the rows bound all its loops."""

    def one(graph: fx.GraphModule, example: Sequence[Any], kind: str) -> Any:
        whole = all_levels(import_fx(graph, example), SPECS["h200"], OPTIONS)
        for p in (p for launch in whole.launches for p in launch.parts):
            if any(isinstance(s, Dot) for s in p.program.walk()):
                loops = emit_triton(p.program, "k").text.split("    for ")[1:]
                heads = [text.split("\n")[0] for text in loops]
                bounded.append(any("_most" in h for h in heads) and "_least" in emit_triton(p.program, "k").text)
        script = link(whole.graph, whole.plan.reading, whole.launches, Layouts(whole.graph))
        return assemble(graph, whole, script, OPTIONS)

    return one


def run(name: str) -> str:
    """What is wrong with a case, or nothing."""
    block_bounds.BLOCK, block_bounds._FEWEST, block_bounds._SHARE = 16, 2, float("inf")
    torch.manual_seed(7)
    (fn, make), bounded = SEGMENTS[name], list[bool]()

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return capture(gm, inputs, noting(bounded), decompositions(), rewrites_for(OPTIONS))

    args = list(make(SIZES))
    compiled = torch.compile(fn, backend=backend, dynamic=False)
    found: list[tuple[Tensor, ...]]
    if name in TRAINING:
        args = [x.requires_grad_(x.is_floating_point()) for x in args]
        g = torch.randn_like(fn(*args))
        found = list(zip(*(training_step(f, a, g) for f, a in ((compiled, args), (fn, args), (fn, widened(args))))))
    else:
        found = [(compiled(*args), fn(*args), fn(*widened(args)))]
    if bounded != [True] * (3 if name in TRAINING else 1):
        return f"kernels with products whose loops are bounded by a summary: {bounded}"
    for got, eager, exact in found:
        verdict = compare(got, eager, exact)
        if verdict.status is FAIL:
            return str(verdict)
    return ""


if __name__ == "__main__":
    report(sys.argv[1:] or CASES, run)
