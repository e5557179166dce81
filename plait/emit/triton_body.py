"""The statements of one TileProgram as the body of a Triton function."""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence
from dataclasses import dataclass

from plait.emit.triton_accuracy import Accuracy
from plait.emit.triton_bounds import Segment, bounds_of, longest_last, segments
from plait.emit.triton_dot import Carried, loads_before_loops, products_early, without_small_dots
from plait.emit.triton_gaps import Gaps, Room
from plait.emit.triton_grid import Grid
from plait.emit.triton_index import Axes, Indexer, Local, plan_dims, spans
from plait.emit.triton_online import merge_passes
from plait.emit.triton_ops import (
    Call,
    convert,
    convert_up,
    division_by_constant,
    division_by_few,
    literal,
    rule_of,
    tl_type,
)
from plait.emit.triton_position import position_as_float
from plait.emit.triton_random import by_words
from plait.emit.triton_reduce import Reducer
from plait.emit.triton_rows import with_row_conditions, within, without_between
from plait.emit.triton_softmax import (
    complement,
    contracted,
    definitions,
    exp_of_difference,
    from_product,
    scale_late,
    tanh_absolutely,
)
from plait.emit.triton_tiles import Tiles
from plait.emit.triton_tma import Walk
from plait.errors import InternalError, LowerFailed
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.index import Expr
from plait.tile.masks import with_conditions
from plait.tile.program import (
    Check,
    Dot,
    Let,
    Load,
    Reduce,
    Scan,
    Stmt,
    Store,
    Sweep,
    TileProgram,
    draw_of,
    operands,
    walk,
)


@dataclass(frozen=True)
class TritonArg:
    """A kernel parameter. `kind`: buffer (`index` into the buffers of part `part`, a pointer to `dtype`), symbol (of the
    parameter's name), draw (number `index` of the part's draws), or fault."""

    name: str
    kind: str
    part: int
    index: int
    dtype: DType


def decorator(args: Sequence[TritonArg]) -> str:
    """The line above a function: one binary serves all draws, whatever their numbers divide by."""
    draws = [a.name for a in args if a.kind == "draw"]
    return f"@triton.jit(do_not_specialize={draws})" if draws else "@triton.jit"


@dataclass(frozen=True)
class _Checked:
    """A Check's outcome: where it holds, and the gathered values it speaks of."""

    text: str
    axes: Axes
    values: frozenset[int]


