"""Group -> flat statements: every stored value is evaluated at its place in the group's dims, pulling what it reads.

A value is an *instance*: a node at index expressions over the dims. Reading a producer at its own place shares the
producer's instance; reading it elsewhere (a rotated half, a shifted row) evaluates it again there. Loads under a guard
carry the guard, so nothing outside a tensor is ever read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from plait.errors import LowerFailed
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.graph import Node, Read, Scalar, Shape, compose
from plait.ir.index import Expr, Facts
from plait.ir.recombine import recombine
from plait.plan.align import Alignment, Reads
from plait.plan.layout import address as address_of
from plait.plan.layout import rows_of
from plait.tile.program import Buffer, Check, Dim, Dot, Let, Load, Reduce, Scan, Span, Stmt, Store

# operators whose operands are rounded to the user's type first, besides those the table marks discontinuous
_EXACT = frozenset({"isnan", "isinf", "signbit"})
# A sum of two rounded values is often exactly between two others, where rounding to even is fair; operands that differ from
# rounded ones by a hair (a batch norm's factor 1/sqrt(1 + eps)) would decide all ties alike, and the bias adds up.
_FAIR = frozenset({"add"})
# operators that hand an operand on unchanged, so that "exact" asks it of their operands
_PASSES = frozenset({"cast", "copy", "pieces", "gather", "where", "neg", "abs", "maximum", "minimum", "fmax", "fmin"})


@dataclass
class Flat:
    """Flat statements of a group, in dependency order. `tensors[b]` is the node that buffer b holds."""

    dims: tuple[Dim, ...]
    buffers: tuple[Buffer, ...]
    tensors: tuple[Node, ...]
    stmts: tuple[Stmt, ...]
    messages: tuple[str, ...]
    symbols: dict[str, tuple[int, int | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Env:
    """What lowering asks of its surroundings: strides of materialised values, which nodes are evaluated where they are read,
    and between whose rows lies what is nobody's."""

    strides: Callable[[Node], Shape]
    inline: frozenset[Node]
    numerics: str
    symbols: dict[str, tuple[int, int | None]]
    reads: Reads
    padded: frozenset[Node] = frozenset()


def lower_flat(al: Alignment, stored: Sequence[Node], env: Env) -> Flat:
    """Lower a group. Raises LowerFailed when a reduction is read away from its place."""
    return _Lowering(al, stored, env).run()


def order_dims(al: Alignment, stored: Sequence[Node], reads: Reads) -> tuple[list[int], list[int]]:
    """(grid atoms, row atoms), each outermost first as the largest members have them."""
    row: set[int] = set()
    floating = al.floating(stored, reads)
    members = [n for n in al.nodes if n not in floating]
    for n in members:
        if n.reduces or n.kind == "scan":
            row.update(al.reduced(n))
    grid_order: dict[int, None] = {}
    row_order: dict[int, None] = {}
    for n in sorted(members, key=lambda n: (-len(al.span(n)), n.serial)):
        for a in al.span(n):
            (row_order if a in row else grid_order).setdefault(a)
    return list(grid_order), list(row_order)


