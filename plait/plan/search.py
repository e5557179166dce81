"""Which groups: contract exact chains first, then merge best first by what the merge saves, while laws and the time model agree.

Candidates are pairs with an edge between them (vertical) and pairs that read the same tensor (siblings). Each popped pair
is judged once: a law's Reason, a cycle, or a predicted loss is recorded as its Decision; otherwise the pair becomes one
group whose own neighbours are candidates again.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from plait.errors import CheckFailed
from plait.ir.budget import is_used_up
from plait.ir.fuel import take_at
from plait.ir.graph import Graph, Node, identity
from plait.plan.align import FUSIBLE, Aligner, Alignment
from plait.plan.chains import chains
from plait.plan.cost import CostModel
from plait.plan.device import DeviceSpec
from plait.plan.forced import Forced, forced_kernels, grow, refused
from plait.plan.inline import Reading
from plait.plan.islands import Keys, islands
from plait.plan.legality import Context, why_not
from plait.plan.plan import Decision, Group, Plan
from plait.plan.reasons import BETWEEN, Reason, Why

Fits = Callable[[Alignment, list[Node]], "Reason | None"]
_OUT_OF_FUEL = Reason(Why.FORBIDDEN, "beyond the option fuel")
_MAX_ARGUMENTS = 48
_MAX_NODES = 400
_MAX_SIBLINGS = 16  # neighbours in reading order that a tensor's readers are paired with


@dataclass
class _Part:
    """A group under construction."""

    alignment: Alignment
    ns: float
    below: int  # bitset of groups that depend on this one
    sources: frozenset[Node]  # what it reads from outside


def make_plan(graph: Graph, spec: DeviceSpec, reading: Reading, fits: Fits, *, fuse: bool = True) -> Plan:
    """Plan a graph. `fits` says why no schedule fits a group, or None; `fuse=False` gives every operation its own kernel."""
    setting = Setting(graph, spec, reading, fits)
    planned: dict[tuple[object, ...], tuple[list[tuple[int, int]], list[tuple[int, int, Decision]]]] = {}
    keys = Keys(setting.reading, setting.demanded)
    alignments: list[Alignment] = []
    decisions: list[Decision] = []
    forced = setting.forced() if fuse else []
    for island in islands(setting.reading, setting.fusible, setting.model.size, [f.nodes for f in forced]):
        search = _Search(setting, island)
        key = keys.key(island)
        if key not in planned:
            if fuse:
                for f in forced:
                    if f.nodes[0] in search.positions:
                        search.merge_forced(f)
                search.merge_chains()
                search.contract_chains()
                search.merge_best_first()
            local = {n: i for i, n in enumerate(island)}
            planned[key] = search.merges, [(local[d.producer], local[d.consumer], d) for d in search.decisions]
        else:
            search.replay(planned[key][0])
        alignments += [part.alignment for part in search.parts.values()]
        decisions += [search.as_here(replace(d, producer=island[p], consumer=island[c])) for p, c, d in planned[key][1]]
    return finish(setting, alignments, decisions)


class Setting:
    """What all searches of one graph share."""

    def __init__(self, graph: Graph, spec: DeviceSpec, reading: Reading, fits: Fits) -> None:
        self.graph = graph
        self.reading = reading
        self.nodes = self.reading.nodes
        self.positions = {n: i for i, n in enumerate(self.nodes)}
        self.users = self.reading.users
        # effects keep their order: each counts as a reader of the one before
        ordered = [n for n in self.nodes if n.kind == "extern" and n.attr("serial") is not None]
        for x, y in itertools.pairwise(ordered):
            if y not in self.users[x]:
                self.users[x].append(y)
        self.demanded = self.reading.demanded
        self.inline = self.reading.inline
        self.model = CostModel(graph, spec, self.reading, self.stored)
        self.laws = Context(
            self.model,
            self.stored,
            lambda al: fits(al, self.stored(frozenset(al.nodes))),
            graph.partials,
            frozenset(n for n in graph.padded if n.op == "copy"),
            frozenset(r.source for n in graph.nodes() if n.op == "between" for r in n.reads[1:]),
            _MAX_ARGUMENTS,
            _MAX_NODES,
        )
        self.aligner = Aligner(self.reading.reads, self.reading.inline)

    def forced(self) -> list[Forced]:
        """Kernels that the user wants."""
        return forced_kernels(self.graph, self.nodes, self.users, self.fusible, self.laws.relaid)

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


class _Search:
    """Merges the nodes of one island."""

    def __init__(self, setting: Setting, island: list[Node]) -> None:
        self.setting, self.nodes = setting, island
        self.model, self.laws, self.demanded = setting.model, setting.laws, setting.demanded
        self.reads = setting.reading.reads
        self.positions = {n: i for i, n in enumerate(island)}
        self.users = {n: [u for u in setting.users[n] if u in self.positions] for n in island}
        self.readers: dict[Node, list[Node]] = {}
        for n in island:
            for s in dict.fromkeys(r.source for r in self.reads(n)):
                self.readers.setdefault(s, []).append(n)
        self.next_part = len(island)
        self.decisions: list[Decision] = []
        self.merges: list[tuple[int, int]] = []  # (node, node) positions whose parts were joined, in order
        below = [0] * len(island)
        for i in reversed(range(len(island))):
            for u in self.users[island[i]]:
                j = self.positions[u]
                below[i] |= below[j] | (1 << j)
        self.part_of = dict(self.positions)
        self.parts: dict[int, _Part] = {}
        for i, n in enumerate(island):
            al = setting.aligner.single(n)
            self.parts[i] = self.part(al, below[i])

    def part(self, al: Alignment, below: int) -> _Part:
        inside = frozenset(al.nodes)
        sources = frozenset(r.source for n in al.nodes for r in self.reads(n)) - inside
        return _Part(al, self.model.time(al), below, sources)

    def replay(self, merges: list[tuple[int, int]]) -> None:
        """Merge as an equal island was merged."""
        for p, c in merges:
            if not self.granted([self.nodes[p], self.nodes[c]]):
                return
            a, b = self.part_of[self.nodes[p]], self.part_of[self.nodes[c]]
            self.join(a, b, self.merged(a, b), p, c)

    def as_here(self, d: Decision) -> Decision:
        """A decision as it stands in this island, where fuel may have ended before it."""
        apart = d.fused and self.part_of[d.producer] != self.part_of[d.consumer]
        return replace(d, reason=_OUT_OF_FUEL) if apart else d

    def granted(self, nodes: list[Node]) -> bool:
        """Whether there is fuel for one more merge."""
        return take_at("merge", "plan", self.setting.graph, nodes)

    # ---------------------------------------------------------------- merging
    def merge_forced(self, forced: Forced) -> None:
        """Merge what the user wants in one kernel, whatever it costs. Raises FusionRefused where a law forbids it."""
        grown = grow(forced.nodes, lambda n: self.parts[self.part_of[n]].alignment, self.setting.aligner, self.reads)
        al = grown[-1][1]
        reason = why_not(self.laws, al)
        if reason is None and not self.is_convex(list(dict.fromkeys(self.part_of[n] for n in al.nodes))):
            reason = Reason(Why.CYCLE, "by way of another kernel that is wanted")
        if reason is not None:
            # the first that does not fit to those before it
            at = next((k for k, (_, part) in enumerate(grown) if k and why_not(self.laws, part) is not None), -1)
            raise refused(self.setting.graph, forced.region, reason, [n for n, _ in grown[at - 1 :][:2]])
        if not self.granted(list(forced.nodes)):
            return
        first = forced.nodes[0]
        for n, _ in grown[1:]:
            a, b = self.part_of[first], self.part_of[n]
            if a != b:
                self.join(a, b, self.merged(a, b), self.positions[first], self.positions[n])
                self.decisions.append(Decision(first, n, None))

    def contract_chains(self) -> None:
        """Pointwise nodes with a single pointwise reader that reads them point by point: always one kernel."""
        for n in self.nodes:
            if n.kind != "map" or n in self.demanded or len(self.setting.users[n]) != 1 or not self.users[n]:
                continue
            (u,) = self.users[n]
            if u.kind != "map" or len(u.axes) != len(n.axes):
                continue
            same = (
                all(r.index == identity(n.shape) and not r.guard for r in self.reads(u) if r.source is n)
                and u.axes == n.axes
            )
            if same and self.part_of[n] != self.part_of[u] and not self.makes_cycle(self.part_of[n], self.part_of[u]):
                al = self.merged(self.part_of[n], self.part_of[u])
                if len(al.nodes) <= _MAX_NODES and why_not(self.laws, al) is None and self.granted([n, u]):
                    self.join(self.part_of[n], self.part_of[u], al, self.positions[n], self.positions[u])
                    self.decisions.append(Decision(n, u, None))

    def merge_chains(self) -> None:
        """Contractions with what follows from them, where all of it together is lawful and pays."""
        for chain in chains(self.nodes, _before_merges(self)):
            numbers = list(dict.fromkeys(self.part_of[n] for n in chain))
            if len(numbers) == 1 or not self.is_convex(numbers):
                continue
            if is_used_up():
                return
            al = self.parts[numbers[0]].alignment
            for k in numbers[1:]:
                al = self.setting.aligner.merge(al, self.parts[k].alignment)
            if why_not(self.laws, al) is not None or self.model.time(al) >= sum(self.parts[k].ns for k in numbers):
                continue
            if not self.granted(chain):
                continue
            for n in chain[1:]:
                a, b = self.part_of[chain[0]], self.part_of[n]
                if a != b:
                    self.join(a, b, self.merged(a, b), self.positions[chain[0]], self.positions[n])
                    self.decisions.append(Decision(chain[0], n, None))

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
                self.join(a, b, al, ps, cs)
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
        for r in self.reads(n):
            if r.source in self.positions:
                self.push(heap, r.source, n)
            else:
                for u in self.readers[r.source][:_MAX_SIBLINGS]:
                    if u is not n:
                        self.push(heap, min(n, u, key=_serial), max(n, u, key=_serial))
        for u in self.users[n]:
            self.push(heap, n, u)
        for x, y in itertools.pairwise(self.users[n][:_MAX_SIBLINGS]):
            self.push(heap, x, y)

    def push(self, heap: list[tuple[float, int, int, int, int]], p: Node, c: Node) -> None:
        a, b = self.part_of[p], self.part_of[c]
        if a != b:
            heapq.heappush(heap, (-self.saving(a, b), self.positions[p], self.positions[c], a, b))

    def saving(self, a: int, b: int) -> float:
        """Bytes that fusing two parts is likely to save: the order of trying, not the judgement."""
        x, y = self.parts[a], self.parts[b]
        bytes_of = [self.nbytes(s) for s in x.sources & y.sources]
        both = frozenset((*x.alignment.nodes, *y.alignment.nodes))
        for s in (x.sources | y.sources) & both:
            inner = s not in self.demanded and all(u in both for u in self.setting.users[s])
            # an edge that becomes internal counts a little more than siblings that save as much
            bytes_of.append(1.01 * self.nbytes(s) * (2.0 if inner else 1.0))
        return math.fsum(bytes_of)  # the same in every order: that of a set is another in every process

    def nbytes(self, n: Node) -> float:
        return self.model.size(n.shape) * n.dtype.nbytes

    def judge(self, p: Node, c: Node, a: int, b: int) -> tuple[Decision, Alignment | None]:
        """Fuse or refuse, with the reason."""
        apart = self.parts[a].ns + self.parts[b].ns
        stake = self.saving(a, b)
        if is_used_up():
            return Decision(p, c, Reason(Why.BUDGET), apart, 0.0, stake), None
        if self.makes_cycle(a, b):
            return Decision(p, c, Reason(Why.CYCLE, f"between {p.op} and {c.op}"), apart, 0.0, stake), None
        al = self.merged(a, b)
        together = self.model.time(al)
        reason = why_not(self.laws, al)
        if reason is None and together >= apart:
            reason = Reason(Why.NO_GAIN, "", together, apart)
        if reason is None and not self.granted([p, c]):
            reason = _OUT_OF_FUEL
        return Decision(p, c, reason, apart, together, stake), al if reason is None else None

    def merged(self, a: int, b: int) -> Alignment:
        return self.setting.aligner.merge(self.parts[a].alignment, self.parts[b].alignment)

    def makes_cycle(self, a: int, b: int) -> bool:
        """True when some third part lies between the two."""
        return self._path_through(a, b) or self._path_through(b, a)

    def is_convex(self, numbers: list[int]) -> bool:
        """False when some path between these parts leaves them."""
        inside = sum(1 << k for k in numbers)
        below = 0
        for k in numbers:
            below |= self.parts[k].below
        return not any(below >> q & 1 and part.below & inside for q, part in self.parts.items() if not inside >> q & 1)

    def _path_through(self, a: int, b: int) -> bool:
        if not self.parts[a].below >> b & 1:
            return False
        for n in self.parts[a].alignment.nodes:
            for u in self.users[n]:
                q = self.part_of[u]
                if q not in (a, b) and self.parts[q].below >> b & 1:
                    return True
        return False

    def join(self, a: int, b: int, al: Alignment, p: int, c: int) -> None:
        """Make one part of two (those of nodes p and c); whoever is above either is now above both."""
        self.merges.append((p, c))
        both = (1 << a) | (1 << b)
        below = (self.parts[a].below | self.parts[b].below) & ~both
        del self.parts[a], self.parts[b]
        number = self.next_part  # a new number: judgements of the old parts do not carry over
        self.next_part += 1
        for part in self.parts.values():
            if part.below & both:
                part.below = (part.below & ~both) | below | (1 << number)
        self.parts[number] = self.part(al, below)
        for n in al.nodes:
            self.part_of[n] = number


def _before_merges(search: _Search) -> dict[Node, list[Node]]:
    """Readers of each node, without the combinations of partial results: those are kernels of their own."""
    partials = search.setting.graph.partials
    if not partials:
        return search.users
    hanging: set[Node] = set()
    merges: set[Node] = set()
    for n in search.nodes:
        if n not in partials and any(r.source in partials or r.source in hanging for r in search.reads(n)):
            (merges if n.reduces else hanging).add(n)
    return {n: [u for u in users if u not in merges] for n, users in search.users.items()}


def _serial(n: Node) -> int:
    return n.serial


# -------------------------------------------------------------------------------------------------------------- result
def finish(setting: Setting, alignments: list[Alignment], decisions: list[Decision]) -> Plan:
    """Order the groups, and decide the pairs that were never candidates: those with an ATen call, or one between them."""
    part_of = {n: i for i, al in enumerate(alignments) for n in al.nodes}
    loose = [n for n in setting.nodes if n not in part_of]
    for n in loose:
        part_of[n] = len(alignments)
        alignments.append(Alignment((n,), {}, {}, {}, {}, {}, frozenset()))
    groups: list[Group] = []
    group_of: dict[Node, Group] = {}
    for i in _topological(setting, alignments, part_of):
        al = alignments[i]
        first = al.nodes[0]
        if first.kind == "extern":
            group = Group(len(groups), "extern", al.nodes, al.nodes)
        elif setting.fusible(first):
            stored = tuple(setting.stored(frozenset(al.nodes)))
            cost = setting.model.cost(al)
            group = Group(len(groups), "kernel", al.nodes, stored, al, cost, cost.time_on(setting.model.spec))
        else:
            continue
        groups.append(group)
        group_of.update(dict.fromkeys(al.nodes, group))
    decided = {(part_of[d.producer], part_of[d.consumer]) for d in decisions}
    decisions = decisions + _never_candidates(setting, part_of, decided)
    return Plan(setting.graph, tuple(groups), setting.reading, tuple(decisions), group_of)


def _topological(setting: Setting, alignments: list[Alignment], part_of: dict[Node, int]) -> list[int]:
    """Parts, producers first; among the ready ones the earliest in program order."""
    needs: list[set[int]] = [set() for _ in alignments]
    after: list[set[int]] = [set() for _ in alignments]
    for n in setting.nodes:
        for u in setting.users[n]:
            a, b = part_of[n], part_of[u]
            if a != b:
                needs[b].add(a)
                after[a].add(b)
    last = [setting.positions[al.nodes[-1]] for al in alignments]
    ready = [(last[i], i) for i, sources in enumerate(needs) if not sources]
    heapq.heapify(ready)
    out: list[int] = []
    while ready:
        _, i = heapq.heappop(ready)
        out.append(i)
        for b in sorted(after[i]):
            needs[b].discard(i)
            if not needs[b]:
                heapq.heappush(ready, (last[b], b))
    if len(out) != len(alignments):
        raise CheckFailed("plan", "P2", "groups depend on each other in a circle")
    return out


def _never_candidates(setting: Setting, part_of: dict[Node, int], decided: set[tuple[int, int]]) -> list[Decision]:
    """Refusals of neighbouring pairs that no search looked at."""
    out: list[Decision] = []
    for n in setting.nodes:
        for s in dict.fromkeys(r.source for r in setting.reading.reads(n)) if n not in setting.inline else ():
            source = s.reads[0].source if s.kind == "project" else s
            if source.kind == "source" or n.kind == "project" or part_of[source] == part_of[n]:
                continue
            stake = 2 * setting.model.size(s.shape) * s.dtype.nbytes
            call = next((x for x in (n, source) if x.kind == "extern"), None)
            if call is not None:
                out.append(Decision(source, n, Reason(Why.OPAQUE, str(call.attr("target"))), 0.0, 0.0, stake))
            elif not {(part_of[source], part_of[n]), (part_of[n], part_of[source])} & decided:
                out.append(Decision(source, n, Reason(Why.OPAQUE, BETWEEN), 0.0, 0.0, stake))
    return out
