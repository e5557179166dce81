"""Split a reduction that too few blocks would perform: partial results first, then their combination.

    sum[p | r=131072]   ->   part = sum[p, s=32 | r'=4096] (x at r = 4096 s + r'), sum[p | s=32] (part)

Exact for max, min, any, all and integers; float sums are reassociated, as any parallel sum is. Refuses arg-reductions,
dynamic extents, reductions with enough independent rows, and those that the user wants in one kernel with others.
"""

from __future__ import annotations

import math
from dataclasses import replace

from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.fuel import take_at
from plait.ir.graph import Builder, Graph, Node, Read, Scalar, identity
from plait.plan.device import DeviceSpec
from plait.plan.layout import Layouts
from plait.plan.regions import is_forced
from plait.rewrite.engine import transform

_SPLITTABLE = frozenset({"sum", "prod", "max", "min", "any", "all"})


def identity_of(op: str, dtype: DType) -> Scalar:
    """The element that changes nothing under a monoid."""
    if op == "sum":
        return 0
    if op == "prod":
        return 1
    if op in ("any", "all"):
        return op == "all"
    if dtype.is_float:
        return float("-inf") if op == "max" else float("inf")
    bits = 8 * dtype.nbytes
    low, high = (0, (1 << bits) - 1) if dtype is DType.u8 else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    return low if op == "max" else high


def split_reductions(graph: Graph, spec: DeviceSpec) -> Graph:
    """Split where the time model's machine would stand idle."""
    layouts = Layouts(graph)
    partials: set[Node] = set()
    done = _partials_and_merges(graph)

    def visit(builder: Builder, n: Node, reads: tuple[Read, ...]) -> Node | None:
        parts = None if n in done or is_forced(graph, n) else _parts(n, spec, layouts)
        if parts is None or not take_at("rewrite", "split_reductions", graph, [n]):
            return None
        final = _split(builder, n, reads[0], *parts)
        partials.add(final.reads[0].source)
        return final

    out = transform(graph, visit)
    return replace(out, partials=out.partials | partials)


def _partials_and_merges(graph: Graph) -> set[Node]:
    """Partial results that are there already, and what hangs on them up to their combination."""
    out = set(graph.partials)
    for n in graph.nodes():
        if any(r.source in graph.partials or (r.source in out and r.source.kind == "map") for r in n.reads):
            out.add(n)
    return out


def _parts(n: Node, spec: DeviceSpec, layouts: Layouts) -> tuple[int, int] | None:
    """(which axis, how many elements of it a part has), or None to leave the reduction whole."""
    if n.kind != "reduce" or n.op not in _SPLITTABLE or any(e.const is None for e in n.axes):
        return None
    first = len(n.shape)
    extents = [e.const or 0 for e in n.axes]
    rows, total = math.prod(extents[:first]), math.prod(extents[first:])
    if total == 0 or rows == 0:
        return None
    along = _runs_along_rows(n, layouts)
    want = _wanted_parts(rows, total, along, spec)
    axis = max(range(first, len(extents)), key=lambda k: extents[k])
    extent = extents[axis]
    want = min(want, extent)
    if want <= 1:
        return None
    return axis, _chunk(extent, want, 512 if along and extent >= 2048 else 1)


def _runs_along_rows(n: Node, layouts: Layouts) -> bool:
    """Whether neighbouring elements in memory are reduced together (else: added column by column)."""
    read = n.reads[0]
    address = ix.ZERO
    for e, s in zip(read.index, layouts.strides(read.source), strict=True):
        address = address + e * s
    coeffs, _ = address.linear()
    return not any(coeffs.get(ix.axis_atom(k)) is ix.ONE for k in range(len(n.shape)) if n.axes[k].const != 1)


def _wanted_parts(rows: int, total: int, along: bool, spec: DeviceSpec) -> int:
    """Parts that fill the machine about twice, each still long enough to be worth a block."""
    if spec.kind == "cpu":
        lanes = rows if along else -(-rows // 64)
        return 1 if lanes >= 2 * spec.units or total * rows < (1 << 16) else min(4 * spec.units, total // 1024)
    blocks = rows if along else -(-rows // 64)
    shortest = 4096 if along else 64
    if 2 * blocks >= spec.units or total < 2 * shortest:
        return 1
    return min(-(-4 * spec.units // blocks), total // shortest)


def _chunk(extent: int, want: int, multiple: int) -> int:
    """Length of a part: an exact divisor of the extent near the wanted count if there is one, else a round number."""
    for parts in range(want, min(2 * want, extent) + 1):
        if extent % parts == 0 and (extent // parts) % multiple == 0:
            return extent // parts
    chunk = -(-extent // want)
    return -(-chunk // multiple) * multiple


def _split(builder: Builder, n: Node, read: Read, axis: int, chunk: int) -> Node:
    extent = n.axes[axis].const or 0
    parts = -(-extent // chunk)
    ndim = len(n.shape)
    # partial axes: the result's, the part number, then the reduced ones with the split axis shortened to a chunk
    reduced = [ix.const(chunk) if k == axis else e for k, e in enumerate(n.axes) if k >= ndim]
    axes = (*n.shape, ix.const(parts), *reduced)
    env = {ix.axis_atom(k): ix.axis(k if k < ndim else k + 1) for k in range(len(n.axes))}
    at = ix.axis(axis + 1) + chunk * ix.axis(ndim)
    env[ix.axis_atom(axis)] = at
    facts = ix.Facts(axes=axes, symbols=builder.facts.symbols)
    index = tuple(e.substitute(env, facts) for e in read.index)
    guard = tuple(g.substitute(env, facts) for g in read.guard)
    fill = read.fill
    source = read.source
    if extent % chunk:
        if guard:  # the operand's own guard has another fill: give it a node first
            source = builder.node("copy", n.axes, [read])
            index, guard = (tuple(e.substitute(env, facts) for e in identity(n.axes))), ()
        guard = (extent - 1 - at,)
        fill = identity_of(n.op, n.dtype)
    partial = builder.node(
        n.op, axes, [replace(read, source=source, index=index, guard=guard, fill=fill)], reduce=n.reduce
    )
    final = (*n.shape, ix.const(parts))
    return builder.node(n.op, final, [Read(partial, identity(final))], reduce=1)
