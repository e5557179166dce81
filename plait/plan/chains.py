"""Which reductions of a graph form cascades, and in how many passes each chain of them can be had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.ir.graph import Graph, Node
from plait.plan.body import Refusal, body_of, space_of
from plait.plan.cascade import Cascade, plan_cascade


@dataclass(frozen=True)
class Passes:
    """Cascades that follow each other, each over the same axis again, and why each but the first had to."""

    cascades: tuple[Cascade, ...]
    refusals: tuple[Refusal, ...]


def plan_passes(graph: Graph, reductions: Sequence[Node], *, numerics: str = "fused") -> Passes | Refusal:
    """As few passes as can be had by taking each as long as it goes; a later pass reads earlier results as row values."""
    cascades: list[Cascade] = []
    refusals: list[Refusal] = []
    rest = list(reductions)
    while rest:
        found = plan_cascade(graph, rest, numerics=numerics)
        if isinstance(found, Refusal):
            refusals.append(found)
            # an earlier end also means another space, so the shorter chain is planned anew
            end = rest.index(found.reduction) if found.reduction in rest else len(rest) - 1
            while end > 0 and isinstance(found := plan_cascade(graph, rest[:end], numerics=numerics), Refusal):
                end -= 1
            if isinstance(found, Refusal):
                return found
            rest = rest[end:]
        else:
            rest = []
        cascades.append(found)
    return Passes(tuple(cascades), tuple(refusals))


def find_chains(graph: Graph, *, numerics: str = "fused") -> list[tuple[Node, ...]]:
    """Sets of two or more reductions over axes of equal length: one and all that it uses, directly or not. Two that share a
    member are one where a single pass has both."""
    uses: dict[Node, dict[Node, None]] = {}
    for n in graph.nodes():
        own = space_of(n)
        if own is None:
            continue
        states = {m: k for k, m in enumerate(uses) if _count(m) is own.count}
        body = body_of(graph, n, states, numerics=numerics)
        while isinstance(body, Refusal) and body.nodes and body.nodes[0] in states:
            del states[body.nodes[0]]
            body = body_of(graph, n, states, numerics=numerics)
        direct = {} if isinstance(body, Refusal) else body.states
        if n.op == "gather" and not direct:
            continue  # a plain look-up
        uses[n] = {m: None for d in direct for m in (*uses[d], d)}
    inner = {m for below in uses.values() for m in below}
    out: list[tuple[Node, ...]] = []
    for n, below in uses.items():
        if not below or n in inner:
            continue
        chain = tuple(sorted((*below, n), key=lambda m: m.serial))
        # siblings that share what they use can share the pass
        for k, other in enumerate(out):
            together = tuple(sorted({*chain, *other}, key=lambda m: m.serial))
            if len(together) < len(chain) + len(other) and isinstance(
                plan_cascade(graph, together, numerics=numerics), Cascade
            ):
                out[k] = together
                break
        else:
            out.append(chain)
    return out


def _count(n: Node) -> object:
    found = space_of(n)
    return None if found is None else found.count
