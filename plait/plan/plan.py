"""Plan: which operations share a kernel, what is written to memory, and every decision with its reason.

Invariants: P1 every computed node is in exactly one group, or evaluated where it is read; P2 groups are in topological
order; P3 values crossing groups are stored; P4 every law holds for each group; P5 every refused candidate has a Reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from plait.ir.graph import Graph, Node
from plait.plan.align import Alignment
from plait.plan.cost import Cost
from plait.plan.inline import Reading
from plait.plan.reasons import Reason


@dataclass(frozen=True, slots=True)
class Group:
    """One kernel ("kernel") or one ATen call ("extern"). `stored` are the members written to memory."""

    number: int
    kind: str
    nodes: tuple[Node, ...]
    stored: tuple[Node, ...]
    alignment: Alignment | None = None
    cost: Cost | None = None
    predicted_ns: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of one neighbouring pair: `reason` None when they were fused. Times are predictions in ns."""

    producer: Node
    consumer: Node
    reason: Reason | None
    apart_ns: float = 0.0
    together_ns: float = 0.0
    bytes_at_stake: float = 0.0

    @property
    def fused(self) -> bool:
        """Whether the pair shares a kernel."""
        return self.reason is None


@dataclass
class Plan:
    """Groups in execution order; the inline nodes of `reading` are evaluated wherever they are read."""

    graph: Graph
    groups: tuple[Group, ...]
    reading: Reading
    decisions: tuple[Decision, ...]
    group_of: dict[Node, Group] = field(default_factory=dict)

    def kernels(self) -> Iterator[Group]:
        """The groups that become kernels."""
        return (g for g in self.groups if g.kind == "kernel")

    def refusals(self) -> list[Decision]:
        """Refused pairs, most bytes at stake first."""
        return sorted(
            (d for d in self.decisions if d.reason),
            key=lambda d: (-d.bytes_at_stake, d.producer.serial, d.consumer.serial),
        )

    def _lying(self, n: Node) -> str:
        strides = self.graph.padded.get(n)
        return repr(n) if strides is None else f"{n!r} strides ({', '.join(map(str, strides))})"

    def __str__(self) -> str:
        lines: list[str] = []
        for g in self.groups:
            members = " ".join(repr(n) for n in g.nodes)
            lines.append(f"{g.kind} {g.number}: {members} -> {' '.join(map(self._lying, g.stored))}")
        for d in self.decisions:
            if d.reason is not None:
                lines.append(f"apart: {d.producer} | {d.consumer}: {d.reason}")
        return "\n".join(lines) + "\n"
