"""Programs that call `scaled_dot_product_attention`, in the forms people use, with makers of their arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Program = Callable[..., Tensor]
CALLS: dict[str, tuple[Program, Callable[[], tuple[Tensor, ...]]]] = {}
RANDOM = ("dropped",)

sdpa = F.scaled_dot_product_attention


def call(make: Callable[[], tuple[Tensor, ...]]) -> Callable[[Program], Program]:
    """Register a program with the maker of its arguments."""

    def add(fn: Program) -> Program:
        CALLS[fn.__name__] = (fn, make)
        return fn

    return add


def qkv(m: int = 70, n: int = 53, heads: int = 4, kv: int = 4, d: int = 16, dtype: Any = None) -> tuple[Tensor, ...]:
    """Queries, keys and values of two batches."""
    sizes = (2, heads, m, d), (2, kv, n, d), (2, kv, n, d)
    return tuple(torch.randn(*s, dtype=dtype) for s in sizes)


def visible(*shape: int) -> Tensor:
    """A mask under which one query sees nothing."""
    mask = torch.rand(*shape) > 0.3
    mask[..., 3, :] = False
    return mask


@call(qkv)
def plain(q, k, v):
    return sdpa(q, k, v)


@call(qkv)
def scaled(q, k, v):
    return sdpa(q, k, v, scale=0.4)


@call(qkv)
def causal(q, k, v):
    return sdpa(q, k, v, is_causal=True)


@call(lambda: qkv(40, 90))
def causal_with_more_keys(q, k, v):
    return sdpa(q, k, v, is_causal=True)


@call(lambda: (*qkv(), visible(2, 1, 70, 53)))
def bool_mask(q, k, v, mask):
    return sdpa(q, k, v, mask)


@call(lambda: (*qkv(), torch.randn(1, 4, 70, 53).masked_fill(~visible(70, 53), -math.inf)))
def float_mask(q, k, v, bias):
    return sdpa(q, k, v, bias)


@call(lambda: qkv(kv=2))
def grouped(q, k, v):
    return sdpa(q, k, v, enable_gqa=True)


@call(lambda: (*qkv(kv=2), visible(2, 4, 70, 53)))
def grouped_under_a_mask_a_head(q, k, v, mask):
    return sdpa(q, k, v, mask, enable_gqa=True)


@call(lambda: (*qkv(1, 90, kv=1), torch.rand(2, 1, 1, 90) > 0.3))
def one_query(q, k, v, mask):
    return sdpa(q, k, v, mask, enable_gqa=True)


@call(lambda: (*qkv(33, 33), torch.randn(33, 16), torch.randn(33, 16)))
def rotated(q, k, v, cos, sin):
    def rope(x: Tensor) -> Tensor:
        return x * cos + torch.cat([-x[..., 8:], x[..., :8]], -1) * sin

    return sdpa(rope(q), rope(k), v, is_causal=True)


@call(lambda: (torch.randn(2, 37, 192), torch.randn(2, 37, 64)))
def gated(x, gate):
    q, k, v = x.view(2, 37, 3, 4, 16).permute(2, 0, 3, 1, 4).unbind(0)
    return sdpa(q, k, v).transpose(1, 2).reshape(2, 37, 64) * torch.sigmoid(gate)


@call(lambda: (*qkv(61, 61), torch.tensor([40, 61])))
def mask_of_positions(q, k, v, lengths):
    i, j = torch.arange(61)[:, None], torch.arange(61)
    return sdpa(q, k, v, ((j <= i) & (i - j < 20))[None, None] & (j < lengths[:, None])[:, None, None])


@call(lambda: (torch.randn(2, 29, 24), torch.randn(2, 29, 24), torch.randn(2, 29, 24)))
def three_dimensions(q, k, v):
    return sdpa(q, k, v[..., :20])


@call(lambda: tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(31, 45)))
def heads_between(q, k, v):
    return sdpa(q, k, v)


@call(lambda: qkv(1, 1, 1, 1, 1))
def one_of_everything(q, k, v):
    return sdpa(q, k, v)


@call(lambda: qkv(40, 300))
def dropped(q, k, v):
    return sdpa(q, k, v, dropout_p=0.25)


def arguments(name: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """The program's arguments, seeded."""
    torch.manual_seed(0)
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in CALLS[name][1]())