class _Lowering:
    def __init__(self, al: Alignment, stored: Sequence[Node], env: Env) -> None:
        self.al, self.env = al, env
        self.members = frozenset(al.nodes)
        self.stored = list(stored)
        self.shown = _shown(self.stored, self.members | env.inline)
        grid, row = order_dims(al, stored, env.reads)
        self.dim_of = {a: i for i, a in enumerate([*grid, *row])}
        self.dims = tuple(
            Dim(f"{'r' if i >= len(grid) else 'p'}{i if i < len(grid) else i - len(grid)}", al.extent[a], role)
            for i, (a, role) in enumerate([*((a, "grid") for a in grid), *((a, "row") for a in row)])
        )
        self.facts = Facts(axes=tuple(d.extent for d in self.dims), symbols=env.symbols)
        exprs = {a: ix.axis(i) for a, i in self.dim_of.items()}
        floating = al.floating(stored, env.reads)
        self.place = {n: al.place(n, exprs) for n in al.nodes if n not in floating}
        self.stmts: list[Stmt] = []
        self.memo: dict[tuple[Any, ...], int] = {}
        self.spans: list[frozenset[int]] = []
        self.types: list[DType] = []
        self.buffers: dict[tuple[Node, str], int] = {}
        self.buffer_list: list[tuple[Node, Buffer]] = []
        self.messages: list[str] = []

    def run(self) -> Flat:
        for n in self.stored:
            self.store(n)
        return Flat(
            self.dims,
            tuple(b for _, b in self.buffer_list),
            tuple(n for n, _ in self.buffer_list),
            tuple(self.stmts),
            tuple(self.messages),
            self.env.symbols,
        )

    # ---------------------------------------------------------------- values
    def store(self, n: Node) -> None:
        place = self.place[n]
        parallel = place[: len(n.shape)]
        v = self.value(n, parallel, (), False)
        strides = self.env.strides(n)
        address = recombine(address_of(parallel, strides), self.facts)
        own = address.axes() | frozenset(i for e in parallel for i in e.axes())
        # blocks that differ only in a dim the value does not have would store it again: the first one does
        absent = [i for i, d in enumerate(self.dims) if d.role == "grid" and i not in own]
        guard = tuple(-ix.axis(i) for i in absent)
        b = self.buffer(n, "out", strides)
        self.stmts.append(Store(b, address, v, _span(own | frozenset(absent)), guard))

    def value(self, n: Node, index: Shape, guard: Shape, exact: bool) -> int:
        """The local that holds node `n` at `index`; under `guard` only, and rounded as the user typed it if `exact`."""
        member = n in self.members
        place = self.place.get(n)
        if place is not None and index == place[: len(n.shape)]:
            guard = ()
        if n.reduces or n.kind == "scan":
            guard = () if member else guard
        # only these hand on a value that was never rounded
        exact = exact and n.op in _PASSES and self.env.numerics == "fused" and (member or n in self.env.inline)
        key = ("value", n, index, guard, exact)
        found = self.memo.get(key)
        if found is None:
            found = self.memo[key] = self._compute(n, index, guard, exact, member)
        return found

    def _compute(self, n: Node, index: Shape, guard: Shape, exact: bool, member: bool) -> int:
        if not member and n not in self.env.inline:
            return self.load(n, index, guard, 0)
        if n.op == "const":
            return self.let("const", (), n.dtype.compute, value=n.attr("value"))
        if n.op == "index":
            (expr,) = compose((n.attr("expr"),), index, self.facts)
            return self.let("index", (), DType.i64, expr=expr)
        if n.kind == "reduce":
            return self.reduce(n, index)
        if n.kind == "contract":
            return self.contract(n, index)
        if n.kind == "scan":
            return self.scan(n, index)
        if n.kind == "random":
            (linear,) = compose((n.attr("linear"),), index, self.facts)
            args = tuple(self.operand(n, r, index, guard, False) for r in n.reads)
            return self.let(n.op, args, n.dtype, dtype=n.dtype, draw=n.attr("draw"), linear=linear)
        return self.map(n, index, guard, exact)

    def map(self, n: Node, index: Shape, guard: Shape, exact: bool) -> int:
        want = n.defn.discontinuous or n.op in _EXACT or n.op in _FAIR or (exact and n.op in _PASSES)
        if n.op == "pieces":
            return self.pieces(n, index, guard, want)
        if n.op == "gather":
            return self.gather(n, index, guard, want)
        args = tuple(self.operand(n, r, index, guard, want) for r in n.reads)
        if n.op == "copy":
            return args[0]
        if n.op == "cast":
            return self.cast(n, args[0], exact)
        attrs = {k: v for k, v in n.attrs if k != "implicit"}
        return self.let(n.op, args, n.dtype.compute, **attrs)

    def cast(self, n: Node, v: int, exact: bool) -> int:
        """Casts to storage types round and stay in the compute type; implicit ones are left out where numerics allow."""
        target = n.dtype.compute
        if self.types[v] is not target:
            v = self.let("cast", (v,), target, dtype=target)
        if not n.dtype.is_storage_only:
            return v
        elided = n.attr("implicit") and self.env.numerics == "fused" and not exact
        elided = elided and n not in self.stored and n not in self.shown
        return v if elided else self.let("round", (v,), target, dtype=n.dtype)

    def operand(self, reader: Node, read: Read, index: Shape, guard: Shape, exact: bool) -> int:
        """One read of a map node at `index` of its axes."""
        at = compose(read.index, index, self.facts)
        return self.guarded(read.source, at, compose(read.guard, index, self.facts), read.fill, guard, exact)

    def guarded(self, source: Node, at: Shape, own: Shape, fill: Scalar, outer: Shape, exact: bool) -> int:
        own = tuple(g for g in own if not self.facts.is_nonneg(g))
        if not own:
            return self.value(source, at, outer, exact)
        target = source.dtype.compute
        if any(self.facts.is_nonneg(-g - 1) for g in own):
            return self.let("const", (), target, value=fill)
        if source not in self.members and source not in self.env.inline:
            return self.load(source, at, _join(outer, own), fill, filled=True)
        v = self.value(source, at, _join(outer, own), exact)
        ok = self.let("holds", (), DType.b1, guard=own)
        return self.let("where", (ok, v, self.let("const", (), target, value=fill)), target)

    def pieces(self, n: Node, index: Shape, guard: Shape, exact: bool) -> int:
        """The first read whose guard holds; the last one needs no test of its own when some piece always holds."""
        out: int | None = None
        for read in reversed(n.reads):
            own = tuple(g for g in compose(read.guard, index, self.facts) if not self.facts.is_nonneg(g))
            at = compose(read.index, index, self.facts)
            if any(self.facts.is_nonneg(-g - 1) for g in own):
                continue
            v = self.value(read.source, at, _join(guard, own), exact)
            if out is not None and own:
                v = self.let("where", (self.let("holds", (), DType.b1, guard=own), v, out), n.dtype.compute)
            out = v
        if out is None:
            return self.let("const", (), n.dtype.compute, value=0)
        return out

    def gather(self, n: Node, index: Shape, guard: Shape, exact: bool) -> int:
        """An indirect read: positions are checked, and what fails the check is never read."""
        data = n.reads[0]
        locals_of = {
            k: self.operand(n, n.reads[k], index, guard, False) for e in (*data.index, *data.guard) for k in e.values()
        }
        env = {ix.Atom.make("value", k): ix.value(v) for k, v in locals_of.items()}
        env |= {ix.axis_atom(i): e for i, e in enumerate(index)}
        at = tuple(e.substitute(env, self.facts) for e in data.index)
        own = tuple(e.substitute(env, self.facts) for e in data.guard)
        own = tuple(g for g in own if not self.facts.is_nonneg(g))
        bounds: list[Expr] = []
        for e, extent in zip(at, data.source.shape, strict=True):
            if not e.values():
                continue
            self.check(e, extent, _join(guard, own))
            bounds += [e, extent - 1 - e]
        source = data.source
        if source in self.members or source in self.env.inline:
            # not in memory (yet): computed again at the place that the indices name
            return self.guarded(source, at, _join(own, tuple(bounds)), data.fill, guard, exact)
        return self.load(source, at, _join(guard, own, tuple(bounds)), data.fill, filled=bool(own))

    def reduce(self, n: Node, index: Shape) -> int:
        place = self.place[n]
        first = len(n.shape)
        if index != place[:first]:
            raise LowerFailed(f"{n} is read away from its place")
        dims = frozenset(self.dim_of[a] for a in self.al.reduced(n))
        want = n.defn.discontinuous
        v = self.operand(n, n.reads[0], place, (), want)
        linear = ix.flatten(place[first:], n.axes[first:]) if n.op in ("argmax", "argmin") else None
        if not dims:
            return self.let("const", (), DType.i64, value=0) if linear is not None else v
        span = self.spans[v] - dims
        out = self.fresh(span, n.dtype)
        self.stmts.append(Reduce(out, n.op, v, _span(dims), n.dtype, _span(span), linear))
        return out

    def contract(self, n: Node, index: Shape) -> int:
        """A sum of products. The Dot itself rounds its factors to their type, unless they must be eager's bits before."""
        place = self.place[n]
        if index != place[: len(n.shape)]:
            raise LowerFailed(f"{n} is read away from its place")
        dims = frozenset(self.dim_of[a] for a in self.al.reduced(n))
        exact = self.env.numerics != "fused" or not dims
        a, b = (self.operand(n, r, place, (), exact) for r in n.reads)
        if not dims:  # a sum of one product
            return self.let("mul", (a, b), n.dtype)
        operand = n.reads[0].source.dtype
        a, b = (_unrounded(self.stmts, v, operand) for v in (a, b))
        span = (self.spans[a] | self.spans[b]) - dims
        out = self.fresh(span, n.dtype)
        self.stmts.append(Dot(out, "dot", a, _span(dims), n.dtype, _span(span), other=b, operand=operand))
        return out

    def scan(self, n: Node, index: Shape) -> int:
        if index != self.place[n]:
            raise LowerFailed(f"{n} is read away from its place")
        dims = [self.dim_of[a] for a in self.al.reduced(n)]
        v = self.operand(n, n.reads[0], index, (), False)
        if not dims:
            return v
        if len(dims) > 1:
            raise LowerFailed(f"the scanned axis of {n} is split")
        span = self.spans[v] | {dims[0]}
        out = self.fresh(span, n.dtype)
        self.stmts.append(Scan(out, n.op, v, dims[0], n.dtype, _span(span)))
        return out

    # ---------------------------------------------------------------- statements
    def let(self, op: str, args: tuple[int, ...], result: DType, /, **attrs: Any) -> int:
        packed = tuple(sorted(attrs.items()))
        key = ("let", op, args, result, repr(packed))
        found = self.memo.get(key)
        if found is not None:
            return found
        span = frozenset[int]().union(*(self.spans[a] for a in args))
        for v in attrs.values():
            for e in v if isinstance(v, tuple) else (v,):
                if isinstance(e, Expr):
                    span |= self.expr_span(e)
        out = self.memo[key] = self.fresh(span, result)
        self.stmts.append(Let(out, op, args, result, _span(span), packed))
        return out

    def load(self, n: Node, at: Shape, guard: Shape, fill: Scalar, filled: bool = False) -> int:
        """A load under a guard; `filled`: somebody wants the fill where the guard fails, so it may not be dropped."""
        strides = self.env.strides(n)
        address = recombine(address_of(at, strides), self.facts)
        if guard and not filled and not _guards_matter(n, at, address, guard, self.facts):
            guard = ()
        key = ("load", n, at, guard, repr(fill))
        found = self.memo.get(key)
        if found is not None:
            return found
        # the address may not move with a dim of stride 0, so the span follows the address
        span = self.expr_span(address).union(*(self.expr_span(g) for g in guard))
        out = self.memo[key] = self.fresh(span, n.dtype.compute)
        b = self.buffer(n, "in", strides)
        self.stmts.append(Load(out, b, address, n.dtype.compute, _span(span), guard, fill))
        return out

    def check(self, e: Expr, extent: Expr, guard: Shape) -> None:
        key = ("check", e, extent, guard)
        if key in self.memo:
            return
        self.messages.append("index out of range in self")
        self.memo[key] = code = len(self.messages)
        span = self.expr_span(e).union(*(self.expr_span(g) for g in guard))
        self.stmts.append(Check(e, extent, code, _span(span), guard))

    def expr_span(self, e: Expr) -> frozenset[int]:
        out = frozenset(e.axes())
        for k in e.values():
            out |= self.spans[k]
        return out

    def fresh(self, span: Iterable[int], dtype: DType) -> int:
        self.spans.append(frozenset(span))
        self.types.append(dtype)
        return len(self.spans) - 1

    def buffer(self, n: Node, role: str, strides: Shape) -> int:
        found = self.buffers.get((n, role))
        if found is None:
            found = self.buffers[(n, role)] = len(self.buffer_list)
            rows = rows_of(n.shape, strides) if n in self.env.padded else None
            elems = ix.ONE + address_of(tuple(e - 1 for e in n.shape), strides)
            elems = elems + (rows[1] - rows[0] if rows else 0)  # the last row has its gap, too
            self.buffer_list.append((n, Buffer(f"b{found}", n.dtype, role, elems, rows)))
        return found


