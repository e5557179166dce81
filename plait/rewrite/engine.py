"""Rebuild a graph node by node: the only way a graph changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from plait.ir.graph import Builder, Graph, Node, Read

Visit = Callable[[Builder, Node, tuple[Read, ...]], "Node | None"]


def transform(graph: Graph, visit: Visit, first: Callable[[Node], bool] | None = None) -> Graph:
    """A new graph in which each node is visit(builder, old node, its reads of new nodes), or itself where that is None.

    Side tables follow: the replacement inherits origins and layout of what it stands for; nodes made on the way get the
    origins of the node they were made for. With `first`, the nodes it names (all that these read among them) are made before
    the others.
    """
    builder = Builder(graph.facts())
    new: dict[Node, Node] = {}
    out = replace(graph, origins={}, layouts={}, padded={})
    # inputs that nobody reads come along, so that the new graph has no node of the old one
    order = sorted({*graph.nodes(), *(i.node for i in graph.inputs)}, key=lambda n: n.serial)
    if first is not None:
        order.sort(key=lambda n: not first(n))
    for n in order:
        reads = tuple(replace(r, source=new[r.source]) for r in n.reads)
        before = len(builder.made)
        made = visit(builder, n, reads)
        if made is None:
            made = rebuilt(builder, n, reads)
        new[n] = made
        for m in builder.made[before:]:
            out.origins.setdefault(m, graph.origins.get(n, ()))
        if n in graph.layouts and made.shape == n.shape:
            out.layouts.setdefault(made, graph.layouts[n])
        if n in graph.padded and made.shape == n.shape:
            out.padded.setdefault(made, graph.padded[n])
    out.inputs = tuple(replace(i, node=new[i.node]) for i in graph.inputs)
    out.bindings = {
        name: ("extern", new.get(how[1], how[1]), *how[2:]) if how[0] == "extern" else how
        for name, how in graph.bindings.items()
    }
    out.refusals = {new[n]: why for n, why in graph.refusals.items() if n in new}
    out.outputs = tuple(replace(o, read=replace(o.read, source=new[o.read.source])) for o in graph.outputs)
    out.partials = frozenset(new[n] for n in graph.nodes() if n in graph.partials)
    out.effects = tuple(new[n] for n in graph.effects)
    return out


def rebuilt(builder: Builder, n: Node, reads: tuple[Read, ...]) -> Node:
    """The same operation on new reads."""
    return builder.node(n.op, n.axes, reads, reduce=n.reduce, **dict(n.attrs))
