"""Kernels that the user wants: the nodes of each such region, what lies between them, and why they cannot be one kernel.

They are merged before all else, whatever the time model says of it; the laws hold for them as for every kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from plait.errors import FusionRefused
from plait.ir.graph import Graph, Node, Region
from plait.plan.align import FUSIBLE, Aligner, Alignment, Reads
from plait.plan.reasons import BETWEEN, UNLOCK, Reason, Why
from plait.plan.regions import forced_sets

Users = Mapping[Node, Sequence[Node]]


@dataclass(frozen=True)
class Forced:
    """One kernel that the user wants, its nodes in order."""

    region: Region
    nodes: tuple[Node, ...]


def forced_kernels(
    graph: Graph, nodes: Sequence[Node], users: Users, fusible: Callable[[Node], bool], relaid: frozenset[Node]
) -> list[Forced]:
    """Every kernel that the user wants. `relaid`: copies that are there for products, which must not take them in. Raises
    FusionRefused for one that an ATen call, or what waits for one, would cut."""

    def wanted(n: Node) -> bool:
        return (fusible(n) and n not in relaid) or n.kind == "extern"

    out: list[Forced] = []
    for region, members in forced_sets(graph, nodes, wanted):
        call = next((n for n in members if n.kind == "extern"), None)
        if call is not None:
            said = graph.refusals.get(call, "")
            detail = str(call.attr("target")) + (f", {said}" if said else "")
            raise refused(graph, region, Reason(Why.OPAQUE, detail), [call])
        between = _between(members, nodes, users)
        cut = next((n for n in between if not fusible(n) and n.kind != "source"), None)
        if cut is not None:
            reason = (
                Reason(Why.OPAQUE, BETWEEN) if cut.kind not in FUSIBLE else Reason(Why.CYCLE, f"by way of {cut.op}")
            )
            raise refused(graph, region, reason, [cut])
        if len(members) + len(between) > 1:
            out.append(Forced(region, tuple(sorted({*members, *between}, key=lambda n: n.serial))))
    return out


def refused(graph: Graph, region: Region, reason: Reason, nodes: Iterable[Node]) -> FusionRefused:
    """The error that says why a region is not one kernel, with the user's lines of these nodes."""
    lines = dict.fromkeys(o.line for n in nodes for o in graph.origins.get(n, ())[:1] if o.line)
    return FusionRefused(
        f"{region} cannot be one kernel: {reason}", origin="\n     ".join(lines) or None, hint=UNLOCK[reason.why]
    )


def _between(members: Sequence[Node], nodes: Sequence[Node], users: Users) -> list[Node]:
    """Other nodes on a path from a member to a member."""
    own = set(members)
    below: set[Node] = set()
    for n in nodes:
        if n in own or n in below:
            below.update(u for u in users[n] if u not in own)
    leads: set[Node] = set()
    for n in reversed(nodes):
        if n in below and any(u in own or u in leads for u in users[n]):
            leads.add(n)
    return [n for n in nodes if n in leads]


def grow(
    nodes: Sequence[Node], part_of: Callable[[Node], Alignment], aligner: Aligner, reads: Reads
) -> list[tuple[Node, Alignment]]:
    """The parts of these nodes put together one by one, neighbours first: each node that is added, and the whole so far."""
    al = part_of(nodes[0])
    out = [(nodes[0], al)]
    left = [n for n in nodes if n not in al.nodes]
    while left:
        n = next((m for m in left if _touch(m, al, reads)), left[0])
        al = aligner.merge(al, part_of(n))
        left = [m for m in left if m not in al.nodes]
        out.append((n, al))
    return out


def _touch(n: Node, al: Alignment, reads: Reads) -> bool:
    """Whether a node reads, feeds, or reads the same as, a group."""
    own = {n, *(r.source for r in reads(n))}
    return not own.isdisjoint(al.nodes) or any(r.source in own for m in al.nodes for r in reads(m))
