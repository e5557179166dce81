"""Split a reduction that too few blocks would perform: partial results first, then their combination.

    sum[p | r=131072]   ->   part = sum[p, s=32 | r'=4096] (x at r = 4096 s + r'), sum[p | s=32] (part)

Exact for max, min, any, all and integers; float sums are reassociated, as any parallel sum is. Refuses arg-reductions,
dynamic extents and reductions with enough independent rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.graph import Builder, Graph, Node, Read, Scalar, identity
from plait.plan.device import DeviceSpec
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
    """Split where the time model's machine would stand idle, or a row does not fit on chip."""

    def visit(builder: Builder, n: Node, reads: tuple[Read, ...]) -> Node | None:
        parts = _parts(graph, n, spec)
        return None if parts is None else _split(builder, n, reads[0], *parts)

    return transform(graph, visit)


def _parts(graph: Graph, n: Node, spec: DeviceSpec) -> tuple[int, int] | None:
    """(which axis, how many parts), or None to leave the reduction whole."""
    if n.kind != "reduce" or n.op not in _SPLITTABLE or any(e.const is None for e in n.axes):
        return None
    shape = [e.const or 0 for e in n.shape]
    rows, reduced = _product(shape), [e.const or 0 for e in n.axes[len(shape) :]]
    total = _product(reduced)
    widest = max(range(len(reduced)), key=lambda k: reduced[k])
    pick: Callable[[int, int, DeviceSpec], int] = _cpu_parts if spec.kind == "cpu" else _gpu_parts
    parts = pick(rows, total, spec)
    parts = min(parts, reduced[widest])
    return (len(shape) + widest, parts) if parts > 1 else None


def _cpu_parts(rows: int, total: int, spec: DeviceSpec) -> int:
    if rows >= 2 * spec.units or total < (1 << 16):
        return 1
    return 4 * spec.units


def _gpu_parts(rows: int, total: int, spec: DeviceSpec) -> int:
    if total <= 4096:
        return 1
    if rows < 2 * spec.units * 64:
        # few rows (a column reduction has 64 of them in a block): as many parts as fill the card twice
        want = -(-4 * spec.units * 64 // max(rows, 1)) if rows >= 64 else -(-4 * spec.units // max(rows, 1))
        return max(min(want, total // 2048), -(-total // spec.row_elems))
    return -(-total // spec.row_elems)


def _split(builder: Builder, n: Node, read: Read, axis: int, parts: int) -> Node:
    extent = n.axes[axis].const or 0
    chunk = -(-extent // parts)
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


def _product(values: list[int]) -> int:
    out = 1
    for v in values:
        out *= v
    return out
