"""Before a tiled part is written: statements are put in a form that is easy to emit, tiles get their sizes, and the
statements of a body are ordered into *steps*: runs that share one loop nest, and single reductions and sweeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from plait.errors import LowerFailed
from plait.ir.dtype import DType
from plait.tile.program import (
    Check,
    Dot,
    Let,
    Load,
    Reduce,
    Scan,
    Span,
    Stmt,
    Store,
    Sweep,
    TileProgram,
    operands,
    walk,
)

Run = list[Let | Load | Store | Check]
Step = Run | Reduce | Sweep

_MOST = 4096  # points of a dim in a tile
_UNKNOWN = 1024  # of a dim to be taken whole whose extent is not known


# ---------------------------------------------------------------- rewriting
def prepare(program: TileProgram) -> TileProgram:
    """Factors of Dots become values that their operand type holds exactly, and every "before" comes before its Reduce."""
    return replace(program, body=_Prepare(program).body(program.body))


class _Prepare:
    def __init__(self, program: TileProgram) -> None:
        self.program = program
        self.makers: dict[int, Let | Load | Reduce] = {}
        self.before: dict[int, list[Let]] = {}  # of a Reduce
        for s in program.walk():
            if isinstance(s, Scan):
                raise LowerFailed("a C++ kernel with contractions has no scans")
            if isinstance(s, Let | Load | Reduce):
                self.makers[s.out] = s
            if isinstance(s, Let) and s.op == "before":
                self.before.setdefault(s.args[0], []).append(s)
        self.next = max(self.makers, default=0) + 1
        self.rounded: dict[tuple[int, DType], int] = {}
        self.wanted: dict[int, list[Let]] = {}  # local -> roundings of it that Dots want
        for s in program.walk():
            if isinstance(s, Dot):
                for k in (s.arg, s.other):
                    self._want(k, s.operand)

    def _want(self, k: int, operand: DType) -> None:
        if self._exact(self.makers[k], operand) or (k, operand) in self.rounded:
            return
        made = self.makers[k]
        self.rounded[(k, operand)] = self.next
        attrs = (("dtype", operand),) if operand.is_storage_only else ()
        op = "round" if attrs else "copy"
        let = Let(self.next, op, (k,), made.dtype, made.span, attrs)
        self.wanted.setdefault(k, []).append(let)
        self.next += 1

    def _exact(self, s: Let | Load | Reduce, operand: DType) -> bool:
        if isinstance(s, Reduce):
            return isinstance(s, Dot) and not operand.is_storage_only
        if not operand.is_storage_only:
            return True
        if isinstance(s, Load):
            return self.program.buffers[s.buffer].dtype is operand
        return s.op in ("round", "cast") and dict(s.attrs).get("dtype") is operand

    def body(self, stmts: Sequence[Stmt]) -> tuple[Stmt, ...]:
        """The statements with roundings and the values before reductions in their places."""
        out: list[Stmt] = []
        late: set[int] = set()  # roundings of reductions are made where they are used
        for s in stmts:
            if isinstance(s, Sweep):
                out.append(replace(s, body=self.body(s.body)))
                continue
            if isinstance(s, Let) and s.op == "before":
                continue
            if isinstance(s, Reduce):
                out += self.before.get(s.out, [])
            if isinstance(s, Dot):
                factors = {k: self.rounded.get((k, s.operand), k) for k in (s.arg, s.other)}
                for k in factors:
                    if factors[k] != k and isinstance(self.makers[k], Reduce) and factors[k] not in late:
                        late.add(factors[k])
                        out += [w for w in self.wanted[k] if w.out == factors[k]]
                out.append(replace(s, arg=factors[s.arg], other=factors[s.other]))
                continue
            out.append(s)
            if isinstance(s, Let | Load):
                out += self.wanted.get(s.out, [])
        return tuple(out)


# ---------------------------------------------------------------- tiles
class Tiles:
    """How many points of each dim a tile has; dims with one are plain loop counters."""

    def __init__(self, program: TileProgram, names: Sequence[str]) -> None:
        self.program, self.names = program, names
        self.sizes = [self._size(i) for i in range(len(program.dims))]

    def _size(self, i: int) -> int:
        d = self.program.dims[i]
        size, n = self.program.schedule.size(d.name), d.extent.const
        if size == 1 and d.name == self.program.schedule.vector and d.role == "row":
            size = 0
        if size == 0:
            # a sweep of several steps does as well as one over all
            size = _UNKNOWN if n is None else min(n, _MOST)
        return max(size if n is None else min(size, n), 1)

    def of(self, span: Span | frozenset[int]) -> tuple[int, ...]:
        """The dims of a span that a tile has several points of."""
        return tuple(d for d in sorted(span) if self.sizes[d] > 1)

    def whole(self, d: int) -> bool:
        """True when one tile is all of the dim."""
        n = self.program.dims[d].extent.const
        return n is not None and self.sizes[d] == n

    def even(self, d: int) -> bool:
        """True when every tile has all its points."""
        n = self.program.dims[d].extent.const
        return n is not None and n % self.sizes[d] == 0

    def count(self, d: int) -> str:
        """The points of the current tile."""
        return str(self.sizes[d]) if self.even(d) else f"{self.names[d]}_to"


# ---------------------------------------------------------------- order
@dataclass
class _Item:
    stmt: Stmt
    needs: set[int]  # items before this one


def key_of(s: Stmt, tiles: Tiles) -> tuple[int, ...] | None:
    """The tile dims of a statement that can share a loop nest; None for the others."""
    return tiles.of(s.span) if isinstance(s, Let | Load | Store | Check) else None


def steps(body: Sequence[Stmt], tiles: Tiles) -> list[Step]:
    """The statements in an order that keeps what depends on each other, with long runs over the same tile dims."""
    items = _dependencies(body, tiles.program)
    done: set[int] = set()
    left = list(range(len(items)))
    out: list[Step] = []

    def ready(i: int) -> bool:
        return items[i].needs <= done

    while left:
        keys = {i: key_of(items[i].stmt, tiles) for i in left if ready(i)}
        first = next(iter(keys))
        # rows and columns of a tile first: a run over all of it that needs them would have to end
        smaller = (i for i, k in keys.items() if k is not None and set(k) < set(keys[first] or ()))
        first = min(smaller, key=lambda i: (len(keys[i] or ()), i), default=first)
        key = keys[first]
        if key is None:
            s = items[first].stmt
            assert isinstance(s, Reduce | Sweep)
            out.append(s)
            done.add(first)
            left.remove(first)
            continue
        run: Run = []
        while True:
            i = next((i for i in left if ready(i) and key_of(items[i].stmt, tiles) == key), None)
            if i is None:
                break
            s = items[i].stmt
            assert isinstance(s, Let | Load | Store | Check)
            run.append(s)
            done.add(i)
            left.remove(i)
        out.append(run)
    return out


def _dependencies(body: Sequence[Stmt], program: TileProgram) -> list[_Item]:
    items: list[_Item] = []
    maker: dict[int, int] = {}
    readers: dict[int, set[int]] = {}  # of an accumulator before its Reduce
    touched: dict[int, list[tuple[int, bool]]] = {}  # memory that is read and written: (item, writes)
    for i, s in enumerate(body):
        inside = list(walk((s,)))
        made = {t.out for t in inside if isinstance(t, Let | Load | Reduce)}
        needs = {maker[k] for t in inside for k in operands(t) if k in maker}
        if isinstance(s, Let) and s.op == "before":
            readers.setdefault(s.args[0], set()).add(i)
            needs = set()
        if isinstance(s, Reduce):
            needs |= readers.get(s.out, set())
        for t in inside:
            if isinstance(t, Load | Store) and program.buffers[t.buffer].role in ("inout", "scratch"):
                writes = isinstance(t, Store)
                seen = touched.setdefault(t.buffer, [])
                needs |= {j for j, wrote in seen if wrote or writes}
                seen.append((i, writes))
        maker |= dict.fromkeys(made, i)
        items.append(_Item(s, needs - {i}))
    return items
