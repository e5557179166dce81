"""Attention whose masks compare keys' positions with numbers that are tensors: positions of queries in a cache, lengths,
first points. ROWS maps a name to (function, maker of its arguments), as tests/attention_variants does; RANGES those of many ranges,
empty ones among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from plait.compiler import Compiled, all_levels
from plait.frontend.externs import decompositions
from plait.frontend.fx_import import import_fx
from plait.options import Options
from plait.plan.device import SPECS
from tests.attention_variants import Fn, Make, Sizes, positions, qkv, scores, weighted

ROWS: dict[str, tuple[Fn, Make]] = {}


def add(make: Make, fn: Fn) -> Fn:
    """Register a function with the maker of its arguments."""
    ROWS[fn.__name__] = (fn, make)
    return fn


def random_positions(s: Sizes) -> Tensor:
    """In no order; rows that see nothing, a quarter of them together, and numbers far out of range."""
    pos = torch.randint(-3, s.n + 5, (s.m,), generator=torch.Generator().manual_seed(3))
    pos[::7] = torch.tensor([-1, 2**63 - 1, -(2**63), -(2**32), 2**32])[torch.arange(len(pos[::7])) % 5]
    pos[: s.m // 4] = -1
    return pos


def in_order(s: Sizes) -> Tensor:
    """As a prompt's are."""
    return torch.arange(s.m) + (s.n - s.m)


