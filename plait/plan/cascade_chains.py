"""Which reductions of a graph form cascades, and in how many passes each chain of them can be had."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from plait.ir.graph import Graph, Node
from plait.plan.body import Refusal, body_of, space_of
from plait.plan.cascade import Cascade, plan_cascade
from plait.plan.formula import parts_of


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


def find_chains(
    graph: Graph, *, numerics: str = "fused", among: Callable[[Node], bool] | None = None
) -> list[tuple[Node, ...]]:
    """Sets of two or more reductions over axes of equal length: one and all that it uses, directly or not. Two that share a
    member are one where a single pass has both. `among`: which reductions to look at, None for all."""
    uses: dict[Node, dict[Node, None]] = {}
    above = _ancestors(graph)
    for n in graph.nodes():
        own = space_of(n) if among is None or among(n) else None
        if own is None:
            continue
        direct = _direct(graph, n, [m for m in uses if _count(m) is own.count], uses, above, numerics)
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


def _ancestors(graph: Graph) -> dict[Node, int]:
    """For every node the set, as bits by serial, of reductions it follows from (itself included)."""
    out: dict[Node, int] = {}
    for n in graph.nodes():
        bits = 1 << n.serial if space_of(n) is not None else 0
        for r in n.reads:
            bits |= out[r.source]
        out[n] = bits
    return out


def _direct(
    graph: Graph,
    n: Node,
    candidates: Sequence[Node],
    uses: Mapping[Node, Mapping[Node, None]],
    above: Mapping[Node, int],
    numerics: str,
) -> list[Node]:
    """The earlier reductions that n can read while they run: through maps alone, and not by way of anything that has to be
    whole before n starts."""
    states = {m: k for k, m in enumerate(m for m in candidates if above[n] >> m.serial & 1)}
    while states:
        body = body_of(graph, n, states, numerics=numerics, following=frozenset())
        if isinstance(body, Refusal):
            late = [m for m in body.nodes[:1] if m in states]
        else:
            tensors = {f.value.source for f in parts_of(body.expr) if f.op in ("stream", "row")} - {None}
            whole = 0
            for t in tensors:
                whole |= above[t]
            late = [d for d in body.states if any(whole >> m.serial & 1 for m in (d, *uses[d]))]
            if not late:
                return list(body.states)
        if not late:
            return []
        for m in late:
            del states[m]
    return []


def _count(n: Node) -> object:
    found = space_of(n)
    return None if found is None else found.count
