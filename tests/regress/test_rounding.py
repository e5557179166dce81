"""Where values are rounded. `numerics="eager"` rounds wherever eager does; casts that the user wrote round in every mode."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness import agree
from torch import Tensor


@pytest.mark.parametrize("numerics", ["fused", "eager"])
def test_results_of_one_call_agree_about_overflow(numerics: str) -> None:
    """A half product came back infinite while isinf of it said no, because the test saw the wide register."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = x * x
        return y, torch.isinf(y), torch.where(torch.isinf(y), torch.zeros_like(y), y)

    x = torch.full((40,), 300.0, dtype=torch.float16)
    x[::3] = 2.0
    agree(fn, (x,), exact=True, numerics=numerics)


@pytest.mark.parametrize("numerics", ["fused", "eager"])
def test_a_cast_down_and_back_rounds(numerics: str) -> None:
    """The pair of casts was folded away although the user had asked for the rounding."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        a = x.to(torch.bfloat16).to(torch.float32)
        return a, x.to(torch.float16).to(torch.float32), x - a

    agree(fn, (torch.randn(4, 37),), exact=True, numerics=numerics)


@pytest.mark.parametrize("numerics", ["fused", "eager"])
def test_product_is_rounded_before_a_wider_bias(numerics: str) -> None:
    """The user's cast between a product and a float32 bias disappeared."""

    def fn(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        y = (x @ w).to(torch.bfloat16) + b
        return y, y == y.to(torch.bfloat16)

    agree(fn, (torch.randn(2, 15, 32), torch.randn(32, 17), torch.zeros(17)), exact=True, numerics=numerics)


@pytest.mark.parametrize("numerics", ["fused", "eager"])
def test_rounding_that_a_wide_result_shows(numerics: str) -> None:
    """A float32 result took in what a bfloat16 value had been before it was rounded."""

    def fn(x: Tensor, w: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        g = x * w
        return g.float(), m + g.float(), m + torch.sin(x).float()

    a, b = torch.randn(32, 32).bfloat16(), torch.randn(32, 32).bfloat16()
    agree(fn, (a, b, torch.randn(32, 32)), exact=True, numerics=numerics)


@pytest.mark.parametrize("numerics", ["fused", "eager"])
def test_comparisons_see_rounded_values(numerics: str) -> None:
    """Ties that exist after bfloat16 rounding vanished, and with them the gradients."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 1.01
        top = y.amax(-1, keepdim=True)
        hit = y == top
        return hit, hit.sum(-1)

    agree(fn, (torch.linspace(1.0, 1.02, 64).bfloat16().reshape(4, 16),), exact=True, numerics=numerics)


def test_comparisons_of_sums_see_rounded_values() -> None:
    """The same, one operator further: only rounding everywhere gives eager's answer."""

    def fn(x: Tensor) -> Tensor:
        y = x * 1.01
        return (y + 1.0) >= (y.amax(-1, keepdim=True) + 1.0)

    agree(fn, (torch.linspace(1.0, 1.02, 64).bfloat16().reshape(4, 16),), exact=True, numerics="eager")


def test_zero_dimensional_double_does_not_widen() -> None:
    """The scalar was used at full width, or widened the result."""

    def fn(x: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        return x + s, x.float() + s, s + 1, torch.where(x > 0, x, s)

    x = torch.tensor([[0.0, 0.0, 0.1], [-0.2, 1.0, -1.0]]).bfloat16()
    agree(fn, (x, torch.tensor(-0.1, dtype=torch.float64)), exact=True, numerics="eager")


def test_gradient_at_the_kink_of_a_hinge_loss() -> None:
    """In bfloat16 the compiled gradient took the other branch."""

    def fn(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
        return F.margin_ranking_loss(a, b, t, margin=1.7)

    a = torch.tensor([1.703125, 1.703125, 2.5], dtype=torch.bfloat16, requires_grad=True)
    b = torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)
    agree(fn, (a, b, torch.ones(3, dtype=torch.bfloat16)), train=True, exact=True, numerics="eager")


def test_cancelling_products_cancel() -> None:
    """A fused multiply-add rounds one product and not the other: a huge number instead of zero."""

    def fn(a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return a * x + b * x, a * x - a * x, (a * b - b * a).abs().amax()

    a = torch.randn(64) * 1e18
    agree(fn, (a, -a, torch.randn(64) * 1e9), exact=True)


def test_double_stays_double() -> None:
    """Products and constants lost half their digits."""

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        h = F.gelu(F.layer_norm(x @ w, (9,), eps=1e-5) * 0.1 + 1 / 3)
        return h.softmax(-1), h.logsumexp(-1), torch.erf(h) * 1e-9, h.var(-1), torch.sigmoid(h).log(), h.pow(2.5)

    agree(fn, (torch.randn(5, 7, dtype=torch.float64), torch.randn(7, 9, dtype=torch.float64)))


def test_integer_codes_of_a_quantiser_are_exact() -> None:
    """A quotient that differs in its last bit moves a code, so division must be division."""

    def fn(x: Tensor, scale: Tensor, zero: int) -> tuple[Tensor, ...]:
        q = (torch.round(x / scale) + zero).clamp(0, 255).to(torch.uint8)
        s = (x.amax(-1) - x.amin(-1)) / 255
        d = torch.clamp(torch.round(x / s[:, None]), -128, 127).to(torch.int8)
        e = torch.ceil(torch.log2(x.abs().amax(-1))).clamp(-127, 127) + 127
        return q, d, e.to(torch.uint8), (q.float() - zero) * scale

    x = torch.randn(16, 67)
    x[0, :8] = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 3.5, 0.05, 0.15])
    agree(fn, (x, torch.tensor(0.1), 128), (x, torch.tensor(1.0), 3), exact=True)


def test_scale_of_a_bfloat16_maximum_is_a_bfloat16_quotient() -> None:
    """The scale had more digits than eager's."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = (448.0 / torch.clamp(torch.abs(torch.max(x)), min=1e-12)).to(torch.float32)
        return scale, torch.reciprocal(x.abs().amax(-1)).to(torch.float32)

    agree(fn, (torch.randn(16, 16, 40).bfloat16(),), exact=True, numerics="eager")


def test_square_inside_a_norm_is_taken_in_float32() -> None:
    """Squares of half activations near 300 overflowed."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        h = x.float()
        r = torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
        return (h * r).to(x.dtype) * w

    agree(fn, ((torch.randn(3, 5, 512) * 300).half(), torch.ones(512).half()))


def test_gradient_of_a_maximum_whose_operand_is_computed_twice() -> None:
    """The gradient looks for elements equal to the maximum; a recomputed operand with another last bit finds none, and the
    division by their number gives NaN everywhere."""

    def fn(x: Tensor, r: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        pooled = (x * r + m).amax(-1)
        gated = (F.gelu(x) * r).amax(-1)
        return pooled.float(), gated.float(), (x.float().atan2(m.float() + 2) * 3).amin(1)

    order = torch.stack([torch.randperm(50) for _ in range(16)])  # distinct and far apart: rounding makes no ties
    x = (order * 0.125 - 3.0).bfloat16().requires_grad_()
    agree(fn, (x, (torch.rand(16, 1) + 0.1).bfloat16(), torch.rand(16, 1).bfloat16()), train=True)
