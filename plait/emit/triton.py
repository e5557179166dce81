"""TileProgram to Triton source: one module with one kernel, to be compiled by Triton 3.6 or run by its interpreter.

The grid is one-dimensional: the tiles of the grid dims, row-major, the last dim fastest. Arguments are the buffers'
pointers in order, then the run-time sizes, then (when the program checks indices) a pointer to one int32 into which
failing lanes put the greatest failing code. Nothing is read at an index that fails its Check.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from plait.emit.triton_accuracy import Accuracy, reads_of
from plait.emit.triton_helpers import closure
from plait.emit.triton_index import Axes, DimPlan, Indexer, Local, plan_dims, size_name, spans
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
from plait.emit.triton_reduce import Reducer
from plait.errors import InternalError, LowerFailed
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.index import Expr
from plait.ir.ops import OPS
from plait.tile.program import Check, Let, Load, Reduce, Scan, Stmt, Store, Sweep, TileProgram

MAX_PROGRAMS = 2**31 - 1


@dataclass(frozen=True)
class TritonArg:
    """A kernel parameter. `kind`: buffer (`index` into the buffers of part `part`, a pointer to `dtype`), symbol (of the
    parameter's name), or fault."""

    name: str
    kind: str
    part: int
    index: int
    dtype: DType


@dataclass(frozen=True)
class TritonSource:
    """A module text whose function `name` is the kernel; launched as kernel[(programs,)](*args, num_warps=…, num_stages=…)
    with `options` too. `programs` counts blocks, over the symbols; an empty grid (0) is not launched. `has_fault`: the last
    argument is one int32, zero before the launch, and the 1-based greatest failing code of `messages` after it."""

    name: str
    text: str
    args: tuple[TritonArg, ...]
    programs: Expr
    num_warps: int
    num_stages: int
    has_fault: bool
    messages: tuple[str, ...] = ()
    options: tuple[tuple[str, bool], ...] = ()


def emit_triton(parts: TileProgram | Sequence[TileProgram], name: str, *, f8_saturates: bool = True) -> TritonSource:
    """The kernel of a program, or of several independent ones side by side (parts: each takes a range of the blocks).
    Raises LowerFailed for what this backend does not do (scratch buffers among it). `f8_saturates`: f8e4m3 values out of
    range become 448, as eager of torch 2.13 has it; before, they became NaN."""
    programs = (parts,) if isinstance(parts, TileProgram) else tuple(parts)
    emitters: list[Emitter] = []
    for p in programs:
        emitters.append(Emitter(p, len(emitters), sum(len(e.program.messages) for e in emitters), len(programs) == 1))
    if len(programs) == 1:
        body, args = emitters[0].function(name, "tl.program_id(0)"), emitters[0].args
        blocks = emitters[0].programs
    else:
        body, args, blocks = _side_by_side(emitters, name)
    if blocks.const is not None and blocks.const > MAX_PROGRAMS:
        raise LowerFailed(f"{name}: {blocks.const} blocks")
    if not f8_saturates:
        body = body.replace("_to_f8e4m3(", "_to_f8e4m3_nan(")
    helpers = closure(body)
    return TritonSource(
        name=name,
        text="\n\n".join([_head(programs, "".join(helpers) + body), *helpers, body]),
        args=args,
        programs=blocks,
        num_warps=max(p.schedule.warps for p in programs),
        num_stages=max(p.schedule.stages for p in programs),
        has_fault=args[-1:] != () and args[-1].kind == "fault",
        messages=tuple(m for p in programs for m in p.messages),
        options=(("enable_fp_fusion", all(e.accuracy.may_contract for e in emitters)),),
    )


def _head(programs: Sequence[TileProgram], text: str) -> str:
    out: list[str] = []
    for p in programs:
        out += [*(f"# {line}".rstrip() for line in p.header), f"# {p.schedule}"]
    out += ["import triton", "import triton.language as tl"]
    if "libdevice." in text:
        out.append("from triton.language.extra import libdevice")
    return "\n".join(out) + "\n"


def _side_by_side(emitters: list[Emitter], name: str) -> tuple[str, tuple[TritonArg, ...], Expr]:
    """A device function for every part, and a kernel that finds a block's part by ranges."""
    functions = [e.function(f"part{e.number}", "pid", ("pid",)) for e in emitters]
    args: dict[str, TritonArg] = {}
    for e in emitters:
        args |= {a.name: a for a in e.args}
    ordered = sorted(args.values(), key=lambda a: ("buffer", "symbol", "fault").index(a.kind))
    lines = ["pid = tl.program_id(0)"]
    symbols = dict.fromkeys(s for e in emitters for s in e.program.symbols)
    lines += [f"{size_name(s)} = tl.cast({s}, tl.int64)" for s in symbols]
    end = ix.ZERO
    for e in emitters:
        start, end = end, end + e.programs
        test = f"{'el' if e.number else ''}if pid < {e.ix.text(end, ())}:"
        call = ", ".join(a.name for a in e.args)
        lines += [test, f"    part{e.number}(pid - ({e.ix.text(start, ())}), {call})"]
    kernel = f"@triton.jit\ndef {name}({', '.join(a.name for a in ordered)}):\n"
    kernel += "".join(f"    {line}\n" for line in lines)
    return "\n\n".join([*functions, kernel]), tuple(ordered), end


@dataclass(frozen=True)
class _Checked:
    """A Check's outcome: where it holds, and the gathered values it speaks of."""

    text: str
    axes: Axes
    values: frozenset[int]


class Emitter:
    """Emits one program as a function. `single`: it is a kernel of its own, not one of several parts."""

    def __init__(self, program: TileProgram, number: int, first_code: int, single: bool) -> None:
        for b in program.buffers:
            if b.role == "scratch":
                raise LowerFailed(f"{program.name}: scratch buffers are not kept on a GPU")
        self.program, self.number, self.first_code = program, number, first_code
        self.prefix = "" if single else f"p{number}_"
        self.dims = plan_dims(program)
        self.ix = Indexer(self.dims, program.schedule.vector)
        self.reducer = Reducer(self.ix, dict(spans(program)), 32 * program.schedule.warps, self._lanes())
        self.lines: list[str] = []
        self.depth = 1
        self.checks: list[_Checked] = []  # those without a guard: they hold for every access of the same values
        self.count = 0
        self.types = {s.out: s.dtype for s in program.walk() if isinstance(s, (Let, Load, Reduce, Scan))}
        self.accuracy = Accuracy(program)
        self.pending: set[int] = set()  # reductions that an open loop carries
        self.waiting: list[Reduce] = []

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
        body = "\n".join(self.lines)
        parameters = ", ".join((*first, *(a.name for a in self.args)))
        text = f"@triton.jit\ndef {name}({parameters}):\n" + "\n".join((*self._prologue(body, block), body)) + "\n"
        return "\n\n".join((*self.reducer.functions.values(), text))

    @property
    def args(self) -> tuple[TritonArg, ...]:
        """Parameters."""
        out = [
            TritonArg(self._pointer(i), "buffer", self.number, i, b.dtype) for i, b in enumerate(self.program.buffers)
        ]
        out += [TritonArg(s, "symbol", self.number, i, DType.i64) for i, s in enumerate(self.program.symbols)]
        if any(isinstance(s, Check) for s in self.program.walk()):
            out.append(TritonArg("fault_ptr", "fault", self.number, 0, DType.i32))
        return tuple(out)

    def _pointer(self, i: int) -> str:
        return f"{self.prefix}{self.program.buffers[i].name}_ptr"

    # ---------------------------------------------------------------- grid
    def _grid_dims(self) -> list[DimPlan]:
        return [d for d in self.dims if not d.covered and not d.looped]

    @property
    def programs(self) -> Expr:
        """How many blocks there are."""
        if any(d.extent.const == 0 for d, dim in zip(self.dims, self.program.dims) if dim.role == "grid"):
            return ix.ZERO
        return ix.product(d.tiles for d in self._grid_dims())

    def _prologue(self, body: str, block: str) -> list[str]:
        """Definitions of sizes and of the dims' index variables: those that the body uses."""
        defs: list[tuple[str, str]] = []
        defs += [(size_name(s), f"tl.cast({s}, tl.int64)") for s in self.program.symbols]
        defs += self._coordinates(block)
        for d in self.dims:
            if not d.looped or d.blocked:
                defs += self._variables(d, d.looped)
        needed = set(re.findall(r"\w+", body))
        kept: list[str] = []
        for name, text in reversed(defs):
            if name in needed:
                kept.append(f"    {name} = {text}")
                needed |= set(re.findall(r"\w+", text))
        return kept[::-1]

    def _coordinates(self, block: str) -> list[tuple[str, str]]:
        grid = self._grid_dims()
        out: list[tuple[str, str]] = []
        rest = block
        if any(d.wide for d in grid):
            rest = f"tl.cast({rest}, tl.int64)"
        for n, d in enumerate(reversed(grid)):
            last = n == len(grid) - 1
            tiles = self.ix.text(d.tiles, ())
            name = f"{d.name}_tile" if d.blocked else d.name
            out.append((name, rest if last else f"{rest} % ({tiles})"))
            if not last:
                out.append((f"{d.name}_rest", f"{rest} // ({tiles})"))
                rest = f"{d.name}_rest"
        return out

    def _variables(self, d: DimPlan, in_loop: bool) -> list[tuple[str, str]]:
        """Definitions for one dim; the part that changes with a loop is left to the loop."""
        if not d.blocked:
            return []
        lane = f"{d.name}_lane"
        out = [(lane, f"tl.arange(0, {d.tile})")]
        if in_loop:
            return out
        if d.covered:
            out.append((d.name, lane))
        else:
            out += [(f"{d.name}_start", f"{d.name}_tile * {d.tile}"), (d.name, f"{d.name}_start + {lane}")]
        return [*out, *self._ok(d)]

    def _ok(self, d: DimPlan) -> list[tuple[str, str]]:
        if d.even:
            return []
        extent = self.ix.text(d.extent, ())
        if not d.wide:
            return [(f"{d.name}_ok", f"{d.name} < {extent}")]
        # compared in 32 bits, lane by lane
        return [(f"{d.name}_ok", f"{d.name}_lane < tl.cast(tl.minimum({extent} - {d.name}_start, {d.tile}), tl.int32)")]

    # ---------------------------------------------------------------- statements
    def body(self, body: tuple[Stmt, ...]) -> None:
        for s in body:
            if isinstance(s, Sweep) or any(r.out in reads_of(s) for r in self.waiting):
                self.flush()
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
        self.flush()

    def flush(self) -> None:
        """Perform the reductions that were put off until a result is used, so that they go together."""
        waiting, self.waiting = self.waiting, []
        self.put(*self.reducer.whole(waiting))

    def let(self, s: Let) -> None:
        attrs = dict(s.attrs)
        dims = {i for k in s.args for i in self.ix.locals[k].axes}
        for e in (attrs.get("expr"), attrs.get("linear"), *attrs.get("guard", ())):
            dims |= set(self.ix.axes_of(e)) if e is not None else set()
        axes = self.ix.ordered(dims)
        args = [self.ix.operand(k, axes) for k in s.args]
        types = [self.types[k] for k in s.args]
        if s.op == "index":
            text = self.ix.text(attrs["expr"], axes)
            args = [f"tl.cast({text}, {tl_type(s.dtype)})"]
        elif s.op == "holds":
            args = self.ix.guards(attrs["guard"], axes)
        elif OPS[s.op].kind == "random":
            args += [self.ix.text(attrs["linear"], axes), str(attrs["draw"])]
        fast = self.accuracy.fast_exp(s) if s.op == "exp" else self.accuracy.tolerant(s.out)
        quotient = self.quotient(s, axes, fast) if s.op == "div" and s.dtype is DType.f32 else None
        text = quotient or rule_of(s.op)(Call(tuple(args), tuple(types), s.dtype, attrs, fast))
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
            x, divisor.text, lambda name: self.ix.widen(name, divisor.axes, axes), f"v{s.out}", fast
        )
        self.put(*lines)
        return text

    def _mask(self, dims: tuple[int, ...], guard: tuple[Expr, ...], values: frozenset[int], to: Axes) -> str:
        parts = self.ix.inside(dims, to) + self.ix.guards(guard, to)
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
        mask = self._mask(axes, s.guard, s.address.values(), axes)
        address = self.ix.address(self._pointer(s.buffer), s.address, axes)
        narrow_float = b.dtype in (DType.f8e4m3, DType.f8e5m2)
        text = f"tl.load({address}"
        if mask:
            text += f", mask={mask}"
            # a fill in fp8 would be converted lane by lane: it is put in afterwards
            text += "" if narrow_float else f", other={literal(s.fill, b.dtype)}"
        text = convert_up(text + ")", b.dtype, s.dtype)
        if mask and narrow_float:
            text = f"tl.where({mask}, {text}, {literal(s.fill, s.dtype)})"
        self.put(f"v{s.out} = {text}")
        self.ix.locals[s.out] = Local(f"v{s.out}", axes, s.dtype)

    def store(self, s: Store) -> None:
        b = self.program.buffers[s.buffer]
        v = self.ix.locals[s.value]
        axes = self._access_axes((*s.span, *v.axes), (s.address, *s.guard))
        mask = self._mask(axes, s.guard, s.address.values(), axes)
        address = self.ix.address(self._pointer(s.buffer), s.address, axes)
        value = convert(self.ix.operand(s.value, axes), v.dtype, b.dtype)
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
    def _carried(self, dims: tuple[int, ...]) -> bool:
        return any(self.dims[i].looped for i in dims)

    def reduce(self, s: Reduce) -> None:
        if not self._carried(s.dims):
            self.waiting.append(s)
        elif s.out in self.pending:
            self.put(*self.reducer.step(s))
        else:
            raise InternalError(f"{self.program.name}: reduction v{s.out} stands outside the sweep over its dims")

    def scan(self, s: Scan) -> None:
        self.put(*self.reducer.scan(s, self.dims[s.dim].looped))

    def sweep(self, s: Sweep) -> None:
        d = self.dims[s.dim]
        if not d.looped:
            self.body(s.body)
            return
        carried = [r for r in _statements(s.body) if self._begins(r, s.dim)]
        for r in carried:
            self.pending.add(r.out)
            self.put(
                *(self.reducer.begin(r, self.types[r.arg]) if isinstance(r, Reduce) else self.reducer.begin_scan(r))
            )
        checks = len(self.checks)
        stages = self.program.schedule.stages
        variable = f"{d.name}_start" if d.blocked else d.name
        more = f", num_stages={stages}" if stages > 1 else ""
        self.put(f"for {variable} in tl.range(0, {self.ix.text(d.extent, ())}, {d.tile}{more}):")
        self.depth += 1
        if d.blocked:
            self.put(f"{d.name} = {d.name}_start + {d.name}_lane")
            self.put(*(f"{name} = {text}" for name, text in self._ok(d)))
        self.body(s.body)
        self.depth -= 1
        del self.checks[checks:]
        self.pending -= {r.out for r in carried}
        self.put(*self.reducer.end([r for r in carried if isinstance(r, Reduce)]))

    def _begins(self, r: Stmt, dim: int) -> bool:
        """The accumulator of `r` starts before the loop over `dim`: its outermost."""
        if isinstance(r, Reduce):
            return dim in r.dims and r.out not in self.pending
        return isinstance(r, Scan) and r.dim == dim


def _statements(body: tuple[Stmt, ...]) -> list[Reduce | Scan]:
    out: list[Reduce | Scan] = []
    for s in body:
        if isinstance(s, Sweep):
            out += _statements(s.body)
        elif isinstance(s, (Reduce, Scan)):
            out.append(s)
    return out
