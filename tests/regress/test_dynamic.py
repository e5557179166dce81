"""Sizes and numbers that change between calls: the current value counts every time, and few graphs serve all."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from harness import agree
from torch import Tensor, nn


def test_clamp_bound_follows_its_argument() -> None:
    """After the float argument became dynamic an earlier bound stayed in the kernel."""

    def fn(x: Tensor, limit: float) -> Tensor:
        g, u = x.chunk(2, -1)
        return F.silu(g).clamp(max=limit) * u.clamp(min=-limit, max=limit)

    agree(fn, *(((torch.randn(4, 16) * 4).requires_grad_(), v) for v in (1.0, 2.0, 3.0, 0.5)), train=True)


def test_arguments_computed_from_a_changing_float() -> None:
    """eps, delta and slope stayed at the value of an earlier call."""

    def fn(x: Tensor, y: Tensor, s: float) -> tuple[Tensor, ...]:
        norm = F.rms_norm(x * s, (4,), eps=s + 1e-3)
        return norm, F.huber_loss(x, y * s, delta=s * 0.5), F.leaky_relu(x, s * 0.1), F.elu(x * s, alpha=s)

    x, y = torch.randn(4, 4), torch.randn(4, 4)
    agree(fn, *((x, y, v) for v in (0.5, 1.0, 2.0, 4.0)))


def test_batch_of_one_first() -> None:
    """A first call with batch 1 baked the size in."""

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        h = F.gelu(x @ w)
        return h / h.norm(dim=-1, keepdim=True), h.mean(0), x + x.sum(0, keepdim=True)

    w = torch.randn(6, 5)
    agree(fn, *((torch.randn(b, 6), w) for b in (1, 4, 7, 2, 1, 33)), max_graphs=3)


def test_size_used_as_a_value() -> None:
    """Using a size as a number fixed it."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        n = x.shape[0]
        mask = torch.full((n, n), -1e4).triu(1)
        return x + torch.full((1,), n), mask + x, x.sum() / n

    agree(fn, *((torch.ones(n),) for n in (10, 11, 17)), dynamic=True, max_graphs=1)


class NormGate(nn.Module):
    """Layer norm, linear layer, gate."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.linear(self.norm(x))) * x


def test_training_with_changing_batch_sizes() -> None:
    """The backward of a layer norm fixed the batch size."""
    agree(NormGate(), *((torch.randn(b, 12, requires_grad=True),) for b in (3, 5, 8, 2)), train=True, max_graphs=2)


def test_heads_split_and_merged_at_changing_sizes() -> None:
    """Batch and time both change between calls."""

    def fn(x: Tensor, heads: int) -> tuple[Tensor, ...]:
        b, t, c = x.shape
        q = x.view(b, t, heads, c // heads).transpose(1, 2)
        s = (q @ q.mT).softmax(-1)
        return (s @ q).transpose(1, 2).reshape(b, t, c), x.reshape(-1, c).mean(-1).view(b, t)

    agree(fn, *((torch.randn(b, t, 12), 3) for b, t in ((2, 5), (3, 7), (2, 9), (5, 4))), max_graphs=2)


def test_cache_that_grows_by_one() -> None:
    """Every length was compiled again."""

    def fn(q: Tensor, keys: Tensor, values: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        return (q @ keys.mT * 0.35).softmax(-1) @ values, keys, values

    def step(n: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(1, 2, m, 8) for m in (1, n, n, 1, 1))

    agree(fn, *map(step, (4, 5, 6, 7, 8)), max_graphs=3)


def test_float_that_changes_on_every_call() -> None:
    """A temperature or learning rate compiled anew each time."""

    def fn(x: Tensor, temperature: float, rate: float) -> tuple[Tensor, Tensor]:
        p = (x / temperature).softmax(-1)
        return p, x - p * (rate * temperature)

    agree(fn, *((torch.randn(3, 10), 1.0 + 0.1 * i, 0.01 * (i + 1)) for i in range(6)), max_graphs=2)


def _adam_step(p: Tensor, g: Tensor, m: Tensor, v: Tensor, t: Tensor) -> None:
    t.add_(1)
    m.mul_(0.9).add_(g, alpha=0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    n = t.item()
    denominator = (v.sqrt() / (1 - 0.999**n) ** 0.5).add_(1e-8)
    p.addcdiv_(m, denominator, value=-0.001 / (1 - 0.9**n))


def test_optimiser_that_reads_its_step_counter() -> None:
    """With the graph broken at .item() the values were wrong from the third round on."""

    def fn(start: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        p, m, v, t = start.clone(), torch.zeros_like(start), torch.zeros_like(start), torch.zeros(())
        for _ in range(5):
            _adam_step(p, g, m, v, t)
        return p, m, v

    agree(fn, (torch.randn(7, 3), torch.randn(7, 3)))


def test_one_function_called_from_several_threads() -> None:
    """It crashed, or mixed up the calls."""

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = F.silu(x @ w)
        return h.softmax(-1), (h * 2).sum(0)

    agree(fn, *((torch.randn(3 + i % 4, 8), torch.randn(8, 6)) for i in range(8)), threads=4)
