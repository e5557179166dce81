"""Give products whose factor lies badly a copy of it that can lie well, where the copy costs less than the odd rows.

    aten.mm(%input_1: bf16[8192, 50257], %w)      the gradient of logits that came from outside, rows of 100514 bytes
    aten.mm(%copy, %w),  %copy = %input_1         pad_rows then lets the copy's rows begin at multiples of 128 bytes

Values of our own need none: pad_rows lays them out themselves. Nor do products that the user wants in one kernel with others. One copy serves every product that reads the same value.
"""

from __future__ import annotations

from dataclasses import replace

from plait.ir.fuel import aside, take_at
from plait.ir.graph import Builder, Graph, Node, Read, identity
from plait.plan.contract_cost import UNEVEN, depth_of, product_ns
from plait.plan.cost import size_at_hints
from plait.plan.device import DeviceSpec
from plait.plan.layout import Layouts, begins_oddly, is_matrix, is_product
from plait.plan.regions import is_forced
from plait.rewrite.engine import rebuilt, transform
from plait.rewrite.passes.pad_rows import pad_rows


def even_rows(graph: Graph, spec: DeviceSpec, numerics: str) -> Graph:
    """The graph with the copies that pay."""
    if not spec.row_bytes or numerics != "fused":
        return graph
    if not _odd_factors(graph, Layouts(graph)):
        return graph  # padding makes no more of them
    with aside():  # only tried here
        odd = _odd_factors(graph, Layouts(pad_rows(graph, spec, numerics)))
    gains: dict[Node, float] = {}
    for n, k in odd:
        gains[n.reads[k].source] = gains.get(n.reads[k].source, 0.0) + _gain_ns(graph, spec, n)
    pays = [s for s in gains if gains[s] > _copy_ns(graph, spec, s)]
    copied = {s for s in pays if take_at("rewrite", "even_rows", graph, [s])}
    moved = {(n, k) for n, k in odd if n.reads[k].source in copied}
    if not moved:
        return graph

    def visit(builder: Builder, n: Node, reads: tuple[Read, ...]) -> Node | None:
        fixed = tuple(
            replace(r, source=_copy(builder, r.source)) if (n, k) in moved else r for k, r in enumerate(reads)
        )
        return None if fixed == reads else rebuilt(builder, n, fixed)

    return transform(graph, visit)


def _odd_factors(graph: Graph, layouts: Layouts) -> list[tuple[Node, int]]:
    """(product, place of the read) of every factor that lies badly."""
    products = [n for n in graph.nodes() if is_product(n) and not is_forced(graph, n)]
    return [(n, k) for n in products for k in (len(n.reads) - 2, len(n.reads) - 1) if _is_odd(n.reads[k], layouts)]


def _is_odd(r: Read, layouts: Layouts) -> bool:
    """Whether a factor in 16 bits is a matrix whose rows begin at odd places, and could begin elsewhere."""
    view = layouts.view(r) if r.source.dtype.nbytes == 2 else None
    return view is not None and is_matrix(view) and begins_oddly(view, r.source.dtype.nbytes)


def _gain_ns(graph: Graph, spec: DeviceSpec, n: Node) -> float:
    """What odd rows cost a product."""
    return product_ns(spec, n, size_at_hints(graph, (*n.shape, depth_of(n)))) * (1 / UNEVEN - 1)


def _copy_ns(graph: Graph, spec: DeviceSpec, s: Node) -> float:
    return spec.launch_ns + 2 * size_at_hints(graph, s.shape) * s.dtype.nbytes / spec.bytes_per_ns


def _copy(builder: Builder, s: Node) -> Node:
    return builder.node("copy", s.shape, [Read(s, identity(s.shape))])
