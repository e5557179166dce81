"""A short way to write TilePrograms with products of matrices by hand, and their cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tile_make import TORCH, Make

from plait.ir.dtype import DType
from plait.ir.index import Expr
from plait.tile.program import Dot, Let, Load, Reduce


class MakeDot(Make):
    """With products, and accumulators that are read and scaled."""

    def dot(self, a: int, b: int, dims: tuple[int, ...], operand: torch.dtype, scale: int | None = None) -> int:
        n = self._new({*self.spans[a], *self.spans[b]} - set(dims), TORCH[operand].compute)
        self.body.append(
            Dot(n, "dot", a, dims, self.types[n], self.spans[n], None, scale, other=b, operand=TORCH[operand])
        )
        return n

    def load_again(self, t: torch.Tensor, address: Expr) -> int:
        """From the buffer that holds this very tensor already."""
        b = next(i for i, x in enumerate(self.tensors) if x is t)
        n = self._new(address.axes(), TORCH[t.dtype].compute)
        self.body.append(Load(n, b, address, self.types[n], self.spans[n]))
        return n

    def carried(self, monoid: str, a: int, dims: tuple[int, ...], scale: int | None = None) -> int:
        n = self.reduce(monoid, a, dims)
        last = self.body[-1]
        assert isinstance(last, Reduce)
        self.body[-1] = replace(last, scale=scale)
        return n

    def rounded(self, a: int, storage: DType) -> int:
        n = self._new(self.spans[a], self.types[a])
        self.body.append(Let(n, "round", (a,), self.types[a], self.spans[a], (("dtype", storage),)))
        return n

    def running(self, r: int) -> int:
        return self.let("running", r)

    def before(self, r: int) -> int:
        return self.let("before", r)

    def exp_of_difference(self, a: int, b: int) -> int:
        return self.let("exp", self.let("sub", a, b))


@dataclass
class DotCase:
    """`reference`: float64 values of the outputs, in order; `sizes`: of the symbols."""

    make: MakeDot
    reference: list[torch.Tensor]
    sizes: dict[str, int] = field(default_factory=dict)


CASES: dict[str, Callable[[], DotCase]] = {}


def add(name: str, f: Callable[..., DotCase], *args: Any, **options: Any) -> None:
    CASES[name] = lambda: f(*args, **options)


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def causal(shift: int) -> Callable[[Expr, Expr], Expr]:
    return lambda i, r: i - r + shift


def since(width: int) -> Callable[[Expr, Expr], Expr]:
    return lambda i, r: r - i + width
