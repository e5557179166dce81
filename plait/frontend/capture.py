"""Capture: from TorchDynamo's graph to forward, backward and inference graphs of ATen calls, by torch's AOT autograd.

`capture` hands each graph to a compile function and gives back what Dynamo will call. Before the joint graph is split,
two kinds of value are barred from being computed a second time in the backward, where that would be wrong:

- what is read from an input that the forward overwrites (the backward would read the new contents), and
- what the backward compares for equality, as the gradient of amax does (a recomputed value can differ in its last bit).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from plait.frontend.fx_nodes import is_view, last_placeholder
from plait.frontend.marks import EQUALITY, keep
from plait.frontend.saved import keep_saved, mark_private
from plait.ir.fault import passed

Boxed = Callable[[list[Any]], Sequence[Any]]
# (graph module, its example inputs, "inference" | "forward" | "backward") -> a boxed callable
CompileOne = Callable[[fx.GraphModule, Sequence[Any], str], Boxed]

# (joint graph, its forward's nodes): changes the graph
Rewrite = Callable[[fx.Graph, set[fx.Node]], None]


def capture(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    compile_one: CompileOne,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    rewrites: Sequence[Rewrite] = (),
) -> Callable[..., Any]:
    """Trace `gm` through autograd and functionalisation, and compile each graph with `compile_one`. `rewrites` change a joint
    graph before it is split."""
    from torch._dynamo.backends.common import aot_autograd

    def of_kind(kind: str) -> Callable[[fx.GraphModule, Sequence[Any]], Boxed]:
        def compiled(graph: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
            if kind == "forward":
                keep_saved()
            return compile_one(graph, inputs, kind)

        return compiled

    traced = aot_autograd(
        fw_compiler=of_kind("forward"),
        bw_compiler=of_kind("backward"),
        inference_compiler=of_kind("inference"),
        partition_fn=functools.partial(partition, rewrites=rewrites),
        decompositions=dict(decompositions or {}),
        keep_inference_input_mutations=True,
    )(gm, example_inputs)
    assert callable(traced)
    return traced


def partition(
    joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, rewrites: Sequence[Rewrite] = (), **settings: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """torch's min-cut partitioner, told what may not be recomputed."""
    from torch._functorch import config
    from torch._functorch.compile_utils import fx_graph_cse
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    _drop_detach(joint.graph)
    joint.graph.eliminate_dead_code()
    if config.cse:
        # the partitioner does this first; done before the marks, so that merging equal nodes cannot lose one
        joint.graph = fx_graph_cse(joint.graph)
    forward = _forward_nodes(joint.graph, num_fwd_outputs)
    for rewrite in rewrites:
        rewrite(joint.graph, forward)
        forward = _forward_nodes(joint.graph, num_fwd_outputs)
    joint.graph = passed("joint", joint.graph)
    _keep_reads_of_overwritten_inputs(joint.graph, forward)
    _keep_operands_of_equality(joint.graph, forward)
    joint.graph.lint()
    joint.recompile()
    forward_graph, backward_graph = min_cut_rematerialization_partition(
        joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **settings
    )
    mark_private(forward_graph.graph, backward_graph.graph, num_fwd_outputs)
    return forward_graph, backward_graph


def _drop_detach(graph: fx.Graph) -> None:
    """Autograd is over in a joint graph, so detach is its operand; left in, the partitioner would save its result."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])


def _forward_nodes(graph: fx.Graph, num_fwd_outputs: int) -> set[fx.Node]:
    """Nodes that the forward's own outputs and its writes to inputs need."""
    output = graph.output_node()
    results = output.args[0]
    assert isinstance(results, (list, tuple))
    stack = [n for n in results[:num_fwd_outputs] if isinstance(n, fx.Node)]
    seen: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen


def _keep_reads_of_overwritten_inputs(graph: fx.Graph, forward: set[fx.Node]) -> None:
    overwritten = {
        n.args[0]: None
        for n in graph.nodes
        if n.op == "call_function" and n.target is torch.ops.aten.copy_.default and _is_placeholder(n.args[0])
    }
    for source in overwritten:
        assert isinstance(source, fx.Node)
        readers = list(_readers(source))
        if all(r in forward for r in readers):
            for r in readers:
                keep(r)
            continue
        # the backward reads the input itself: what it must see is a copy from before the write
        with graph.inserting_after(last_placeholder(graph)):
            kept = graph.call_function(torch.ops.aten.clone.default, (source,))
        kept.meta = {k: v for k, v in source.meta.items() if k in ("val", "tensor_meta")}
        keep(kept)
        for user in list(source.users):
            if user is not kept and not _writes_to(user):
                user.replace_input_with(source, kept)


def _keep_operands_of_equality(graph: fx.Graph, forward: set[fx.Node]) -> None:
    for node in graph.nodes:
        if node.op != "call_function" or str(node.target) not in EQUALITY or node in forward:
            continue
        operands = [_behind_views(a) for a in node.args if isinstance(a, fx.Node)]
        if len(operands) == 2 and all(_is_float(a) for a in operands):
            for a in operands:
                if a in forward and a.op == "call_function":
                    keep(a)


def _readers(source: fx.Node) -> Iterator[fx.Node]:
    """Users of a tensor that read its elements, those behind views of it included; not the writes into it."""
    for user in source.users:
        if is_view(user):
            yield from _readers(user)
        elif user.op != "output" and not (_writes_to(user) and user.args[0] is source):
            yield user


def _behind_views(node: fx.Node) -> fx.Node:
    while is_view(node):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node


def _writes_to(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is torch.ops.aten.copy_.default


def _is_placeholder(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "placeholder"


def _is_float(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and val.is_floating_point()


def user_line(graph: fx.Graph | Iterable[fx.Node]) -> str:
    """The first source line, outside torch itself, that a graph comes from; "" when none is known."""
    nodes = graph.nodes if isinstance(graph, fx.Graph) else graph
    for node in nodes:
        trace = node.meta.get("stack_trace")
        for frame in reversed(trace.split('File "')[1:] if isinstance(trace, str) else []):
            where, _, code = frame.partition("\n")
            path, _, rest = where.partition('", line ')
            if "/torch/" not in path:
                return f"{path.rpartition('/')[2]}:{rest.partition(',')[0]} {code.strip().partition(chr(10))[0]}"
    return ""
