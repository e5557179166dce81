"""TileProgram: how one group runs, for a GPU block or a CPU thread alike.

    dims    the group's axes: `grid` dims are cut into tiles that blocks (threads) own, `row` dims every block sweeps whole
    body    Let | Load | Store | Check | Reduce | Scan | Sweep

Locals are integers (printed v0, v1, …), each assigned once. A value's `span` is the sorted tuple of dims it varies over.
Addresses and guards are Exprs whose leaves are: axis(i) = dims[i], sym(name) = a run-time size (an i64 parameter),
value(k) = the local k (an integer value). Addresses count elements from the buffer's data pointer.

Two forms. *Flat*: no Sweep; a tile covers the row dims whole, and every value is computed once. *Swept*: row dims are
walked by Sweep loops, one or more passes; a Reduce or Scan inside a Sweep over its dims is a carried accumulator, and a
Reduce's result exists only after the outermost Sweep over its dims.

Types: a local's `dtype` is a compute type (never f16, bf16, f8*): a Load converts up from the buffer's type, a Store
rounds to it. Let "round" (attr dtype) rounds to a storage type and keeps the compute type.

Invariants: L1 in bounds, and in no gap, under guard; L2 each output element stored once; L3 masked lanes hold the identity of the
reduction that consumes them; L4 no value escapes its loop but reduce results (inside
the loop a carried one is read by "running" and "before" only); L5 accumulators have the declared dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.index import Expr
from plait.tile.schedule import Schedule

Span = tuple[int, ...]
Scalar = bool | int | float


@dataclass(frozen=True, slots=True)
class Dim:
    """One axis of the group. `role` is "grid" or "row"."""

    name: str
    extent: Expr
    role: str


@dataclass(frozen=True, slots=True)
class Buffer:
    """A kernel argument. `role`: in, out, inout, or scratch (private to a block, `elems` long, addressed by row dims).
    `elems` bounds addresses: 0 <= address < elems.

    `rows` (extent, pitch): rows of so many elements begin every `pitch` elements, and what lies between, behind the last
    row too, is nobody's. A program stays inside the rows; what is made of it may read the gaps, if nothing hangs on what it
    finds there (a NaN, say), and write anything to them."""

    name: str
    dtype: DType
    role: str
    elems: Expr
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Let:
    """out = op(args). Ops are the map and random operators of ir/ops (same attributes, with `expr` and `linear` over dims),
    "round" (attr dtype: to a storage type and back), "holds" (no args, attr guard: a tuple of Exprs over dims and locals;
    true where all are >= 0), and of a Reduce that an open sweep carries, "running" (its value so far, this step's points
    included) and "before" (its value before this step's Reduce statement)."""

    out: int
    op: str
    args: tuple[int, ...]
    dtype: DType
    span: Span
    attrs: tuple[tuple[str, Any], ...] = ()

    def attr(self, name: str) -> Any:
        """One attribute; KeyError when absent."""
        return dict(self.attrs)[name]


@dataclass(frozen=True, slots=True)
class Load:
    """out = buffer[address] where every guard expression is >= 0, else fill (nothing is read)."""

    out: int
    buffer: int
    address: Expr
    dtype: DType
    span: Span
    guard: tuple[Expr, ...] = ()
    fill: Scalar = 0


@dataclass(frozen=True, slots=True)
class Store:
    """buffer[address] = value, rounded to the buffer's type. `span` are the dims whose points each store once."""

    buffer: int
    address: Expr
    value: int
    span: Span
    guard: tuple[Expr, ...] = ()


@dataclass(frozen=True, slots=True)
class Check:
    """Report failure `code` (1-based, names an entry of TileProgram.messages) unless 0 <= index < extent wherever guard holds."""

    index: Expr
    extent: Expr
    code: int
    span: Span
    guard: tuple[Expr, ...] = ()


@dataclass(frozen=True, slots=True)
class Reduce:
    """out = monoid over `dims` of arg. Monoids: sum prod max min any all argmax argmin (as in ir/ops). `linear` is, for
    argmax and argmin, the index to report, over dims. `scale` (of a sum inside a sweep over its dims): the local by which
    what was added up before this step is multiplied first, as online softmax does when its maximum has moved."""

    out: int
    monoid: str
    arg: int
    dims: Span
    dtype: DType
    span: Span  # of the result: arg's span less dims
    linear: Expr | None = None
    scale: int | None = None


@dataclass(frozen=True, slots=True)
class Dot(Reduce):
    """out = sum over `dims` of round(arg) * round(other), rounded to nearest in the type `operand` (which may be a storage
    type), added up in `dtype`; `monoid` is "dot". Both factors need not vary over the same dims: a tile of the result is
    a matrix product of a tile of each."""

    other: int = -1
    operand: DType = DType.f32


@dataclass(frozen=True, slots=True)
class Scan:
    """out = inclusive scan of arg along dim. Scans: cumsum cumprod cummax cummin logcumsumexp."""

    out: int
    scan: str
    arg: int
    dim: int
    dtype: DType
    span: Span


@dataclass(frozen=True, slots=True)
class Sweep:
    """for every point of row dim `dim`, in order: body."""

    dim: int
    body: tuple[Stmt, ...]


Stmt = Let | Load | Store | Check | Reduce | Scan | Sweep


@dataclass(frozen=True, slots=True)
class TileProgram:
    """One kernel, or one part of a horizontally fused kernel."""

    name: str
    dims: tuple[Dim, ...]
    buffers: tuple[Buffer, ...]
    symbols: tuple[str, ...]
    body: tuple[Stmt, ...]
    schedule: Schedule
    messages: tuple[str, ...] = ()  # of Checks: what went out of range
    header: tuple[str, ...] = ()  # comment lines: plan, cost, the user's source lines

    def walk(self) -> Iterator[Stmt]:
        """Every statement, sweeps before their bodies."""
        yield from walk(self.body)

    @property
    def draws(self) -> tuple[int, ...]:
        """Numbers of the random draws in it. Kernels take them as arguments: layers that draw alike are one kernel."""
        return tuple(dict.fromkeys(d for s in self.walk() if (d := draw_of(s)) is not None))

    @property
    def numbers(self) -> tuple[Expr, ...]:
        """What a kernel takes beside its buffers, in order: the symbols and the draws."""
        return (*map(ix.sym, self.symbols), *map(ix.const, self.draws))


def draw_of(s: Stmt) -> int | None:
    """The number of the draw that a statement takes random numbers of."""
    return dict(s.attrs).get("draw") if isinstance(s, Let) else None


def walk(body: Iterable[Stmt]) -> Iterator[Stmt]:
    """Every statement of a body, sweeps before their bodies."""
    for s in body:
        yield s
        if isinstance(s, Sweep):
            yield from walk(s.body)


def exprs_of(s: Stmt) -> Iterator[Expr]:
    """Every index expression of a statement itself (not of a sweep's body)."""
    if isinstance(s, Load | Store):
        yield s.address
        yield from s.guard
    elif isinstance(s, Check):
        yield s.index
        yield s.extent
        yield from s.guard
    elif isinstance(s, Reduce):
        if s.linear is not None:
            yield s.linear
    elif isinstance(s, Let):
        for _, v in s.attrs:
            for e in v if isinstance(v, tuple) else (v,):
                if isinstance(e, Expr):
                    yield e


def operands(s: Stmt) -> list[int]:
    """Locals that a statement (not what a sweep holds) reads, those in its index expressions included."""
    out: list[int] = []
    if isinstance(s, Let):
        out += s.args
    elif isinstance(s, Store):
        out.append(s.value)
    elif isinstance(s, Reduce | Scan):
        out.append(s.arg)
        if isinstance(s, Dot):
            out.append(s.other)
        if isinstance(s, Reduce) and s.scale is not None:
            out.append(s.scale)
    for e in exprs_of(s):
        out += sorted(e.values())
    return out
