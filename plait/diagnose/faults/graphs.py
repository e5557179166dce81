"""Faults of capture, import and rewrites: graphs that mean something else. All of them are well formed: no checker sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from plait.diagnose.faults.known import Change
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.graph import Builder, Graph, Node, Read, contiguous_strides, identity
from plait.rewrite.engine import transform

Visit = Callable[[Builder, Graph, Node, Sequence[Read]], "Node | None"]


def nodes(visit: Visit, after: str = "", backward: bool = False) -> Change:
    """Nodes replaced by what `visit` makes of them: of any graph, or after the rewrite `after`; of a backward only."""

    def change(graph: Graph, about: str) -> Graph | None:
        if about != after or (backward and not _is_backward(graph)):
            return None
        count = 0

        def counted(builder: Builder, n: Node, reads: tuple[Read, ...]) -> Node | None:
            nonlocal count
            made = visit(builder, graph, n, reads)
            count += made is not None
            return made

        spoilt = transform(graph, counted)
        return spoilt if count else None

    return change


def _is_backward(graph: Graph) -> bool:
    return any(str(i.node.attr("name")).startswith("tangents") for i in graph.inputs)


def _value(read: Read) -> Any:
    return read.source.attr("value") if read.source.op == "const" else None


def _const(builder: Builder, dtype: DType, value: Any) -> Read:
    return Read(builder.node("const", (), dtype=dtype, value=value), ())


# ---------------------------------------------------------------------------------------------------------------- capture
def one_use_lost(joint: fx.Graph, about: str) -> fx.Graph | None:
    """The last sum of two gradients is the first of them."""
    added = [n for n in joint.nodes if n.target is torch.ops.aten.add.Tensor and len(n.all_input_nodes) == 2]
    if not added:
        return None
    added[-1].replace_all_uses_with(added[-1].all_input_nodes[0])
    joint.erase_node(added[-1])
    return joint


# ------------------------------------------------------------------------------------------------------- constants, norms
def other_constant(is_it: Callable[[float], bool], other: Callable[[float], float]) -> Visit:
    """Another number in the place of a float constant."""

    def visit(builder: Builder, graph: Graph, n: Node, reads: Sequence[Read]) -> Node | None:
        if n.op != "const" or not n.dtype.is_float or not is_it(float(n.attr("value"))):
            return None
        return builder.node("const", (), dtype=n.dtype, value=other(float(n.attr("value"))))

    return visit


def epsilon_outside(builder: Builder, graph: Graph, n: Node, reads: Sequence[Read]) -> Node | None:
    """1 / sqrt(v + eps) -> 1 / (sqrt(v) + eps)."""
    if n.op != "rsqrt" or reads[0].source.op != "add":
        return None
    variance, epsilon = reads[0].source.reads
    root = builder.node("sqrt", n.axes, [variance])
    added = builder.node("add", n.axes, [Read(root, identity(n.axes)), epsilon])
    return builder.node("reciprocal", n.axes, [Read(added, identity(n.axes))])


def maximum_not_subtracted(builder: Builder, graph: Graph, n: Node, reads: Sequence[Read]) -> Node | None:
    """exp(x - max x) -> exp(x)."""
    if n.op != "sub" or reads[1].source.op != "max":
        return None
    return builder.node("copy", n.axes, [reads[0]])


# ------------------------------------------------------------------------------------------------------------------ masks
def mask_dropped(builder: Builder, graph: Graph, n: Node, reads: Sequence[Read]) -> Node | None:
    """where(mask, -inf, x) -> x."""
    return builder.node("copy", n.axes, [reads[2]]) if n.op == "where" and _value(reads[1]) == -float("inf") else None


def compared_the_other_way(builder: Builder, graph: Graph, n: Node, reads: Sequence[Read]) -> Node | None:
    """a < b -> not (a >= b), which differs where one is NaN."""
    if n.op != "lt":
        return None
    other = builder.node("ge", n.axes, reads)
    return builder.node("bit_not", n.axes, [Read(other, identity(n.axes))])


# --------------------------------------------------------------------------------------------------------------- integers
def rounded_to_zero(builder: Builder, graph: Graph, n: Node, reads: Sequence[Read]) -> Node | None:
    """Floor division -> C's."""
    return builder.node("truncdiv", n.axes, reads) if n.op == "floordiv" else None


