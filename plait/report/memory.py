"""Memory over the life of a graph, from its script: what is allocated before use and released after the last."""

from __future__ import annotations

from plait.compiler import Compiled
from plait.ir.graph import Graph
from plait.plan.cost import size_at_hints
from plait.runtime.steps import AllocStep, ExternStep, FreeStep, Script


def peak_bytes(compiled: Compiled, script: Script) -> float:
    """The most bytes that values made by the graph hold at once. Workspaces of library calls are not known."""
    graph = compiled.graph
    calls = iter([launch.groups[0].nodes[0] for launch in compiled.launches if not launch.parts])
    held: dict[int, float] = {}
    most = 0.0
    for step in script.steps:
        if isinstance(step, AllocStep) and step.reuse is not None:
            # an argument's memory is not the graph's
            held[step.slot] = held.pop(step.reuse, 0.0)
        elif isinstance(step, AllocStep):
            held[step.slot] = size_at_hints(graph, step.shape) * step.dtype.nbytes
        elif isinstance(step, ExternStep):
            outs = next(calls).attr("outs")
            for slot, out in zip(step.outs, outs, strict=True):
                if slot is not None and step.inplace is None and len(out) == 3 and isinstance(out[0], tuple):
                    held[slot] = size_at_hints(graph, out[0]) * out[1].nbytes
        elif isinstance(step, FreeStep):
            held.pop(step.slot, None)
        most = max(most, sum(held.values()))
    return most


def input_bytes(graph: Graph) -> float:
    """Bytes of the tensors that the graph is given."""
    return sum(size_at_hints(graph, i.node.shape) * i.node.dtype.nbytes for i in graph.inputs if i.layout is not None)
