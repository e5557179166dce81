"""Quantisation to float8: saturation, scales a row, a block or a step old."""

from __future__ import annotations

import torch
from harness import agree
from torch import Tensor


def test_norm_then_a_scale_for_every_token() -> None:
    """Scale and codes left the band that unfused code keeps."""

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        h = x.float()
        y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * w
        scale = (y.abs().amax(-1, keepdim=True) / 448.0).clamp_min(1e-12)
        q = (y / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        return q, scale * 448.0, (q.float() * scale).isnan().any()

    x = torch.randn(6, 48).bfloat16()
    x[2] = 0.0
    agree(fn, (x, torch.rand(48) + 0.5))


def test_cast_with_the_last_scale_and_this_maximum() -> None:
    """Cast, transposed copy and maximum of one input."""

    def fn(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        y = (x.float() * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        return y, y.t().contiguous(), x.abs().max().float()

    agree(fn, (torch.randn(128, 96).bfloat16() * 30, torch.tensor(2.0)))


def test_casts_at_and_past_the_largest_value() -> None:
    """Overflow was NaN in one stack and the largest value in another."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        a, b = x.to(torch.float8_e4m3fn), x.to(torch.float8_e5m2)
        return a, b, a.float() * 2, (x * 0.5).to(torch.float8_e4m3fn).to(torch.bfloat16)

    inf, nan = float("inf"), float("nan")
    edges = [448.0, 449.0, 464.0, 465.0, 1000.0, -1000.0, inf, -inf, nan]
    tiny = [2**-9, 2**-10, 57344.0, 61440.0, 0.0, -0.0, 17.3]
    agree(fn, (torch.tensor((edges + tiny) * 2),), exact=True)


def test_norm_then_a_scale_for_every_block() -> None:
    """The block's index was not recognised, or its scale was broadcast wrongly."""

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x.float()
        y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * w
        b = y.unflatten(-1, (-1, 32))
        e = torch.floor(torch.log2(b.abs().amax(-1, keepdim=True).clamp_min(1e-20))) - 8
        q = (b * torch.exp2(-e)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).flatten(-2)
        return q, (e.squeeze(-1) + 127).to(torch.uint8)

    agree(fn, (torch.randn(32, 256).bfloat16(), torch.rand(256) + 0.5))
