"""Losses of a linear layer, forward and backward, through every level for a GPU, run by Triton's interpreter and judged by float64.

As a program (TRITON_INTERPRET=1) it runs every case and prints one JSON line each: {"case": name, "error": text or ""}.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from plait.frontend.capture import capture
from plait.frontend.externs import decompositions
from plait.frontend.joint import rewrites_for
from plait.oracle.compare import FAIL, compare
from plait.plan import contract_cost
from tests.loss_variants import FORMS, Sizes, arguments
from tests.triton_training import OPTIONS, noting, report

CASES = ("ignored", "soft_targets")
# long enough to be split over blocks; no tile divides them
SIZES = Sizes(rows=150, depth=24, words=1300)


def run(name: str) -> str:
    """What is wrong with a case, or nothing."""
    seen: dict[str, list[int]] = {}

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return capture(gm, inputs, noting(seen), decompositions(), rewrites_for(OPTIONS))

    x, w, *others = arguments(name, SIZES)

    def step(fn: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        a, b = x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_()
        loss = fn(a, b, *(o.to(dtype) if o.is_floating_point() else o for o in others))
        return loss.detach(), *torch.autograd.grad(loss, (a, b))

    got = step(torch.compile(FORMS[name], backend=backend, dynamic=False), torch.float32)
    if not any(seen["forward"]):
        return f"products a kernel: {seen}"
    for a, b, c in zip(got, step(FORMS[name], torch.float32), step(FORMS[name], torch.float64), strict=True):
        verdict = compare(a, b, c)
        if verdict.status is FAIL:
            return str(verdict)
    return ""


if __name__ == "__main__":
    contract_cost.OWN["cuda"] = contract_cost.WALKED = 100.0  # small products, opened all the same
    report(CASES, run)
