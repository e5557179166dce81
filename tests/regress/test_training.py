"""Gradients through custom functions, scatters, flags, second derivatives; optimisers over many tensors; complex numbers."""

from __future__ import annotations

from typing import Any

import torch
from harness import agree
from torch import Tensor, nn


class HalfGradient(torch.autograd.Function):
    """Hands its input on and halves the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 0.5


class Mix(torch.autograd.Function):
    """Two operands with a backward of their own."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b + a - b * 0.5

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return g * (b + 1), g * (a - 0.5)


def test_custom_function_that_returns_its_input() -> None:
    """Its backward was lost."""
    agree(lambda x: HalfGradient.apply(x * 3.0).tanh(), (torch.randn(6, 5, requires_grad=True),), train=True)


def test_custom_function_given_one_tensor_twice() -> None:
    """Half of the gradient was lost."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return Mix.apply(x, x).sum(), Mix.apply(x, x * 2)

    agree(fn, (torch.tensor([0.7, -1.3, 2.1, 0.05], requires_grad=True),), train=True)


def test_gradient_of_what_a_diagonal_scatter_overwrites() -> None:
    """It was zero everywhere, not only where the base is replaced."""

    def fn(x: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        return torch.diagonal_scatter(x * 2, d).sum(), torch.select_scatter(x, d, 0, 1).sin()

    agree(fn, (torch.randn(8, 8, requires_grad=True), torch.randn(8, requires_grad=True)), train=True)


def test_flags_of_results_made_without_gradient() -> None:
    """no_grad regions changed which results carry a gradient."""

    def fn(x: Tensor, y: Tensor, unused: Tensor) -> tuple[Tensor, ...]:
        a = x * 2
        with torch.no_grad():
            b = x + y
        c = (x * y).detach()
        return a + b, b, c, y.exp() * c, x > 0

    agree(fn, tuple(torch.randn(4, 3, requires_grad=True) for _ in range(3)), train=True)


class Curvature(nn.Module):
    """A gradient differentiated again."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.net(x).pow(3).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        (gg,) = torch.autograd.grad(g.square().sum(), x)
        return y.detach(), g.detach(), gg


def test_second_derivative_is_right_or_refused() -> None:
    """It was silently wrong."""
    agree(Curvature(), (torch.randn(5, 3, requires_grad=True),), grad_mode=True, may_raise=True)


def test_optimiser_step_over_many_small_tensors() -> None:
    """Hundreds of kernel arguments failed, or took minutes to compile."""

    def fn(ps: list[Tensor], gs: list[Tensor], ms: list[Tensor], vs: list[Tensor], t: Tensor) -> Tensor:
        torch._foreach_lerp_(ms, gs, 0.1)
        torch._foreach_mul_(vs, 0.999)
        torch._foreach_addcmul_(vs, gs, gs, 0.001)
        root = torch._foreach_sqrt(vs)
        torch._foreach_div_(root, (1 - 0.999**t).sqrt())
        torch._foreach_add_(root, 1e-8)
        update = torch._foreach_div(ms, root)
        torch._foreach_mul_(update, -0.01 / (1 - 0.9**t))
        torch._foreach_mul_(ps, 1 - 1e-4)
        torch._foreach_add_(ps, update)
        return torch.stack(torch._foreach_norm(ps)).norm()

    def many(scale: float = 1.0) -> list[Tensor]:
        return [torch.randn(3 + i % 5, 1 + i % 4) * scale for i in range(60)]

    agree(fn, (many(), many(), many(0.1), [v.abs() for v in many()], torch.tensor(3.0)))


def test_optimiser_step_on_complex_parameters() -> None:
    """It did not compile."""

    def fn(ps: list[Tensor], gs: list[Tensor]) -> list[Tensor]:
        torch._foreach_add_(ps, gs, alpha=-0.1)
        return torch._foreach_mul(ps, 2.0)

    def pair() -> list[Tensor]:
        return [torch.randn(3, 2, dtype=torch.complex64), torch.randn(4, dtype=torch.complex64)]

    agree(fn, (pair(), pair()), strict=False)


def test_rotary_embedding_in_complex_numbers() -> None:
    """It did not compile; running it in eager is fine."""

    def fn(q: Tensor, angle: Tensor) -> Tensor:
        turn = torch.polar(torch.ones_like(angle), angle)
        c = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
        return torch.view_as_real(c * turn[None, :, None]).flatten(3).type_as(q)

    angle = torch.outer(torch.arange(7.0), 10000 ** (-torch.arange(4.0) / 4))
    agree(fn, (torch.randn(2, 7, 3, 8, requires_grad=True), angle), train=True, strict=False)


def test_lazily_conjugated_tensor_read_as_real_numbers() -> None:
    """The pending conjugation was dropped."""

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        c = torch.complex(x, x * 2).conj()
        y = c @ w
        return torch.view_as_real(y.conj().resolve_conj()), c.imag, (y.mH @ y).real

    agree(fn, (torch.randn(3, 4), torch.randn(4, 4, dtype=torch.complex64)), strict=False)
