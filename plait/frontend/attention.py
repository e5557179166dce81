"""`scaled_dot_product_attention` written plainly: the mathematics that is planned with its neighbours where a call is opened.

What eager says of it holds here: scores in float32 (float64 of float64), a causal mask that begins at the first query and the
first key, zeros for a query that a mask lets see nothing, gradients of such a query zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Call = torch.nn.functional.scaled_dot_product_attention
TARGETS = (Call, torch._C._nn.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@dataclass(frozen=True)
class Given:
    """Arguments of a call: tensors (or the nodes that stand for them), and numbers."""

    query: Any
    key: Any
    value: Any
    attn_mask: Any = None
    dropout_p: Any = 0.0
    is_causal: Any = False
    scale: Any = None
    enable_gqa: Any = False

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: dict[str, Any]) -> Given:
        """From a call's arguments, by place and by name."""
        return cls(**dict(zip(_NAMES, args, strict=False)), **kwargs)


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    *,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    grouped: bool,
    dtype: torch.dtype,
    order: tuple[int, ...],
) -> Tensor:
    """(..., heads, queries, width) of `dtype`. Queries (..., heads, queries, depth), keys and values (..., heads, keys, depth or
    width); `grouped`: of fewer heads, each for as many queries' heads. `order`: the result's dimensions, outermost first in memory."""
    shape = query.shape
    # casts are written below: autocast would add its own
    with torch.autocast(query.device.type, enabled=False):
        if attn_mask is not None and attn_mask.is_floating_point() and dtype is not query.dtype:
            attn_mask = attn_mask.to(dtype)
        query, key, value = (x.to(dtype) for x in (query, key, value))
        if grouped:
            query, key, value, attn_mask = _by_group(query, key, value, attn_mask)
        factor = 1.0 / math.sqrt(shape[-1]) if scale is None else scale
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        scores = (query @ key.transpose(-1, -2)).to(wide) * factor
        weights = _weights(scores, attn_mask, is_causal)
        if dropout_p > 0:
            weights = torch.nn.functional.dropout(weights, dropout_p, True)
        out = weights.to(dtype) @ value
    if grouped:
        out = out.reshape(*shape[:-1], value.shape[-1])
    if order == tuple(range(out.ndim)):
        return out
    return out.permute(order).contiguous().permute([order.index(d) for d in range(out.ndim)])


def _by_group(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries by heads of keys. One query a head: queries of a group are rows of one product."""
    heads, kv = q.shape[-3], k.shape[-3]
    per_head = mask is not None and mask.ndim > 2 and mask.shape[-3] != 1
    if isinstance(q.shape[-2], int) and q.shape[-2] == 1 and not per_head:
        return q.reshape(*q.shape[:-3], kv, heads // kv, q.shape[-1]), k, v, mask
    if mask is not None and mask.ndim > 2:
        mask = _in_groups(mask, kv) if per_head else mask.unsqueeze(-3)
    return _in_groups(q, kv), k.unsqueeze(-3), v.unsqueeze(-3), mask


def _in_groups(x: Tensor, groups: int) -> Tensor:
    return x.reshape(*x.shape[:-3], groups, x.shape[-3] // groups, *x.shape[-2:])


def _weights(scores: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Softmax over the keys that are visible; a causal mask alone shows each query the first."""
    if causal:
        i, j = (torch.arange(n, device=scores.device) for n in scores.shape[-2:])
        return torch.softmax(scores.masked_fill(j[None] > i[:, None], -math.inf), -1)
    if mask is None:
        return torch.softmax(scores, -1)
    scores = torch.where(mask, scores, -math.inf) if mask.dtype is torch.bool else scores + mask.to(scores.dtype)
    return torch.ops.aten._safe_softmax(scores, -1)  # type: ignore[no-any-return]
