"""Masks of positions as conditions on index expressions: what computes them from positions becomes one "holds".

    i = index(p1); j = index(r0); far = gt(j, i); where(far, -inf, x)    ->    where(holds(p1 - r0 >= 0), x, -inf)

A choice between a constant and a value has the constant where its condition fails. Loop bounds and the split into full and
partial tiles are read off such conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.index import Expr
from plait.tile.flat import Flat
from plait.tile.program import Dim, Let, Load, Reduce, Scan, Stmt, Sweep, TileProgram

Guard = tuple[Expr, ...]


def conditions(flat: Flat) -> Flat:
    """The same statements with comparisons of positions, and what is made of them, as conditions."""
    known = _Known(flat.dims, flat.symbols, flat.stmts)
    return replace(flat, stmts=known.body(flat.stmts))


def logic(op: str, args: Sequence[object]) -> bool | None:
    """An operator on bools of which some are not known (anything but a bool): an "and" with a false one is false, an "or" with a
    true one true, so that a negated formula says as much as its De Morgan form."""
    if op in ("bit_and", "mul", "minimum"):
        return False if any(a is False for a in args) else _all_known(args, all)
    if op in ("bit_or", "add", "maximum"):
        return True if any(a is True for a in args) else _all_known(args, any)
    if op == "bit_not":
        return _all_known(args, lambda known: not known[0])
    if op in ("copy", "cast"):
        return _all_known(args, lambda known: known[0])
    if op in ("bit_xor", "ne"):
        return _all_known(args, lambda known: known[0] != known[1])
    return _all_known(args, lambda known: known[0] == known[1]) if op == "eq" else None


def _all_known(args: Sequence[object], made: Callable[[list[bool]], bool]) -> bool | None:
    known = [a for a in args if isinstance(a, bool)]
    return made(known) if len(known) == len(args) else None


def is_statistic(s: Stmt | None, guard: Expr, span_of: Callable[[int], Iterable[int]]) -> bool:
    """Whether a statement loads a value that is one for a whole row of a mask, as the saved maximum and sum of a softmax are.
    It is taken to be finite (and no divisor 0) where the mask hides a point of the row: a row of which the mask hides all,
    or that is -inf throughout, has no finite maximum, and no tile of it need be visited to find that out. `span_of` gives the
    dims that a local of the guard's varies over."""
    moving = guard.axes().union(*(span_of(k) for k in guard.values()))
    return isinstance(s, Load) and not moving <= set(s.span)


def with_conditions(program: TileProgram, rows: frozenset[int] = frozenset()) -> TileProgram:
    """Likewise of a whole program. Conditions on the locals `rows` are put together like those on positions."""
    return replace(program, body=_Known(program.dims, {}, program.walk(), rows).body(program.body))


