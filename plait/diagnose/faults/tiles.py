"""Faults of tile programs and of the code that is emitted for them. The latter are made in the program as the emitters see it, so
that they are the same in C++, Triton and Gluon; the program that is judged beside the code stays right.

None of them reads or writes outside a buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from plait.diagnose.faults.known import Change
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.index import Expr
from plait.tile.lower import Lowered
from plait.tile.program import Let, Load, Reduce, Span, Stmt, Store, Sweep, TileProgram, operands, walk


class Fresh:
    """Numbers for new locals of a program, and statements that use them."""

    def __init__(self, program: TileProgram) -> None:
        outs = [s.out for s in program.walk() if not isinstance(s, Store | Sweep) and hasattr(s, "out")]
        self.program, self.next = program, max(outs, default=-1) + 1
        self.spans: dict[int, Span] = {s.out: s.span for s in program.walk() if isinstance(s, Let | Load | Reduce)}
        self.made: list[Stmt] = []

    def let(self, op: str, args: Sequence[int], dtype: DType, span: Span = (), **attrs: Any) -> int:
        """A new local; it varies over what its operands do, and `span`."""
        whole = tuple(sorted({*span, *(d for a in args for d in self.spans.get(a, ()))}))
        out, self.next = self.next, self.next + 1
        self.spans[out] = whole
        self.made.append(Let(out, op, tuple(args), dtype, whole, tuple(sorted(attrs.items()))))
        return out

    def take(self) -> list[Stmt]:
        """The statements made since the last call."""
        made, self.made = self.made, []
        return made


Rewrite = Callable[[Fresh, Stmt], "list[Stmt] | None"]


def statements(rewrite: Rewrite) -> Callable[[TileProgram], TileProgram | None]:
    """Statements replaced by what `rewrite` makes of them."""

    def change(program: TileProgram) -> TileProgram | None:
        fresh, count = Fresh(program), 0

        def body(stmts: Sequence[Stmt]) -> tuple[Stmt, ...]:
            nonlocal count
            out: list[Stmt] = []
            for s in stmts:
                if isinstance(s, Sweep):
                    out.append(replace(s, body=body(s.body)))
                    continue
                made = rewrite(fresh, s)
                count += made is not None
                out += [s] if made is None else made
            return tuple(out)

        spoilt = replace(program, body=body(program.body))
        return spoilt if count else None

    return change


def in_code(change: Callable[[TileProgram], TileProgram | None]) -> Change:
    """At the emitters' door."""
    return lambda program, about: change(program)


def in_tiles(change: Callable[[TileProgram], TileProgram | None]) -> Change:
    """In what lowering gives."""

    def changed(lowered: Lowered, about: str) -> Lowered | None:
        spoilt = change(lowered.program)
        return None if spoilt is None else replace(lowered, program=spoilt)

    return changed


def _reduces(s: Stmt, monoid: str) -> bool:
    return isinstance(s, Reduce) and s.monoid == monoid


# -------------------------------------------------------------------------------------------------------------- reductions
def zero_for_max(fresh: Fresh, s: Stmt) -> list[Stmt] | None:
    """The maximum begins at 0."""
    if not isinstance(s, Reduce) or not _reduces(s, "max"):
        return None
    zero = fresh.let("const", (), s.dtype, value=0.0)
    arg = fresh.let("maximum", (s.arg, zero), s.dtype)
    return [*fresh.take(), replace(s, arg=arg)]


def without_nan(fresh: Fresh, s: Stmt) -> list[Stmt] | None:
    """A maximum that passes over NaN, as the machine's instruction does."""
    if not isinstance(s, Reduce) or not _reduces(s, "max"):
        return None
    least = fresh.let("const", (), s.dtype, value=-float("inf"))
    lost = fresh.let("isnan", (s.arg,), DType.b1)
    arg = fresh.let("where", (lost, least, s.arg), s.dtype)
    return [*fresh.take(), replace(s, arg=arg)]


def tail_counted(fresh: Fresh, s: Stmt) -> list[Stmt] | None:
    """Lanes behind the end of a row hold its last element, as they do where loads are clamped, and are added too."""
    if not isinstance(s, Reduce) or not _reduces(s, "sum") or len(s.dims) != 1:
        return None
    (dim,) = s.dims
    extent = fresh.program.dims[dim].extent
    at = fresh.let("index", (), DType.i64, (dim,), expr=ix.axis(dim))
    last = fresh.let("index", (), DType.i64, expr=extent - ix.ONE)
    is_last = fresh.let("eq", (at, last), DType.b1)
    zero = fresh.let("const", (), s.dtype, value=0.0)
    again = fresh.let("where", (is_last, s.arg, zero), s.dtype)
    arg = fresh.let("add", (s.arg, again), s.dtype)
    return [*fresh.take(), replace(s, arg=arg)]


