"""Nodes put into a graph of ATen calls: with the place in the user's code, and the value that fake tensors say."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_OWN = ("val", "tensor_meta", "unbacked_bindings")  # what a node knows of itself alone


def call_before(at: fx.Node, target: Any, *args: Any, marked: bool = False, **kwargs: Any) -> fx.Node:
    """A call before the node `at`; `marked`: with the marks for recomputation that `at` has from the user."""
    with at.graph.inserting_before(at):
        out = at.graph.call_function(target, args, kwargs)
    out.meta = {k: v for k, v in at.meta.items() if k not in _OWN and (marked or k != "recompute")}
    given, named = fx.map_arg((out.args, out.kwargs), lambda n: n.meta["val"])
    with next(a.meta["val"] for a in out.all_input_nodes).fake_mode:
        out.meta["val"] = target(*given, **named)
    return out


def last_placeholder(graph: fx.Graph) -> fx.Node:
    """Behind it all arguments are there."""
    placeholders: list[fx.Node] = [n for n in graph.nodes if n.op == "placeholder"]
    return placeholders[-1]


def is_view(node: fx.Node) -> bool:
    """A call whose result shows the memory of an operand, and that changes none."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    aliases = [a.alias_info for a in node.target._schema.arguments if a.alias_info is not None]
    return bool(aliases) and not any(bool(a.is_write) for a in aliases)
