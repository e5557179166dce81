"""Which contractions to open: those whose neighbours' traffic is worth more than the vendor's edge in products.

An open product shares a kernel with what is around it, so the tensors between them never reach memory; a closed one runs
at the vendor's throughput. Judged from the call's own surroundings: planning then has the last word, and a product that
stays alone in its kernel is closed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plait.ir.graph import Graph, Node
from plait.ir.index import Expr
from plait.plan.contract_cost import OWN
from plait.plan.cost import size_at_hints
from plait.plan.device import DeviceSpec
from plait.plan.plan import Plan


def worth_opening(graph: Graph, spec: DeviceSpec, can_open: Callable[[Node], bool]) -> frozenset[Node]:
    """Calls (that `can_open`) whose opening saves more traffic than it costs in throughput."""
    users = graph.users()
    demanded = {o.read.source for o in graph.outputs}

    def size(n: Node) -> float:
        return size_at_hints(graph, n.shape) * n.dtype.nbytes

    out: set[Node] = set()
    for n in graph.nodes():
        if not can_open(n):
            continue
        saved = 0.0
        if n not in demanded and users[n] and all(_joins(u, can_open) for u in users[n]):
            saved += 2 * size(n)
        for r in n.reads:
            s = r.source
            if s.kind in ("map", "reduce") and s not in demanded and all(_joins(u, can_open) for u in users[s]):
                saved += 2 * size(s)
        flops = 2.0 * size_at_hints(graph, n.shape) * size_at_hints(graph, [_depth(n)])
        rate = spec.half_flops_per_ns if n.dtype.nbytes <= 2 else spec.float_flops_per_ns
        if saved / spec.bytes_per_ns > flops / rate * (1 / OWN - 1):
            out.add(n)
    return frozenset(out)


def _depth(n: Node) -> Expr:
    domain = n.reads[-1].domain
    assert domain is not None
    return domain[-2]


def _joins(n: Node, can_open: Callable[[Node], bool]) -> bool:
    return n.kind in ("map", "reduce") or can_open(n)


def lonely(plan: Plan) -> list[Node]:
    """Contract nodes that share their kernel with nothing that saves traffic: casts and sums of their own call."""
    out: list[Node] = []
    for g in plan.kernels():
        products = [n for n in g.nodes if n.kind == "contract"]
        others = [n for n in g.nodes if n.kind != "contract" and n.op not in ("cast", "copy", "const", "index")]
        if len(products) == 1 and not others:
            out += products
    return out


def in_order(nodes: Sequence[Node]) -> list[Node]:
    """Contract nodes by construction: the order of the calls they stand for."""
    return sorted((n for n in nodes if n.kind == "contract"), key=lambda n: n.serial)
