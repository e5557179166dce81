"""Which groups: contract exact chains first, then merge best first by what the merge saves, while laws and the time model agree.

Candidates are pairs with an edge between them (vertical) and pairs that read the same tensor (siblings). Each popped pair
is judged once: a law's Reason, a cycle, or a predicted loss is recorded as its Decision; otherwise the pair becomes one
group whose own neighbours are candidates again.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from plait.ir.graph import Graph, Node, identity
from plait.plan.align import FUSIBLE, Aligner, Alignment
from plait.plan.cost import CostModel
from plait.plan.device import DeviceSpec
from plait.plan.legality import Context, why_not
from plait.plan.plan import Decision, Group, Plan
from plait.plan.reasons import Reason, Why

Fits = Callable[[Alignment, list[Node]], "Reason | None"]
_MAX_ARGUMENTS = 48
_MAX_NODES = 400
_MAX_SIBLINGS = 16  # neighbours in reading order that a tensor's readers are paired with


@dataclass
class _Part:
    """A group under construction."""

    alignment: Alignment
    ns: float
    below: int  # bitset of groups that depend on this one


def make_plan(graph: Graph, spec: DeviceSpec, fits: Callable[[Alignment], Reason | None], *, fuse: bool = True) -> Plan:
    """Plan a graph. `fits` says why no schedule fits a group, or None; `fuse=False` gives every operation its own kernel."""
    return _Search(graph, spec, fits, fuse).run()


def inline_nodes(graph: Graph) -> frozenset[Node]:
    """Nodes cheap enough to evaluate wherever they are read: short chains of maps that read no memory."""
    depth: dict[Node, int] = {}
    for n in graph.nodes():
        if n.kind == "map" and all(r.source in depth for r in n.reads) and n.op != "gather":
            d = 1 + sum(depth[r.source] for r in n.reads)
            if d <= 12:
                depth[n] = d
    return frozenset(depth)


class _Search:
    def __init__(self, graph: Graph, spec: DeviceSpec, fits: Callable[[Alignment], Reason | None], fuse: bool) -> None:
        self.graph, self.spec, self.fuse = graph, spec, fuse
        self.nodes = graph.nodes()
        self.positions = {n: i for i, n in enumerate(self.nodes)}
        self.users = graph.users()
        # effects keep their order: each counts as a reader of the one before
        ordered = [n for n in self.nodes if n.kind == "extern" and n.attr("serial") is not None]
        for x, y in itertools.pairwise(ordered):
            if y not in self.users[x]:
                self.users[x].append(y)
        self.demanded = {o.read.source for o in graph.outputs}
        for n in self.nodes:
            if n.kind == "extern":
                self.demanded.update(r.source for r in n.reads)
        self.inline = inline_nodes(graph)
        self.model = CostModel(graph, spec, self.stored)
        self.laws = Context(self.model, fits, _MAX_ARGUMENTS, _MAX_NODES)
        self.aligner = Aligner()
        self.part_of: dict[Node, int] = {}
        self.parts: dict[int, _Part] = {}
        self.next_part = len(self.nodes)
        self.decisions: list[Decision] = []

    def run(self) -> Plan:
        self.start()
        if self.fuse:
            self.contract_chains()
            self.merge_best_first()
        return self.finish()

    # ---------------------------------------------------------------- state
    def fusible(self, n: Node) -> bool:
        """Nodes that kernels are made of; inline ones only when somebody needs them in memory."""
        return n.kind in FUSIBLE and (n not in self.inline or n in self.demanded)

    def stored(self, inside: frozenset[Node]) -> list[Node]:
        """Members read by others, in order. An inline member read elsewhere is evaluated there."""
        out: list[Node] = []
        for n in inside:
            if n in self.demanded or (n not in self.inline and any(u not in inside for u in self.users[n])):
                out.append(n)
        return sorted(out, key=lambda n: n.serial)

    def start(self) -> None:
        """One part a node; externs and sources are parts too (for cycles), but never merged."""
        index = self.positions
        below = [0] * len(self.nodes)
        for n in reversed(self.nodes):
            i = index[n]
            for u in self.users[n]:
                below[i] |= below[index[u]] | (1 << index[u])
        for n in self.nodes:
            i = index[n]
            self.part_of[n] = i
            if self.fusible(n):
                al = self.aligner.single(n)
                self.parts[i] = _Part(al, self.model.time(al), below[i])
            else:
                self.parts[i] = _Part(Alignment((n,), {}, {}, {}, {}, {}, frozenset()), 0.0, below[i])

    # ---------------------------------------------------------------- merging
    def contract_chains(self) -> None:
        """Pointwise nodes with a single pointwise reader that reads them point by point: always one kernel."""
        for n in self.nodes:
            if n.kind != "map" or not self.fusible(n) or n in self.demanded or len(self.users[n]) != 1:
                continue
            (u,) = self.users[n]
            if u.kind != "map" or not self.fusible(u) or len(u.axes) != len(n.axes):
                continue
            same = (
                all(r.index == identity(n.shape) and not r.guard for r in u.reads if r.source is n) and u.axes == n.axes
            )
            if same and not self.makes_cycle(self.part_of[n], self.part_of[u]):
                al = self.merged(self.part_of[n], self.part_of[u])
                if len(al.nodes) <= _MAX_NODES and why_not(self.laws, al) is None:
                    self.join(self.part_of[n], self.part_of[u], al)
                    self.decisions.append(Decision(n, u, None))

    def merge_best_first(self) -> None:
        heap: list[tuple[float, int, int, int, int]] = []
        for n in self.nodes:
            self.push_around(heap, n)
        judged: dict[tuple[int, int], Decision] = {}
        while heap:
            _, ps, cs, a0, b0 = heapq.heappop(heap)
            p, c = self.nodes[ps], self.nodes[cs]
            a, b = self.part_of[p], self.part_of[c]
            if a == b:
                continue
            if (a, b) != (a0, b0):
                if (min(a, b), max(a, b)) not in judged:
                    self.push(heap, p, c)
                continue
            if (min(a, b), max(a, b)) in judged:
                continue
            decision, al = self.judge(p, c, a, b)
            judged[(min(a, b), max(a, b))] = decision
            if al is not None:
                self.join(a, b, al)
                for n in al.nodes:
                    self.push_around(heap, n)
        self.decisions += self.standing(judged.values())

    def standing(self, judged: Iterable[Decision]) -> list[Decision]:
        """One decision a pair: refusals of parts that met again later, and then fused, no longer stand."""
        latest: dict[tuple[int, int], Decision] = {}
        fused: list[Decision] = []
        for d in judged:
            a, b = self.part_of[d.producer], self.part_of[d.consumer]
            if d.fused:
                fused.append(d)
            elif a != b:
                latest[(min(a, b), max(a, b))] = d
        return sorted([*fused, *latest.values()], key=lambda d: (d.producer.serial, d.consumer.serial))

    def push_around(self, heap: list[tuple[float, int, int, int, int]], n: Node) -> None:
        """Candidates that involve n."""
        if self.fusible(n):
            for r in n.reads:
                if self.fusible(r.source) and r.source not in self.inline:
                    self.push(heap, r.source, n)
                elif r.source.kind != "map":
                    siblings = [u for u in self.users[r.source] if u is not n and self.fusible(u)]
                    for u in siblings[:_MAX_SIBLINGS]:
                        self.push(heap, n, u)
            for u in self.users[n]:
                if self.fusible(u):
                    self.push(heap, n, u)
            readers = [u for u in self.users[n] if self.fusible(u)][:_MAX_SIBLINGS]
            for x, y in itertools.pairwise(readers):
                self.push(heap, x, y)

    def push(self, heap: list[tuple[float, int, int, int, int]], p: Node, c: Node) -> None:
        a, b = self.part_of[p], self.part_of[c]
        if a != b:
            # serial numbers may have gaps after rewriting: positions in self.nodes are what the heap names
            heapq.heappush(heap, (-self.saving(p, c), self.positions[p], self.positions[c], a, b))

    def saving(self, p: Node, c: Node) -> float:
        """Bytes that fusing the pair is likely to save: the order of trying, not the judgement."""
        if any(r.source is p for r in c.reads):
            size = self.model.size(p.shape) * p.dtype.nbytes
            return size * (2.0 if len(self.users[p]) == 1 and p not in self.demanded else 1.0)
        shared = {r.source for r in p.reads} & {r.source for r in c.reads}
        return sum(self.model.size(s.shape) * s.dtype.nbytes for s in shared)

    def judge(self, p: Node, c: Node, a: int, b: int) -> tuple[Decision, Alignment | None]:
        """Fuse or refuse, with the reason."""
        apart = self.parts[a].ns + self.parts[b].ns
        stake = self.saving(p, c)
        if self.makes_cycle(a, b):
            return Decision(p, c, Reason(Why.CYCLE, f"between {p.op} and {c.op}"), apart, 0.0, stake), None
        al = self.merged(a, b)
        together = self.model.time(al)
        reason = why_not(self.laws, al)
        if reason is None and together >= apart:
            reason = Reason(Why.NO_GAIN, "", together, apart)
        return Decision(p, c, reason, apart, together, stake), al if reason is None else None

    def merged(self, a: int, b: int) -> Alignment:
        return self.aligner.merge(self.parts[a].alignment, self.parts[b].alignment)

    def makes_cycle(self, a: int, b: int) -> bool:
        """True when some third part lies between the two."""
        return self._path_through(a, b) or self._path_through(b, a)

    def _path_through(self, a: int, b: int) -> bool:
        if not self.parts[a].below >> b & 1:
            return False
        for n in self.parts[a].alignment.nodes:
            for u in self.users[n]:
                q = self.part_of[u]
                if q not in (a, b) and self.parts[q].below >> b & 1:
                    return True
        return False

    def join(self, a: int, b: int, al: Alignment) -> None:
        """Make one part of two; whoever is above either is now above both."""
        both = (1 << a) | (1 << b)
        below = (self.parts[a].below | self.parts[b].below) & ~both
        del self.parts[a], self.parts[b]
        number = self.next_part  # a new number: judgements of the old parts do not carry over
        self.next_part += 1
        for part in self.parts.values():
            if part.below & both:
                part.below = (part.below & ~both) | below | (1 << number)
        self.parts[number] = _Part(al, self.model.time(al), below)
        for n in al.nodes:
            self.part_of[n] = number

    # ---------------------------------------------------------------- result
    def finish(self) -> Plan:
        order = self.topological_parts()
        groups: list[Group] = []
        group_of: dict[Node, Group] = {}
        for i in order:
            al = self.parts[i].alignment
            first = al.nodes[0]
            if first.kind in ("source", "project") or (first in self.inline and first not in self.demanded):
                continue
            if first.kind == "extern":
                group = Group(len(groups), "extern", al.nodes, al.nodes)
            else:
                stored = tuple(self.stored(frozenset(al.nodes)))
                group = Group(len(groups), "kernel", al.nodes, stored, al, self.model.cost(al), self.parts[i].ns)
            groups.append(group)
            group_of.update(dict.fromkeys(al.nodes, group))
        return Plan(self.graph, tuple(groups), self.inline, tuple(self.refused_externs() + self.decisions), group_of)

    def topological_parts(self) -> list[int]:
        """Parts, producers first; among the ready ones the earliest in program order."""
        needs: dict[int, set[int]] = {i: set() for i in self.parts}
        for n in self.nodes:
            for u in self.users[n]:
                a, b = self.part_of[n], self.part_of[u]
                if a != b:
                    needs[b].add(a)
        after: dict[int, list[int]] = {i: [] for i in self.parts}
        for b, sources in needs.items():
            for a in sources:
                after[a].append(b)
        last = {i: self.positions[part.alignment.nodes[-1]] for i, part in self.parts.items()}
        ready = [(last[i], i) for i, sources in needs.items() if not sources]
        heapq.heapify(ready)
        out: list[int] = []
        while ready:
            _, i = heapq.heappop(ready)
            out.append(i)
            for b in after[i]:
                needs[b].discard(i)
                if not needs[b]:
                    heapq.heappush(ready, (last[b], b))
        return out

    def refused_externs(self) -> list[Decision]:
        """Every edge to or from an ATen call is a refusal with its reason."""
        out: list[Decision] = []
        for n in self.nodes:
            for s in dict.fromkeys(r.source for r in n.reads):
                source = s.reads[0].source if s.kind == "project" else s
                opaque = next((x for x in (n, source) if x.kind == "extern"), None)
                if opaque is None or source.kind == "source" or n.kind == "project":
                    continue
                stake = 2 * self.model.size(s.shape) * s.dtype.nbytes
                out.append(Decision(source, n, Reason(Why.OPAQUE, str(opaque.attr("target"))), 0.0, 0.0, stake))
        return out
