"""Losses over a vocabulary as users write them: of rows `x`, a table `w` of one row a word, and what is to be found.

Each form is a function of (x, w, y, extra): `y` are words, `extra` what some forms need besides (a bias, weights of words,
another model's rows and table).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Form = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
FORMS: dict[str, Form] = {}


@dataclass(frozen=True)
class Sizes:
    rows: int = 70
    depth: int = 24
    words: int = 1300
    dtype: torch.dtype = torch.float32


def form(f: Form) -> Form:
    FORMS[f.__name__] = f
    return f


def arguments(name: str, sizes: Sizes, seed: int = 3) -> list[Tensor]:
    """x, w, y, extra; some words are to be ignored."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=g) * scale).to(sizes.dtype)

    x, w = randn(sizes.rows, sizes.depth), randn(sizes.words, sizes.depth, scale=2 / sizes.depth**0.5)
    y = torch.randint(0, sizes.words, (sizes.rows,), generator=g)
    if name in ("ignored", "ignored_words", "weighted", "smooth_and_weighted"):
        y = torch.where(torch.arange(sizes.rows) % 5 == 2, -100, y)
    extra = {
        "biased": (sizes.words,),
        "weighted": (sizes.words,),
        "smooth_and_weighted": (sizes.words,),
        "soft_targets": (sizes.rows, sizes.words),
        "taught": (sizes.rows, sizes.words),
        "taught_by_rows": (sizes.rows, sizes.depth),
    }.get(name, (1,))
    e = randn(*extra)
    if "weighted" in name:
        e = torch.rand(extra, generator=g)
    return [x, w, y, e.softmax(-1) if name == "soft_targets" else e]


@form
def plain(x: Tensor, w: Tensor, y: Tensor, extra: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), y)


@form
def as_it_comes(x: Tensor, w: Tensor, y: Tensor, extra: Tensor) -> Tensor:
    """In the type of the operands throughout."""
    return F.cross_entropy(x @ w.t(), y)


@form
def ignored(x: Tensor, w: Tensor, y: Tensor, extra: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), y)


@form
def ignored_words(x: Tensor, w: Tensor, y: Tensor, extra: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), y, ignore_index=-100, reduction="sum") / (y != -100).sum()


@form
def each_row(x: Tensor, w: Tensor, y: Tensor, extra: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), y, reduction="none")


@form
def biased(x: Tensor, w: Tensor, y: Tensor, extra: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w, extra).float(), y)


@form
def capped(x: Tensor, w: Tensor, y: Tensor, extra: Tensor) -> Tensor:
    return F.cross_entropy(torch.tanh(F.linear(x, w).float() / 3) * 3, y)


@form
def smooth(x: Tensor, w: Tensor, y: Tensor, extra: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), y, label_smoothing=0.1)


@form
def weighted(x: Tensor, w: Tensor, y: Tensor, extra: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), y, weight=extra.float())


@form
def smooth_and_weighted(x: Tensor, w: Tensor, y: Tensor, extra: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), y, weight=extra.float(), label_smoothing=0.1)


@form
def with_z_loss(x: Tensor, w: Tensor, y: Tensor, extra: Tensor) -> Tensor:
    logits = F.linear(x, w).float()
    z = torch.logsumexp(logits, -1)
    return F.cross_entropy(logits, y) + 1e-3 * (z * z).mean()


@form
def by_hand(x: Tensor, w: Tensor, y: Tensor, extra: Tensor) -> Tensor:
    """The z-loss and the loss from one logsumexp."""
    logits = F.linear(x, w).float()
    z = torch.logsumexp(logits, -1)
    return (z - logits.gather(-1, y[:, None])[:, 0]).mean() + 1e-3 * z.square().mean()


@form
def log_softmax_picked(x: Tensor, w: Tensor, y: Tensor, extra: Tensor) -> Tensor:
    p = F.log_softmax(F.linear(x, w).float(), -1)
    return -p[torch.arange(x.shape[0]), y].mean()


@form
def shifted(x: Tensor, w: Tensor, y: Tensor, extra: Tensor) -> Tensor:
    """Each row of a sequence is to find the next word."""
    logits = F.linear(x.view(2, -1, x.shape[1]), w).float()
    here, there = logits[:, :-1], y.view(2, -1)[:, 1:]
    return F.cross_entropy(here.reshape(-1, w.shape[0]), there.reshape(-1))


@form
def soft_targets(x: Tensor, w: Tensor, y: Tensor, extra: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), extra.float())


@form
def taught(x: Tensor, w: Tensor, y: Tensor, extra: Tensor) -> Tensor:
    """The divergence from another model's logits."""
    p = F.log_softmax(F.linear(x, w).float(), -1)
    return F.kl_div(p, F.log_softmax(extra.float(), -1), log_target=True, reduction="batchmean")


@form
def taught_by_rows(x: Tensor, w: Tensor, y: Tensor, extra: Tensor) -> Tensor:
    """The other model's logits are a product, too."""
    p = F.log_softmax(F.linear(x, w).float(), -1)
    return F.kl_div(p, F.softmax(F.linear(extra, w).float(), -1), reduction="batchmean")
