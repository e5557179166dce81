"""The values a program is verified on: as given, shuffled by several seeds, and classes that break careless kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from plait.diagnose.program import copies

_MOST = 8  # elements of one tensor that get a special value: what a product makes of more is NaN everywhere, and says nothing
_EACH = 2048  # elements for each of them


@dataclass(frozen=True)
class Case:
    """Arguments of one run, and the class of values they are."""

    name: str
    args: tuple[Any, ...]
    seed: int


def cases(args: Sequence[Any], seeds: int) -> Iterator[Case]:
    """The arguments as they are, `seeds` - 1 times shuffled, and once for each class of values. Integers stay as they
    are, for they may be indices; a program without floats has the first case only."""
    yield Case("as given", tuple(args), 0)
    if not any(_is_float(x) for x in pytree.tree_leaves(list(args))):
        return
    for seed in range(1, seeds):
        yield Case(f"seed {seed}", _changed(args, seed, _shuffled), seed)
    for k, (name, change) in enumerate(CLASSES.items()):
        yield Case(name, _changed(args, seeds + k, change, 1 if name in _FIRST else None), seeds + k)


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.layout is torch.strided and x.dtype.itemsize > 1


def _changed(
    args: Sequence[Any], seed: int, change: Callable[[Tensor, torch.Generator], Tensor], most: int | None = None
) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(seed)
    made = copies(args)
    done: set[int] = set()
    with torch.no_grad():
        for x in pytree.tree_leaves(made):
            if len(done) == most:
                break
            if _is_float(x) and x.numel() and id(x) not in done and not _overlaps(x):
                done.add(id(x))
                x.copy_(change(x.detach().cpu(), generator))
    return tuple(made)


def _overlaps(x: Tensor) -> bool:
    return any(n > 1 and s == 0 for n, s in zip(x.shape, x.stride(), strict=True))


def _shuffled(x: Tensor, g: torch.Generator) -> Tensor:
    """The same values in other places, each moved a little: signs, zeros and ranges stay what they were."""
    flat = x.flatten()[torch.randperm(x.numel(), generator=g)]
    return (
        (flat.double() * (1 + 0.1 * torch.rand(flat.shape, generator=g, dtype=torch.float64))).to(x.dtype).view(x.shape)
    )


def _sprinkled(value: Callable[[Tensor], float]) -> Callable[[Tensor, torch.Generator], Tensor]:
    def change(x: Tensor, g: torch.Generator) -> Tensor:
        count = min(_MOST, -(-x.numel() // _EACH))
        places = torch.zeros(x.numel(), dtype=torch.bool)
        places[torch.randint(x.numel(), (count,), generator=g)] = True
        places = places.view(x.shape)
        return torch.where(places, torch.full_like(x, value(x)), x)

    return change


def _infinite(x: Tensor, g: torch.Generator) -> Tensor:
    up, down = _sprinkled(lambda _: float("inf")), _sprinkled(lambda _: float("-inf"))
    return down(up(x, g), g)


def _wide(x: Tensor, g: torch.Generator) -> Tensor:
    """All of them times a power of two: what is cut off, or replaced by a number that is large enough for most, shows."""
    _, most = torch.frexp(torch.tensor(torch.finfo(x.dtype).max, dtype=torch.float64))
    return x * 2.0 ** min(16, int(most) // 8)


def _denormal(x: Tensor, g: torch.Generator) -> Tensor:
    return (torch.rand(x.shape, generator=g, dtype=torch.float64) * torch.finfo(x.dtype).tiny).to(x.dtype)


def _zero_rows(x: Tensor, g: torch.Generator) -> Tensor:
    if x.dim() < 2:
        return torch.zeros_like(x)
    rows = torch.rand((*x.shape[:-1], 1), generator=g) < 0.5
    rows.view(-1)[0] = True
    return torch.where(rows, torch.zeros_like(x), x)


CLASSES: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "infinities": _infinite,
    "NaN": _sprinkled(lambda _: float("nan")),
    "infinities in all": _infinite,
    # a few squares of them can still be added up
    "large": _sprinkled(lambda x: float(torch.finfo(x.dtype).max) ** 0.5 / 16),
    "wide": _wide,
    "denormal": _denormal,
    "zero rows": _zero_rows,
}
"""Class of values -> what becomes of a float argument."""
_FIRST = ("infinities", "NaN")  # of the first float argument only: a row of it is lost, and not everything