def _shown(stored: Sequence[Node], here: frozenset[Node]) -> frozenset[Node]:
    """Values that reach a stored one of a wide type point by point: there the user sees whether they were rounded. (A
    reduction, a product or a narrow result hides it.)"""
    seen: set[Node] = set()
    stack = [n for n in stored if not n.dtype.is_storage_only]
    while stack:
        n = stack.pop()
        if n not in seen and n.kind == "map" and n in here:
            seen.add(n)
            stack.extend(r.source for r in n.reads)
    return frozenset(seen)


def _unrounded(stmts: Sequence[Stmt], v: int, operand: DType) -> int:
    """What a value was before it was rounded to a Dot's operand type, as the Dot does itself."""
    made = next((s for s in reversed(stmts) if getattr(s, "out", -1) == v), None)
    rounds = isinstance(made, Let) and made.op == "round" and made.attr("dtype") is operand
    return made.args[0] if isinstance(made, Let) and rounds else v


def _guards_matter(n: Node, at: Shape, address: Expr, guard: Shape, facts: Facts) -> bool:
    """Guards of what is in bounds anyway and varies over other dims only keep a load from being hoisted."""
    if any(g.values() for g in guard) or any(e.values() for e in at):
        return True
    if any(g.axes() & address.axes() for g in guard):
        return True
    return not all(facts.in_range(e, extent) for e, extent in zip(at, n.shape, strict=True))


def _span(dims: Iterable[int]) -> Span:
    return tuple(sorted(dims))


def _join(*guards: Shape) -> Shape:
    """A conjunction of guards, in a canonical order."""
    return tuple(sorted({g for part in guards for g in part}, key=lambda e: e.key))
