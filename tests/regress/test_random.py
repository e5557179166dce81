"""Random numbers: an own stream is allowed, wrong statistics, repetition and a mask that differs in the backward are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import agree
from torch import Tensor


def test_dropout_uses_one_mask_forward_and_backward() -> None:
    """The gradient used another mask than the result."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.dropout(x, 0.25, True)
        return y, y.sum()

    def observe(out: Any, grads: dict[str, Tensor]) -> list[Any]:
        y, total = out
        kept = y != 0
        values = sorted({round(v, 4) for v in y.flatten().tolist()})
        rate = bool(0.70 < kept.float().mean() < 0.80)
        return [torch.equal(kept, grads["argument 0"] != 0), values, rate, torch.allclose(y.sum(), total)]

    agree(fn, *((torch.ones(64, 64, requires_grad=True),) for _ in range(2)), train=True, observe=observe)


def test_draws_have_the_right_statistics_and_do_not_repeat() -> None:
    """Draws repeated from call to call, or left their range."""
    earlier: list[Tensor] = []

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        draws = torch.rand_like(x), torch.randn_like(x), torch.randint(3, 9, x.shape)
        return *draws, torch.rand_like(x), torch.bernoulli(torch.full_like(x, 0.3))

    def observe(out: Any, grads: dict[str, Tensor]) -> list[Any]:
        u, n, i, other, b = out
        earlier.append(u)  # two calls in eager, then two compiled: a run's second must differ from its first
        new = len(earlier) % 2 == 1 or not torch.equal(earlier[-1], earlier[-2])
        spread = bool(abs(n.std() - 1) < 0.04 and abs(n.mean()) < 0.05)
        flat = bool(u.min() >= 0 and u.max() < 1 and abs(u.mean() - 0.5) < 0.02)
        independent = bool(abs(((u - 0.5) * (other - 0.5)).mean()) < 0.01)
        return [new, spread, flat, independent, sorted(set(i.flatten().tolist())), bool(abs(b.mean() - 0.3) < 0.03)]

    agree(fn, *((torch.zeros(100, 100),) for _ in range(2)), observe=observe)


def test_same_seed_same_draws() -> None:
    """A compiled function repeats its draws under one seed, and only then."""
    import harness

    def fn(x: Tensor) -> Tensor:
        return torch.rand_like(x) + F.dropout(x, 0.5, True)

    torch._dynamo.reset()
    compiled = harness.compiled_form(fn, harness.Expect())
    found = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        found.append(compiled(torch.ones(40, 40)))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_nothing_and_of_everything(p: float) -> None:
    """The two ends of the range need no luck."""
    agree(lambda x: F.dropout(x * 2, p, True), (torch.randn(9, 5, requires_grad=True),), train=True)
