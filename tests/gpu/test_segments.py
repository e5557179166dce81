"""Loops under masks of the tokens' numbers on a card: values, gradients, and time beside a mask that hides nothing."""

from __future__ import annotations

import pytest
import torch

from plait.oracle.compare import check
from tests.attention_segments import SEGMENTS
from tests.attention_variants import VARIANTS, Sizes, training_step, widened

pytestmark = pytest.mark.gpu

LONG = Sizes(b=2, h=8, m=2100, n=2100, d=64)


@pytest.mark.parametrize("gluon", ["off", "all"])
@pytest.mark.parametrize("name", SEGMENTS)
def test_values_and_gradients(name: str, gluon: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    fn, make = SEGMENTS[name]
    args = [x.cuda().requires_grad_(x.is_floating_point() and x.dim() == 4) for x in make(LONG)]
    g = torch.randn_like(fn(*args))
    compiled = torch.compile(fn, backend="plait", dynamic=False, options={"strict": True, "gluon": gluon})
    check(training_step(compiled, args, g), training_step(fn, args, g), training_step(fn, widened(args), g))


def test_eight_documents_take_a_fraction_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    """(4, 16, 4096, 128), causal: a mask that hides nothing more is walked whole."""
    fn = VARIANTS["documents"][0]
    q, k, v = (torch.randn(4, 16, 4096, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    ids = (torch.arange(4096, device="cuda") // 512).expand(4, 4096).contiguous()
    compiled = torch.compile(fn, backend="plait", dynamic=False, options={"strict": True})
    times: dict[str, float] = {}
    with torch.no_grad():
        for name, document in (("one", torch.zeros_like(ids)), ("eight", ids)) * 2:
            compiled(q, k, v, document)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(20):
                compiled(q, k, v, document)
            end.record()
            end.synchronize()
            times[name] = begin.elapsed_time(end) / 20
    with capsys.disabled():
        print(times)
    assert times["eight"] < times["one"]
