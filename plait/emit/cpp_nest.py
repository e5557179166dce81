"""Joins sweeps: two nested sweeps that walk memory as one loop would become that loop, so that inner extents stay long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from plait.ir import index as ix
from plait.ir.index import Expr
from plait.tile.program import Let, Load, Reduce, Scan, Stmt, Store, Sweep, TileProgram, exprs_of


@dataclass
class Joined:
    """A program with joined sweeps. `extents`: of sweeps (by identity) that walk more than their own dim."""

    body: tuple[Stmt, ...]
    extents: dict[int, Expr] = field(default_factory=dict)


def join_sweeps(program: TileProgram, vector: int | None) -> Joined:
    """Join every sweep over the vector dim with the sweep around it, where nothing in it tells the two apart."""
    out = Joined(())
    out.body = _join_all(program, program.body, vector, out)
    return out


def _join_all(program: TileProgram, body: Sequence[Stmt], vector: int | None, out: Joined) -> tuple[Stmt, ...]:
    return tuple(_join(program, s, vector, out) if isinstance(s, Sweep) else s for s in body)


def _join(program: TileProgram, sweep: Sweep, vector: int | None, out: Joined) -> Sweep:
    body = _join_all(program, sweep.body, vector, out)
    if vector is not None and sweep.dim != vector and len(body) == 1 and isinstance(body[0], Sweep):
        inner = body[0]
        extent = out.extents.get(id(inner), program.dims[inner.dim].extent)
        leaf = None if any(isinstance(s, Sweep) for s in inner.body) else inner.body
        if inner.dim == vector and leaf is not None and all(_indifferent(s, sweep.dim, vector, extent) for s in leaf):
            joined = Sweep(vector, tuple(_without(s, sweep.dim) for s in leaf))
            out.extents[id(joined)] = program.dims[sweep.dim].extent * extent
            return joined
    return Sweep(sweep.dim, body)


def _indifferent(s: Stmt, outer: int, inner: int, extent: Expr) -> bool:
    """True when the statement sees only outer * extent + inner."""
    if isinstance(s, Scan | Sweep):
        return False
    if (outer in s.span) != (inner in s.span):
        return False
    if isinstance(s, Reduce) and (outer in s.dims) != (inner in s.dims):
        return False
    one = {ix.axis_atom(inner): ix.axis(inner) + ix.axis(outer) * extent}
    for e in exprs_of(s):
        if any(a.kind in ("div", "mod") and ({outer, inner} & Expr.make({(a,): 1}).axes()) for a in e.atoms()):
            return False
        if e.substitute({ix.axis_atom(outer): ix.ZERO}).substitute(one) is not e:
            return False
    return True


def _without(s: Stmt, dim: int) -> Stmt:
    """The statement at 0 of the dim, in whose place the joined dim runs on."""
    env = {ix.axis_atom(dim): ix.ZERO}

    def at(e: Expr) -> Expr:
        return e.substitute(env)

    if isinstance(s, Let):
        return replace(s, attrs=tuple((k, _mapped(v, env)) for k, v in s.attrs))
    if isinstance(s, Reduce):
        dims = tuple(d for d in s.dims if d != dim)
        return replace(s, dims=dims, linear=None if s.linear is None else at(s.linear))
    if isinstance(s, Scan | Sweep):
        return s
    guard = tuple(at(g) for g in s.guard)
    if isinstance(s, Load | Store):
        return replace(s, address=at(s.address), guard=guard)
    return replace(s, index=at(s.index), guard=guard)


def _mapped(v: Any, env: dict[ix.Atom, Expr]) -> Any:
    if isinstance(v, Expr):
        return v.substitute(env)
    return tuple(_mapped(e, env) for e in v) if isinstance(v, tuple) else v
