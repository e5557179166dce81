"""Give products whose factor lies badly a copy of it that can lie well, where the copy costs less than the odd rows.

    aten.mm(%input_1: bf16[8192, 50257], %w)      the gradient of logits that came from outside, rows of 100514 bytes
    aten.mm(%copy, %w),  %copy = %input_1         pad_rows then lets the copy's rows begin at multiples of 128 bytes

Values of our own need none: pad_rows lays them out themselves. One copy serves every product that reads the same value.
"""

from __future__ import annotations

from dataclasses import replace

from plait.ir import index as ix
from plait.ir.graph import Builder, Graph, Node, Read, identity
from plait.plan.contract_cost import UNEVEN, product_ns
from plait.plan.cost import size_at_hints
from plait.plan.device import DeviceSpec
from plait.plan.layout import ALIGNED, Layouts, is_matrix, is_product
from plait.rewrite.engine import rebuilt, transform
from plait.rewrite.passes.pad_rows import pad_rows


def even_rows(graph: Graph, spec: DeviceSpec, numerics: str) -> Graph:
    """The graph with the copies that pay."""
    if not spec.row_bytes or numerics != "fused":
        return graph
    layouts = Layouts(pad_rows(graph, spec, numerics))
    gains: dict[Node, float] = {}
    wanted: set[tuple[Node, int]] = set()
    for n in graph.nodes():
        for k, r in enumerate(n.reads):
            if k >= len(n.reads) - 2 and is_product(n) and _is_odd(r, layouts):
                gains[r.source] = gains.get(r.source, 0.0) + _gain_ns(graph, spec, n)
                wanted.add((n, k))
    paying = {s for s, gain in gains.items() if gain > _copy_ns(graph, spec, s)}
    if not paying:
        return graph

    def visit(builder: Builder, n: Node, reads: tuple[Read, ...]) -> Node | None:
        if not any((n, k) in wanted and r.source in paying for k, r in enumerate(n.reads)):
            return None
        fixed = [
            replace(new, source=_copy(builder, new.source)) if (n, k) in wanted and old.source in paying else new
            for k, (old, new) in enumerate(zip(n.reads, reads, strict=True))
        ]
        return rebuilt(builder, n, tuple(fixed))

    return transform(graph, visit)


def _is_odd(r: Read, layouts: Layouts) -> bool:
    """Whether a factor in 16 bits is a matrix whose rows begin at odd places, and could begin elsewhere."""
    view = layouts.view(r) if r.source.dtype.nbytes == 2 else None
    if view is None or not is_matrix(view):
        return False
    inner = [s for s, extent in zip(view.strides, view.shape, strict=True) if s is not ix.ONE and extent is not ix.ONE]
    return any(s.const is not None and s.const * 2 % ALIGNED for s in inner)


def _gain_ns(graph: Graph, spec: DeviceSpec, n: Node) -> float:
    """What odd rows cost a product."""
    domain = n.reads[-1].domain
    assert domain is not None
    return product_ns(spec, n, size_at_hints(graph, n.shape) * size_at_hints(graph, domain[-2:-1])) * (1 / UNEVEN - 1)


def _copy_ns(graph: Graph, spec: DeviceSpec, s: Node) -> float:
    return spec.launch_ns + 2 * size_at_hints(graph, s.shape) * s.dtype.nbytes / spec.bytes_per_ns


def _copy(builder: Builder, s: Node) -> Node:
    return builder.node("copy", s.shape, [Read(s, identity(s.shape))])
