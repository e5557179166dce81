"""`scaled_dot_product_attention` on a card: both forms right, and what the choice is worth, measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._prims_common import check_significant_strides

from plait.frontend import open_attention
from plait.oracle.compare import check
from plait.plan.attention_cost import choose
from plait.runtime import report
from tests.attention_calls import CALLS, RANDOM, arguments, sdpa
from tests.attention_variants import widened

pytestmark = pytest.mark.gpu


def compiled(fn: Any, state: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    torch._dynamo.reset()
    report.reset()
    monkeypatch.setattr(open_attention, "choose", lambda *given: replace(choose(*given), state=state))
    return torch.compile(fn, backend="plait", fullgraph=True, options={"strict": True})


def step(fn: Any, args: Any) -> list[Tensor]:
    given = [a.detach().clone().requires_grad_(a.is_floating_point()) for a in args]
    out = fn(*given)
    grad = torch.linspace(-1, 1, out.numel(), device="cuda", dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, [a for a in given if a.requires_grad], grad)]


@pytest.mark.parametrize("state", ["open", "closed"])
@pytest.mark.parametrize("name", [n for n in CALLS if n not in RANDOM and n != "mask_of_positions"])
def test_a_call(name: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager on the card has other kernels than on the CPU: queries that see nothing are 0 there too, and strides are its own."""
    fn, args = CALLS[name][0], [a.cuda() for a in arguments(name, torch.bfloat16)]
    got, eager = step(compiled(fn, state, monkeypatch), args), step(fn, args)
    check(got, eager, step(fn, widened(args)))
    same, where = check_significant_strides(got[0], eager[0])
    assert same, (where, got[0].stride(), eager[0].stride())


def rotated_and_gated(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, gate: Tensor) -> Tensor:
    half = q.shape[-1] // 2
    q, k = (x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin for x in (q, k))
    return sdpa(q, k, v, is_causal=True) * torch.sigmoid(gate)


def test_both_forms_timed(monkeypatch: pytest.MonkeyPatch, record_property: Any) -> None:
    """Milliseconds of both, in turn; the choice is reported beside them, and no time is asserted."""
    shape = (4, 32, 4096, 128)
    args = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    args += [torch.randn(4096, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    args.append(torch.randn(shape, device="cuda", dtype=torch.bfloat16))
    forms: dict[str, Any] = {}
    with torch.no_grad():
        for state in ("open", "closed"):
            forms[state] = compiled(rotated_and_gated, state, monkeypatch)
            got = forms[state](*args)
            few = [x[:1, :2] if x.ndim == 4 else x for x in args]
            exact = rotated_and_gated(*widened(few))
            check([got[:1, :2]], [rotated_and_gated(*few)], [exact])
        times: dict[str, list[float]] = {state: [] for state in forms}
        for _ in range(20):
            for state, fn in forms.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                fn(*args)
                end.record()
                torch.cuda.synchronize()
                times[state].append(begin.elapsed_time(end))
    for state, found in times.items():
        record_property(state, sorted(found)[len(found) // 2])
        print(f"{state}: {sorted(found)[len(found) // 2]:.3f} ms")
    assert all(min(found) > 0 for found in times.values())