def narrow_sum(program: TileProgram) -> TileProgram | None:
    """A sum whose accumulator is a bf16."""
    fresh, out, count = Fresh(program), list[Stmt](), 0
    for s in program.body:
        inside = list(walk([s]))
        read = {k for i in inside for k in operands(i)}
        sums = [r for r in inside if isinstance(r, Reduce) and r.monoid == "sum" and r.out not in read]
        if not sums:
            out.append(s)
            continue
        count += 1
        new = {}
        for r in sums:
            new[r.out], fresh.next = fresh.next, fresh.next + 1
        out += _renamed([s], new)
        out += [Let(r.out, "round", (new[r.out],), r.dtype, r.span, (("dtype", DType.bf16),)) for r in sums]
    return replace(program, body=tuple(out)) if count else None


def _renamed(body: Sequence[Stmt], new: dict[int, int]) -> tuple[Stmt, ...]:
    """Reductions with other results."""
    return tuple(
        replace(s, body=_renamed(s.body, new))
        if isinstance(s, Sweep)
        else replace(s, out=new[s.out])
        if isinstance(s, Reduce) and s.out in new
        else s
        for s in body
    )


def not_rescaled(fresh: Fresh, s: Stmt) -> list[Stmt] | None:
    """What was added up under an older maximum stays as it was."""
    return [replace(s, scale=None)] if isinstance(s, Reduce) and s.scale is not None else None


# ---------------------------------------------------------------------------------------------------------- loads, masks
def one_key_more(fresh: Fresh, s: Stmt) -> list[Stmt] | None:
    """What a mask leaves out begins one element later."""
    if not isinstance(s, Let) or s.op != "holds":
        return None
    guard: tuple[Expr, ...] = s.attr("guard")
    return [replace(s, attrs=(("guard", tuple(g - ix.ONE for g in guard)),))]


def flushed(fresh: Fresh, s: Stmt) -> list[Stmt] | None:
    """Denormal numbers are read as zero."""
    if not isinstance(s, Load) or s.dtype is not DType.f32:
        return None
    inner, fresh.next = fresh.next, fresh.next + 1
    fresh.spans[inner] = s.span
    size = fresh.let("abs", (inner,), s.dtype)
    least = fresh.let("const", (), s.dtype, value=2.0**-126)
    small = fresh.let("lt", (size, least), DType.b1)
    zero = fresh.let("const", (), s.dtype, value=0.0)
    value = fresh.let("where", (small, zero, inner), s.dtype)
    *made, last = fresh.take()
    assert isinstance(last, Let) and last.out == value
    return [replace(s, out=inner), *made, replace(last, out=s.out)]


# ----------------------------------------------------------------------------------------------------------------- stores
def _grid(fresh: Fresh, s: Store) -> tuple[int, int] | None:
    """A grid dim that a store varies over, with its extent."""
    for d in s.span:
        dim = fresh.program.dims[d]
        if dim.role == "grid" and (dim.extent.const or 0) > 1 and d in s.address.axes():
            return d, dim.extent.const or 0
    return None


def remainder_not_stored(fresh: Fresh, s: Stmt) -> list[Stmt] | None:
    """Whole tiles are stored, what is left over is not."""
    found = _grid(fresh, s) if isinstance(s, Store) else None
    if not isinstance(s, Store) or found is None:
        return None
    dim, extent = found
    whole = extent - (extent % 8 or 1)
    return [replace(s, guard=(*s.guard, ix.const(whole - 1) - ix.axis(dim)))]


def one_place_for_two(fresh: Fresh, s: Stmt) -> list[Stmt] | None:
    """Two blocks write their partial results to one place: whichever comes last is kept."""
    found = _grid(fresh, s) if isinstance(s, Store) else None
    if not isinstance(s, Store) or found is None:
        return None
    dim, _ = found
    facts = ix.Facts(axes=tuple(d.extent for d in fresh.program.dims))
    pair = ix.floordiv(ix.axis(dim), 2, facts) * 2
    return [replace(s, address=s.address.substitute({ix.axis_atom(dim): pair}, facts))]
