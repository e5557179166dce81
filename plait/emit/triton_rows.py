"""Masks that compare the positions of a loop with a whole number of the row: loaded positions, lengths, first points.

    v = load(b, i)                                      v = load(b, i);  w = within(v)
    sweep r: c = le(index(r), v); where(c, x, -inf)  -> sweep r: c = holds(w - r >= 0); where(c, x, -inf)

"within" (this backend's own operator) moves a number to just beyond all that it is compared with, attr limit, where it was
further out: no comparison comes out otherwise, nothing overflows, and 32 bits hold it. A loop's bounds are then read off
its extremes over a block's rows: the loop visits what some row sees, and masks what not all of them see.

    first = load(b, i); end = load(b, i)
    sweep r: c = between(index(r), first, end)  -> sweep r: c = between() {guard=(r - within(first), within(end) - 1 - r)}

"between" says nothing that what it is put on does not say (rewrite/passes/block_bounds): with its numbers known before the
loop it bounds the loop, and it is evaluated nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from plait.emit.triton_index import Indexer
from plait.emit.triton_reduce import across
from plait.emit.triton_softmax import definitions
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.index import Expr
from plait.tile.masks import with_conditions
from plait.tile.positions import position_of
from plait.tile.program import Let, Load, Stmt, Sweep, TileProgram

_BEYOND = 2**48
"""Beyond any position of a dim whose extent is known at run time only."""
_NARROW = 2**31 - 1
_EXTREMES = (("most", "max", -1), ("least", "min", 1))


def with_row_conditions(program: TileProgram, looped: frozenset[int]) -> TileProgram | None:
    """The program with such comparisons as conditions, or None where it has none."""
    rows = _Rows(program, looped)
    body = rows.visit(program.body, {})
    if not rows.held:
        return None
    return with_conditions(replace(program, body=tuple(rows.inserted(body))), frozenset(rows.held.values()))


def without_between(program: TileProgram) -> TileProgram:
    """The program with conditions that are implied as true: where no loop is bounded by them."""

    def visit(s: Stmt) -> Stmt:
        if isinstance(s, Sweep):
            return replace(s, body=tuple(map(visit, s.body)))
        return _implied(s) if isinstance(s, Let) and s.op == "between" else s

    return replace(program, body=tuple(map(visit, program.body)))


def _implied(s: Let, guard: tuple[Expr, ...] = ()) -> Let:
    return Let(s.out, "between", (), DType.b1, (), (("guard", guard),))


def extreme(k: int, greatest: bool) -> Expr:
    """The greatest or the least value over a block of a local that is held within a limit."""
    return Expr.make({(ix.Atom.make("most" if greatest else "least", k),): 1})


def extremes(k: int, indexer: Indexer) -> Iterator[tuple[str, str]]:
    """(name, text) of both: points beyond the extents do not count."""
    v, limit = indexer.locals[k], indexer.bounds[k]
    inside = " & ".join(indexer.inside(v.axes, v.axes))
    for name, monoid, side in _EXTREMES:
        text = f"tl.where({inside}, {v.text}, {side * limit})" if inside else v.text
        for axis in reversed(range(len(v.axes))):
            text = across(monoid, text, axis, v.dtype)
        yield f"v{k}_{name}", text


def within(x: str, limit: int, dtype: DType) -> str:
    """The text of "within"."""
    text = f"tl.minimum(tl.maximum({x}, {-limit}), {limit})"
    return f"tl.cast({text}, tl.int32)" if dtype is DType.i32 else text


class _Rows:
    """`held`: by local and limit, the local that holds it within the limit."""

    def __init__(self, program: TileProgram, looped: frozenset[int]) -> None:
        self.looped, self.defs = looped, definitions(program)
        self.facts = ix.Facts(axes=tuple(d.extent for d in program.dims))
        self.next = 1 + max(self.defs, default=-1)
        self.seen: set[int] = set()
        self.held: dict[tuple[int, int], int] = {}

    def visit(self, body: tuple[Stmt, ...], before: Mapping[int, frozenset[int]]) -> tuple[Stmt, ...]:
        """Statements with comparisons as conditions. `before`: by dim of an open loop, what was known when it began."""
        out: list[Stmt] = []
        for s in body:
            if isinstance(s, Sweep):
                opened = {**before, s.dim: frozenset(self.seen)} if s.dim in self.looped else before
                out.append(replace(s, body=self.visit(s.body, opened)))
                continue
            out.append(self._condition(s, before) or s if isinstance(s, Let) else s)
            self.seen.add(getattr(s, "out", -1))
        return tuple(out)

    def _condition(self, s: Let, before: Mapping[int, frozenset[int]]) -> Let | None:
        if s.op == "between":
            return self._between(s, before)
        if s.op not in ("lt", "le", "gt", "ge"):
            return None
        for k, other in (s.args, s.args[::-1]):
            e = position_of(k, self.defs)
            if e is None or not self._is_of_rows(other, e, before):
                continue
            v = ix.value(self._held(other, e))
            a, b = (e, v) if k == s.args[0] else (v, e)
            g = {"lt": b - a - 1, "le": b - a, "gt": a - b - 1, "ge": a - b}[s.op]
            return Let(s.out, "holds", (), DType.b1, s.span, (("guard", (g,)),))
        return None

    def _between(self, s: Let, before: Mapping[int, frozenset[int]]) -> Let:
        e = position_of(s.args[0], self.defs)
        if e is None or not all(self._is_of_rows(k, e, before) for k in s.args[1:]):
            return _implied(s)
        first, end = (ix.value(self._held(k, e)) for k in s.args[1:])
        return _implied(s, (e - first, end - 1 - e))

    def _is_of_rows(self, k: int, e: Expr, before: Mapping[int, frozenset[int]]) -> bool:
        """Whether a whole number that is no position is known before the loops along which the position `e` moves."""
        d, loops = self.defs.get(k), [before[i] for i in e.axes() if i in before]
        if not loops or not isinstance(d, Let | Load) or d.dtype is not DType.i64:
            return False
        return position_of(k, self.defs) is None and all(k in known for known in loops)

    def _held(self, k: int, e: Expr) -> int:
        ends = [self.facts.lower(e), self.facts.upper(e)]
        sizes = [abs(x.const) for x in ends if x is not None and x.const is not None]
        limit = max(sizes) + 1 if len(sizes) == 2 else _BEYOND
        if (k, limit) not in self.held:
            self.held[k, limit] = self.next
            self.next += 1
        return self.held[k, limit]

    def inserted(self, body: tuple[Stmt, ...]) -> Iterator[Stmt]:
        """Statements, each followed by what holds its value within limits."""
        for s in body:
            yield replace(s, body=tuple(self.inserted(s.body))) if isinstance(s, Sweep) else s
            for (k, limit), out in self.held.items():
                if isinstance(s, Let | Load) and s.out == k:
                    dtype = DType.i32 if limit < _NARROW else DType.i64
                    yield Let(out, "within", (k,), dtype, s.span, (("limit", limit),))
