"""Operators that are taken apart before forward and backward are: then the backward saves what is cheap to save.

Seen whole, a log-softmax or a negative log likelihood pins a tensor as large as the logits for the backward; seen in
parts, the partitioner finds that row statistics are enough, and the rest is computed again where it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def early_decompositions() -> dict[Any, Callable[..., Any]]:
    """Operator overload -> function of ATen calls."""
    from torch._decomp import get_decompositions

    aten = torch.ops.aten
    table: dict[Any, Callable[..., Any]] = dict(
        get_decompositions([aten._log_softmax, aten._log_softmax_backward_data, aten.nll_loss_forward])
    )
    table = {op: fn for op, fn in table.items() if str(op).endswith(".default")}
    table[aten.nll_loss_backward.default] = _nll_loss_backward
    return table


_MEAN = 1  # at::Reduction


def _nll_loss_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> torch.Tensor:
    """-grad at the target's class, else 0, as a comparison of positions and not as a scatter. Only x's shape is used."""
    dim = 0 if x.dim() < 2 else 1
    if reduction == _MEAN:
        grad = grad / total_weight
    if x.dim() > 1 and grad.dim() == target.dim():
        grad = grad.unsqueeze(dim)
    shape = [1] * x.dim()
    shape[dim] = -1
    classes = torch.arange(x.shape[dim], device=x.device).view(shape)
    wanted = target.unsqueeze(dim) if x.dim() > 1 else target
    here = (classes == wanted) & (wanted != ignore_index)
    value = -grad if weight is None else -grad * weight.view(shape)
    return torch.where(here, value, torch.zeros((), dtype=x.dtype, device=x.device))
