"""Losses: ignored targets, smoothing, weights, and the gradient that comes in from outside."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from harness import agree
from torch import Tensor, nn


def test_every_option_of_cross_entropy() -> None:
    """Label smoothing was ignored, or ignored targets counted."""

    def fn(x: Tensor, t: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        smooth = F.cross_entropy(x, t, weight=w, ignore_index=-100, label_smoothing=0.1)
        soft = F.cross_entropy(x, x.detach().softmax(-1))
        nothing = F.cross_entropy(x, torch.full_like(t, -100), reduction="sum")
        return smooth, F.cross_entropy(x.float(), t, reduction="sum"), soft, nothing

    t = torch.tensor([1, -100, 4, 0, -100, 2])
    agree(fn, (torch.randn(6, 5, requires_grad=True), t, torch.rand(5) + 0.5), train=True)


def test_mean_over_no_tokens_is_eagers_nan() -> None:
    """A batch with every label ignored gave zero or garbage."""

    def fn(x: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        return F.cross_entropy(x, t), F.cross_entropy(x, t, reduction="none"), F.nll_loss(x, t)

    agree(fn, (torch.randn(4, 5), torch.full((4,), -100)))


class Head(nn.Module):
    """Last layer and a loss weighted per token afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(10, 15)

    def forward(self, h: Tensor, t: Tensor, w: Tensor) -> Tensor:
        loss = F.cross_entropy(self.out(h).flatten(0, 1), t.flatten(), reduction="none", ignore_index=-100)
        return (loss * w.flatten()).sum() / w.sum()


def test_unreduced_loss_receives_the_weights_in_its_gradient() -> None:
    """The fused loss ignored the incoming gradient."""
    t = torch.randint(0, 15, (2, 4))
    t[0, 1] = -100
    agree(Head(), (torch.randn(2, 4, 10, requires_grad=True), t, torch.rand(2, 4)), train=True)


def test_gradient_of_a_soft_margin_that_is_kept_by_far() -> None:
    """The gradient was 1 - sigmoid, nothing but rounding for large margins."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return F.soft_margin_loss(x, y, reduction="sum")

    agree(fn, (torch.linspace(13, 18, 41).requires_grad_(), torch.ones(41)), train=True)
