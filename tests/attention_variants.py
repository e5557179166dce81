"""Attention as users write it: plain functions of tensors, each of which should become one forward kernel.

Shapes are (batch, heads, length, head_dim). VARIANTS maps a name to (function, maker of its arguments); makers take the
sizes and a dtype, so that the same program is planned for a card and run here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    """Sizes of one run: batch, heads, length of queries and of keys, head dim."""

    b: int = 2
    h: int = 4
    m: int = 512
    n: int = 512
    d: int = 64
    dtype: torch.dtype = torch.bfloat16


Fn = Callable[..., Tensor]
Make = Callable[[Sizes], tuple[Tensor, ...]]
VARIANTS: dict[str, tuple[Fn, Make]] = {}


def qkv(s: Sizes, kv_heads: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values."""
    k = kv_heads or s.h
    return (
        torch.randn(s.b, s.h, s.m, s.d, dtype=s.dtype),
        torch.randn(s.b, k, s.n, s.d, dtype=s.dtype),
        torch.randn(s.b, k, s.n, s.d, dtype=s.dtype),
    )


def variant(make: Make = qkv) -> Callable[[Fn], Fn]:
    """Register a function with the maker of its arguments."""

    def add(fn: Fn) -> Fn:
        VARIANTS[fn.__name__] = (fn, make)
        return fn

    return add


def scores(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2)).float() / math.sqrt(q.shape[-1])


def weighted(s: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(s, -1).to(v.dtype) @ v


def positions(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(q.shape[-2], device=q.device)[:, None], torch.arange(k.shape[-2], device=q.device)[None]


@variant()
def full(q, k, v):
    return weighted(scores(q, k), v)


@variant()
def half_precision_throughout(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v


@variant()
def causal(q, k, v):
    i, j = positions(q, k)
    return weighted(scores(q, k).masked_fill(j > i, -math.inf), v)


@variant()
def causal_by_tril(q, k, v):
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    return weighted(torch.where(mask, scores(q, k), -math.inf), v)


@variant()
def window(q, k, v):
    i, j = positions(q, k)
    return weighted(scores(q, k).masked_fill((j > i) | (i - j > 128), -math.inf), v)


@variant()
def prefix(q, k, v):
    i, j = positions(q, k)
    return weighted(scores(q, k).masked_fill((j > i) & (j >= 37), -math.inf), v)


@variant(lambda s: (*qkv(s), torch.exp2(-torch.arange(1, s.h + 1).float())))
def alibi(q, k, v, slope):
    i, j = positions(q, k)
    return weighted((scores(q, k) - slope[:, None, None] * (i - j)).masked_fill(j > i, -math.inf), v)


@variant()
def softcap(q, k, v):
    return weighted(30 * torch.tanh(scores(q, k) / 30), v)


@variant(lambda s: (*qkv(s), torch.randn(32, s.h)))
def learned_position_bias(q, k, v, table):
    i, j = positions(q, k)
    bucket = (j - i).clamp(-16, 15) + 16
    return weighted(scores(q, k) + table[bucket].permute(2, 0, 1), v)


@variant(lambda s: (*qkv(s), torch.randn(s.h, s.m, s.n)))
def bias_of_windows(q, k, v, bias):
    return weighted(scores(q, k) + bias, v)


@variant(lambda s: qkv(s, kv_heads=2))
def grouped_query(q, k, v):
    b, h, m, d = q.shape
    g = k.shape[1]
    s = (q.view(b, g, h // g, m, d) @ k[:, :, None].transpose(-1, -2)).float() * d**-0.5
    return (torch.softmax(s, -1).to(q.dtype) @ v[:, :, None]).view(b, h, m, d)


@variant(lambda s: qkv(s, kv_heads=1))
def multi_query(q, k, v):
    return weighted(scores(q, k), v)


@variant(lambda s: (*qkv(s), torch.arange(s.n)[None] < torch.tensor([[s.n], [s.n - s.n // 3]])))
def padding(q, k, v, keep):
    return weighted(scores(q, k).masked_fill(~keep[:, None, None], -math.inf), v)


@variant(lambda s: (*qkv(s), torch.arange(s.m).div(100, rounding_mode="floor")[None].expand(s.b, s.m)))
def documents(q, k, v, document):
    same = document[:, None, :, None] == document[:, None, None, :]
    i, j = positions(q, k)
    return weighted(scores(q, k).masked_fill(~same | (j > i), -math.inf), v)


@variant(lambda s: (*qkv(s), torch.randn(s.h)))
def sink(q, k, v, extra):
    s = scores(q, k)
    e = extra[:, None, None]
    top = torch.maximum(s.amax(-1, keepdim=True), e)
    p = torch.exp(s - top)
    return (p / (p.sum(-1, keepdim=True) + torch.exp(e - top))).to(v.dtype) @ v


@variant(lambda s: (*qkv(s), *qkv(s)[:2]))
def differential(q, k, v, q2, k2):
    return (torch.softmax(scores(q, k), -1) - 0.3 * torch.softmax(scores(q2, k2), -1)).to(v.dtype) @ v


@variant()
def sigmoid(q, k, v):
    return torch.sigmoid(scores(q, k) - math.log(k.shape[-2])).to(v.dtype) @ v


@variant(lambda s: (*qkv(s), torch.randn(s.d), torch.randn(s.d)))
def normed(q, k, v, wq, wk):
    def norm(x: Tensor, w: Tensor) -> Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * w).to(x.dtype)

    return weighted(scores(norm(q, wq), norm(k, wk)), v)


@variant(lambda s: (*qkv(s), torch.randn(s.m, s.d), torch.randn(s.m, s.d)))
def rotated(q, k, v, cos, sin):
    def rope(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return (x * cos + turned * sin).to(x.dtype)

    return weighted(scores(rope(q), rope(k)), v)


@variant()
def dropped(q, k, v):
    return torch.nn.functional.dropout(torch.softmax(scores(q, k), -1), 0.2, True).to(v.dtype) @ v


@variant(lambda s: (torch.randn(s.b, s.m, 3 * s.h * s.d, dtype=s.dtype),))
def sliced_projection(qkv):
    b, n, width = qkv.shape
    q, k, v = qkv.view(b, n, 3, 4, width // 12).permute(2, 0, 3, 1, 4).unbind(0)
    return weighted(scores(q, k), v).transpose(1, 2).reshape(b, n, width // 3)


def widened(args: Sequence[Tensor]) -> list[Tensor]:
    """The arguments in float64, for a reference."""
    return [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in args]


def training_step(fn: Fn, args: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """The result, and the gradients of the arguments that want one."""
    y = fn(*args)
    return [y, *torch.autograd.grad(y, [x for x in args if x.requires_grad], grad.to(y.dtype))]


def arguments(name: str, sizes: Sizes) -> tuple[Any, ...]:
    """The variant's arguments, seeded."""
    torch.manual_seed(0)
    return VARIANTS[name][1](sizes)