class Emitter:
    """Emits one program as a function. `single`: it is a kernel of its own, not one of several parts."""

    def __init__(
        self, program: TileProgram, number: int, first_code: int, single: bool, indexer: Indexer | None = None
    ) -> None:
        for b in program.buffers:
            if b.role == "scratch":
                raise LowerFailed(f"{program.name}: scratch buffers are not kept on a GPU")
        self.number, self.first_code = number, first_code
        self.prefix = "" if single else f"p{number}_"
        self.draws = {d: f"draw{number}_{k}" for k, d in enumerate(program.draws)}
        self.ix = indexer or Indexer(plan_dims(program), program.schedule.vector)
        self.dims = self.ix.dims
        self.grid = Grid(self.ix, program.symbols)
        looped = frozenset(d.index for d in self.dims if d.looped)
        program = self.program = _prepared(program, self.ix, looped)
        self.defs = definitions(program)
        self.reducer = Reducer(self.ix, dict(spans(program)), 32 * program.schedule.warps, self._lanes())
        self.carried = Carried(program, self.reducer)
        if self.carried.matrices:
            self.grid.order(longest_last(program, self.defs, self.ix), self.carried.sides())
        walks = program.schedule.blocks and single and self.carried.matrices
        long = sum(isinstance(s, Dot) and any(self.dims[i].looped for i in s.dims) for s in program.walk())
        self.walk = Walk(self.grid, program.buffers, program.schedule.blocks, long) if walks else None
        self.sides = Tiles(program, self.ix)
        self.gaps = Gaps(program, self.ix)
        self.lines: list[str] = []
        self.depth = 2 if self.walk else 1
        self.checks: list[_Checked] = []  # those without a guard: they hold for every access of the same values
        self.count = 0
        self.types = {s.out: s.dtype for s in program.walk() if isinstance(s, (Let, Load, Reduce, Scan))}
        self.accuracy = Accuracy(program)
        self.pending: set[int] = set()  # reductions that an open loop carries
        self.waiting: list[Reduce] = []
        self.true: set[int] = set()  # conditions known to hold

    def _lanes(self) -> int:
        """Neighbouring points of the vector dim in the 16 bytes that a thread loads at once."""
        vector = {d.index for d in self.dims if d.name == self.program.schedule.vector}
        loads = [s for s in self.program.walk() if isinstance(s, Load) and s.address.axes() & vector]
        return min((16 // self.program.buffers[s.buffer].dtype.nbytes for s in loads), default=1)

    # ---------------------------------------------------------------- text
    def put(self, *lines: str) -> None:
        """Append statements."""
        self.lines += ["    " * self.depth + text for text in lines]

    def function(self, name: str, block: str, first: tuple[str, ...] = ()) -> str:
        """The text of a function that does the work of the block whose number is the expression `block`."""
        self.body(merge_passes(self.program, frozenset(d.index for d in self.dims if d.looped)))
        body = without_unused("\n".join(self.lines))
        prologue = self.grid.prologue(body, block) if self.walk is None else self.walk.prologue(body, block)
        parameters = ", ".join((*first, *(a.name for a in self.args)))
        text = f"{decorator(self.args)}\ndef {name}({parameters}):\n" + "\n".join((*prologue, body)) + "\n"
        return "\n\n".join((*self.reducer.functions.values(), text))

    @property
    def args(self) -> tuple[TritonArg, ...]:
        """Parameters."""
        out = [
            TritonArg(self._pointer(i), "buffer", self.number, i, b.dtype) for i, b in enumerate(self.program.buffers)
        ]
        out += [TritonArg(s, "symbol", self.number, i, DType.i64) for i, s in enumerate(self.program.symbols)]
        out += [TritonArg(name, "draw", self.number, i, DType.i64) for i, name in enumerate(self.draws.values())]
        if any(isinstance(s, Check) for s in self.program.walk()):
            out.append(TritonArg("fault_ptr", "fault", self.number, 0, DType.i32))
        return tuple(out)

    def _pointer(self, i: int) -> str:
        return f"{self.prefix}{self.program.buffers[i].name}_ptr"

    # ---------------------------------------------------------------- statements
    def body(self, body: tuple[Stmt, ...]) -> None:
        """Emit statements. Reductions wait until nothing is left that does not need one of their results, and then go
        together; what needs them is put off meanwhile."""
        straight = not any(isinstance(s, Sweep) for s in body)
        while body:
            later: list[Stmt] = []
            missing: set[int] = set()
            for s in body:
                needs = missing.union(r.out for r in self.waiting) & set(operands(s))
                # a load must not fall behind a store that it stood before: they may share memory
                held = isinstance(s, Store) and any(isinstance(x, Load) for x in later)
                if straight and (needs or held):
                    later.append(s)
                    missing.add(getattr(s, "out", -1))
                    continue
                if needs or isinstance(s, Sweep):
                    self.flush()
                self.one(s)
            self.flush()
            body = tuple(later)

    def one(self, s: Stmt) -> None:
        """Emit one statement."""
        if isinstance(s, Let):
            self.let(s)
        elif isinstance(s, Load):
            self.load(s)
        elif isinstance(s, Store):
            self.store(s)
        elif isinstance(s, Check):
            self.check(s)
        elif isinstance(s, Reduce):
            self.reduce(s)
        elif isinstance(s, Scan):
            self.scan(s)
        else:
            self.sweep(s)

    def flush(self) -> None:
        """Perform the reductions that were put off until a result is used, so that they go together."""
        waiting, self.waiting = self.waiting, []
        self.put(*self.reducer.whole(waiting))

    def let(self, s: Let) -> None:
        if s.op in ("running", "before"):
            self.put(*self.carried.reading(s))
            return
        attrs = dict(s.attrs)
        dims = {i for k in s.args for i in self.ix.locals[k].axes}
        for e in (attrs.get("expr"), attrs.get("linear"), *(attrs.get("guard", ()) if s.op == "holds" else ())):
            dims |= set(self.ix.axes_of(e)) if e is not None else set()
        axes = self.ix.ordered(dims)
        args = [self.ix.operand(k, axes) for k in s.args]
        types = [self.types[k] for k in s.args]
        draw = draw_of(s)
        if s.op == "between" and not args:
            self.true.add(s.out)
            axes = ()
        elif s.op == "index":
            args = [f"tl.cast({self.ix.text(attrs['expr'], axes)}, {tl_type(s.dtype)})"]
        elif s.op == "within":
            self.ix.bounds[s.out] = attrs["limit"]
        elif s.op == "holds":
            args = self.ix.guards(attrs["guard"], axes)
            if not args:  # all known: no points to tell apart
                self.true.add(s.out)
                axes = ()
        elif draw is not None:
            args += [self.ix.text(attrs["linear"], axes), self.draws[draw]]
        fast = self.accuracy.may_approximate(s)
        text: str | None = None
        if s.op == "within":
            text = within(args[0], attrs["limit"], s.dtype)
        elif s.op == "div" and s.dtype is DType.f32:
            coarse = from_product(s.args[0], self.defs) and self.accuracy.slack(s.out) > 0
            text = self.quotient(s, axes, fast or coarse)
        elif s.op in ("bit_and", "mul") and s.dtype is DType.b1 and self.true & set(s.args):
            k = s.args[s.args[0] in self.true]
            text = args[s.args.index(k)] if self.ix.locals[k].axes == axes else None
            self.true |= {s.out} if k in self.true else set()
        elif s.op == "where" and s.args[0] in self.true:
            text = args[1] if self.ix.locals[s.args[1]].axes == axes else None
        elif s.op == "exp" and fast and (found := exp_of_difference(s, self.defs, self.ix)) is not None:
            self.put(*found[0])
            text = found[1]
        elif self.accuracy.shifts_exponents(s):
            text = tanh_absolutely(s, self.defs, self.ix)
        elif s.op == "add" and fast:
            text = complement(s, self.defs, self.ix, axes)
        elif s.op in ("add", "sub") and self.accuracy.slack(s.out) > 0:
            text = contracted(s, axes, self.defs, self.ix)
        elif s.op == "cast" and s.dtype is DType.f32:
            text = position_as_float(s.args[0], axes, self.defs, self.ix)
        elif draw is not None:
            text = by_words(s, args[:2], axes, self.ix, self.draws[draw])
        text = text or rule_of(s.op)(Call(tuple(args), tuple(types), s.dtype, attrs, fast))
        self.put(f"v{s.out} = {text}")
        self.ix.locals[s.out] = Local(f"v{s.out}", axes, s.dtype)

    def quotient(self, s: Let, axes: Axes, fast: bool) -> str | None:
        """The text of a division that is cheaper than one a point, or None."""
        x = self.ix.operand(s.args[0], axes)
        value = self.accuracy.constant(s.args[1])
        if value is not None:
            return division_by_constant(x, value, fast)
        divisor = self.ix.locals[s.args[1]]
        if divisor.axes == axes:
            return None
        lines, text = division_by_few(
            x,
            divisor.text,
            lambda name: self.ix.widen(name, divisor.axes, axes),
            "" if self.accuracy.is_large(s.args[1]) else f"v{s.out}",
            f"v{s.out}_r",
            fast,
        )
        self.put(*lines)
        return text

    def _mask(
        self,
        dims: tuple[int, ...],
        guard: tuple[Expr, ...],
        values: frozenset[int],
        to: Axes,
        room: Room | None = None,
    ) -> str:
        if room is not None and self.ix.is_even(room.dim):
            room = None
        exact = dims if room is None else tuple(i for i in dims if i != room.dim)
        parts = self.ix.inside(exact, to) + self.ix.guards(guard, to)
        parts += [self.ix.widen(text, (room.dim,), to) for text in room.text(self.ix)] if room is not None else []
        for c in self.checks:
            if c.values <= values and set(c.axes) <= set(to):
                parts.append(self.ix.widen(c.text, c.axes, to))
        return " & ".join(dict.fromkeys(parts))

    def _access_axes(self, span: tuple[int, ...], exprs: tuple[Expr, ...]) -> Axes:
        dims = set(span)
        for e in exprs:
            dims |= set(self.ix.axes_of(e))
        return self.ix.ordered(dims)

    def load(self, s: Load) -> None:
        b = self.program.buffers[s.buffer]
        axes = self._access_axes(s.span, (s.address, *s.guard))
        if (twin := self.sides.again(s, axes)) is not None:
            self.put(*twin[0])
            self.ix.locals[s.out] = twin[1]
            return
        room = self.gaps.room(s)
        mask = self._mask(axes, s.guard, s.address.values(), axes, room)
        address = self.ix.address(self._pointer(s.buffer), s.address, axes)
        factor = self.carried.keeps_storage(s, b.dtype)
        keeps = factor or (b.dtype in (DType.f16, DType.bf16) and bool(self.carried.matrices))  # for another side
        box = self.walk.load(s, self._pointer(s.buffer), axes) if factor and self.walk else None
        mask = "" if box else mask
        narrow_float = b.dtype in (DType.f8e4m3, DType.f8e5m2) and not keeps
        text = f"tl.load({address}"
        if mask:
            text += f", mask={mask}"
            # a fill in fp8 would be converted lane by lane: it is put in afterwards
            text += "" if narrow_float else f", other={literal(s.fill, b.dtype)}"
        text = box or text + ")"
        if keeps:
            self.put(f"v{s.out}s = {text}")
            text = f"v{s.out}s"
        text = convert_up(text, b.dtype, s.dtype)
        if mask and narrow_float:
            text = f"tl.where({mask}, {text}, {literal(s.fill, s.dtype)})"
        self.put(f"v{s.out} = {text}")
        self.ix.locals[s.out] = Local(f"v{s.out}", axes, s.dtype, f"v{s.out}s" if keeps else "", b.dtype)
        if self.carried.matrices and room is None:
            self.sides.note(s, self.ix.locals[s.out])

    def store(self, s: Store) -> None:
        b = self.program.buffers[s.buffer]
        stored = self.accuracy.rounded_from(s.value, b.dtype)
        v = self.ix.locals[stored]
        axes = self._access_axes((*s.span, *v.axes), (s.address, *s.guard))
        mask = self._mask(axes, s.guard, s.address.values(), axes, self.gaps.room(s))
        address = self.ix.address(self._pointer(s.buffer), s.address, axes)
        value = convert(self.ix.operand(stored, axes), v.dtype, b.dtype)
        self.put(f"tl.store({address}, {value}{', mask=' + mask if mask else ''})")

    def check(self, s: Check) -> None:
        self.count += 1
        n = self.count
        axes = self._access_axes((), (s.index, s.extent, *s.guard))
        wide = not (self.ix.is_narrow(s.index) and self.ix.is_narrow(s.extent))
        index = self.ix.text(s.index, axes, wide)
        self.put(f"ok{n} = ({index} >= 0) & ({index} < {self.ix.text(s.extent, axes, wide)})")
        bad = [*self.ix.inside(axes, axes), *self.ix.guards(s.guard, axes), f"(ok{n} == 0)"]
        pointer = f"tl.broadcast_to(fault_ptr, {self.ix.shape(axes)})" if axes else "fault_ptr"
        code = f"tl.full({self.ix.shape(axes)}, {self.first_code + s.code}, tl.int32)"
        self.put(f"tl.atomic_max({pointer}, {code}, mask={' & '.join(bad)})")
        if s.guard:
            return  # where the guard does not hold, the same index may be good elsewhere
        self.checks.append(_Checked(f"ok{n}", axes, s.index.values()))
        extent = s.extent.const
        for k in s.index.values():
            if s.index is ix.value(k) and extent is not None:
                self.ix.bounds[k] = extent

    # ---------------------------------------------------------------- reductions and loops
    def reduce(self, s: Reduce) -> None:
        if not any(self.dims[i].looped for i in s.dims):
            if isinstance(s, Dot):
                self.put(*self.carried.value(s))
            else:
                self.waiting.append(s)
        elif s.out in self.pending:
            self.put(*(self.carried if self.carried.owns(s) else self.reducer).step(s))
        else:
            raise InternalError(f"{self.program.name}: reduction v{s.out} stands outside the sweep over its dims")

    def scan(self, s: Scan) -> None:
        self.put(*self.reducer.scan(s, self.dims[s.dim].looped))

    def sweep(self, s: Sweep) -> None:
        d = self.dims[s.dim]
        if not d.looped:
            self.body(s.body)
            return
        carried = [r for r in reductions_in(s.body) if begins(r, s.dim, self.pending)]
        own = [r for r in carried if isinstance(r, Reduce) and self.carried.owns(r)]
        for r in carried:
            self.pending.add(r.out)
            if isinstance(r, Reduce) and self.carried.owns(r):
                self.put(*self.carried.begin(r))
            elif isinstance(r, Reduce):
                self.put(*self.reducer.begin(r, self.types[r.arg]))
            else:
                self.put(*self.reducer.begin_scan(r))
        for part in segments(s, self.defs, self.ix):
            self.put(*part.before)
            self.carried.again(own)
            self.loop(s, part)
        self.pending -= {r.out for r in carried}
        self.put(*self.reducer.end([r for r in carried if isinstance(r, Reduce) and r not in own]))
        for r in own:
            self.put(*self.carried.end(r))

    def loop(self, s: Sweep, part: Segment) -> None:
        """One loop over (a part of) a swept dim."""
        d, stages = self.dims[s.dim], self.program.schedule.stages
        checks, tiles = len(self.checks), len(self.sides.loaded)
        variable = f"{d.name}_start" if d.blocked else d.name
        more = f", num_stages={stages}" if stages > 1 else ""
        # one pipeline of a stream's loop and that of its one product's depth: the next row's first tiles come early
        inner = [x for x in walk(s.body) if isinstance(x, Sweep) and self.dims[x.dim].looped]
        more += ", flatten=True" if inner and sum(isinstance(x, Dot) for x in walk(s.body)) == 1 else ""
        known = self.ix.true, self.ix.whole, self.true
        self.ix.true, self.true = self.ix.true | part.true, set(self.true)
        self.ix.whole = self.ix.whole | ({s.dim} if part.whole else set())
        self.put(f"for {variable} in tl.range({part.start}, {part.end}, {d.tile}{more}):")
        self.depth += 1
        if d.blocked:
            self.put(f"{d.name} = {d.name}_start + {d.name}_lane")
            self.put(*(f"{name} = {text}" for name, text in self.grid.inside(d) if not part.whole))
        self.body(s.body)
        self.depth -= 1
        del self.checks[checks:]
        self.sides.leave(tiles)
        self.ix.true, self.ix.whole, self.true = known


def _prepared(program: TileProgram, indexer: Indexer, looped: frozenset[int]) -> TileProgram:
    if not any(isinstance(s, Dot) for s in program.walk()):
        return program
    program = loads_before_loops(without_small_dots(program, indexer), looped)
    rows = with_row_conditions(program, looped)
    if rows is not None:
        rows = products_early(scale_late(rows))
        sweeps = [s for s in rows.walk() if isinstance(s, Sweep) and s.dim in looped]
        if any(b.rows for s in sweeps for b in bounds_of(s, definitions(rows), indexer)):
            return rows
    return products_early(scale_late(with_conditions(without_between(program))))


def begins(r: Stmt, dim: int, pending: set[int]) -> bool:
    """The accumulator of `r` starts before the loop over `dim`: its outermost."""
    if isinstance(r, Reduce):
        return dim in r.dims and r.out not in pending
    return isinstance(r, Scan) and r.dim == dim


def reductions_in(body: tuple[Stmt, ...]) -> list[Reduce | Scan]:
    """Reductions and scans of a body, those inside its sweeps too."""
    out: list[Reduce | Scan] = []
    for s in body:
        if isinstance(s, Sweep):
            out += reductions_in(s.body)
        elif isinstance(s, (Reduce, Scan)):
            out.append(s)
    return out


def without_unused(body: str) -> str:
    """The text without definitions of values that nothing uses."""
    lines, before = body.split("\n"), -1
    defines = re.compile(r" *(v\d+s?) = ")
    while len(lines) != before:
        before = len(lines)
        uses = collections.Counter(n for line in lines for n in re.findall(r"\bv\d+s?\b", line))
        uses.subtract(m.group(1) for line in lines if (m := defines.match(line)))
        lines = [line for line in lines if not ((m := defines.match(line)) and not uses[m.group(1)])]
    return "\n".join(lines)