def not_wrapped(builder: Builder, graph: Graph, n: Node, reads: Sequence[Read]) -> Node | None:
    """where(i < 0, i + n, i) -> maximum(i, 0)."""
    if n.op != "where" or n.dtype is not DType.i64:
        return None
    return builder.node("maximum", n.axes, [reads[2], _const(builder, DType.i64, 0)])


def last_of_equals(builder: Builder, graph: Graph, n: Node, reads: Sequence[Read]) -> Node | None:
    """argmax from the other end."""
    if n.op != "argmax":
        return None
    last = len(n.axes) - 1
    top = n.axes[last] - ix.ONE
    turned = {ix.axis_atom(last): top - ix.axis(last)}
    facts = graph.facts(n.axes)
    read = replace(reads[0], index=tuple(e.substitute(turned, facts) for e in reads[0].index))
    found = builder.node("argmax", n.axes, [read], reduce=n.reduce, **dict(n.attrs))
    size = Read(builder.node("index", n.shape, expr=top), identity(n.shape))
    return builder.node("sub", n.shape, [size, Read(found, identity(n.shape))])


# ------------------------------------------------------------------------------------------------------------------- sums
def last_part_lost(builder: Builder, graph: Graph, n: Node, reads: Sequence[Read]) -> Node | None:
    """The sum of the parts of a split sum, but for the last."""
    if n.op != "sum" or n.reduce != 1 or n.reads[0].source not in graph.partials:
        return None
    return builder.node("sum", (*n.shape, n.axes[-1] - ix.ONE), reads, reduce=1)


def first_row_alone(builder: Builder, graph: Graph, n: Node, reads: Sequence[Read]) -> Node | None:
    """The sum over the rows that an operand was repeated for -> its first term."""
    if n.op != "sum" or n.reduce != 1 or len(n.shape) != 1 or n.reads[0].index[-1] != ix.axis(0):
        return None
    at = {ix.axis_atom(1): ix.ZERO}
    index = tuple(e.substitute(at, graph.facts(n.axes)) for e in reads[0].index)
    return builder.node("copy", n.shape, [replace(reads[0], index=index)])


def row_term_added(builder: Builder, graph: Graph, n: Node, reads: Sequence[Read]) -> Node | None:
    """y (g - sum(g y)) -> y (g + sum(g y))."""
    return builder.node("add", n.axes, reads) if n.op == "sub" and reads[1].source.op == "sum" else None


# ----------------------------------------------------------------------------------------------------------- random numbers
def other_draw(builder: Builder, graph: Graph, n: Node, reads: Sequence[Read]) -> Node | None:
    """The numbers of another draw."""
    if n.kind != "random":
        return None
    return builder.node(n.op, n.axes, reads, **{**dict(n.attrs), "draw": n.attr("draw") + 1})


# ------------------------------------------------------------------------------------------------------ results, arguments
def before_the_update(builder: Builder, graph: Graph, n: Node, reads: Sequence[Read]) -> Node | None:
    """A value made of an argument's new contents -> of its old ones."""
    updated = {o.read.source for o in graph.outputs if o.writes_to is not None}
    if n.op != "mul" or n.reads[0].source not in updated:
        return None
    old = reads[0].source.reads[0].source
    return builder.node(n.op, n.axes, [replace(reads[0], source=old), *reads[1:]])


def dense_results(graph: Graph, about: str) -> Graph | None:
    """Results row by row, whatever eager does."""
    outputs = tuple(
        replace(o, strides=contiguous_strides(o.read.domain))
        if o.read.domain is not None and o.writes_to is None
        else o
        for o in graph.outputs
    )
    return replace(graph, outputs=outputs) if outputs != graph.outputs else None


def not_narrowed(graph: Graph, about: str) -> Graph | None:
    """Results in the type that they were computed in."""
    outputs = tuple(
        replace(o, read=replace(o.read, source=o.read.source.reads[0].source)) if o.read.source.op == "cast" else o
        for o in graph.outputs
    )
    return replace(graph, outputs=outputs) if outputs != graph.outputs else None
