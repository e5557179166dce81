"""The option memory: training of a linear layer and a loss with the logits in blocks, forward and backward."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.compiler import Compiled
from plait.errors import BadOption
from plait.options import Options
from plait.oracle.compare import FAIL, check_call, compare
from plait.runtime import report
from plait.runtime.steps import ExternStep
from tests.loss_variants import FORMS, Sizes, arguments

LONG = [n for n in FORMS if n != "ignored"]
Step = Any


def step_of(fn: Any) -> Step:
    def step(x: Tensor, w: Tensor, y: Tensor, extra: Tensor) -> tuple[Tensor, ...]:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        loss = fn(x, w, y, extra)
        return loss.detach(), *torch.autograd.grad(loss, (x, w), torch.ones_like(loss))

    return step


def compiled_form(name: str, **options: Any) -> Any:
    torch._dynamo.reset()
    report.reset()
    return torch.compile(FORMS[name], backend="plait", dynamic=False, options={"strict": True, **options})


def backward() -> Compiled:
    found: list[Compiled] = [r.details["compiled"] for r in report.all() if r.kind == "backward"]
    return next(c for c in found if c.loops or c.blocked)


@pytest.mark.parametrize("name", ["ignored", *(pytest.param(n, marks=pytest.mark.long) for n in LONG)])
def test_values_and_gradients(name: str) -> None:
    """Deeper than kernels hold, so that the logits would be in memory."""
    args = arguments(name, Sizes(rows=600, depth=272, words=1024))
    wide = [a.double() if a.is_floating_point() else a for a in args]
    eager, exact = step_of(FORMS[name])(*args), step_of(FORMS[name])(*wide)
    got = step_of(compiled_form(name, memory="least"))(*args)
    for a, b, c in zip(got, eager, exact, strict=True):
        assert compare(a, b, c).status is not FAIL, f"{name}: {compare(a, b, c)}"
    if name in ("ignored", "with_z_loss"):
        blocked = [b for b in backward().blocked if not b.why]
        assert [(b.count, b.nbytes) for b in blocked] == [(2, 600 * 1024 * 4)]


@pytest.mark.long
def test_sixteen_bits_are_added_up_in_thirty_two() -> None:
    args = arguments("ignored", Sizes(rows=600, depth=272, words=2048, dtype=torch.bfloat16))
    wide = [a.double() if a.is_floating_point() else a for a in args]
    eager, exact = step_of(FORMS["ignored"])(*args), step_of(FORMS["ignored"])(*wide)
    got = step_of(compiled_form("ignored", memory="least"))(*args)
    for a, b, c in zip(got, eager, exact, strict=True):
        assert compare(a, b, c).status is not FAIL, str(compare(a, b, c))
    assert [b.why for b in backward().blocked] == [""]


def _status(key: str) -> int:
    with open("/proc/self/status", encoding="utf-8") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def test_the_logits_are_not_in_memory() -> None:
    """Of the process, as the system counts it: beyond gradients a tenth of the logits."""
    sizes = Sizes(rows=1024, depth=272, words=16384)
    args = arguments("plain", sizes)
    step = step_of(compiled_form("plain", memory="least", pool_mb=0))
    gradients = 4 * (math.prod(args[0].shape) + math.prod(args[1].shape))
    step(*args)
    with open("/proc/self/clear_refs", "w", encoding="utf-8") as reset:
        reset.write("5")  # the peak begins anew
    before = _status("VmRSS")
    kept = step(*args)
    assert len(kept) == 3
    assert _status("VmHWM") - before - gradients < 4 * sizes.rows * sizes.words / 10


def test_what_the_option_takes() -> None:
    assert [Options.make(None, {"memory": v}).memory for v in (None, "auto", "least", 64, "64")] == [
        None,
        None,
        0,
        64,
        64,
    ]
    for bad in (True, -1, 1.5, "much"):
        with pytest.raises(BadOption, match="memory"):
            Options.make(None, {"memory": bad})


def test_a_product_adds_to_a_value_that_dies_there() -> None:
    """In place; not where it is read again."""

    def dies(a: Tensor, m: Tensor, n: Tensor) -> Tensor:
        return torch.addmm(torch.sin(a), m, n)

    def lives(a: Tensor, m: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.sin(a)
        return torch.addmm(y, m, n), y

    args = [torch.randn(30, 20), torch.randn(30, 70), torch.randn(70, 20)]
    for fn, inplace in ((dies, 0), (lives, None)):
        torch._dynamo.reset()
        report.reset()
        check_call(torch.compile(fn, backend="plait", options={"strict": True, "mode": "O1"}), fn, args)
        steps = report.all()[0].details["script"].steps
        assert [s.inplace for s in steps if isinstance(s, ExternStep)] == [inplace]
