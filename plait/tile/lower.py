"""Group + schedule -> TileProgram: the one entry to lowering."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from plait.errors import LowerFailed
from plait.ir import index as ix
from plait.ir.fault import passed
from plait.ir.graph import Node
from plait.plan.align import Alignment
from plait.plan.device import DeviceSpec
from plait.tile.cascade import defer
from plait.tile.choose import Hint, choose
from plait.tile.choose_contract import has_dots
from plait.tile.coalesce import coalesce
from plait.tile.flat import Env, Flat, lower_flat
from plait.tile.masks import conditions
from plait.tile.pieces import cut_pieces
from plait.tile.plain import plain
from plait.tile.program import Dot, Stmt, Store, Sweep, TileProgram, exprs_of, walk
from plait.tile.schedule import Schedule
from plait.tile.sweep import sweep

# room for a CPU thread's private row buffers: beyond the second-level cache reading back still costs less than what is kept
_ROW_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class Lowered:
    """A program and the node behind each of its buffers (scratch buffers, which come last, have none)."""

    program: TileProgram
    tensors: tuple[Node, ...]


def lower(
    al: Alignment,
    stored: Sequence[Node],
    env: Env,
    spec: DeviceSpec,
    hint: Hint,
    *,
    name: str,
    schedule: Schedule | None = None,
    plainly: bool = False,
    header: tuple[str, ...] = (),
) -> Lowered:
    """Lower a group under `schedule` (default: chosen for the device, or, `plainly`, the plain one). Raises LowerFailed when the group has no such form."""
    flat = lower_flat(al, stored, env)
    if has_dots(flat):
        flat = conditions(defer(flat) if env.numerics == "fused" else flat)
    flat = coalesce(flat)
    flat = cut_pieces(flat)
    schedule = schedule or (plain if plainly else choose)(flat, spec, hint)
    return passed("tile", program_of(flat, schedule, spec, name, header))


def program_of(flat: Flat, schedule: Schedule, spec: DeviceSpec, name: str, header: tuple[str, ...]) -> Lowered:
    """A TileProgram from flat statements in the schedule's form."""
    body, buffers = flat.stmts, flat.buffers
    if schedule.form == "swept":
        roles = {d.name: d.role for d in flat.dims}
        rows = spec.kind == "cpu" and roles.get(schedule.vector) == "row" and not has_dots(flat)
        keep = _ROW_BUFFER_BYTES if rows else 0
        # C++ walks a dim that is held whole in one step
        swept = sweep(flat, keep, _whole(flat, schedule) if spec.kind == "cuda" else frozenset())
        _once(flat, swept.body)
        body, buffers = swept.body, (*flat.buffers, *swept.scratch)
        if has_dots(flat):
            body = _stored_once(
                body, {i for i, d in enumerate(flat.dims) if d.role == "grid" and schedule.size(d.name) == 0}
            )
    program = TileProgram(
        name=name,
        dims=flat.dims,
        buffers=buffers,
        symbols=_symbols(flat, body),
        body=body,
        schedule=schedule,
        messages=flat.messages,
        header=header,
    )
    return Lowered(program, flat.tensors)


def _stored_once(body: Sequence[Stmt], whole: set[int]) -> tuple[Stmt, ...]:
    """Stores without the guards that keep them to the first point of a dim of which there is one tile."""
    out: list[Stmt] = []
    for s in body:
        if isinstance(s, Sweep):
            s = replace(s, body=_stored_once(s.body, whole))
        elif isinstance(s, Store):
            first = {-ix.axis(i): i for i in whole if i not in s.address.axes()}
            dropped = {first[g] for g in s.guard if g in first}
            guard = tuple(g for g in s.guard if g not in first)
            s = replace(s, guard=guard, span=tuple(i for i in s.span if i not in dropped))
        out.append(s)
    return tuple(out)


def _whole(flat: Flat, schedule: Schedule) -> frozenset[int]:
    """Row dims of a program with contractions that a block holds whole: no loop walks them."""
    if not has_dots(flat):
        return frozenset()
    return frozenset(
        i
        for i, d in enumerate(flat.dims)
        if d.role == "row" and schedule.size(d.name) == 0 and d.extent.const is not None
    )


def _once(flat: Flat, body: tuple[Stmt, ...]) -> None:
    """A product is too dear to be formed again: in a second pass, or in every step of a loop that it does not vary over."""
    want = sum(isinstance(s, Dot) for s in flat.stmts)
    have = sum(isinstance(s, Dot) for s in walk(body))
    if have > want or _repeats(body, frozenset()):
        raise LowerFailed("a product would be formed again for a second pass over its rows")


def _repeats(body: tuple[Stmt, ...], loops: frozenset[int]) -> bool:
    return any(
        _repeats(s.body, loops | {s.dim})
        if isinstance(s, Sweep)
        else isinstance(s, Dot) and not loops <= {*s.span, *s.dims}
        for s in body
    )


def _symbols(flat: Flat, body: tuple[Stmt, ...]) -> tuple[str, ...]:
    """Names of the run-time sizes a program mentions, sorted."""
    found: set[str] = set()
    for d in flat.dims:
        found |= d.extent.symbols()
    for b in flat.buffers:
        found |= b.elems.symbols()
    for s in walk(body):
        for e in exprs_of(s):
            found |= e.symbols()
    return tuple(sorted(found))