def lengths(s: Sizes) -> Tensor:
    """Of a batch: part of the keys, none, more than there are."""
    return torch.tensor([s.n * 2 // 3, 0, s.n + 9])[torch.arange(s.b) % 3].to(torch.int32)


def by_position(q, k, v, pos):
    mask = torch.arange(k.shape[-2], device=q.device)[None] <= pos[:, None]
    return weighted(scores(q, k).masked_fill(~mask, -math.inf), v)


def by_position_in_order(q, k, v, pos):
    return by_position(q, k, v, pos)


def grouped_by_position(q, k, v, pos):
    groups = q.shape[1] // k.shape[1]
    return by_position(q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), pos)


def by_length(q, k, v, length):
    keep = torch.arange(k.shape[-2], device=q.device)[None] < length[:, None]
    return weighted(torch.where(keep[:, None, None], scores(q, k), -math.inf), v)


def causal_by_length(q, k, v, length):
    i, j = positions(q, k)
    keep = (j < length[:, None, None]) & (j <= i)
    return weighted(scores(q, k).masked_fill(~keep[:, None], -math.inf), v)


def window_by_position(q, k, v, pos):
    j = torch.arange(k.shape[-2], device=q.device)[None]
    hidden = (j > pos[:, None]) | (j < pos[:, None] - 40)
    return weighted(scores(q, k).masked_fill(hidden, -math.inf), v)


def since_start(q, k, v, start):
    i, j = positions(q, k)
    return weighted(scores(q, k).masked_fill((j > i) | (j < start[:, None]), -math.inf), v)


def not_in_window(q, k, v):
    """Numbers that are positions: a mask that is denied as a whole."""
    i, j = positions(q, k)
    return weighted(scores(q, k).masked_fill(~((j <= i) & (i - j < 300)), -math.inf), v)


add(lambda s: (*qkv(s), random_positions(s)), by_position)
add(lambda s: (*qkv(s), in_order(s)), by_position_in_order)
add(lambda s: (*qkv(s, kv_heads=2), in_order(s)), grouped_by_position)
add(lambda s: (*qkv(s), lengths(s)), by_length)
add(lambda s: (*qkv(s), lengths(s)), causal_by_length)
add(lambda s: (*qkv(s), random_positions(s).clamp(-(2**40))), window_by_position)
add(lambda s: (*qkv(s), torch.arange(s.m) // 100 * 100), since_start)


def arguments(name: str, sizes: Sizes) -> tuple[Tensor, ...]:
    """The variant's arguments, seeded."""
    torch.manual_seed(0)
    return {**ROWS, **RANGES}[name][1](sizes)


def planned(name: str, sizes: Sizes) -> Compiled:
    """The variant's plan for a card."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        args = [mode.from_tensor(x) for x in arguments(name, sizes)]
        gm = make_fx(torch.func.functionalize({**ROWS, **RANGES}[name][0]), decomposition_table=decompositions())(*args)
    return all_levels(import_fx(gm, args), SPECS["h200"], Options.make(None, {}))


def ends(s: Sizes) -> list[tuple[int, int]]:
    """First points and ends of ranges of keys: none, one, about tiles' edges (of 16 and of 128), all, more than there are, crossed,
    negative."""
    n = s.n
    found = [(0, 0), (0, 1), (0, 15), (0, 16), (0, 17), (0, 127), (0, 128), (0, 129), (0, n - 1), (0, n), (0, n + 9)]
    found += [(0, -5), (-9, -5), (-9, 5), (5, 3), (n, 1), (16, 16), (16, 32), (127, 128), (128, 128), (128, 256)]
    return [*found, (129, 255), (n - 1, n), (n, n), (n, n + 5), (n + 3, 2 * n), (-(2**40), 2**40), (2**40, -(2**40))]


def batches(s: Sizes) -> tuple[Tensor, ...]:
    """A range for each batch."""
    first, end = torch.tensor(ends(s)).t().contiguous()
    return *qkv(replace(s, b=len(first))), first, end


def rows(s: Sizes, held: int) -> tuple[Tensor, ...]:
    """A range for so many rows."""
    first, end = torch.tensor(ends(s)).repeat_interleave(held, 0).t().contiguous()
    return *qkv(replace(s, m=len(first))), first, end


RANGES: dict[str, tuple[Fn, Make]] = {}


def of_batches(seen: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> None:
    """Register attention to keys j of which `seen`(i, j, first, end) says that row i has them."""

    def fn(q, k, v, first, end):
        i, j = positions(q, k)
        keep = seen(i, j, first[:, None, None], end[:, None, None])
        return weighted(torch.where(keep[:, None], scores(q, k), -math.inf), v)

    RANGES[seen.__name__] = fn, batches


@of_batches
def until(i, j, first, end):
    return j < end


@of_batches
def since(i, j, first, end):
    return j >= first


@of_batches
def between(i, j, first, end):
    return (j >= first) & (j < end)


@of_batches
def causal_until(i, j, first, end):
    return (j <= i) & (j < end)


@of_batches
def causal_between(i, j, first, end):
    return (j <= i) & (j >= first) & (j < end)


@of_batches
def window_until(i, j, first, end):
    return (j <= i) & (i - j < 100) & (j < end)


@of_batches
def window_since(i, j, first, end):
    return (j <= i) & (i - j < 100) & (j >= first)


@of_batches
def prefix_until(i, j, first, end):
    return ((j <= i) | (j < 37)) & (j < end)


def between_of_rows(q, k, v, first, end):
    j = torch.arange(k.shape[-2], device=q.device)[None]
    return weighted(scores(q, k).masked_fill((j < first[:, None]) | (j >= end[:, None]), -math.inf), v)


# neighbouring groups of 64 rows, whose ranges differ; ranges within a block
RANGES["between_of_groups"] = between_of_rows, lambda s: rows(s, 64)
RANGES["between_of_rows"] = between_of_rows, lambda s: rows(s, 5)


def saturated(s: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of which some lie far beyond a cap, beside others that do not; a row that is NaN, and a last key that is infinite."""
    q, k, v = qkv(s)
    q[..., ::7, :] *= 1e3
    q[..., 5::11, :] *= 30
    q[0, 0, 9] = math.nan
    k[..., -1, :] = math.inf
    return q, k, v


def capped_causal(q, k, v):
    i, j = positions(q, k)
    return weighted((30 * torch.tanh(scores(q, k) / 30)).masked_fill(j > i, -math.inf), v)
