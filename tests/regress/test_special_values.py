"""NaN, infinities, signed zeros, subnormals, overflow: the places where algebra on real numbers is not algebra on floats."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness import agree
from torch import Tensor, nn

NAN, INF = float("nan"), float("inf")


class Norms(nn.Module):
    """Batch norm in inference, ELU, group norm of single channels."""

    def __init__(self) -> None:
        super().__init__()
        self.batch, self.group = nn.BatchNorm1d(10), nn.GroupNorm(10, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        t = self.group(F.elu(self.batch(x)))
        return t, torch.log(t.clamp(min=1e-6))


def test_norm_of_constant_planes_before_a_logarithm() -> None:
    """Zero variance leaves what eager's one rounding of x * scale + shift leaves; 0 in its place is another logarithm."""
    agree(Norms().eval(), (torch.ones(6, 10, 12),))

    def fn(x: Tensor, w: Tensor, b: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        groups = F.group_norm(x, 2, w, b), F.group_norm(x, 10, w), F.group_norm(x, 5)
        batch = F.batch_norm(x, None, None, w, b, True), F.batch_norm(x, m, v, w, b), F.batch_norm(x, m, v)
        return *groups, *batch, F.instance_norm(x, None, None, w, b), F.layer_norm(x, (10, 12)), F.layer_norm(x, (12,))

    w, b, v = torch.rand(10) + 0.5, torch.zeros(10), torch.rand(10)
    planes = [(torch.full((6, 10, 12), c), w, b, torch.full((10,), c), v) for c in (0.3, -7.1, 100.3)]
    agree(fn, *planes, exact=True)


def test_running_statistics_of_a_channel_with_an_infinity() -> None:
    """Eager's mean of the batch is a sum over its count, so it is infinite; the variance, and means that are updated as they
    go, are NaN."""

    def fn(x: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, ...]:
        y = F.batch_norm(x, mean, var, training=True)
        return y, *torch.var_mean(x, (0, 2)), F.layer_norm(x, (5,)), F.group_norm(x, 3)

    x = torch.randn(4, 3, 5)
    x[1, 1, 2], x[2, 2, 0] = INF, -INF
    agree(fn, (x, torch.zeros(3), torch.ones(3)))


def test_softmax_of_huge_logits_is_one_hot() -> None:
    """Scale and maximum were swapped, and the rows became NaN."""

    def fn(x: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        return (x * s).softmax(-1), (x * 1e14).softmax(-1), (x / 1e-14).log_softmax(-1).exp()

    agree(fn, (torch.randn(5, 9), torch.tensor(-1.7e14)))


def test_hyperbolic_functions_near_their_overflow() -> None:
    """The mean of two exponentials overflows before cosh does."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return torch.cosh(x), torch.sinh(x), torch.sigmoid(-x), F.softplus(x)

    x = torch.tensor([88.85, 88.9, 89.1, -89.2, 0.0, 1e-8, -1e-8, 104.0] * 3)
    agree(fn, (x,))
    # on a CPU some of eager's elements are infinite early, which ones depends on its vectors
    agree(lambda x: (torch.cosh(x), torch.sinh(x)), (x,), (x.bfloat16(),), (x.double() * 7.95,), exact=True)


def test_subnormal_products_are_kept() -> None:
    """They were flushed to zero, and after loading the library eager flushed them too."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2.0**-124
        return y.view(torch.int32), y != 0

    agree(fn, (torch.tensor([0.1875, 1.0, 0.5, 3.0] * 5),), exact=True)
    assert bool(torch.tensor(2.0**-124) * 0.1875 != 0), "the process flushes subnormals now"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nan_passes_through_either_operand(dtype: torch.dtype) -> None:
    """Minima and clamps handed NaN on from one side only; fmax ignores it."""

    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        clamps = a.clamp(min=0.5), a.clamp(-1, 1), torch.clamp_min(a, b), F.hardtanh(a)
        pairs = torch.maximum(a, b), torch.minimum(b, a), torch.fmax(a, b)
        return torch.relu(a), *clamps, *pairs, torch.where(a > b, a, b)

    a = torch.tensor([NAN, 1.0, -2.0, INF, NAN, 0.0, -INF, 3.0] * 3, dtype=dtype)
    b = torch.tensor([1.0, NAN, 0.0, 2.0, NAN, -1.0, 5.0, INF] * 3, dtype=dtype)
    agree(fn, (a, b), exact=True)


def test_argmax_finds_the_first_nan_and_the_first_tie() -> None:
    """NaN was ignored, or a constant index came back."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return x.argmax(-1), x.argmin(-1), x.max(-1).indices, x.min(0).indices, x.flatten().argmax()

    x = torch.randint(0, 4, (6, 40)).float()
    x[2, 17] = x[4, 3] = x[4, 30] = NAN
    x[5] = 2.0
    agree(fn, (x,), (torch.full((3, 19), -INF),), exact=True)


def test_rows_with_everything_masked() -> None:
    """Plain softmax gives NaN, guarded forms stay finite, and neither spreads."""

    def fn(scores: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        z = scores.masked_fill(~mask, -INF)
        p, m = z.softmax(-1), z.amax(-1, keepdim=True)
        e = (z - torch.where(m.isinf(), 0.0, m)).exp()
        return p, e / e.sum(-1, keepdim=True).clamp_min(1e-30), p.nan_to_num(0.0)

    mask = torch.rand(2, 9, 21) > 0.4
    mask[0, 3] = mask[1, 8] = False
    agree(fn, (torch.randn(2, 9, 21), mask))


def test_adding_zero_changes_the_sign_of_minus_zero() -> None:
    """x + 0 was dropped, so that 1/x came out as the other infinity."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        v = torch.ceil(x)
        return (v + torch.zeros_like(v)).reciprocal(), (v + 0).reciprocal(), 1.0 / (v * 1), 1.0 / (v - 0.0)

    agree(fn, (torch.tensor([-0.5, -0.1, -0.9, 0.0] * 5),), exact=True)


def test_signs_of_zero_results() -> None:
    """minimum, frac and relu gave the other zero."""

    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        found = torch.minimum(a, b), torch.maximum(a, b), torch.frac(a), torch.relu(a), -b, a.round()
        return tuple(torch.copysign(torch.ones_like(a), f) for f in found)

    # whole vectors only: for equal zeros eager's own last few elements follow another rule than the rest
    a, b = torch.tensor([-0.0, 0.0, -0.0, -0.0, 0.0] * 16), torch.tensor([0.0, -0.0, -0.0, 1.0, 0.0] * 16)
    agree(fn, (a, b), exact=True)
    agree(fn, (a[:20], b[:20]), exact=True, numerics="eager")


@pytest.mark.parametrize("numerics", ["fused", "eager"])
def test_signs_of_zeros_between_bounds(numerics: str) -> None:
    """A number for a bound leaves x its zero, a tensor puts its own there."""

    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        tensors = a.clamp(min=b), a.clamp(max=b), a.clamp(b, b + 1), a.clamp(b - 1, b)
        numbers = a.clamp(min=0.0), a.clamp(max=-0.0), a.clamp(-0.0, 1), F.relu6(a), F.hardtanh(a, -0.0, 1.0)
        return tuple(torch.copysign(torch.ones_like(a), f) for f in (*tensors, *numbers))

    a = torch.tensor([-0.0, 0.0] * 32)
    agree(fn, (a, -a), exact=True, numerics=numerics)


def test_constant_expression_that_becomes_nan() -> None:
    """Folding it crashed the compiler."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        t = torch.ones(2, 2)
        u = torch.arccosh(torch.log2(torch.atan2(t, t)))
        return u.softmax(-1) + x, u, torch.full((2,), INF) - INF

    agree(fn, (torch.randn(2, 2),))


def test_scans_keep_infinities_and_take_long_rows() -> None:
    """A running sum of infinities turned NaN; a scan over a fused broadcast failed on long rows."""

    def fn(x: Tensor, b: Tensor, inf: Tensor) -> tuple[Tensor, ...]:
        y = x + b
        sums = y.cumsum(1), (1 + y * 0.01).cumprod(1), y.logcumsumexp(1)
        return *sums, inf.cumsum(0), y.cummax(1)[0], y.flip(1).cumsum(1)

    inf = torch.full((70,), INF, dtype=torch.float64)
    agree(fn, (torch.randn(1, 300, 9), torch.randn(9), inf))


def test_decay_matrix_of_masked_differences() -> None:
    """exp of a masked difference of running sums must be zero, and its gradient finite."""

    def fn(a: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        n = a.shape[-1]
        c = a.cumsum(-1)
        lower = torch.ones(n, n, dtype=torch.bool).tril()
        m = (c[..., :, None] - c[..., None, :]).masked_fill(~lower, -torch.inf).exp()
        return m @ x, m.sum(-1)

    a = (-torch.rand(2, 3, 16) * 4).requires_grad_()
    agree(fn, (a, torch.randn(2, 3, 16, 5, requires_grad=True)), train=True)
