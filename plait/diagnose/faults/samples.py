"""Programs that known faults make wrong: each small, plain PyTorch, and right as it is."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.diagnose.faults.known import Sample


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _sample(name: str, fn: Any, *args: Tensor, wants: int = 0) -> Sample:
    """`wants`: how many of the arguments, from the first, want a gradient. A module goes to the device with them."""

    def make(device: str) -> list[Any]:
        if isinstance(fn, nn.Module):
            fn.to(device)
        moved = [a.detach().clone().to(device) for a in args]
        return [m.requires_grad_() if k < wants else m for k, m in enumerate(moved)]

    return Sample(name, fn, make, wants > 0)


def normalised(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-5)


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.tanh(x * weight + bias)


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def causal(scores: Tensor) -> Tensor:
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return torch.softmax(scores.masked_fill(later, float("-inf")), -1)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    queries, keys = scores.shape[-2:]
    later = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(keys - queries + 1)
    return torch.softmax(scores.masked_fill(later, float("-inf")), -1) @ v


def row_maximum(x: Tensor) -> Tensor:
    return x.amax(-1)


def first_largest(x: Tensor) -> Tensor:
    return x.argmax(-1)


def chosen(x: Tensor) -> Tensor:
    return torch.where(x < 0.5, torch.zeros_like(x), torch.ones_like(x)) * 2


def scaled(x: Tensor) -> Tensor:
    return x * 3


def row_sum(x: Tensor) -> Tensor:
    return x.sum(-1)


def long_sum(x: Tensor) -> Tensor:
    return torch.tanh(x).sum()


def narrow(x: Tensor) -> Tensor:
    return x * 2 + 1


def transposed(x: Tensor) -> Tensor:
    return x.t() + 1


def divided(x: Tensor, by: Tensor) -> Tensor:
    return x // by


def rows_of(table: Tensor, at: Tensor) -> Tensor:
    return table[at] * 2


def copied(x: Tensor) -> Tensor:
    return x.clone()


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y, y.clone()


def seen_through_a_view(x: Tensor, y: Tensor) -> Tensor:
    view = x.view(-1)
    x.mul_(y)
    return view * 3


def two_updates(cache: Tensor, i: Tensor, a: Tensor, j: Tensor, b: Tensor) -> Tensor:
    cache.index_copy_(0, i, a)
    cache.index_copy_(0, j, b)
    return cache.sum(0)


def kept_statistic(x: Tensor, statistic: Tensor) -> Tensor:
    y = x * statistic.clone()
    statistic.add_(1)
    return y * y


def dropped(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5) * x


def noisy(x: Tensor) -> Tensor:
    return x + 0.25 * torch.rand_like(x)


def two_uses(x: Tensor) -> Tensor:
    return torch.tanh(x) * x


class Counted(nn.Module):
    """Keeps a running mean of what it sees."""

    mean: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x - self.mean


NORM = _sample("rms_norm", normalised, _random(12, 40), _random(40, seed=1))
SOFTMAX = _sample("softmax", softmax, _random(16, 40))
CAUSAL = _sample("causal softmax", causal, _random(2, 24, 24))
ATTENTION = _sample(
    "attention", attention, _random(2, 24, 16), _random(2, 320, 16, seed=1), _random(2, 320, 16, seed=2)
)
ROW_MAXIMUM = _sample("amax", row_maximum, -_random(16, 40).abs() - 0.1)
ARGMAX = _sample("argmax", first_largest, _random(16, 40))
WHERE = _sample("where", chosen, _random(16, 40))
SCALED = _sample("x * 3", scaled, _random(11, 9))
ROW_SUM = _sample("sum of rows", row_sum, _random(16, 200))
LONG_SUM = _sample("sum of all", long_sum, _random(64, 4096))
NARROW = _sample("bf16 x * 2 + 1", narrow, _random(11, 9, dtype=torch.bfloat16))
TRANSPOSED = _sample("x.t() + 1", transposed, _random(11, 9))
DIVIDED = _sample("x // 3", divided, torch.arange(-20, 20), torch.tensor([3]))
ROWS = _sample("table[at]", rows_of, _random(9, 5), torch.tensor([0, -1, 3, -9]))
COPIED = _sample("x.clone()", copied, _random(11, 9))
TWICE = _sample("y, y.clone()", twice, _random(11, 9))
VIEW = _sample("view of an update", seen_through_a_view, _random(11, 9), _random(11, 9, seed=1))
TWO_UPDATES = _sample(
    "index_copy_ twice",
    two_updates,
    _random(9, 5),
    torch.tensor([1, 2]),
    _random(2, 5, seed=1),
    torch.tensor([2, 3]),
    _random(2, 5, seed=2),
)
BUFFER = Sample("running mean", Counted(9), lambda device: [_random(11, 9).to(device)])
SOFTMAX_GRADIENT = _sample("softmax, training", softmax, _random(16, 40), wants=1)
AFFINE_GRADIENT = _sample(
    "x * w + b, training", affine, _random(12, 40), _random(40, seed=1), _random(40, seed=2), wants=3
)
KEPT = _sample("overwritten statistic", kept_statistic, _random(6, 7), _random(7, seed=1), wants=1)
NOISY = _sample("x + noise", noisy, _random(24, 24))
TWO_USES = _sample("tanh(x) * x, training", two_uses, _random(11, 9), wants=1)
DROPOUT = _sample("dropout, training", dropped, _random(24, 24), wants=1)
