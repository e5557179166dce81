"""The TileProgram evaluator: runs a program with torch over all points of its dims at once, and watches it.

A local is a tensor of the rank of the program's dims, with extent 1 where the local does not vary. Sweeps run their body
once, over the whole dim: passes follow each other as they do in a kernel, and within a pass the points are independent
but for reductions and scans, which have the dim before them whole.

    L1  a load or store outside its buffer under its guard, or a load of what was never written
    L2  an element stored twice (and, on demand, an element of an output never stored)
    P3, P4  a value whose shape or type is not what the program says

Checks of indices do not stop a program; the codes of those that fail are reported, as a kernel would report one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.errors import CheckFailed, TableIncomplete
from plait.ir.index import Atom, Expr
from plait.oracle.semantics import (
    MAPS,
    TORCH,
    IndexValue,
    axis_values,
    bitcast,
    contract,
    eval_index,
    random_values,
    reduce_trailing,
    scan_along,
)
from plait.tile.check import window
from plait.tile.program import Buffer, Check, Dot, Let, Load, Reduce, Scan, Span, Stmt, Store, Sweep, TileProgram


@dataclass
class Traffic:
    """Accesses to one buffer. *Unique* counts elements, *total* every access by a point, as if nothing were reused."""

    name: str
    role: str
    nbytes: int  # of an element
    read_unique: int = 0
    read_total: int = 0
    written_unique: int = 0
    written_total: int = 0

    @property
    def bytes_read(self) -> int:
        """Compulsory bytes: each element once."""
        return self.read_unique * self.nbytes

    @property
    def bytes_written(self) -> int:
        """Bytes written, each element once."""
        return self.written_unique * self.nbytes


@dataclass
class TileReport:
    """`failed`: codes of Checks that failed, ascending. `traffic`: one entry a buffer, in program order."""

    failed: tuple[int, ...]
    traffic: tuple[Traffic, ...]

    @property
    def bytes_moved(self) -> int:
        """Compulsory bytes of all arguments (scratch is not device memory)."""
        return sum(t.bytes_read + t.bytes_written for t in self.traffic if t.role != "scratch")


def run_tile(
    program: TileProgram,
    buffers: Sequence[Tensor],
    symbols: Mapping[str, int] | None = None,
    *,
    complete: bool = False,
) -> TileReport:
    """Run a program on flat (1-d) buffers in their storage types, which are written in place; scratch buffers, which come
    last, are not passed. `complete`: every element of every `out` buffer must be stored."""
    with torch.no_grad():
        return _Run(program, buffers, symbols or {}, complete).run()


def flat_view(x: Tensor, elems: int | None = None) -> Tensor:
    """The memory of a tensor from its first element on, as run_tile wants it (default: as far as its strides reach)."""
    if elems is None:
        elems = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return x.detach().as_strided((elems,), (1,), x.storage_offset())


class _Memory:
    """One buffer and what is known of its elements. Scratch has a copy for each grid point."""

    def __init__(self, buffer: Buffer, data: Tensor, elems: int) -> None:
        self.buffer, self.data, self.elems = buffer, data, elems
        self.read = torch.zeros(len(data), dtype=torch.bool)
        self.stores = torch.zeros(len(data), dtype=torch.int32)
        self.traffic = Traffic(buffer.name, buffer.role, buffer.dtype.nbytes)

    def between(self, address: Tensor) -> Tensor:
        """Which addresses lie between rows."""
        if self.buffer.rows is None:
            return torch.zeros_like(address, dtype=torch.bool)
        extent, pitch = self.buffer.rows
        return address % pitch >= extent

    def account(self) -> Traffic:
        """The traffic, with unique elements counted."""
        self.traffic.read_unique = int(self.read.sum())
        self.traffic.written_unique = int((self.stores > 0).sum())
        return self.traffic


class _Run:
    def __init__(
        self, program: TileProgram, buffers: Sequence[Tensor], symbols: Mapping[str, int], complete: bool
    ) -> None:
        self.p, self.complete = program, complete
        self.symbols: dict[Atom, IndexValue] = {Atom.make("sym", k): v for k, v in symbols.items()}
        self.extents = [self.size(d.extent) for d in program.dims]
        self.axes = axis_values(self.extents)
        self.grid = [i for i, d in enumerate(program.dims) if d.role == "grid"]
        self.locals: dict[int, Tensor] = {}
        self.open: list[int] = []
        self.failed: set[int] = set()
        self.memory = self._memory(buffers)
        self.monoids = {s.out: s.monoid for s in program.walk() if isinstance(s, Reduce)}

    def _memory(self, buffers: Sequence[Tensor]) -> list[_Memory]:
        out: list[_Memory] = []
        given = [b for b in self.p.buffers if b.role != "scratch"]
        if len(given) != len(buffers):
            raise ValueError(f"{self.p.name} takes {len(given)} buffers, got {len(buffers)}")
        passed = iter(buffers)
        for b in self.p.buffers:
            elems = self.size(b.elems)
            if b.role == "scratch":
                copies = math.prod(self.extents[d] for d in self.grid)
                out.append(_Memory(b, torch.zeros(copies * elems, dtype=TORCH[b.dtype]), elems))
                continue
            data = next(passed)
            if data.dim() != 1 or data.dtype is not TORCH[b.dtype] or (len(data) < elems and self.points()):
                raise ValueError(f"{b.name} wants {elems} {b.dtype}, got {data.dtype} {tuple(data.shape)}")
            out.append(_Memory(b, data, elems))
        return out

    def points(self) -> int:
        """Points of all dims together."""
        return math.prod(self.extents)

    def run(self) -> TileReport:
        self.body(self.p.body)
        for m in self.memory:
            if m.buffer.role == "scratch":
                continue
            if bool((m.stores > 1).any()):
                raise self.fail("L2", f"element {int((m.stores > 1).nonzero()[0])} of {m.buffer.name} is stored twice")
            unwritten = (m.stores[: m.elems] == 0) & ~m.between(torch.arange(m.elems))
            if self.complete and m.buffer.role == "out" and bool(unwritten.any()):
                raise self.fail("L2", f"element {int(unwritten.nonzero()[0])} of {m.buffer.name} is never stored")
        return TileReport(tuple(sorted(self.failed)), tuple(m.account() for m in self.memory))

    def fail(self, invariant: str, sentence: str, at: Stmt | None = None) -> CheckFailed:
        return CheckFailed("tile", invariant, f"{self.p.name}: {sentence}", window(self.p, at))

    # ---------------------------------------------------------------- statements
    def body(self, stmts: Sequence[Stmt]) -> None:
        for s in stmts:
            if isinstance(s, Sweep):
                self.open.append(s.dim)
                self.body(s.body)
                self.open.pop()
            elif isinstance(s, Store):
                self.store(s)
            elif isinstance(s, Check):
                self.check(s)
            else:
                self.locals[s.out] = self.checked(s, self.value(s))

    def value(self, s: Let | Load | Reduce | Scan) -> Tensor:
        if isinstance(s, Let):
            return self.let(s)
        if isinstance(s, Load):
            return self.load(s)
        if isinstance(s, Dot):
            return self.dot(s)
        if isinstance(s, Reduce):
            return self.reduce(s)
        arg = self.whole(self.locals[s.arg], (*s.span, s.dim))
        return scan_along(s.scan, arg, s.dim) if arg.numel() else arg

    def checked(self, s: Let | Load | Reduce | Scan, x: Tensor) -> Tensor:
        """The value in the shape of its span; P3 and P4 when it is of another."""
        if x.dtype is not TORCH[s.dtype]:
            raise self.fail("P4", f"v{s.out} is {x.dtype}, declared {s.dtype}", s)
        x = x.reshape([1] * (len(self.extents) - x.dim()) + list(x.shape))
        beyond = [d for d, n in enumerate(x.shape) if n != 1 and d not in s.span]
        if beyond:
            raise self.fail("P3", f"v{s.out} varies over dims {beyond}, its span is {s.span}", s)
        return x

    def let(self, s: Let) -> Tensor:
        args = [self.locals[a] for a in s.args]
        attrs = dict(s.attrs)
        if s.op == "running":
            return args[0]
        if s.op == "before":
            return reduce_trailing(self.monoids[s.args[0]], args[0].new_empty((*args[0].shape, 0)), 1)
        if s.op == "const":
            return torch.full((), attrs["value"], dtype=TORCH[s.dtype])
        if s.op == "index":
            return torch.as_tensor(self.eval(attrs["expr"]), dtype=torch.int64)
        if s.op == "holds":
            return self.holds(attrs["guard"])
        if s.op == "cast":
            return args[0].to(TORCH[s.dtype])
        if s.op == "round" and s.attrs:
            return args[0].to(TORCH[attrs["dtype"]]).to(args[0].dtype)
        if s.op == "bitcast":
            held = next(d for d, t in TORCH.items() if t is args[0].dtype)
            source = attrs.get("source", held)
            return bitcast(args[0], source, attrs["dtype"], None).to(TORCH[s.dtype])
        if s.op in ("rand", "randn", "randbits"):
            linear = torch.as_tensor(self.eval(attrs["linear"]), dtype=torch.int64)
            seed, offset = (int(a.flatten()[0]) for a in args)
            return random_values(s.op, linear, seed, offset, attrs["draw"], attrs["dtype"])
        meaning = MAPS.get(s.op)
        if meaning is None:
            raise TableIncomplete(f"the evaluator has no meaning for operator {s.op!r}")
        return meaning(*args)

    def dot(self, s: Dot) -> Tensor:
        """A sum of products, of operands in their type; a sweep is one step here, so that there is nothing to scale yet."""
        factors = [self.locals[k].to(TORCH[s.operand]).to(TORCH[s.dtype]) for k in (s.arg, s.other)]
        factors = [f.reshape([1] * (len(self.extents) - f.dim()) + list(f.shape)) for f in factors]
        return contract(factors[0], factors[1], s.dims, self.extents)

    def reduce(self, s: Reduce) -> Tensor:
        arg = self.whole(self.locals[s.arg], s.dims)
        order = [d for d in range(arg.dim()) if d not in s.dims] + list(s.dims)
        shape = [1 if d in s.dims else n for d, n in enumerate(arg.shape)]
        if s.monoid not in ("argmax", "argmin"):
            return reduce_trailing(s.monoid, arg.permute(order), len(s.dims)).reshape(shape)
        assert s.linear is not None
        # the least index among the extremes, in whatever order the dims are walked; a NaN is extreme
        linear = torch.as_tensor(self.eval(s.linear), dtype=torch.int64).expand(arg.shape)
        best = reduce_trailing("max" if s.monoid == "argmax" else "min", arg.permute(order), len(s.dims)).reshape(shape)
        extreme = (arg == best) | (arg.isnan() if arg.is_floating_point() else False)
        top = torch.iinfo(torch.int64).max
        return reduce_trailing("min", torch.where(extreme, linear, top).permute(order), len(s.dims)).reshape(shape)

    def check(self, s: Check) -> None:
        index = torch.as_tensor(self.eval(s.index))
        wrong = (index < 0) | (index >= torch.as_tensor(self.eval(s.extent)))
        if self.points() and bool((wrong & self.holds(s.guard)).any()):
            self.failed.add(s.code)

    # ---------------------------------------------------------------- memory
    def load(self, s: Load) -> Tensor:
        m = self.memory[s.buffer]
        mask = self.holds(s.guard)
        address = torch.as_tensor(self.eval(s.address))
        place = self.place(m, address, mask, s)
        mask = mask.expand((place + mask).shape)
        place = place.expand(mask.shape)
        fill = torch.full((), s.fill, dtype=TORCH[s.dtype])
        if not len(m.data):
            return fill.expand(place.shape)
        used = place[mask]
        if m.buffer.role in ("out", "scratch") and bool((m.stores[used] == 0).any()):
            raise self.fail("L1", f"reads an element of {m.buffer.name} that was not written", s)
        m.read[used] = True
        m.traffic.read_total += self.executions(mask, s.span)
        found = m.data[place].to(TORCH[s.dtype])
        return torch.where(mask, found, fill)

    def store(self, s: Store) -> None:
        m = self.memory[s.buffer]
        span = s.span if m.buffer.role != "scratch" else tuple(sorted({*s.span, *self.grid}))
        mask = self.whole(self.holds(s.guard), span)
        address = self.whole(torch.as_tensor(self.eval(s.address)), span)
        value = self.whole(self.locals[s.value], span)
        place = self.place(m, address, mask, s)
        used = place[mask]
        stored = value[mask].to(TORCH[m.buffer.dtype])
        m.data[used] = stored
        m.stores.index_add_(0, used, torch.ones(len(used), dtype=torch.int32))
        m.traffic.written_total += self.executions(mask, span)

    def place(self, m: _Memory, address: Tensor, mask: Tensor, s: Stmt) -> Tensor:
        """Positions in the buffer's data, L1 checked under the mask and clamped elsewhere."""
        wrong = ((address < 0) | (address >= m.elems)) & mask
        if bool(wrong.any()):
            worst = int(address.expand(wrong.shape)[wrong].flatten()[0])
            raise self.fail("L1", f"address {worst} is outside {m.buffer.name}, which has {m.elems} elements", s)
        astray = m.between(address) & mask
        if bool(astray.any()):
            worst = int(address.expand(astray.shape)[astray].flatten()[0])
            raise self.fail("L1", f"address {worst} is between two rows of {m.buffer.name}", s)
        place = address.clamp(0, max(m.elems - 1, 0)).to(torch.int64)
        if m.buffer.role == "scratch":
            copy: IndexValue = 0
            for d in self.grid:
                # what does not vary over a grid dim is the same in every block along it: read the first one's
                varies = isinstance(s, Store) or (isinstance(s, Load) and d in s.span)
                copy = copy * self.extents[d] + (self.axes[d] if varies else 0)
            place = copy * m.elems + place
        return place

    def executions(self, mask: Tensor, span: Span) -> int:
        """How many points perform an access: those of the mask, for each point of grid and open sweeps it does not see."""
        around = {*self.grid, *self.open, *span}
        times = math.prod(self.extents[d] for d in around if d >= mask.dim() or mask.shape[d] == 1)
        return int(mask.sum()) * times

    # ---------------------------------------------------------------- expressions
    def size(self, e: Expr) -> int:
        found = eval_index(e, self.symbols)
        assert isinstance(found, int)
        return found

    def eval(self, e: Expr) -> IndexValue:
        env = dict(self.symbols)
        for a in e.leaves():
            place = a.args[0]
            if a.kind == "axis":
                assert isinstance(place, int)
                env[a] = self.axes[place]
            elif a.kind == "value":
                assert isinstance(place, int)
                env[a] = self.locals[place].to(torch.int64)
        return eval_index(e, env)

    def holds(self, guard: Sequence[Expr]) -> Tensor:
        out = torch.ones([1] * len(self.extents), dtype=torch.bool)
        for g in guard:
            out = out & torch.as_tensor(torch.as_tensor(self.eval(g)) >= 0)
        return out

    def whole(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        """Expanded to the full extent of `dims`."""
        x = x.reshape([1] * (len(self.extents) - x.dim()) + list(x.shape))
        return x.expand([self.extents[d] if d in dims else n for d, n in enumerate(x.shape)])
