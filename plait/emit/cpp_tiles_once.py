"""Reductions that one tile does whole: nothing was added up before it, so nothing is scaled, cleared or combined with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from plait.ir.dtype import DType
from plait.tile.program import Let, Load, Reduce, Scan, Stmt, Sweep, TileProgram, operands

_IDENTITY = {"max": -math.inf, "min": math.inf, "sum": 0.0, "dot": 0.0, "prod": 1.0}


def reduced_at_once(program: TileProgram, whole: Callable[[int], bool]) -> frozenset[int]:
    """Reductions all of whose dims have one tile only (`whole`) and are swept around them once."""

    def found(body: Sequence[Stmt], swept: frozenset[int]) -> Iterator[int]:
        for s in body:
            if isinstance(s, Sweep):
                yield from found(s.body, swept | {s.dim})
            elif isinstance(s, Reduce) and all(d in swept and whole(d) for d in s.dims):
                yield s.out

    return frozenset(found(program.body, frozenset()))


def without_carrying(program: TileProgram, once: frozenset[int]) -> TileProgram:
    """The program without scales of such reductions and without what only scales needed. A "before" of theirs is the identity."""
    reductions = {s.out: s for s in program.walk() if isinstance(s, Reduce) and s.out in once}

    def change(s: Stmt) -> Stmt:
        if isinstance(s, Sweep):
            return replace(s, body=tuple(map(change, s.body)))
        if isinstance(s, Reduce) and s.out in once:
            return replace(s, scale=None)
        if isinstance(s, Let) and s.op == "before" and s.args[0] in once:
            value = _identity(reductions[s.args[0]], s.dtype)
            return s if value is None else replace(s, op="const", args=(), attrs=(("value", value),))
        return s

    program = replace(program, body=tuple(map(change, program.body)))
    while True:
        used = {k for s in program.walk() for k in operands(s)}
        body = _without_unused(program.body, used)
        if body == program.body:
            return program
        program = replace(program, body=body)


def _identity(s: Reduce, dtype: DType) -> float | None:
    return _IDENTITY.get(s.monoid) if dtype.is_float else None


def _without_unused(body: Sequence[Stmt], used: set[int]) -> tuple[Stmt, ...]:
    out: list[Stmt] = []
    for s in body:
        if isinstance(s, Sweep):
            inner = _without_unused(s.body, used)
            if inner:
                out.append(replace(s, body=inner))
        elif not isinstance(s, Let | Load | Reduce | Scan) or s.out in used:
            out.append(s)
    return tuple(out)
