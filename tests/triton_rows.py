"""Kernels over rows that lie apart, run by Triton's interpreter with NaN between the rows and judged by float64. Results are
written over what nobody needs any more.

As a program (TRITON_INTERPRET=1) it runs every case and prints one JSON line each: {"case": name, "error": text or ""}.
"""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from plait.compiler import all_levels
from plait.emit.triton import emit_triton
from plait.frontend.capture import capture
from plait.frontend.externs import decompositions
from plait.frontend.fx_import import import_fx
from plait.frontend.joint import rewrites_for
from plait.frontend.saved import report_strides
from plait.oracle.compare import FAIL, compare
from plait.plan import contract_cost
from plait.plan.device import SPECS
from plait.plan.layout import Layouts
from plait.runtime import tensors
from plait.runtime.assemble import assemble
from plait.runtime.guarded import boxed
from plait.runtime.link import link
from tests.triton_training import OPTIONS, report

ROWS, DEPTH, WORDS = 12, 24, 197
_BOUNDED = re.compile(r"\([pr]\d < 200\)")  # up to the next multiple of 16 bytes


def loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy((x @ w.t()).float(), y, ignore_index=3)


def sums(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """Down the columns, along the rows, and both at once."""
    h = (x @ w.t()).float()
    return h.tanh().sum(0).square().mean() + h.amax(-1).sum() + h.square().mean()


def scanned(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    h = (x @ w.t()).float()
    return h.cumsum(-1).square().mean() + h.gather(1, h.argmax(-1, keepdim=True)).mean()


def elsewhere(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """Rows that are named by numbers, neighbours along a row, a row from its end."""
    h = (x @ w.t()).float()
    return (h[y % ROWS] * h).sum(-1).mean() + (h[:, 1:] - h[:, :-1]).square().mean() + (h.flip(-1) * h).mean()


def between(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """Read by a product along the row and by one across, after a change of every element."""
    h = x @ w.t()
    return (torch.tanh(h) @ w).float().square().mean() + (h.relu().t() @ x).float().square().mean()


FORMS: dict[str, Callable[..., Tensor]] = {f.__name__: f for f in (loss, sums, scanned, elsewhere, between)}
# form, type, whether products are opened
PLANNED = {
    f"{name} {dtype} {'opened' if opened else 'closed'}": (FORMS[name], dtype, opened)
    for name in FORMS
    for dtype, opened in (("bfloat16", False), ("bfloat16", True), ("float32", False))
    if (name in ("loss", "sums", "between") if opened else name == "loss") or (dtype == "bfloat16" and not opened)
}
CASES = tuple(PLANNED)
FORGOTTEN: list[bool] = []  # whether memory was written over, where that was asked
_is_forgotten = tensors.is_forgotten


def noting(seen: list[int]) -> Any:
    """A compile function that notes how many accesses of each pass run into gaps."""

    def one(graph: fx.GraphModule, example: Sequence[Any], kind: str) -> Any:
        whole = all_levels(import_fx(graph, example), SPECS["h200"], OPTIONS)
        texts = [emit_triton([p.program for p in launch.parts], "k").text for launch in whole.launches if launch.parts]
        seen.append(sum(len(_BOUNDED.findall(t)) for t in texts))
        script = link(whole.graph, whole.plan.reading, whole.launches, Layouts(whole.graph), overwrite=True)
        with unset_fake_temporarily():
            made = assemble(graph, whole, script, OPTIONS)
        report_strides(whole.graph)
        return boxed(made)

    return one


def run(name: str) -> str:
    """What is wrong with a case, or nothing."""
    fn, dtype, opened = PLANNED[name]
    contract_cost.OWN["cuda"] = contract_cost.WALKED = 100.0 if opened else 1e-9
    torch._dynamo.reset()
    torch.manual_seed(7)
    seen: list[int] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return capture(gm, inputs, noting(seen), decompositions(), rewrites_for(OPTIONS))

    x, w = torch.randn(ROWS, DEPTH), torch.randn(WORDS, DEPTH) / DEPTH**0.5
    y = torch.randint(0, WORDS, (ROWS,))

    def step(f: Any, to: torch.dtype, twice: bool = False) -> tuple[Tensor, ...]:
        a, b = (t.to(getattr(torch, dtype)).to(to).requires_grad_() for t in (x, w))
        found = f(a, b, y)
        if twice:
            torch.autograd.grad(found, (a, b), retain_graph=True)
        seen = len(FORGOTTEN)
        out = found.detach(), *torch.autograd.grad(found, (a, b))
        del FORGOTTEN[seen if twice else len(FORGOTTEN) :]
        return out

    own = getattr(torch, dtype)
    compiled = torch.compile(fn, backend=backend, dynamic=False)
    FORGOTTEN.clear()
    got = step(compiled, own)
    own_logits = name.startswith("loss") and name.endswith("closed")
    if own_logits and FORGOTTEN != [True]:
        return f"the gradient of the logits is not written over the logits: {FORGOTTEN}"
    FORGOTTEN.clear()
    if own_logits and (not all(map(torch.equal, got, step(compiled, own, True))) or FORGOTTEN != [False]):
        return f"what a second backward needs is written over: {FORGOTTEN}"
    if len(seen) != 2 or not sum(seen):
        return f"accesses that run into gaps: {seen}"
    for a, b, c in zip(got, step(fn, own), step(fn, torch.float64), strict=True):
        verdict = compare(a, b, c)
        if verdict.status is FAIL:
            return str(verdict)
    return ""


def _noted(slots: Any, slot: int) -> bool:
    FORGOTTEN.append(_is_forgotten(slots, slot))
    return FORGOTTEN[-1]


def _with_nan(empty: Any, shape: Any, strides: Any, dtype: torch.dtype, elems: int) -> Tensor:
    return tensors.view(empty((elems,), (1,), dtype).fill_(torch.nan), shape, strides, 0)


if __name__ == "__main__":
    tensors.roomy = _with_nan
    tensors.is_forgotten = _noted
    tensors.references = lambda x: 1  # the interpreter asks for every UntypedStorage, which is counted for ever
    report(sys.argv[1:] or CASES, run)
