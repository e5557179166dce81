"""Flat statements -> swept ones: row dims become loops, in as many passes as dependent reductions need.

At each loop level the reductions that end there are ranked by dependency; each rank is one pass. A value that a later
pass needs again is recomputed there, unless it is dear and `keep` allows a private row buffer for it. Values that do
not vary over a loop are computed outside it. Sums that follow a maximum by an exponential share its pass (see cascade).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from plait.errors import LowerFailed
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.index import Expr
from plait.plan.opcost import op_cost
from plait.tile.cascade import Follows, Values, correction, follows, running_base
from plait.tile.coalesce import map_exprs
from plait.tile.flat import Flat
from plait.tile.program import Buffer, Check, Dot, Let, Load, Reduce, Scan, Stmt, Store, Sweep, exprs_of, operands

Sink = Store | Check | Reduce
_DEAR = 8.0  # additions' worth of work from which on storing and loading again is cheaper


@dataclass
class Swept:
    """The body of a swept program and the scratch buffers it wants appended."""

    body: tuple[Stmt, ...]
    scratch: tuple[Buffer, ...]


def sweep(flat: Flat, keep_bytes: int = 0, whole: frozenset[int] = frozenset()) -> Swept:
    """Nest a flat program's statements in sweeps, over row dims but those that blocks hold `whole`. `keep_bytes`: room for private row buffers (0: recompute everything);
    a buffer holds one row of one block, so it wants a vector dim that is a row dim.
    Raises LowerFailed when a reduced dim lies outside a dim its result still has."""
    return _Sweeper(flat, keep_bytes, whole).run()


class _Sweeper:
    def __init__(self, flat: Flat, keep_bytes: int, whole: frozenset[int]) -> None:
        self.flat = flat
        self.rows = [i for i, d in enumerate(flat.dims) if d.role == "row" and i not in whole]
        self.rowset = frozenset(self.rows)
        self.values = Values(flat.stmts)
        self.defs = self.values.defs
        self.next = max(self.defs, default=-1) + 1
        self.room = keep_bytes
        self.products = any(isinstance(s, Dot) for s in flat.stmts)
        self.scratch: list[Buffer] = []
        self.current: dict[int, int] = {}  # a pending reduction -> the local its result goes to this time
        self.scales: dict[int, int] = {}  # a maximum in its pass -> the correction of the sums that follow it

    def run(self) -> Swept:
        sinks: list[Sink] = [s for s in self.flat.stmts if isinstance(s, Store | Check)]
        body = self.level(frozenset(), {}, sinks)
        return Swept(tuple(body), tuple(self.scratch))

    # ---------------------------------------------------------------- structure
    def level(self, inside: frozenset[int], names: dict[int, int], sinks: list[Sink]) -> list[Stmt]:
        """Statements that perform `sinks` given that the row dims `inside` are fixed. `names`: locals available so far."""
        names = dict(names)
        out: list[Stmt] = []
        pending = self.with_reductions(inside, names, sinks)
        kept: dict[int, int] = {}
        phases = self.phases(inside, names, pending)
        for number, group in enumerate(phases):
            for dim, members in self.by_next_dim(inside, group):
                self.hoist(out, inside, names, members)
                if dim is None:
                    for s in members:
                        self.perform(out, names, s)
                        if isinstance(s, Reduce):
                            self.lead(out, names, s, members)
                    continue
                later = [s for g in phases[number + 1 :] for s in g] if inside == frozenset() else []
                inner = inside | {dim}
                save = self.to_keep(inner, names, members, later, kept)
                body = self.level(inner, {**names, **self.reload(kept, inner)}, [*members, *save])
                out.append(Sweep(dim, tuple(body)))
                for s in save:
                    kept[s.value] = s.buffer
            for s in group:
                # what an outer sweep still carries has no result yet: its running value, if it leads, stays in its place
                if isinstance(s, Reduce) and not any(s is carried for carried in sinks):
                    names[s.out] = self.current[s.out]
                    self.scales.pop(s.out, None)
        return out

    def reload(self, kept: dict[int, int], inner: frozenset[int]) -> dict[int, int]:
        """Marks values in row buffers as available: a negative name means "load it from this scratch buffer"."""
        return {v: -1 - b for v, b in kept.items() if self.row_span(v) <= inner}

    def with_reductions(self, inside: frozenset[int], names: dict[int, int], sinks: list[Sink]) -> list[Sink]:
        """The sinks and every reduction under them that ends at this level."""
        seen: set[int] = set()
        found: list[Sink] = []
        for s in sinks:
            for v in sorted(self.closure_of(s, names)):
                d = self.defs[v]
                if isinstance(d, Reduce) and v not in seen and v not in names and not any(s is d for s in sinks):
                    seen.add(v)
                    if frozenset(d.span) & self.rowset <= inside:
                        if frozenset(d.dims) & inside:
                            raise LowerFailed("a reduction ends inside a sweep over its own dims")
                        found.append(d)
                        self.current[v] = self.fresh()
        return [*found, *sinks]

    def phases(self, inside: frozenset[int], names: dict[int, int], sinks: list[Sink]) -> list[list[Sink]]:
        """Sinks ranked: those of rank n need only reductions of lower rank."""
        rank: dict[int, int] = {}
        ends = {s.out for s in sinks if isinstance(s, Reduce)}
        order = sorted(sinks, key=lambda s: (0, s.out) if isinstance(s, Reduce) else (1, 0))
        groups: dict[int, list[Sink]] = {}
        for s in order:
            below = [
                rank[v] - (self.followed(s, v) is not None)
                for v in self.closure_of(s, names)
                if v in ends and v in rank and not (isinstance(s, Reduce) and v == s.out)
            ]
            r = 1 + max(below, default=-1)
            if isinstance(s, Reduce):
                rank[s.out] = r
            groups.setdefault(r, []).append(s)
        return [groups[r] for r in sorted(groups)]

    def followed(self, s: Sink, v: int) -> Follows | None:
        """Whether s, a sum, may share the pass of v, a maximum that its terms hang on. Where reading a row again is all that
        a second pass costs, that is cheaper than correcting sums; forming products again is not."""
        return follows(self.values, s, self.defs[v]) if self.products and isinstance(s, Reduce) else None

    def by_next_dim(self, inside: frozenset[int], group: list[Sink]) -> list[tuple[int | None, list[Sink]]]:
        """Sinks by the outermost row dim they still need a sweep over; straight-line ones last (they may use the sweeps)."""
        buckets: dict[int | None, list[Sink]] = {}
        for s in group:
            need = self.need(s) - inside
            buckets.setdefault(min(need) if need else None, []).append(s)
        return sorted(buckets.items(), key=lambda kv: (kv[0] is None, kv[0] or 0))

    def need(self, s: Sink) -> frozenset[int]:
        """Row dims a sink is performed over."""
        span = frozenset(s.span) | (frozenset(s.dims) if isinstance(s, Reduce) else frozenset())
        return span & self.rowset

    def row_span(self, v: int) -> frozenset[int]:
        return frozenset(self.defs[v].span) & self.rowset

    # ---------------------------------------------------------------- values
    def closure_of(self, s: Sink, names: dict[int, int]) -> set[int]:
        """Locals a sink needs that are not available."""
        out: set[int] = set()
        stack = operands(s)
        while stack:
            v = stack.pop()
            if v not in out and v not in names:
                out.add(v)
                stack.extend(operands(self.defs[v]))
        return out

    def hoist(self, out: list[Stmt], inside: frozenset[int], names: dict[int, int], sinks: list[Sink]) -> None:
        """Compute at this level what the sinks need and what does not vary deeper."""
        for s in sinks:
            for v in sorted(self.closure_of(s, names)):
                if self.row_span(v) <= inside and self.ready(v, names):
                    self.materialise(out, names, v)

    def ready(self, v: int, names: dict[int, int]) -> bool:
        return v in names or (
            not isinstance(self.defs[v], Reduce) and all(self.ready(a, names) for a in operands(self.defs[v]))
        )

    def perform(self, out: list[Stmt], names: dict[int, int], s: Sink) -> None:
        done = _renamed(s, {v: self.materialise(out, names, v) for v in operands(s)})
        if isinstance(done, Reduce) and isinstance(s, Reduce):
            scales = [scale for v, scale in self.scales.items() if v != s.out and v in self.values.under(s.out)]
            done = replace(done, out=self.current[s.out], scale=scales[0] if scales else None)
        out.append(done)

    def lead(self, out: list[Stmt], names: dict[int, int], m: Reduce, sinks: list[Sink]) -> None:
        """After the step of a maximum that sums of its pass follow: what they take for it, and what corrects them."""
        found = next((f for s in sinks if (f := self.followed(s, m.out)) is not None), None)
        if found is None:
            return
        carried = replace(m, out=self.current[m.out])
        base = running_base(carried, [self.fresh() for _ in range(5)])
        before = self.fresh()
        out += [*base, Let(before, "before", (carried.out,), m.dtype, m.span)]
        earlier = {v: name for v, name in names.items() if m.out not in self.values.under(v)} | {m.out: before}
        names[m.out] = base[-1].out
        anchors = self.materialise(out, earlier, found.anchor), self.materialise(out, names, found.anchor)
        out += correction(found.op, carried, before, anchors, [self.fresh() for _ in range(6)])
        self.scales[m.out] = out[-1].out  # type: ignore[union-attr]

    def fresh(self) -> int:
        self.next += 1
        return self.next - 1

    def materialise(self, out: list[Stmt], names: dict[int, int], v: int) -> int:
        """The local that holds v here, computing it and what it needs."""
        found = names.get(v)
        if found is not None and found >= 0:
            return found
        d = self.defs[v]
        name = self.fresh()
        if found is not None:
            out.append(Load(name, -1 - found, _row_address(self.flat, self.rows), d.dtype, d.span))
        elif isinstance(d, Reduce):
            raise LowerFailed("a reduction's result is used before its sweep ends")
        else:
            env = {a: self.materialise(out, names, a) for a in operands(d)}
            again = _renamed(d, env)
            assert isinstance(again, Let | Load | Scan)
            out.append(replace(again, out=name))
        names[v] = name
        return name

    # ---------------------------------------------------------------- row buffers
    def to_keep(
        self, inner: frozenset[int], names: dict[int, int], now: list[Sink], later: list[Sink], kept: dict[int, int]
    ) -> list[Store]:
        """Stores of dear values of this pass that a later pass wants, as far as there is room."""
        if not self.room or not later:
            return []
        soon: set[int] = set()
        after: set[int] = set()
        for s in now:
            soon |= self.closure_of(s, names)
        for s in later:
            after |= self.closure_of(s, names)
        shared = {
            v
            for v in soon & after
            if self.row_span(v) == self.rowset and v not in kept and not isinstance(self.defs[v], Scan)
        }
        users = {a for s in later for a in operands(s)}
        users |= {a for v in after - shared for a in operands(self.defs[v])}
        out: list[Store] = []
        for v in sorted(shared & users):
            if self.work(v, names) < _DEAR:
                continue
            buffer = self.new_scratch(v)
            if buffer is not None:
                out.append(Store(buffer, _row_address(self.flat, self.rows), v, self.defs[v].span))
        return out

    def work(self, v: int, names: dict[int, int]) -> float:
        return sum(op_cost(d.op) for x in self.values.under(v) if x not in names and isinstance(d := self.defs[x], Let))

    def new_scratch(self, v: int) -> int | None:
        elems = ix.product(self.flat.dims[i].extent for i in self.rows)
        dtype: DType = self.defs[v].dtype
        if elems.const is None or elems.const * dtype.nbytes > self.room:
            return None
        self.room -= elems.const * dtype.nbytes
        number = len(self.flat.buffers) + len(self.scratch)
        self.scratch.append(Buffer(f"row{len(self.scratch)}", dtype, "scratch", elems))
        return number


def _renamed(s: Stmt, env: dict[int, int]) -> Stmt:
    """A statement with its operands replaced."""
    substitution = {ix.Atom.make("value", a): ix.value(b) for a, b in env.items()}
    s = map_exprs(s, lambda e: e.substitute(substitution)) if any(e.values() for e in exprs_of(s)) else s
    if isinstance(s, Let):
        return replace(s, args=tuple(env[a] for a in s.args))
    if isinstance(s, Store):
        return replace(s, value=env[s.value])
    if isinstance(s, Dot):
        return replace(s, arg=env[s.arg], other=env[s.other])
    if isinstance(s, Reduce | Scan):
        return replace(s, arg=env[s.arg])
    return s


def _row_address(flat: Flat, rows: list[int]) -> Expr:
    """Where a row buffer holds the value of the current point of the row dims."""
    return ix.flatten([ix.axis(i) for i in rows], [flat.dims[i].extent for i in rows])
