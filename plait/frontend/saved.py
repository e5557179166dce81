"""Strides of what a forward saves for its backward: nobody else sees them, so the compiler may choose.

`mark_private` says, when a joint graph is split, which results of the forward only the backward reads; the forward's
compilation reports the strides that it chose (`report_strides`), and AOT autograd gives the backward's example inputs those
(`left_apart` finds them), while the FX graph keeps saying eager's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from plait.frontend.fx_nodes import is_view
from plait.ir.graph import Graph

_PRIVATE = "plait_private"  # on a forward's output node: names of the results that only the backward reads
_COMPUTED = "plait_computed"  # on a backward's placeholder: such a result, which is no argument of the user's


def mark_private(forward: fx.Graph, backward: fx.Graph, num_fwd_outputs: int) -> None:
    """Note on the forward's output which of its results are saved, and no more than that. A saved tensor whose memory the
    backward looks at (as_strided) is as eager has it."""
    output = forward.output_node()
    results = output.args[0]
    assert isinstance(results, (list, tuple))
    shown = {n for n in results[:num_fwd_outputs] if isinstance(n, fx.Node)}
    readers = {n.name: n for n in backward.nodes if n.op == "placeholder"}
    output.meta[_PRIVATE] = frozenset(
        n.name
        for n in results[num_fwd_outputs:]
        if isinstance(n, fx.Node) and n not in shown and n.name in readers and not _bares_memory(readers[n.name])
    )
    for n in forward.nodes:
        if n.name in output.meta[_PRIVATE] and not _shows_argument(n):
            readers[n.name].meta[_COMPUTED] = True


def was_computed(placeholder: fx.Node) -> bool:
    """Whether an argument of a backward is a value that its forward computed and showed to nobody else."""
    return bool(placeholder.meta.get(_COMPUTED))


def _shows_argument(node: fx.Node) -> bool:
    """An argument, or a view of one."""
    while is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.op != "call_function"


def _bares_memory(node: fx.Node) -> bool:
    return any(
        user.target in (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default)
        or ((is_view(user) or user.target is torch.ops.aten._unsafe_view.default) and _bares_memory(user))
        for user in node.users
    )


def private_results(output: fx.Node) -> frozenset[fx.Node]:
    """Results marked so."""
    names: frozenset[str] = output.meta.get(_PRIVATE, frozenset())
    return frozenset(n for n in output.all_input_nodes if n.name in names)


def left_apart(val: Any, example: Any) -> tuple[int, ...] | None:
    """Strides that an argument really has, where they are numbers and not those of the FX graph."""
    if not isinstance(example, torch.Tensor) or example is val or example.layout is not torch.strided:
        return None
    real, traced = example.stride(), val.stride()
    if not all(isinstance(s, int) for s in (*real, *traced)) or len(real) != len(traced):
        return None
    return None if all(a == b or n == 1 for a, b, n in zip(real, traced, val.shape, strict=True)) else tuple(real)


def as_traced(gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    """The graph in eager: its views want the strides that it was traced with."""
    if not strides_wanted(gm, examples):
        return gm.forward
    return lambda *args: gm.forward(*as_wanted(gm, examples, args))


def as_wanted(gm: fx.GraphModule, examples: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Arguments with the strides that the graph was traced with."""
    given = list(args)
    for k, strides in strides_wanted(gm, examples).items():
        dense = torch.empty_strided(args[k].shape, strides, dtype=args[k].dtype, device=args[k].device)
        given[k] = dense.copy_(args[k])
    return given


def strides_wanted(gm: fx.GraphModule, examples: Sequence[Any]) -> dict[int, tuple[int, ...]]:
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    return {
        k: n.meta["val"].stride()
        for k, (n, example) in enumerate(zip(placeholders, examples, strict=False))
        if "val" in n.meta and left_apart(n.meta["val"], example) is not None
    }


def keep_saved() -> None:
    """Let a backward be run again (retain_graph). AOT autograd takes it that a backward writes over what was saved, and refuses
    a second run; ours asks at run time whether anybody else holds what it would write over."""
    meta = getattr(torch._guards.TracingContext.try_get(), "fw_metadata", None)
    if meta is not None and hasattr(meta, "bw_donated_idxs"):
        meta.bw_donated_idxs = []


def report_strides(graph: Graph) -> None:
    """Tell AOT autograd the strides of the results that have others than eager's."""
    context = torch._guards.TracingContext.try_get()
    told = getattr(context, "output_strides", None)
    if told is None or told:
        return
    chosen: list[tuple[int, ...] | None] = []
    for r in graph.returns:
        o = graph.outputs[r[1]] if r[0] == "tensor" else None
        lies = o is not None and o.private and o.read.source in graph.padded
        chosen.append(tuple(s.const or 0 for s in o.strides) if o is not None and lies else None)
    if any(chosen):
        told.extend(chosen)
