"""The option memory on a card: training of a linear layer and a loss, what it holds and how long it takes."""

from __future__ import annotations

import pytest
import torch

from tests.loss_variants import FORMS

pytestmark = pytest.mark.gpu


def test_logits_in_blocks() -> None:
    """Of the logits' 2.1 GB a quarter at most: the sum of dX in float32, as much beside it while it is added up, and blocks."""
    rows, depth, words = 8192, 4096, 128256
    x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16).requires_grad_()
    w = (torch.randn(words, depth, device="cuda", dtype=torch.bfloat16) / depth**0.5).requires_grad_()
    y = torch.randint(0, words, (rows,), device="cuda")
    held: dict[str, int] = {}
    found: dict[str, tuple[torch.Tensor, ...]] = {}
    for memory in ("auto", "least"):
        torch._dynamo.reset()
        fn = torch.compile(FORMS["plain"], backend="plait", dynamic=False, options={"strict": True, "memory": memory})
        torch.autograd.grad(fn(x, w, y, x), (x, w))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        found[memory] = torch.autograd.grad(fn(x, w, y, x), (x, w))
        end.record()
        torch.cuda.synchronize()
        held[memory] = torch.cuda.max_memory_allocated() - before - 2 * (x.numel() + w.numel())
        print(f"memory={memory}: {start.elapsed_time(end):.1f} ms, {held[memory] / 1e6:.0f} MB beyond gradients")
    assert held["least"] < 2 * rows * words / 4
    assert all(torch.isfinite(g).all() for g in found["least"])  # their values: tests/unit/test_memory_option.py
