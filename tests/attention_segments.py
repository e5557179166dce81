"""Attention whose masks are made of numbers of the tokens, on both sides: documents, positions that are loaded, times, what is
kept. SEGMENTS maps a name to (function, maker of its arguments), as tests/attention_variants does.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tests.attention_variants import Fn, Make, Sizes, positions, qkv, scores, weighted

SEGMENTS: dict[str, tuple[Fn, Make]] = {}


def segment(make: Make) -> Callable[[Fn], Fn]:
    """Register a function with the maker of its arguments."""

    def add(fn: Fn) -> Fn:
        SEGMENTS[fn.__name__] = (fn, make)
        return fn

    return add


def sorted_ids(s: Sizes) -> Tensor:
    """Of a batch: documents of other lengths in each row of it, from negative numbers on."""
    lengths = torch.tensor([5, 37, 1, 16, 3, 29])
    rounds = -(-(s.n + 7 * s.b) // int(lengths.sum()))
    ids = torch.repeat_interleave(torch.arange(6 * rounds) - 2, lengths.repeat(rounds))
    return torch.stack([ids[7 * b : 7 * b + s.n] for b in range(s.b)])


def padded_ids(s: Sizes) -> Tensor:
    """The last fifth is padding, which sees itself."""
    ids = sorted_ids(s).to(torch.int32)
    ids[:, s.n - s.n // 5 :] = -1
    return ids


def shuffled_ids(s: Sizes) -> Tensor:
    return torch.randint(-4, 9, (s.b, s.n), generator=torch.Generator().manual_seed(2))


def one_id(s: Sizes) -> Tensor:
    return torch.full((s.b, s.n), 7)


def unknown_times(s: Sizes) -> Tensor:
    """Rising floats, among them infinities and NaN, which equals nothing: those rows see nothing."""
    times = (sorted_ids(s) * 0.37).float()
    times[:, 3], times[:, s.n // 2], times[:, -1] = -math.inf, math.nan, math.inf
    return times


def same(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    return weighted(scores(q, k).masked_fill(ids[:, None, :, None] != ids[:, None, None, :], -math.inf), v)


@segment(lambda s: (*qkv(s), sorted_ids(s)))
def same_document(q, k, v, ids):
    return same(q, k, v, ids)


@segment(lambda s: (*qkv(s), shuffled_ids(s)))
def in_no_order(q, k, v, ids):
    return same(q, k, v, ids)


@segment(lambda s: (*qkv(s), padded_ids(s)))
def padded_and_causal(q, k, v, ids):
    i, j = positions(q, k)
    mask = (ids[:, None, :, None] == ids[:, None, None, :]) & (j <= i)
    return weighted(torch.where(mask, scores(q, k), -math.inf), v)


@segment(lambda s: (*qkv(s), one_id(s)))
def all_alike(q, k, v, ids):
    return same(q, k, v, ids)


@segment(lambda s: (*qkv(s), unknown_times(s)))
def float_ids(q, k, v, ids):
    return same(q, k, v, ids)


@segment(lambda s: (*qkv(s), torch.arange(s.m) + s.n - s.m, torch.arange(s.n)))
def window_by_positions(q, k, v, pos_q, pos_k):
    apart = pos_q[:, None] - pos_k[None]
    return weighted(scores(q, k).masked_fill((apart < 0) | (apart >= 40), -math.inf), v)


@segment(lambda s: (*qkv(s, kv_heads=2), sorted_ids(s)))
def grouped_documents(q, k, v, ids):
    b, h, m, d = q.shape
    g = k.shape[1]
    s = (q.view(b, g, h // g, m, d) @ k[:, :, None].transpose(-1, -2)).float() * d**-0.5
    s = s.masked_fill(ids[:, None, None, :, None] != ids[:, None, None, None, :], -math.inf)
    return (torch.softmax(s, -1).to(q.dtype) @ v[:, :, None]).view(b, h, m, d)


@segment(lambda s: (*qkv(s), (torch.arange(s.n) % s.n < s.n // 3).expand(s.b, s.n)))
def kept(q, k, v, keep):
    return weighted(scores(q, k).masked_fill(~keep[:, None, None], -math.inf), v)
