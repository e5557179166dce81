"""Which tiles of a sweep do nothing because a guard fails at all of their points, as causal masks and windows do.

A sweep's step may be left out when, with a "holds" false, every reduction that outlives the step keeps its value: a maximum
sees only -inf, sums and dots only zeros, and what was added up before is scaled by 1. That is found by computing with the
maximum so far set to several values, -inf (nothing seen yet, so sums are zero) and some finite ones.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from plait.emit.cpp_scope import Scope
from plait.emit.cpp_tiles_plan import Tiles
from plait.ir import index as ix
from plait.ir.index import Expr
from plait.tile.masks import is_statistic, logic
from plait.tile.positions import position_of
from plait.tile.program import Check, Dot, Let, Load, Reduce, Stmt, Store, Sweep, TileProgram, walk

Value = float | bool | str | None  # None: not known
_STATISTIC = "statistic"  # a number of a whole row, known to be finite

_CONDITIONS = ("holds", "between")
_SO_FAR = (0.0, -3.7, 0.0, 2.9, 41.5)
"""Values of a maximum so far, in units that do not matter; the first stands for none at all."""

_BINARY: dict[str, Callable[[float, float], float | bool]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "maximum": max,
    "minimum": min,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
_UNARY: dict[str, Callable[[float], float | bool]] = {
    "copy": lambda x: x,
    "round": lambda x: x,
    "neg": operator.neg,
    "exp": math.exp,
    "exp2": lambda x: 2.0**x,
    "bit_not": lambda x: not x,
    "isnan": math.isnan,
    "isinf": math.isinf,
}
_IDLE = {"max": -math.inf, "min": math.inf, "sum": 0.0, "any": False, "all": True}


def with_implied_conditions(program: TileProgram) -> TileProgram:
    """Each "between" as a condition on its position and its ends, which bounds loops and is evaluated nowhere: it is implied
    by what it is put on."""
    defs = {s.out: s for s in program.walk() if isinstance(s, Let | Load)}

    def visit(s: Stmt) -> Stmt:
        if isinstance(s, Sweep):
            return replace(s, body=tuple(map(visit, s.body)))
        if not isinstance(s, Let) or s.op != "between":
            return s
        at = position_of(s.args[0], defs)
        first, end = (ix.value(k) for k in s.args[1:])
        return Let(s.out, s.op, (), s.dtype, (), (("guard", () if at is None else (at - first, end - 1 - at)),))

    return replace(program, body=tuple(map(visit, program.body)))


class Masks:
    """Finds the guards that idle tiles of one sweep fail. `extremes`: of locals whose values vary over a tile, by name of the
    C++ variable, those that bounds speak of (local, whether the greatest)."""

    def __init__(self, scope: Scope, tiles: Tiles) -> None:
        self.scope, self.tiles = scope, tiles
        self.extremes: dict[str, tuple[int, bool]] = {}
        self.known: dict[int, float] = {
            s.out: s.attr("value") for s in scope.program.walk() if isinstance(s, Let) and s.op == "const"
        }
        self.loads = [s for s in scope.program.walk() if isinstance(s, Load)]

    def bounds(self, sweep: Sweep) -> tuple[list[str], list[str]]:
        """Lower bounds of the first point that matters, and upper bounds of the end of those that do, as C++ expressions."""
        first: list[str] = []
        end: list[str] = []
        for guard in self._idle_guards(sweep):
            for g in guard:
                found = self._bound(g, sweep)
                if found is not None:
                    (first if found[0] else end).append(found[1])
        return list(dict.fromkeys(first)), list(dict.fromkeys(end))

    def _idle_guards(self, sweep: Sweep) -> Iterator[tuple[Expr, ...]]:
        inside = list(walk(sweep.body))
        if any(isinstance(s, Store | Check) for s in inside):
            return
        opened = {s.dim for s in inside if isinstance(s, Sweep)}
        lasting = [s for s in inside if isinstance(s, Reduce) and not set(s.dims) <= opened]
        for guard in dict.fromkeys(s.attr("guard") for s in inside if isinstance(s, Let) and s.op in _CONDITIONS):
            values = self._values(inside, guard)
            if all(self._keeps(r, values) for r in lasting):
                yield guard

    # ---------------------------------------------------------------- what a step computes when a guard fails
    def _values(self, stmts: Sequence[Stmt], failing: tuple[Expr, ...]) -> dict[int, list[Value]]:
        """Values of locals for each value so far, where known."""
        carried = {s.out: s for s in stmts if isinstance(s, Reduce)}
        out: dict[int, list[Value]] = {k: [v] * len(_SO_FAR) for k, v in self.known.items()}
        for load in self.loads:
            if all(is_statistic(load, g, self.scope.spans.__getitem__) for g in failing):
                out[load.out] = [_STATISTIC] * len(_SO_FAR)
        for s in stmts:
            if not isinstance(s, Let):
                continue
            if s.op in _CONDITIONS and s.attr("guard") == failing:
                out[s.out] = [False] * len(_SO_FAR)
            elif s.op in ("running", "before"):
                r = carried.get(s.args[0])
                if r is not None and r.monoid in ("max", "min"):
                    out[s.out] = [_IDLE[r.monoid], *_SO_FAR[1:]]
            else:
                columns = zip(*(out.get(a, [None] * len(_SO_FAR)) for a in s.args), strict=True)
                found = [_value(s.op, args) for args in columns]
                if found:
                    out[s.out] = found
        return out

    def _keeps(self, s: Reduce, values: dict[int, list[Value]]) -> bool:
        def all_are(k: int, x: float) -> bool:
            return all(v is not None and v == x for v in values.get(k, [None]))

        if s.scale is not None:
            scale = values.get(s.scale, [None])
            if not isinstance(scale[0], float | int) or not math.isfinite(scale[0]) or any(v != 1 for v in scale[1:]):
                return False
        if isinstance(s, Dot):
            return all_are(s.arg, 0.0) or all_are(s.other, 0.0)
        return s.monoid in _IDLE and all_are(s.arg, _IDLE[s.monoid])

    # ---------------------------------------------------------------- where a guard can hold
    def _bound(self, g: Expr, sweep: Sweep) -> tuple[bool, str] | None:
        """(True, first point) or (False, end) outside of which the guard fails for every point of the other dims' tiles."""
        slope, most = 0, ix.ZERO
        made = {s.out for s in walk(sweep.body) if isinstance(s, Let | Load | Reduce)}
        tops: list[str] = []
        for m, c in g.terms:
            term = Expr.make({m: c})
            value = m[0].args[0] if len(m) == 1 and m[0].kind == "value" else None
            if isinstance(value, int) and value not in made and self.tiles.of(self.scope.spans[value]):
                name = f"{self.scope.locals[value]}_{'most' if c > 0 else 'least'}"
                self.extremes[name] = (value, c > 0)
                tops.append(f" {'+' if c > 0 else '-'} {abs(c)}*{name}")
                continue
            d = next((d for d in term.axes() if self.tiles.sizes[d] > 1 or d == sweep.dim), None)
            if d is None:
                most = most + term
            elif m != (ix.axis_atom(d),):
                return None
            elif d == sweep.dim:
                slope = c
            elif c > 0:
                tops.append(f" + {c}*({self.scope.dims[d]}_lo + {self.tiles.count(d)} - 1)")
            else:
                tops.append(f" - {-c}*{self.scope.dims[d]}_lo")
        if slope == 0 or any(k in made or self.tiles.of(self.scope.spans[k]) for k in most.values()):
            return None
        rest = self.scope.expr(most) + "".join(tops)
        if slope > 0:
            return True, f"plait::ceildiv(-({rest}), {slope})"
        return False, f"plait::floordiv({rest}, {-slope}) + 1"


def _value(op: str, args: tuple[Value, ...]) -> Value:
    """One operator on values of which some are known."""
    if op == "where":
        c, x, y = args
        return (x if x == y else None) if c is None else x if c else y
    if (found := logic(op, args)) is not None:
        return found
    if _STATISTIC in args:
        return args[0] if (op, args[0]) in (("sub", -math.inf), ("div", 0.0)) else None
    known = [float(a) for a in args if a is not None]
    if len(known) != len(args):
        return None
    try:
        if op in _UNARY:
            return _UNARY[op](known[0])
        return _BINARY[op](known[0], known[1]) if op in _BINARY else None
    except OverflowError:
        return None
