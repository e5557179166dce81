"""Which cascades to split over blocks, and into what parts.

Candidates hang on a running extreme over a long axis. The blocks of such a cascade are the tiles of its rows: rows are what
a contraction inside it has on the other side than the axis, columns that only the values have are held whole by a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from plait.ir.dtype import DType
from plait.ir.graph import Graph, Node, Read, Shape
from plait.ir.index import Expr
from plait.plan.body import Body, Refusal, Space, body_of, space_of
from plait.plan.cascade import IDENTITY, Cascade, plan_cascade
from plait.plan.cascade_chains import find_chains
from plait.plan.contract_cost import TILE, product_ns
from plait.plan.device import DeviceSpec
from plait.plan.formula import ONE, ZERO, Formula, apply, parts_of, product
from plait.plan.monoids import MONOIDS
from plait.plan.regions import is_forced, is_mixed
from plait.rewrite.passes.formula_nodes import inverse

_LONG = 1024  # points of an axis worth splitting
_CHUNK = 128  # parts are multiples of it
_SHORTEST = 512  # points of a part
_BUSY = 0.95  # of the best share of the machine that will do
_MARGIN = 0.8  # of the time unsplit that splitting must stay under


@dataclass(frozen=True)
class Cut:
    """How a cascade is split. `padded`: nodes that have to exist beyond the end of the axis (their axis of that number),
    where parts do not divide it. `real`: the type of results."""

    cascade: Cascade
    extent: int
    parts: int
    chunk: int
    real: DType
    padded: Mapping[Node, int]

    @property
    def uneven(self) -> bool:
        """Whether the last part is shorter."""
        return self.parts * self.chunk != self.extent


def find_cuts(graph: Graph, spec: DeviceSpec, numerics: str) -> list[Cut]:
    """Every cascade worth splitting; no node is in two of them."""
    seeds = [n for n in graph.nodes() if _is_seed(graph, n, spec)]
    if not seeds:
        return []
    members = _around(graph, seeds)
    out: list[Cut] = []
    taken: set[Node] = set()
    for chain in find_chains(graph, numerics=numerics, among=members.__contains__):
        found = plan_cascade(graph, chain, numerics=numerics)
        cuts = [] if isinstance(found, Refusal) else _cuts(graph, found, spec)
        own = {n for cut in cuts for n in (*cut.padded, *(s.node for s in cut.cascade.steps))}
        free = not is_mixed(graph, own) and not any(is_forced(graph, n) for n in own)
        if free and not own & taken:
            out += cuts
            taken |= own
    return out


def _is_seed(graph: Graph, n: Node, spec: DeviceSpec) -> bool:
    """An extreme over one long axis with few blocks of rows."""
    if n.op not in IDENTITY or n.kind != "reduce" or not n.dtype.is_float or any(e.const is None for e in n.axes):
        return False
    own = space_of(n)
    if own is None or len(own.stream) != 1 or (own.stream[0].const or 0) < _LONG:
        return False
    body = body_of(graph, n, {}, following=frozenset())
    return not isinstance(body, Refusal) and _Rows(own, [body], _contracts([body.expr])).are_few(spec)


def _around(graph: Graph, seeds: Sequence[Node]) -> set[Node]:
    """The seeds and the reductions over axes of their length that they reach through maps."""
    counts = {n: {s.axes[-1] for s in seeds if s is n} for n in graph.nodes()}
    out = set(seeds)
    for n in graph.nodes():
        reached = counts[n].union(*(counts[r.source] for r in n.reads))
        if n.kind in ("reduce", "contract"):
            own = space_of(n)
            reached &= {own.count} if own is not None else set()
            if reached:
                out.add(n)
        elif n.kind == "map":
            if n.op == "gather":
                own = space_of(n)
                if own is not None and own.count in reached:
                    out.add(n)
        else:
            reached = set()
        counts[n] = reached
    return out


# ------------------------------------------------------------------------------------------------------------ deciding
def _cuts(graph: Graph, cascade: Cascade, spec: DeviceSpec) -> list[Cut]:
    """The cascade's, and with it those of other reductions of its products; none where it stays whole."""
    space = cascade.space
    if cascade.kind != "online" or len(space.stream) != 1 or any(e.const is None for e in space.axes):
        return []
    extent = space.stream[0].const or 0
    rows = _Rows(space, [s.body for s in cascade.steps], _contracts([f for s in cascade.slots for f in s.lift]))
    if extent < _LONG or not rows.are_few(spec) or not _can_be_rebuilt(cascade):
        return []
    want = rows.parts(spec)
    found = _parts(extent, want, want if rows.is_counted(spec) else 2 * want, lambda parts: rows.busy(parts, spec))
    if found is None or not _pays(cascade, rows, found[0], spec):
        return []
    parts, chunk = found
    together = [cascade, *_others(graph, cascade, rows.inner)]
    real = max((s.node.dtype.compute for s in cascade.steps if s.node.dtype.is_float), key=lambda d: d.nbytes)
    steps = {s.node for c in together for s in c.steps}
    out: list[Cut] = []
    for c in together:
        padded = _Padding(graph, c, steps).nodes() if parts * chunk != extent else {}
        if padded is None:
            return []
        out.append(Cut(c, extent, parts, chunk, real, padded))
    return out


