"""Tensors to run graphs on, with the layouts that the graphs declare."""

from __future__ import annotations

from collections.abc import Callable

import torch

from plait.ir.graph import Graph
from plait.oracle.semantics import TORCH


def arguments(graph: Graph, size: int, seed: int) -> list[torch.Tensor]:
    """Small integers; every symbol is `size`."""
    rng = torch.Generator().manual_seed(seed)
    return laid_out(graph, size, lambda k, count: torch.randint(-4, 5, (count,), generator=rng))


def laid_out(graph: Graph, size: int, values: Callable[[int, int], torch.Tensor]) -> list[torch.Tensor]:
    """Arguments over memory that `values(argument, elements)` gives."""
    out: list[torch.Tensor] = []
    for k, i in enumerate(graph.inputs):
        assert i.layout is not None
        env = {a: size for e in (*i.node.shape, *i.layout.strides, i.layout.offset) for a in e.leaves()}
        shape = [n.evaluate(env) for n in i.node.shape]
        strides = [s.evaluate(env) for s in i.layout.strides]
        span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        offset = i.layout.offset.evaluate(env)
        data = values(k, offset + span).to(TORCH[i.node.dtype])
        out.append(data.as_strided(shape, strides, offset))
    return out
