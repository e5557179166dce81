"""Cut a dim where guards change along it, and compute the pieces side by side: every such guard becomes a constant.

    y[r] = x[r] * c[r] + (r < 64 ? -x[r + 64] : x[r - 64]) * s[r]         r < 128
    ->
    a = x[r], b = x[r + 64];  y[r] = a * c[r] - b * s[r];  y[r + 64] = b * c[r + 64] + a * s[r + 64]      r < 64

A value that varies over the dim becomes one value a piece; what the pieces have in common is computed once, so that a
piece that reads where another one is reads nothing. Reductions over the dim reduce each piece and combine the results.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.index import Atom, Expr, Facts
from plait.tile.coalesce import map_exprs
from plait.tile.flat import Flat
from plait.tile.program import Check, Dot, Let, Load, Reduce, Scan, Stmt, Store, exprs_of, operands

_MOST_PIECES = 4
_LEAST_POINTS = 8  # of a piece: below that the pieces would be no vectors
_COMBINE = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum", "any": "bit_or", "all": "bit_and"}


def cut_pieces(flat: Flat) -> Flat:
    """The same statements with such dims cut, one after another."""
    if any(isinstance(s, Dot) for s in flat.stmts):
        return flat  # its loops are cut by tiles
    for d in range(len(flat.dims)):
        points = _piece(flat, d)
        if points:
            flat = _Cutter(flat, d, points).run()
    return flat


def _piece(flat: Flat, d: int) -> int:
    """Points of a piece of dim d, or 0 when it is not to be cut."""
    extent = flat.dims[d].extent.const
    if extent is None or any(_needs_whole(s, d) for s in flat.stmts):
        return 0
    places = {t for s in flat.stmts for g in _guards(s) for t in _thresholds(g, d) if 0 < t < extent}
    points = math.gcd(extent, *places)
    return points if places and points >= _LEAST_POINTS and extent // points <= _MOST_PIECES else 0


def _needs_whole(s: Stmt, d: int) -> bool:
    if isinstance(s, Scan):
        return s.dim == d
    return isinstance(s, Reduce) and d in s.dims and s.monoid not in _COMBINE


def _guards(s: Stmt) -> tuple[Expr, ...]:
    if isinstance(s, Load | Store | Check):
        return s.guard
    if isinstance(s, Let) and s.op == "holds":
        found: tuple[Expr, ...] = s.attr("guard")
        return found
    return ()


def _thresholds(guard: Expr, d: int) -> Iterable[int]:
    """Where along dim d the guard changes, when it speaks of that dim alone."""
    rest = guard - guard.offset
    if rest is ix.axis(d):
        yield -guard.offset
    elif rest is -ix.axis(d):
        yield guard.offset + 1


class _Cutter:
    def __init__(self, flat: Flat, d: int, points: int) -> None:
        self.flat, self.d = flat, d
        self.starts = range(0, flat.dims[d].extent.const or 0, points)
        self.dims = tuple(replace(dim, extent=ix.const(points)) if i == d else dim for i, dim in enumerate(flat.dims))
        self.facts = Facts(axes=tuple(dim.extent for dim in self.dims), symbols=flat.symbols)
        self.names: dict[tuple[int, int], int] = {}  # (local, piece) -> its new local
        self.same: dict[Any, int] = {}
        self.constants: dict[int, Any] = {}  # new locals that are constants
        self.stmts: list[Stmt] = []
        self.count = 0

    def run(self) -> Flat:
        for s in self.flat.stmts:
            pieces = range(len(self.starts)) if self.varies(s) else (0,)
            for h in pieces:
                self.one(s, h)
            if isinstance(s, Reduce) and self.d in s.dims:
                self.combine(s)
            elif not isinstance(s, Store | Check) and len(pieces) == 1:
                for h in range(1, len(self.starts)):
                    self.names[(s.out, h)] = self.names[(s.out, 0)]  # type: ignore[union-attr]
        return replace(self.flat, dims=self.dims, stmts=_without_unused(self.stmts))

    def varies(self, s: Stmt) -> bool:
        if isinstance(s, Reduce) and self.d in s.dims:
            return True
        return self.d in getattr(s, "span", ()) or any(self.d in e.axes() for e in exprs_of(s))

    def one(self, s: Stmt, h: int) -> None:
        """Statement s in piece h."""
        env: dict[Atom, Expr] = {ix.axis_atom(self.d): ix.axis(self.d) + self.starts[h]}
        for e in exprs_of(s):
            env |= {Atom.make("value", k): ix.value(self.names[(k, h)]) for k in e.values()}
        s = map_exprs(s, lambda e: e.substitute(env, self.facts))
        if isinstance(s, Let):
            self.names[(s.out, h)] = self.let(replace(s, args=tuple(self.names[(k, h)] for k in s.args)))
        elif isinstance(s, Load):
            guard = self.open(s.guard)
            constant = Let(0, "const", (), s.dtype, (), (("value", s.fill),))
            self.names[(s.out, h)] = self.let(constant) if guard is None else self.new(replace(s, guard=guard))
        elif isinstance(s, Reduce | Scan):
            self.names[(s.out, h)] = self.new(replace(s, arg=self.names[(s.arg, h)]))
        elif isinstance(s, Store | Check):
            guard = self.open(s.guard)
            if guard is not None:
                done = replace(s, guard=guard)
                self.stmts.append(replace(done, value=self.names[(done.value, h)]) if isinstance(done, Store) else done)

    def open(self, guard: tuple[Expr, ...]) -> tuple[Expr, ...] | None:
        """What is left to test of a guard; None when it never holds."""
        if any(self.facts.is_nonneg(-g - 1) for g in guard):
            return None
        return tuple(g for g in guard if not self.facts.is_nonneg(g))

    def let(self, s: Let) -> int:
        if s.op == "holds":
            guard = self.open(s.attr("guard"))
            if not guard:
                return self.let(Let(0, "const", (), DType.b1, (), (("value", guard is not None),)))
            s = replace(s, attrs=(("guard", guard),))
        if s.op == "where" and s.args[0] in self.constants:
            return s.args[1] if self.constants[s.args[0]] else s.args[2]
        out = self.new(s)
        if s.op == "const":
            self.constants[out] = s.attr("value")
        return out

    def new(self, s: Let | Load | Reduce | Scan) -> int:
        """The local of a statement, which may be there already."""
        key = repr(replace(s, out=0))
        found = self.same.get(key)
        if found is None:
            found = self.same[key] = self.count
            self.stmts.append(replace(s, out=self.count))
            self.count += 1
        return found

    def combine(self, s: Reduce) -> None:
        total = self.names[(s.out, 0)]
        for h in range(1, len(self.starts)):
            part = self.names[(s.out, h)]
            total = self.new(Let(0, _COMBINE[s.monoid], (total, part), s.dtype, s.span))
        for h in range(len(self.starts)):
            self.names[(s.out, h)] = total


def _without_unused(stmts: list[Stmt]) -> tuple[Stmt, ...]:
    used: set[int] = set()
    kept: list[Stmt] = []
    for s in reversed(stmts):
        if isinstance(s, Store | Check) or getattr(s, "out", -1) in used:
            kept.append(s)
            used.update(operands(s))
    return tuple(kept[::-1])
