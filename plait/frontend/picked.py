"""Gradients of what picks one element of each row, as a choice instead of a scatter.

    scatter_add(zeros, dim, index, g), index being one long along dim   ->   where(arange == index, g, 0)
    index_put(zeros, [arange, index], g, accumulate)                    ->   the same

A scatter needs all of the zeros in memory; a choice is made where the gradient is used. The forward has looked whether the
indices exist.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from plait.frontend.fx_nodes import call_before

_ZEROS = ("aten.new_zeros.default", "aten.zeros.default", "aten.zeros_like.default")


def choose_picked(graph: fx.Graph, forward: set[fx.Node]) -> None:
    """Rewrite such scatters of a joint graph's backward."""
    for n in [n for n in graph.nodes if n not in forward and n.op == "call_function"]:
        if str(n.target) == "aten.scatter_add.default":
            _scattered(n)
        elif str(n.target) == "aten.index_put.default":
            _put(n)
    graph.eliminate_dead_code()


def _is_zeros(n: Any) -> bool:
    return isinstance(n, fx.Node) and str(n.target) in _ZEROS


def _scattered(n: fx.Node) -> None:
    base, dim, index, source = n.args
    if not _is_zeros(base) or not isinstance(index, fx.Node) or not isinstance(source, fx.Node):
        return
    shape = n.meta["val"].shape
    d = dim % len(shape) if shape and isinstance(dim, int) else -1
    picked = [*shape[:d], 1, *shape[d + 1 :]]
    if d < 0 or list(index.meta["val"].shape) != picked or list(source.meta["val"].shape) != picked:
        return
    _choose(n, d, index, source)


def _put(n: fx.Node) -> None:
    """Rows are told apart by an arange over all of them."""
    base, indices, source = n.args[:3]
    shape = n.meta["val"].shape
    if not _is_zeros(base) or len(shape) != 2 or not isinstance(indices, list | tuple) or len(indices) != 2:
        return
    rows, index = indices
    if not isinstance(rows, fx.Node) or not isinstance(index, fx.Node) or not isinstance(source, fx.Node):
        return
    every = str(rows.target) == "aten.arange.default" and rows.args == (shape[0],)
    if not every or any(list(x.meta["val"].shape) != [shape[0]] for x in (index, source)):
        return
    if index.meta["val"].dtype is not torch.int64:
        return
    aten = torch.ops.aten
    # these count from the end where they are negative
    below = call_before(n, aten.lt.Scalar, index, 0)
    index = call_before(n, aten.where.self, below, call_before(n, aten.add.Tensor, index, shape[1]), index)
    _choose(n, 1, call_before(n, aten.unsqueeze.default, index, 1), call_before(n, aten.unsqueeze.default, source, 1))


def _choose(n: fx.Node, d: int, index: fx.Node, source: fx.Node) -> None:
    """Replace a scatter along dimension d."""
    aten, shape, val = torch.ops.aten, n.meta["val"].shape, n.meta["val"]
    with n.graph.inserting_before(n):
        places = n.graph.call_function(aten.arange.default, (shape[d],), {"device": val.device})
    places.meta = {k: v for k, v in n.meta.items() if k in ("stack_trace", "nn_module_stack", "seq_nr")}
    with val.fake_mode:
        places.meta["val"] = torch.arange(shape[d], device=val.device)
    along = call_before(n, aten.view.default, places, [*[1] * d, shape[d], *[1] * (len(shape) - d - 1)])
    hit = call_before(n, aten.eq.Tensor, along, index)
    zero = call_before(n, aten.full_like.default, source, 0)
    n.replace_all_uses_with(call_before(n, aten.where.self, hit, source, zero))
    n.graph.erase_node(n)