def _others(graph: Graph, cascade: Cascade, inner: Sequence[Node]) -> list[Cascade]:
    """Plain reductions over the same axis of products that the cascade forms: they would have to be formed again for them."""
    out: list[Cascade] = []
    own = {s.node for s in cascade.steps}
    hanging = set(inner)
    for n in graph.nodes() if inner else ():
        if not any(r.source in hanging for r in n.reads):
            continue
        if n.kind == "map":
            hanging.add(n)
        elif n.kind == "reduce" and n not in own and n.op in MONOIDS and n.axes[len(n.shape) :] == cascade.space.stream:
            found = plan_cascade(graph, [n])
            if isinstance(found, Cascade) and _can_be_rebuilt(found):
                out.append(found)
    return out


def _can_be_rebuilt(cascade: Cascade) -> bool:
    """Whether accumulators are single numbers, results follow from the rows' axes, and products stay products."""
    if any(MONOIDS[s.monoid].width != 1 for s in cascade.slots):
        return False
    space = cascade.space.parallel
    for i, step in enumerate(cascade.steps):
        if step.node.kind == "extern":
            return False
        found = inverse(step.body.place, step.node.shape, space)
        slots = [s for s in cascade.slots if s.step == i]
        needed = {a for s in slots for a in s.axes}
        if found is None or not needed <= found.keys():
            return False
        if step.node.kind == "contract" and sum(sides_of(s.lift[0], step.body) is not None for s in slots) != 1:
            return False
    return True


