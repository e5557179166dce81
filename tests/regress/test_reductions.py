"""Reductions, norms and scans: long rows, several results of one input, awkward axes, their gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from harness import agree
from torch import Tensor, nn


class PlaneNorms(nn.Module):
    """Group and instance norm."""

    def __init__(self) -> None:
        super().__init__()
        self.group, self.instance = nn.GroupNorm(2, 4), nn.InstanceNorm2d(4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.group(x), self.instance(x + 3)


def test_norms_over_large_planes() -> None:
    """The accumulation drifted further from float64 than eager's."""
    agree(PlaneNorms(), (torch.randn(1, 4, 300, 300),))


def test_softmax_of_rows_far_longer_than_a_block() -> None:
    """Long rows need a split or an online reduction, and must still sum to one."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        p = torch.softmax(x, -1)
        return p.sum(-1), torch.logsumexp(x, -1), p.amax(-1), torch.log_softmax(x.half().float(), -1)[:, :8]

    x = torch.randn(2, 70001) * 4
    x[1, 69999] = 60.0
    agree(fn, (x,))


def test_several_reductions_of_one_input() -> None:
    """Largest and mean magnitude, mean square, and a sum in double."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return x.abs().max(), x.abs().mean(), x.square().mean(), x.double().sum()

    agree(fn, (torch.randn(256, 700),))


def test_softmax_over_the_leading_axis() -> None:
    """The awkward direction for memory."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        e = (x - x.amax(0, keepdim=True)).exp()
        return e / e.sum(0, keepdim=True), x.softmax(0)

    agree(fn, (torch.randn(48, 2048),))


class TwoNorms(nn.Module):
    """Layer norm with GELU plus RMS norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gain = nn.LayerNorm(256), nn.Parameter(torch.ones(256))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(x)) + F.rms_norm(x, (256,), self.gain, 1e-6)


def test_norms_forward_and_backward() -> None:
    """The gradient reduces both ways, over rows and over columns."""
    agree(TwoNorms(), (torch.randn(64, 256, requires_grad=True),), train=True)


def test_look_alike_of_a_norm_with_another_broadcast() -> None:
    """It was taken for a layer norm although its scale runs along another axis."""

    def fn(x: Tensor, g: Tensor, far: Tensor) -> tuple[Tensor, ...]:
        c = x - x.mean(-1, keepdim=True)
        n = c / (c.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        return g * n, far * n + far, n * x.mean(1, keepdim=True)

    flat = torch.randn(1, 1), torch.randn(2), torch.randn(4, 1)
    agree(fn, (torch.randn(2, 5, 7), torch.randn(5, 1), torch.randn(3, 1, 1, 1)), flat)


def test_gradient_of_a_running_product_with_a_zero() -> None:
    """It crashed on long rows, or was far off."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return torch.cumprod(x, 1), torch.prod(x, 1), x.cumsum(1).sin()

    x = torch.rand(3, 33, dtype=torch.float64) + 0.4
    x[1, 5] = 0.0
    agree(fn, (x.requires_grad_(),), train=True)


def test_first_order_recurrence_by_doubling() -> None:
    """The log-depth form that people write by hand."""

    def fn(a: Tensor, x: Tensor) -> Tensor:
        a = torch.sigmoid(a)
        step = 1
        while step < x.shape[1]:
            shifted = F.pad(x, (0, 0, step, 0))[:, :-step]
            decay = F.pad(a, (0, 0, step, 0), value=1.0)[:, :-step]
            x, a, step = x + a * shifted, a * decay, step * 2
        return x

    agree(fn, (torch.randn(2, 13, 5, requires_grad=True), torch.randn(2, 13, 5, requires_grad=True)), train=True)


def test_many_live_values_in_one_region() -> None:
    """Fusing all of it ran out of registers; it must at least be right."""

    def fn(*xs: Tensor) -> tuple[Tensor, ...]:
        live = [torch.sin(x) + 0.1 * i for i, x in enumerate(xs)]
        for _ in range(3):
            live = [a * 0.7 + b.tanh() * 0.3 for a, b in zip(live, live[1:] + live[:1])]
        total = live[0]
        for v in live[1:]:
            total = total + v * v
        return total, live[0], live[-1], torch.stack(live).amax(0)

    agree(fn, tuple(torch.randn(16, 64) for _ in range(20)))
