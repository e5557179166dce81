"""Layers with state, pooling, autocast and checkpoints."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from harness import agree
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class ConvNorm(nn.Module):
    """Convolution, batch norm, ReLU, two means."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.relu(self.norm(self.conv(x)))
        return y.mean((2, 3)), y.square().mean((2, 3))


def test_batch_norm_in_training_advances_its_state() -> None:
    """Running statistics and the batch counter differed from eager's."""
    agree(ConvNorm(), *((torch.randn(4, 3, 8, 9, requires_grad=True),) for _ in range(3)), train=True)


def test_batch_norm_first_of_all() -> None:
    """Its input wants no gradient: plait broke on the result that the backward leaves out, and the graph ran in eager."""
    net = nn.Sequential(nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh())
    agree(net, *((torch.randn(6, 5),) for _ in range(3)), train=True)


class CumulativeNorm(nn.Module):
    """Batch norm whose update depends on its counter, which breaks the graph in two."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        return torch.tanh(self.norm(y) * 2.0)


def test_batch_norm_with_a_cumulative_average() -> None:
    """It failed; it must compile what it can, and average."""
    agree(CumulativeNorm(), *((torch.randn(6, 5),) for _ in range(3)), train=True)


class Drifting(nn.Module):
    """A network that changes its own weights after every call."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.conv(x)))
        self.conv.weight.mul_(1.5)
        self.norm.running_mean.add_(0.1)
        return y


def test_weights_that_change_between_calls() -> None:
    """Folding the norm into the convolution froze the weights of the first call."""
    agree(Drifting().eval(), *((torch.randn(2, 3, 7, 7),) for _ in range(3)))


class ReadsAfterUpdate(nn.Module):
    """A running statistic is updated and then read in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return F.batch_norm(y, self.norm.running_mean, self.norm.running_var, None, None, False).sin()


def test_buffer_read_after_its_update_is_not_updated_twice() -> None:
    """A backward that recomputed the update from the updated buffer gave silently wrong gradients."""
    agree(ReadsAfterUpdate(), *((torch.randn(4, 6, 8, 9, requires_grad=True),) for _ in range(2)), train=True)


def test_average_pooling_in_ceil_mode_divides_by_the_clipped_window() -> None:
    """Border windows were divided by the full size, in the gradient too."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        padded = F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False)
        return F.avg_pool2d(x, 3, 2, ceil_mode=True), padded, F.avg_pool1d(x.flatten(0, 1), 3, 2, ceil_mode=True)

    agree(fn, (torch.randn(1, 2, 6, 8, requires_grad=True),), train=True)


def test_max_pooling_at_edges_with_ties_and_nan() -> None:
    """Ceil mode gave an extra row, dilation crashed."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        wide, places = F.max_pool2d(x, [3, 2], [2, 1], [1, 1], [1, 2], return_indices=True)
        return F.max_pool2d(x, 1, stride=2, ceil_mode=True), wide, places, F.max_pool2d(-x.abs(), 3, 2, 1)

    x = torch.randint(0, 3, (1, 2, 6, 7)).float()
    x[0, 0, 2, 3] = float("nan")
    agree(fn, (x,), exact=True)


class Mixed(nn.Module):
    """Linear layers, a norm and a softmax under autocast, and one layer outside."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast(x.device.type, torch.bfloat16):
            h = self.a(x)
            z = self.norm(h)
            p = F.softmax(self.b(z), -1)
            s = (h @ h.t()).mean() * 0.1
        return h, z, p, s, self.b(z.float()) + 1


def test_dtypes_inside_and_outside_autocast() -> None:
    """Result types differed, and values by a lot."""
    agree(Mixed(), (torch.randn(5, 8, requires_grad=True),), train=True, all_double=True)


class Checkpointed(nn.Module):
    """A block recomputed in the backward, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6)

    def inner(self, x: Tensor) -> Tensor:
        return self.b(F.gelu(self.a(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        x = x + checkpoint(self.inner, x, use_reentrant=False)
        return x + checkpoint(self.inner, x, use_reentrant=False)


def test_checkpointed_block_has_the_same_gradients() -> None:
    """Recomputation inside a checkpoint."""
    agree(Checkpointed(), (torch.randn(4, 6, requires_grad=True),), train=True)