def _parts(extent: int, want: int, limit: int, busy: Callable[[int], float]) -> tuple[int, int] | None:
    """(parts, points of each): a divisor from the wanted count to the limit whose quotient is round, else a round length, the
    longer or the shorter one by how `busy` so many parts keep the machine."""
    most = extent // _SHORTEST
    want = min(want, most)
    if want < 2:
        return None
    for parts in range(want, min(limit, most) + 1):
        if extent % (parts * _CHUNK) == 0:
            return parts, extent // parts
    longer = -(-extent // (want * _CHUNK)) * _CHUNK
    found = [(-(-extent // chunk), chunk) for chunk in (longer, longer - _CHUNK) if chunk]
    return max(found, key=lambda f: busy(f[0]))


def _pays(cascade: Cascade, rows: _Rows, parts: int, spec: DeviceSpec) -> bool:
    """Whether the time model has parts and merge before the whole."""
    tensors = {f.value.source: None for f in cascade.leaves() if f.value.source is not None}
    work = 0.0
    for n in (*rows.inner, *(s.node for s in cascade.steps if s.node.kind == "contract")):
        tensors |= dict.fromkeys(r.source for r in n.reads)
        work += product_ns(spec, n, _points(n.axes))
    inner = {*rows.inner, *(m for s in cascade.steps for f, m in s.body.made.items() if f.args)}
    memory = sum(_points(t.shape) * t.dtype.nbytes for t in tensors if t not in inner) / spec.bytes_per_ns
    partial = sum(_points([cascade.space.parallel[a] for a in s.axes]) * parts * 4.0 for s in cascade.slots)
    whole: float = max(work, memory) / rows.busy(1, spec)
    split: float = max(work, memory) / rows.busy(parts, spec)
    return split + spec.launch_ns + 2 * partial / spec.bytes_per_ns < _MARGIN * whole


def _points(extents: Iterable[Expr]) -> float:
    out = 1.0
    for e in extents:
        out *= e.const or 0
    return out


# ---------------------------------------------------------------------------------------------------------------- rows
def _contracts(formulas: Iterable[Formula]) -> dict[Node, Shape]:
    """Contractions whose products stream by, and where."""
    found = [f.value for f in parts_of(*formulas) if f.op == "stream"]
    return {leaf.source: leaf.index for leaf in found if leaf.source is not None and leaf.source.kind == "contract"}


class _Rows:
    """The blocks of a cascade: parallel axes by what its contractions make of them."""

    def __init__(self, space: Space, bodies: Sequence[Body], inner: Mapping[Node, Shape]) -> None:
        self.inner = tuple(inner)
        self.stream = len(space.parallel)
        rows: set[int] = set()
        width: set[int] = set()
        for n, index in inner.items():
            sides = [_axes_of(r, n, index) for r in n.reads]
            for a, b in (sides, sides[::-1]):
                if self.stream not in a:
                    rows |= a - b
        for body in bodies:
            if body.node.kind == "contract" and body.expr.op == "mul":
                sides = [_axes_of(r, body.node, body.place) for r in body.node.reads]
                states = [f.has_state for f in body.expr.args]
                if states[0] != states[1]:
                    p, v = sides if states[0] else sides[::-1]
                    rows |= p - v
                    width |= v - p
        self.blocks = 1
        for k, e in enumerate(space.parallel):
            size = e.const or 1
            self.blocks *= 1 if k in width else -(-size // TILE) if k in rows else size

        self.alone = bool(inner) and not any(body.node.kind == "contract" for body in bodies)

    def is_counted(self, spec: DeviceSpec) -> bool:
        """Whether rounds of blocks count: those that do nothing but products whose results they reduce take a multiprocessor
        each (`tile/choose_contract`), so that a last round of few blocks leaves the others idle."""
        return self.alone and spec.kind == "cuda"

    def busy(self, parts: int, spec: DeviceSpec) -> float:
        """The share of the machine that works."""
        rounds = parts * self.blocks / spec.units
        return rounds / math.ceil(rounds) if self.is_counted(spec) else min(1.0, rounds)

    def parts(self, spec: DeviceSpec) -> int:
        """Parts to ask for: two rounds of blocks, or the fewest that keep the machine as busy as any."""
        want = math.ceil(2 * spec.units / self.blocks)
        if not self.is_counted(spec):
            return want
        best = max(self.busy(n, spec) for n in range(1, 2 * want + 1))
        return next(n for n in range(1, 2 * want + 1) if self.busy(n, spec) >= _BUSY * best)

    def are_few(self, spec: DeviceSpec) -> bool:
        """Fewer than the machine has units; on cores, and without products, some more is asked."""
        if spec.kind == "cpu":
            return self.blocks < 2 * spec.units
        return (1 if self.inner else 2) * self.blocks < spec.units


def _axes_of(r: Read, n: Node, index: Shape) -> set[int]:
    """Axes of the cascade over which an operand of a contraction moves; `index`: where the contraction's result is."""
    own = {d for e in r.index for d in e.axes() if d < len(n.shape)}
    return {a for d in own for a in index[d].axes()}


# --------------------------------------------------------------------------------------------------------- the factors
def sides_of(lift: Formula, body: Body) -> tuple[Formula, Formula] | None:
    """What a contraction accumulates as a product of what depends on either operand; None when it is no such product."""
    if body.expr.op != "mul":
        return None
    a, b = body.expr.args
    mine, theirs = _leaves(a), _leaves(b)
    first = 0 if a.has_state or not b.has_state else 1
    num: tuple[list[Formula], list[Formula]] = ([], [])
    den: tuple[list[Formula], list[Formula]] = ([], [])
    masks: list[Formula] = []
    for f, up in _factors(lift, masks):
        own = _leaves(f)
        in_a, in_b = bool(own & (mine - theirs)), bool(own & (theirs - mine))
        if in_a and in_b:
            return None
        (num if up else den)[first if not in_a and not in_b else int(in_b)].append(f)
    if not all(f.has_stream for f in (product(num[0]), product(num[1]))):
        return None
    out = [product(n) for n in num]
    for k in (0, 1):
        for d in den[k]:
            out[k] = apply("div", out[k], d)
    for m in masks:
        if _leaves(m) & ((theirs - mine) if first == 0 else (mine - theirs)):
            return None
        out[first] = apply("where", m, out[first], ZERO)
    return out[0], out[1]


def _factors(f: Formula, masks: list[Formula]) -> list[tuple[Formula, bool]]:
    """(factor, whether it multiplies) of a product; masks around it are put apart."""
    if f.op == "mul":
        return [*_factors(f.args[0], masks), *_factors(f.args[1], masks)]
    if f.op == "div":
        return [*_factors(f.args[0], masks), (f.args[1], False)]
    if f.op == "where" and f.args[2] == ZERO:
        masks.append(f.args[0])
        return _factors(f.args[1], masks)
    return [(f, True)] if f != ONE else []


def _leaves(f: Formula) -> set[Formula]:
    return {g for g in parts_of(f) if g.op in ("stream", "row") and g.value.source is not None}


# ------------------------------------------------------------------------------------------------------------- padding
class _Padding:
    """Nodes of a cascade that must exist beyond the end of its axis, because their kernel computes them."""

    def __init__(self, graph: Graph, cascade: Cascade, steps: set[Node]) -> None:
        self.cascade, self.steps, self.users = cascade, steps, graph.users()
        self.demanded = {o.read.source for o in graph.outputs}

    def nodes(self) -> dict[Node, int] | None:
        """Each with the axis that streams, or None where a part cannot be padded."""
        stream = len(self.cascade.space.parallel)
        formulas = [f for s in self.cascade.slots for f in (*s.lift, *([s.correction] if s.correction else []))]
        running = {g.value for g in parts_of(*formulas) if g.op in ("old", "state")}
        if any(g.op == "count" for g in parts_of(*formulas, *(self.cascade.steps[k].lower for k in running))):
            return None
        out: dict[Node, int] = {}
        for leaf in [f.value for f in self.cascade.leaves() if f.op == "stream" and f.value.source is not None]:
            if not self._add(leaf.source, leaf.index, stream, out):
                return None
        return out

    def _add(self, n: Node, index: Shape, axis: int, out: dict[Node, int]) -> bool:
        """False when a product would have to be formed twice."""
        along = [d for d, e in enumerate(index) if axis in e.axes()]
        plain = len(along) == 1 and index[along[0]].as_axis() == axis and n.kind in ("map", "reduce", "contract")
        if n.kind == "contract" and not (plain and out.get(n, along[0]) == along[0] and self._is_inner(n)):
            return False
        if not plain or n in out or n in self.demanded:
            return True
        out[n] = along[0]
        return all(
            self._add(r.source, r.index, along[0], out) for r in n.reads if any(along[0] in e.axes() for e in r.index)
        )

    def _is_inner(self, n: Node) -> bool:
        """Whether nobody but what is split reads a product."""
        seen: set[Node] = set()
        stack = [n]
        while stack:
            m = stack.pop()
            if m in seen or (m in self.steps and m is not n):
                continue
            seen.add(m)
            if m in self.demanded or not self.users[m] or (m is not n and m.kind != "map"):
                return False
            stack += self.users[m]
        return True
