"""Memory over the life of a graph, from its script: what is allocated before use and released after the last."""

from __future__ import annotations

from collections.abc import Sequence

from plait.ir.graph import Graph
from plait.plan.cost import size_at_hints
from plait.runtime.link import Launch
from plait.runtime.steps import AllocStep, ExternStep, FreeStep, LoopStep, Script


def peak_bytes(graph: Graph, launches: Sequence[Launch], script: Script, loops: Sequence[float] = ()) -> float:
    """The most bytes that values made by the graph hold at once; `loops` are those of a block of each loop. Workspaces of library
    calls are not known."""
    calls = iter([launch.groups[0].nodes[0] for launch in launches if not launch.parts])
    held: dict[int, float] = {}
    most = 0.0
    for step in script.steps:
        if isinstance(step, AllocStep) and step.reuse is not None:
            # an argument's memory is not the graph's
            held[step.slot] = held.pop(step.reuse, 0.0)
        elif isinstance(step, AllocStep):
            held[step.slot] = size_at_hints(graph, step.shape) * step.dtype.nbytes
        elif isinstance(step, LoopStep):
            next(calls)
            most = max(most, sum(held.values()) + loops[step.loop])
        elif isinstance(step, ExternStep):
            outs = next(calls).attr("outs")
            for slot, out in zip(step.outs, outs, strict=True):
                if slot is not None and step.inplace is None and len(out) == 3 and isinstance(out[0], tuple):
                    held[slot] = size_at_hints(graph, out[0]) * out[1].nbytes
        elif isinstance(step, FreeStep):
            held.pop(step.slot, None)
        most = max(most, sum(held.values()))
    return most


def output_bytes(graph: Graph) -> float:
    """Bytes of the tensors that the graph returns as its own."""
    given = {i.node for i in graph.inputs}
    made = {o.read.source for o in graph.outputs if o.writes_to is None} - given
    return sum(size_at_hints(graph, n.shape) * n.dtype.nbytes for n in made)


def input_bytes(graph: Graph) -> float:
    """Bytes of the tensors that the graph is given."""
    return sum(size_at_hints(graph, i.node.shape) * i.node.dtype.nbytes for i in graph.inputs if i.layout is not None)
