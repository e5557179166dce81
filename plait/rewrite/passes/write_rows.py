"""Write back only what changed: an update of a box of an input writes the box, and does not copy the input.

    %y = pieces(%k[i0, i1 - p] ?(i1 >= p), …, %cache[i0, i1]);  output %y writes 0
    ->
    output %k[i0, i1] over the box, writes 0 at (0, p)

What `slice_scatter`, `select_scatter` and `copy_` into a view become. Whoever reads %y still sees the whole updated value.
Refuses values that read the input elsewhere than at the box's own place (they would see what was written).
"""

from __future__ import annotations

from dataclasses import replace

from plait.ir import index as ix
from plait.ir.fuel import take_at
from plait.ir.graph import Graph, Node, Output, Read, Shape, identity, topological
from plait.ir.index import Expr


def write_rows(graph: Graph) -> Graph:
    """Shrink write-backs to the boxes that changed."""
    inputs = {i.position: i.node for i in graph.inputs}
    outputs = tuple(
        _shrunk(graph, o, inputs[o.writes_to]) if o.writes_to in inputs and o.at is None else o for o in graph.outputs
    )
    return replace(graph, outputs=outputs)


def _shrunk(graph: Graph, o: Output, target: Node) -> Output:
    n, read = o.read.source, o.read
    whole = read.index == identity(n.shape) and read.domain == n.shape and not read.guard
    if not whole or n.op != "pieces" or len(n.reads) != 2 or n.shape != target.shape:
        return o
    new, old = n.reads
    if old.source is not target or old.index != identity(target.shape) or old.guard:
        return o
    if any(s is target for s in topological([new.source])):
        return o
    box = _box(new.guard, n.axes)
    if box is None:
        return o
    if not take_at("rewrite", "write_rows", graph, [n]):
        return o
    starts, extents = box
    facts = graph.facts(extents)
    env = {
        ix.axis_atom(d): (ix.ZERO if extent is ix.ONE else ix.axis(d)) + start
        for d, (start, extent) in enumerate(zip(starts, extents, strict=True))
    }
    index = tuple(e.substitute(env, facts) for e in new.index)
    return replace(o, read=Read(new.source, index, domain=extents), at=starts)


def _box(guard: Shape, axes: Shape) -> tuple[Shape, Shape] | None:
    """(first index, extent) of each axis, when the guard says no more than bounds of single axes."""
    low: list[Expr] = [ix.ZERO] * len(axes)
    high: list[Expr] = list(axes)
    for g in guard:
        coeffs, rest = g.linear()
        if len(coeffs) != 1:
            return None
        ((atom, c),) = coeffs.items()
        d = atom.args[0]
        if atom.kind != "axis" or not isinstance(d, int) or c.const not in (1, -1):
            return None
        if c.const == 1:
            if low[d] is not ix.ZERO:
                return None
            low[d] = -rest
        else:
            if high[d] is not axes[d]:
                return None
            high[d] = rest + 1
    return tuple(low), tuple(h - a for h, a in zip(high, low, strict=True))
