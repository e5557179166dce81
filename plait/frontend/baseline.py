"""What eager would do for a captured graph: its operators, each a kernel of its own, and the bytes that each moves.

Read off the FX graph before anything is changed. Views move nothing. Parts of an operator that was decomposed on the way
count as that operator. What the backward computes a second time is not eager's work, and counts nothing.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from plait.frontend.origins import ATTENTION, entries, origin_of

_UNKNOWN_SIZE = 64  # of a size that depends on data, as Graph.hint has it
_VIEWS = frozenset(("_unsafe_view", "_reshape_alias", "detach", "lift_fresh"))
# write some rows of their first operand in place, in eager
_UPDATES = frozenset(
    [
        "index_put",
        "_unsafe_index_put",
        "index_copy",
        "index_fill",
        "index_add",
        "slice_scatter",
        "select_scatter",
        "scatter",
        "scatter_add",
    ]
)
# read as many elements of their first operand as they give
_PICKS = frozenset(["index", "gather", "index_select", "embedding", "take", "_unsafe_index"])


@dataclass(frozen=True)
class Operator:
    """An operator of eager's. `call`: the function or module that the user called, if known; `fx`: its nodes; `product_flops`:
    of matrix products and convolutions, by torch's own formulas; `feeds`: nodes of the operators that read its results; `regions`:
    labels of the user's regions around it."""

    call: str
    aten: str
    fx: tuple[str, ...]
    line: str
    module: str
    bytes_read: float
    bytes_written: float
    product_flops: float
    backward: bool = False
    recomputed: bool = False
    feeds: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()


def operators(gm: fx.GraphModule, in_backward: bool = False) -> tuple[Operator, ...]:
    """Operators of a graph of ATen calls, in order; of a backward, the forward's are formed a second time."""
    parts: dict[Any, list[fx.Node]] = {}
    for n in gm.graph.nodes:
        if n.op == "call_function" and isinstance(n.target, torch._ops.OperatorBase) and not _is_free(n):
            parts.setdefault(_whole(n), []).append(n)
    return tuple(_operator(nodes, in_backward) for nodes in parts.values())


def _whole(n: fx.Node) -> Any:
    """What a node is a part of: nodes that one call of a decomposed operator became have one key."""
    attention = (n.meta.get("custom") or {}).get(ATTENTION)
    if attention is not None:  # eager has one kernel, or one for all gradients
        return (ATTENTION, attention, "autograd_backward" in n.meta, n.meta.get("partitioner_tag"))
    original = n.meta.get("original_aten")
    if original is None or str(original) == str(n.target):  # a copied graph holds copies of operators
        return n
    # a node of Dynamo's graph; the backward has none of them, but a number for each operator of the forward
    source = n.meta.get("from_node") or ()
    call = source[-1].name if source else n.meta.get("seq_nr")
    return n if call is None else (str(original), call, n.meta.get("partitioner_tag"), n.meta.get("stack_trace"))


def _operator(nodes: list[fx.Node], in_backward: bool) -> Operator:
    last = nodes[-1]
    again = in_backward and all(n.meta.get("partitioner_tag") == "is_forward" for n in nodes)
    target = last.target if len(nodes) == 1 else last.meta.get("original_aten", last.target)
    if ATTENTION in (last.meta.get("custom") or {}) and len(nodes) > 1:
        target = torch.ops.aten.scaled_dot_product_attention.default
    origin = origin_of(last)
    read, written = (0.0, 0.0) if again else _traffic(nodes)
    return Operator(
        _call(last),
        _name(target),
        tuple(n.name for n in nodes),
        origin.line,
        origin.module,
        read,
        written,
        sum(_product_flops(n) for n in nodes),
        "autograd_backward" in last.meta or (in_backward and not again),
        again,
        tuple(dict.fromkeys(u.name for n in nodes for u in _readers(n) if u not in nodes)),
        tuple(dict.fromkeys(label for _, (_, label, _) in entries(last) if label)),
    )


def _readers(n: fx.Node) -> Iterator[fx.Node]:
    """Users of a value that compute, those behind views included."""
    for u in n.users:
        if u.target is operator.getitem or _is_view(u):
            yield from _readers(u)
        else:
            yield u


@functools.cache
def _name(target: Any) -> str:
    return re.sub(r"^(aten\.[^.]+)\..*$", r"\1", str(target))


def _call(n: fx.Node) -> str:
    """The function or module that the user called: "softmax", "linear"; "" when that is not known."""
    stack = n.meta.get("source_fn_stack") or n.meta.get("fwd_source_fn_stack") or ()
    called = re.sub(r"_\d+$", "", str(stack[-1][0])) if stack else ""
    return "" if called.startswith("getattr") else called


def _traffic(nodes: list[fx.Node]) -> tuple[float, float]:
    """Bytes read from outside, and written for others."""
    inside = set(nodes)
    only = nodes[0] if len(nodes) == 1 else None
    name = _name(only.target).removeprefix("aten.") if only is not None else ""
    views: dict[fx.Node, dict[fx.Node, float]] = {}
    for n in nodes:
        for a in n.all_input_nodes:
            base = _behind_views(a)
            if base not in inside and not (base.target is operator.getitem and base.all_input_nodes[0] in inside):
                views.setdefault(base, {})[a] = _nbytes(a.meta.get("val"))
    operands = {base: min(_nbytes(base.meta.get("val")), sum(seen.values())) for base, seen in views.items()}
    written = sum(
        _nbytes(n.meta.get("val")) for n in nodes if only is not None or any(u not in inside for u in _readers(n))
    )
    first = _behind_views(nodes[0].all_input_nodes[0]) if nodes[0].all_input_nodes else None
    if name in _UPDATES and first in operands:
        rest = sum(b for a, b in operands.items() if a is not first)
        return rest, min(rest, written)
    if name in _PICKS and first in operands:
        operands[first] = min(operands[first], written)
    return sum(operands.values()), written


def _behind_views(n: fx.Node) -> fx.Node:
    """The tensor whose memory a node's value is a view of."""
    while _is_view(n) or (n.target is operator.getitem and _is_view(n.all_input_nodes[0])):
        n = n.all_input_nodes[0]
    return n


def _is_free(n: fx.Node) -> bool:
    """Views, and the last step of a functionalised update, which eager makes in place."""
    return _is_view(n) or n.target is torch.ops.aten.copy_.default


def _is_view(n: fx.Node) -> bool:
    return isinstance(n.target, torch._ops.OpOverload) and _makes_views(n.target)


@functools.cache  # torch reads the schema anew each time, and every node is asked about many times
def _makes_views(target: torch._ops.OpOverload) -> bool:
    return bool(target.is_view) or _name(target).removeprefix("aten.") in _VIEWS


def _nbytes(value: Any) -> float:
    """Bytes of a tensor, or of all in a sequence, at hinted sizes."""
    return float(sum(math.prod(map(_size, t.shape)) * t.element_size() for t in _tensors(value)))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for v in value:
            yield from _tensors(v)


def _size(n: Any) -> int:
    if isinstance(n, int):
        return n
    hint = getattr(n.node, "hint", None)
    return _UNKNOWN_SIZE if hint is None else int(hint)


def _product_flops(n: fx.Node) -> float:
    """A multiplication and an addition each; 0 of what torch has no formula for."""
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(getattr(n.target, "overloadpacket", None))
    if formula is None:
        return 0.0
    args = fx.node.map_arg(n.args, lambda a: a.meta.get("val"))
    kwargs = fx.node.map_arg(n.kwargs, lambda a: a.meta.get("val"))
    return float(_size(formula(*args, **kwargs, out_val=n.meta.get("val"))))
