"""The checker of TileProgram: what can be seen without running it. L1 and L2 for values of addresses are the evaluator's.

P1  ids: dims, buffers, symbols and check codes that are mentioned exist; buffers are used as their role allows
P2  every local is assigned once, and read only where it is in scope (L4: what a sweep computes ends with it, but for
    reductions, which exist after the outermost sweep over their dims)
P3  spans: a value varies over what its operands and expressions vary over, and in swept form over open sweeps only
P4  types: operators get the types they take, loads and stores convert to and from their buffer's type
L2  a store names every grid dim and every open sweep, so that no point stores twice
L5  reductions and scans have the type their operator gives; a carried sum whose terms hang on a running value is rescaled
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from plait.errors import CheckFailed
from plait.ir.dtype import DType
from plait.ir.index import Expr
from plait.ir.ops import OPS, TypeMismatch
from plait.tile.program import Check, Dot, Let, Load, Reduce, Scan, Span, Stmt, Store, Sweep, TileProgram
from plait.tile.text import statement_lines

_ROLES = ("in", "out", "inout", "scratch")
_READ = ("in", "inout", "scratch")
_WRITTEN = ("out", "inout", "scratch")


@dataclass(frozen=True)
class _Local:
    dtype: DType
    span: frozenset[int]
    leads: frozenset[int] = frozenset()  # carried reductions whose running values are in it


@dataclass
class _Scope:
    """Locals in scope, the sweeps that are open (outermost first), and reductions that wait for a sweep to close."""

    locals: dict[int, _Local]
    open: tuple[int, ...] = ()
    waiting: dict[int, tuple[int, _Local]] = field(default_factory=dict)  # local -> (depth of the sweep to close, it)


def check_program(program: TileProgram) -> None:
    """Raise CheckFailed for the first broken invariant, with the statement in its surroundings."""
    _Checker(program).run()


class _Checker:
    def __init__(self, program: TileProgram) -> None:
        self.p = program
        self.assigned: set[int] = set()
        self.now: Stmt | None = None
        self.swept = any(isinstance(s, Sweep) for s in program.body)
        # row dims that tiles cover whole, in a program that sweeps others
        swept = {s.dim for s in program.walk() if isinstance(s, Sweep)}
        self.whole = {i for i, d in enumerate(program.dims) if program.schedule.size(d.name) == 0} - swept
        # with products blocks are tiles on every machine, and of these dims there is one
        tiled = any(isinstance(s, Dot) for s in program.walk())
        self.one_tile = self.whole if tiled else set()

    def fail(self, invariant: str, sentence: str) -> CheckFailed:
        return CheckFailed("tile", invariant, f"{self.p.name}: {sentence}", window(self.p, self.now))

    def run(self) -> None:
        names = [d.name for d in self.p.dims]
        if len(set(names)) != len(names):
            raise self.fail("P1", f"two dims have one name: {names}")
        for d in self.p.dims:
            if d.role not in ("grid", "row"):
                raise self.fail("P1", f"dim {d.name} has role {d.role!r}")
            self.size(d.extent, f"the extent of {d.name}")
        for b in self.p.buffers:
            if b.role not in _ROLES:
                raise self.fail("P1", f"buffer {b.name} has role {b.role!r}")
            self.size(b.elems, f"the length of {b.name}")
            if b.rows is not None and not 0 < b.rows[0] < b.rows[1]:
                raise self.fail("P1", f"buffer {b.name} has rows of {b.rows[0]} elements every {b.rows[1]}")
        if not all(self.p.messages):
            raise self.fail("P1", "a check's message is empty")
        scheduled = {name for name, _ in self.p.schedule.tile} | ({self.p.schedule.vector} - {""})
        if not scheduled <= set(names):
            raise self.fail("P1", f"the schedule speaks of dims {sorted(scheduled - set(names))}")
        self.body(self.p.body, _Scope({}))

    # ---------------------------------------------------------------- scopes
    def body(self, stmts: Sequence[Stmt], scope: _Scope) -> None:
        for s in stmts:
            self.now = s
            if isinstance(s, Sweep):
                self.sweep(s, scope)
                continue
            self.statement(s, scope)

    def sweep(self, s: Sweep, scope: _Scope) -> None:
        if not 0 <= s.dim < len(self.p.dims) or self.p.dims[s.dim].role != "row":
            raise self.fail("P1", f"a sweep over {s.dim}, which is no row dim")
        if s.dim in scope.open:
            raise self.fail("L4", f"a sweep over {self.p.dims[s.dim].name} inside one over it")
        inner = _Scope(dict(scope.locals), (*scope.open, s.dim))
        self.body(s.body, inner)
        self.now = s
        depth = len(scope.open)
        for out, (closes, local) in inner.waiting.items():
            if closes == depth:
                scope.locals[out] = local
            else:
                scope.waiting[out] = (closes, local)

    def define(self, scope: _Scope, out: int, dtype: DType, span: Span, wanted: Iterable[int]) -> None:
        """A local that varies over `wanted` and says so in `span`."""
        if out in self.assigned or out < 0:
            raise self.fail("P2", f"v{out} is assigned twice" if out >= 0 else f"v{out} is no local")
        self.assigned.add(out)
        if dtype.is_storage_only:
            raise self.fail("P4", f"v{out} has the storage-only type {dtype}")
        self.spans(scope, span, wanted, f"v{out}")
        scope.locals[out] = _Local(dtype, frozenset(span))

    def spans(self, scope: _Scope, span: Span, wanted: Iterable[int], what: str) -> None:
        if tuple(sorted(set(span))) != span or not all(0 <= d < len(self.p.dims) for d in span):
            raise self.fail("P3", f"{what} has the span {span}, which is not a sorted tuple of dims")
        missing = frozenset(wanted) - frozenset(span)
        if missing:
            raise self.fail("P3", f"{what} varies over {_named(self.p, missing)}, which its span lacks")
        open_dims = {*scope.open, *self.whole}
        closed = {d for d in span if self.p.dims[d].role == "row"} - open_dims if self.swept else set()
        if closed:
            raise self.fail("P3", f"{what} varies over {_named(self.p, closed)}, outside a sweep over that")

    def use(self, scope: _Scope, k: int) -> _Local:
        found = scope.locals.get(k)
        if found is None:
            why = "has left its scope" if k in self.assigned else "is not assigned before"
            raise self.fail("L4" if k in self.assigned else "P2", f"v{k} {why}")
        return found

    # ---------------------------------------------------------------- expressions
    def size(self, e: Expr, what: str) -> None:
        if e.axes() or e.values():
            raise self.fail("P1", f"{what} is {e!r}, which is no size")
        self.known_symbols(e)

    def known_symbols(self, e: Expr) -> None:
        unknown = e.symbols() - set(self.p.symbols)
        if unknown:
            raise self.fail("P1", f"{sorted(unknown)} are not among the program's symbols")

    def expr(self, scope: _Scope, e: Expr) -> frozenset[int]:
        """The dims an expression varies over."""
        self.known_symbols(e)
        span = e.axes()
        if not all(0 <= d < len(self.p.dims) for d in span):
            raise self.fail("P1", f"{e!r} speaks of dims that do not exist")
        for k in e.values():
            local = self.use(scope, k)
            if not local.dtype.is_int:
                raise self.fail("P4", f"v{k} in an address is {local.dtype}, no integer")
            span |= local.span
        return span

    def exprs(self, scope: _Scope, exprs: Iterable[Expr]) -> frozenset[int]:
        return frozenset[int]().union(*(self.expr(scope, e) for e in exprs))

    # ---------------------------------------------------------------- statements
    def statement(self, s: Stmt, scope: _Scope) -> None:
        if isinstance(s, Let):
            self.let(s, scope)
        elif isinstance(s, Load):
            self.load(s, scope)
        elif isinstance(s, Store):
            self.store(s, scope)
        elif isinstance(s, Check):
            if not 1 <= s.code <= len(self.p.messages):
                raise self.fail("P1", f"check code {s.code} has no message")
            self.spans(scope, s.span, self.exprs(scope, (s.index, s.extent, *s.guard)), "the check")
        elif isinstance(s, Reduce):
            self.reduce(s, scope)
        elif isinstance(s, Scan):
            arg = self.use(scope, s.arg)
            if self.swept and s.dim not in scope.open:
                raise self.fail("L4", "a scan outside a sweep over its dim")
            self.inferred(s.scan, "scan", [arg.dtype], s.dtype)
            self.define(scope, s.out, s.dtype, s.span, arg.span | {s.dim})

    def let(self, s: Let, scope: _Scope) -> None:
        if s.op in ("running", "before"):
            self.carried(s, scope)
            return
        args = [self.use(scope, a) for a in s.args]
        span = frozenset[int]().union(*(a.span for a in args))
        for _, v in s.attrs:
            span |= self.exprs(scope, [e for e in (v if isinstance(v, tuple) else (v,)) if isinstance(e, Expr)])
        if s.op == "round" and s.attrs:
            if len(args) != 1 or not s.attr("dtype").is_storage_only or args[0].dtype is not s.dtype:
                raise self.fail("P4", f"round of {[a.dtype for a in args]} to {s.attr('dtype')} gives {s.dtype}")
        elif s.op == "holds":
            if args or s.dtype is not DType.b1:
                raise self.fail("P4", "holds takes no operands and gives bool")
        else:
            self.inferred(s.op, "map", [a.dtype for a in args], s.dtype, s)
        self.define(scope, s.out, s.dtype, s.span, span)
        leads = frozenset[int]().union(*(a.leads for a in args))
        scope.locals[s.out] = replace(scope.locals[s.out], leads=leads)

    def carried(self, s: Let, scope: _Scope) -> None:
        """A read of an accumulator whose sweep is open."""
        found = scope.waiting.get(s.args[0]) if len(s.args) == 1 else None
        if found is None:
            raise self.fail("L4", f"{s.op} of {s.args}, which no open sweep carries")
        if found[1].dtype is not s.dtype:
            raise self.fail("P4", f"{s.op} of {found[1].dtype} gives {s.dtype}")
        self.define(scope, s.out, s.dtype, s.span, found[1].span)
        if s.op == "running":
            scope.locals[s.out] = replace(scope.locals[s.out], leads=frozenset(s.args))

    def inferred(self, op: str, kind: str, dtypes: list[DType], declared: DType, s: Let | None = None) -> None:
        """The operator exists, takes these types and gives the declared one (in its compute type)."""
        defn = OPS.get(op)
        if defn is None or not (defn.kind == kind or (kind == "map" and defn.kind == "random")):
            raise self.fail("P1", f"{op!r} is no {kind} operator")
        if defn.arity is not None and len(dtypes) != defn.arity:
            raise self.fail("P4", f"{op} takes {defn.arity} operands, got {len(dtypes)}")
        attrs = dict(s.attrs) if s is not None else {}
        missing = set(defn.attrs) - set(attrs) - {"implicit", "name"}
        if op == "const" and "dtype" in missing:
            missing.remove("dtype")
            attrs["dtype"] = declared
        if missing:
            raise self.fail("P4", f"{op} lacks the attributes {sorted(missing)}")
        try:
            found = defn.infer(dtypes, attrs).compute
        except TypeMismatch as e:
            raise self.fail("P4", f"{op}: {e}") from e
        if found is not declared:
            raise self.fail("L5" if kind != "map" else "P4", f"{op} of {dtypes} gives {found}, not {declared}")

    def buffer(self, k: int, roles: tuple[str, ...]) -> DType:
        if not 0 <= k < len(self.p.buffers):
            raise self.fail("P1", f"buffer b{k} does not exist")
        b = self.p.buffers[k]
        if b.role not in roles:
            raise self.fail("P1", f"buffer b{k} has role {b.role}, wanted {' or '.join(roles)}")
        return b.dtype

    def load(self, s: Load, scope: _Scope) -> None:
        dtype = self.buffer(s.buffer, _READ)
        if s.dtype is not dtype.compute:
            raise self.fail("P4", f"a load from {dtype} gives {dtype.compute}, not {s.dtype}")
        if not s.dtype.is_float and isinstance(s.fill, float) and not s.fill.is_integer():
            raise self.fail("P4", f"the fill {s.fill!r} is no {s.dtype}")
        self.define(scope, s.out, s.dtype, s.span, self.exprs(scope, (s.address, *s.guard)))

    def store(self, s: Store, scope: _Scope) -> None:
        dtype = self.buffer(s.buffer, _WRITTEN)
        value = self.use(scope, s.value)
        if value.dtype is not dtype.compute:
            raise self.fail("P4", f"a store of {value.dtype} to a buffer of {dtype}")
        self.spans(scope, s.span, self.exprs(scope, (s.address, *s.guard)) | value.span, "the store")
        if self.p.buffers[s.buffer].role == "scratch":
            return
        grid = {d for d in range(len(self.p.dims)) if self.p.dims[d].role == "grid"}
        repeats = (grid | set(scope.open)) - set(s.span) - self.one_tile
        if repeats:
            raise self.fail("L2", f"each point of {_named(self.p, repeats)} stores again")

    def reduce(self, s: Reduce, scope: _Scope) -> None:
        arg = self.use(scope, s.arg)
        dims = frozenset(s.dims)
        if not dims or not all(0 <= d < len(self.p.dims) and self.p.dims[d].role == "row" for d in dims):
            raise self.fail("P1", f"a reduction over {s.dims}, which are not row dims")
        span, leads = arg.span, arg.leads
        if isinstance(s, Dot):
            other = self.use(scope, s.other)
            span |= other.span
            leads |= other.leads
            if {arg.dtype, other.dtype} != {s.operand.compute}:
                raise self.fail("P4", f"a dot of {arg.dtype} and {other.dtype} as {s.operand}")
            self.inferred("dot", "contract", [s.operand, s.operand], s.dtype)
        else:
            self.inferred(s.monoid, "reduce", [arg.dtype], s.dtype)
        # a loop of one step has added up nothing before
        steps = any(self.p.schedule.size(self.p.dims[d].name) for d in dims & set(scope.open))
        if s.scale is None and s.monoid in ("sum", "dot") and leads and steps:
            raise self.fail("L5", f"the terms of v{s.out} hang on the running v{min(leads)}, and it is not rescaled")
        if s.scale is not None:
            scale = self.use(scope, s.scale)
            if s.monoid not in ("sum", "dot") or scale.dtype is not s.dtype or scale.span - span | scale.span & dims:
                raise self.fail("L5", f"the scale v{s.scale} does not suit the accumulator of v{s.out}")
        if s.monoid in ("argmax", "argmin"):
            if s.linear is None:
                raise self.fail("P4", f"{s.monoid} lacks the index to report")
            self.spans(scope, tuple(sorted(arg.span | dims)), self.expr(scope, s.linear), "the index to report")
        over = [depth for depth, d in enumerate(scope.open) if d in dims]
        if not over:
            if self.swept and not dims <= self.whole:
                raise self.fail("L4", f"a reduction over {_named(self.p, dims)} outside a sweep over that")
            self.define(scope, s.out, s.dtype, s.span, span - dims)
            return
        if not dims <= {*scope.open, *self.whole}:
            raise self.fail("L4", f"a reduction over {_named(self.p, dims)} inside a sweep over only some of that")
        between = set(scope.open[over[0] :]) - dims
        if between:
            raise self.fail("L4", f"the accumulator lives across the sweep over {_named(self.p, between)}")
        self.define(scope, s.out, s.dtype, s.span, span - dims)
        scope.waiting[s.out] = (over[0], scope.locals.pop(s.out))


def _named(program: TileProgram, dims: Iterable[int]) -> str:
    return ", ".join(program.dims[d].name for d in sorted(dims))


def window(program: TileProgram, at: Stmt | None, around: int = 8) -> str:
    """The printed statement with its neighbours and a caret under it."""
    lines = statement_lines(program)
    place = next((k for k, (s, _) in enumerate(lines) if s is at), None)
    if place is None:
        return ""
    out: list[str] = []
    for k in range(max(0, place - around), min(len(lines), place + around + 1)):
        text = lines[k][1]
        out.append("    " + text)
        if k == place:
            out.append("    " + " " * (len(text) - len(text.lstrip())) + "^" * len(text.lstrip()))
    return "\n".join(out)