class _Known:
    def __init__(
        self,
        dims: Sequence[Dim],
        symbols: dict[str, tuple[int, int | None]],
        stmts: Iterable[Stmt],
        rows: frozenset[int] = frozenset(),
    ) -> None:
        self.facts = ix.Facts(axes=tuple(d.extent for d in dims), symbols=symbols)
        spans = {s.out: s.span for s in stmts if isinstance(s, Let | Load | Reduce | Scan)}
        self.rows = {k: spans[k] for k in rows}
        self.count = 1 + max(spans, default=-1)
        self.positions: dict[int, Expr] = {}
        self.guards: dict[int, Guard] = {}
        self.negated: dict[int, Guard] = {}  # what holds where a bool is false
        self.either: dict[int, tuple[int, int]] = {}  # operands of an or
        self.constants: dict[int, object] = {}

    def body(self, stmts: Sequence[Stmt]) -> tuple[Stmt, ...]:
        """Statements rewritten, sweeps' bodies included."""
        out: list[Stmt] = []
        for s in stmts:
            if isinstance(s, Sweep):
                out.append(replace(s, body=self.body(s.body)))
            else:
                out += self.rewritten(s) if isinstance(s, Let) else [s]
        return tuple(out)

    def rewritten(self, s: Let) -> Sequence[Stmt]:
        """The statement, or what it is in terms of conditions; what it is gets noted either way."""
        if s.op == "const":
            self.constants[s.out] = s.attr("value")
        position = self._position(s)
        if position is not None:
            self.positions[s.out] = position
            return [s]
        self._note_negated(s)
        guard = self._guard(s)
        if guard is not None:
            return [self._holds(s.out, guard, s)]
        if s.op == "where" and s.args[1] in self.constants and s.args[2] not in self.constants:
            return self._turned(s)
        return [s]

    def _turned(self, s: Let) -> list[Let]:
        """where(c, constant, x) as where(not c, x, constant), with as much of c as is known; the rest of an or stays inside."""
        c, constant, x = s.args
        guard = self._where_false(c)
        if guard is not None:
            turned = self._holds(self._fresh(), guard, s)
            return [turned, replace(s, args=(turned.out, x, constant))]
        pair = self.either.get(c)
        for known, other in (pair, pair[::-1]) if pair else ():
            guard = self._where_false(known)
            if guard is not None:
                inner = self._turned(replace(s, out=self._fresh(), args=(other, constant, x)))
                turned = self._holds(self._fresh(), guard, s)
                return [*inner, turned, replace(s, args=(turned.out, inner[-1].out, constant))]
        return [s]

    def _fresh(self) -> int:
        self.count += 1
        return self.count - 1

    def _note_negated(self, s: Let) -> None:
        if s.op == "bit_not" and s.args[0] in self.guards:
            self.negated[s.out] = self.guards[s.args[0]]
        if s.dtype is DType.b1 and s.op in ("bit_or", "add", "maximum"):
            self.either[s.out] = (s.args[0], s.args[1])
            parts = [self._where_false(a) for a in s.args]
            if parts[0] is not None and parts[1] is not None:
                self.negated[s.out] = parts[0] + parts[1]

    def _where_false(self, c: int) -> Guard | None:
        """The expressions that are all >= 0 where a bool is false; None when it is no such conjunction."""
        guard = self.guards.get(c)
        return (-guard[0] - 1,) if guard is not None and len(guard) == 1 else self.negated.get(c)

    def _holds(self, out: int, guard: Guard, s: Let) -> Let:
        guard = tuple(g for g in dict.fromkeys(guard) if not self.facts.is_nonneg(g))
        self.guards[out] = guard
        span = tuple(sorted({d for g in guard for d in (*g.axes(), *(i for k in g.values() for i in self.rows[k]))}))
        return Let(out, "holds", (), DType.b1, span, (("guard", guard),))

    def _position(self, s: Let) -> Expr | None:
        """An integer that is an expression of the dims (values that are loaded are none)."""
        if s.dtype is not DType.i64:
            return None
        if s.op == "index":
            e: Expr = s.attr("expr")
            return None if e.values() else e
        if s.op == "const":
            return ix.const(int(s.attr("value")))
        if not s.args or not all(a in self.positions for a in s.args):
            return None
        x = [self.positions[a] for a in s.args]
        if s.op == "neg":
            return -x[0]
        if s.op in ("add", "sub", "mul"):
            return {"add": x[0] + x[-1], "sub": x[0] - x[-1], "mul": x[0] * x[-1]}[s.op]
        return None

    def _guard(self, s: Let) -> Guard | None:
        """The expressions that are all >= 0 where a bool is true; None when it is no such conjunction."""
        if s.dtype is not DType.b1:
            return None
        if s.op == "holds":
            found: Guard = s.attr("guard")
            return None if any(g.values() - set(self.rows) for g in found) else found
        if s.op in ("lt", "le", "gt", "ge", "eq") and all(a in self.positions for a in s.args):
            a, b = (self.positions[k] for k in s.args)
            more = {"lt": (b - a - 1,), "le": (b - a,), "gt": (a - b - 1,), "ge": (a - b,), "eq": (a - b, b - a)}
            return more[s.op]
        if s.op == "bit_not":
            return self._where_false(s.args[0])
        if s.op in ("bit_and", "mul") and all(a in self.guards for a in s.args):
            return self.guards[s.args[0]] + self.guards[s.args[1]]
        return self._chosen(s) if s.op == "where" else None

    def _chosen(self, s: Let) -> Guard | None:
        """where(c, x, y) of conditions and constants: c and x, or not c and y, when the other branch is false."""
        c, x, y = s.args
        guard = self.guards.get(c)
        if guard is None:
            return None
        if self.constants.get(y) is False:
            if self.constants.get(x) is True:
                return guard
            return None if x not in self.guards else guard + self.guards[x]
        if len(guard) == 1 and self.constants.get(x) is False:
            negated = (-guard[0] - 1,)
            if self.constants.get(y) is True:
                return negated
            return None if y not in self.guards else negated + self.guards[y]
        return None
