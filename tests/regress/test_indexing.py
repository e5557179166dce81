"""Gathers and scatters: bad indices are errors, duplicates combine, empty segments stay finite."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from harness import agree, both_raise
from torch import Tensor


def test_negative_token_is_an_error() -> None:
    """It read from the end of the table."""
    both_raise(lambda i, w: F.embedding(i, w) * 2, torch.tensor([2, -2, 4]), torch.randn(5, 6))


def test_index_add_rejects_a_negative_row() -> None:
    """It updated the last one."""

    def fn(x: Tensor, i: Tensor, s: Tensor) -> Tensor:
        return torch.index_add(x, 0, i, s).clamp_max(1.0)

    both_raise(fn, torch.zeros(4, 3), torch.tensor([0, -1]), torch.ones(2, 3))


def test_scatter_reduce_rejects_a_negative_place() -> None:
    """It was accepted."""

    def fn(x: Tensor, i: Tensor, s: Tensor) -> Tensor:
        return torch.scatter_reduce(x, 0, i, s, "sum")

    both_raise(fn, torch.arange(4.0), torch.tensor([0, 1, 0, 1, 2, -1]), torch.arange(6.0))


def test_class_beyond_the_logits_is_an_error() -> None:
    """The loss read past the row."""
    both_raise(lambda x, t: F.nll_loss(x.log_softmax(-1), t), torch.randn(4, 3), torch.tensor([0, 1, 3, 2]))


def test_row_of_an_empty_tensor_is_an_error() -> None:
    """The process died."""
    both_raise(lambda x: x[[0]] * 2, torch.empty(0))


def test_layer_of_another_dtype_is_an_error() -> None:
    """A half input to a float32 layer of size one was accepted."""
    both_raise(torch.nn.Linear(1, 1), torch.randn(1, 1).half())


def test_scatter_reduce_combines_every_duplicate() -> None:
    """Colliding targets were wrong for all but sums."""

    def fn(d: Tensor, i: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        kinds = ("sum", "amax", "amin", "mean", "prod")
        return tuple(d.scatter_reduce(0, i, s, kind, include_self=own) for kind in kinds for own in (True, False))

    agree(fn, (torch.randn(8, 6), torch.randint(0, 8, (20, 6)), torch.randn(20, 6)))


def test_mean_of_empty_segments_is_finite() -> None:
    """A segment that nobody points at made loss and gradient NaN."""

    def fn(x: Tensor, segment: Tensor) -> tuple[Tensor, ...]:
        total = torch.zeros(6, x.shape[1]).index_add(0, segment, x)
        count = torch.zeros(6).index_add(0, segment, torch.ones_like(segment, dtype=x.dtype)).clamp(min=1)
        mean = total / count[:, None]
        safe = torch.where(mean > 0, mean, torch.ones_like(mean)).log()
        return mean, torch.where(mean > 0, safe, torch.zeros_like(mean)), (mean.square().sum(-1) + 1e-12).sqrt()

    segment = torch.tensor([0, 1, 1, 3, 3, 3, 5, 0, 0, 1, 3, 5, 5, 0, 1])
    agree(fn, (torch.randn(15, 4, requires_grad=True), segment), train=True)


def test_gradient_of_a_segment_maximum() -> None:
    """Without a start value the gradient was NaN."""

    def fn(x: Tensor, segment: Tensor) -> tuple[Tensor, Tensor]:
        low = torch.full((4, x.shape[1]), float("-inf"))
        a = low.index_reduce(0, segment, x, "amax", include_self=False)
        index = segment[:, None].expand_as(x)
        return a, torch.zeros(4, x.shape[1]).scatter_reduce(0, index, x, "amax", include_self=False)

    agree(fn, (torch.randn(9, 3, requires_grad=True), torch.tensor([0, 1, 1, 2, 3, 3, 3, 0, 2])), train=True)


class Experts(torch.nn.Module):
    """Two experts a token, their gates renormalised, results added back."""

    def __init__(self, experts: int = 4, dim: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(dim, experts, bias=False)
        self.up = torch.nn.Parameter(torch.randn(experts, dim, hidden) * 0.3)
        self.down = torch.nn.Parameter(torch.randn(experts, hidden, dim) * 0.3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p = self.gate(x).softmax(-1)
        g, chosen = p.topk(2, -1)
        g = g / g.sum(-1, keepdim=True)
        token = torch.arange(x.shape[0]).repeat_interleave(2)
        expert = chosen.flatten()
        y = torch.bmm(F.silu(torch.bmm(x[token].unsqueeze(1), self.up[expert])), self.down[expert]).squeeze(1)
        out = torch.zeros_like(x).index_add(0, token, y * g.flatten()[:, None])
        load = torch.zeros_like(p[0]).scatter_add(0, expert, torch.ones_like(expert, dtype=p.dtype))
        return out, (load / expert.numel() * p.mean(0)).sum()


def test_mixture_of_experts_adds_repeated_rows() -> None:
    """The combining scatter was silently wrong."""
    agree(Experts(), (torch.randn(14, 8, requires_grad=True),), train=True)
