"""Dot statements: which dims of the two factors are rows, columns and depth of a matrix product, and the call of plait::dot."""

from __future__ import annotations

from dataclasses import dataclass

from plait.emit.cpp_ops import CTYPE
from plait.emit.cpp_scope import Scope
from plait.emit.cpp_tiles_plan import Tiles
from plait.emit.cpp_tiles_store import Store
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.index import Expr
from plait.tile.program import Dot, Load, TileProgram


@dataclass(frozen=True)
class Shape:
    """A Dot as matrix products: (first, second) are the factors in the order of rows and columns; dims are None where there
    is none. k comes in `pieces`, one for each point of another summed dim. `outer` dims are looped over around the call."""

    first: int
    second: int
    m: int | None
    n: int | None
    k: int | None
    pieces: int | None
    outer: tuple[int, ...]
    order: tuple[int, ...]  # the layout of the result


def shape_of(s: Dot, tiles: Tiles, spans: dict[int, frozenset[int]]) -> Shape:
    """Columns are the last dim that only one factor varies over, so that the result is dense along it."""
    a, b = set(tiles.of(spans[s.arg])), set(tiles.of(spans[s.other]))
    kept, over = tiles.of(s.span), tiles.of(s.dims)
    rows, cols = [d for d in kept if d in a - b], [d for d in kept if d in b - a]
    m, n = (rows[-1] if rows else None), (cols[-1] if cols else None)
    first, second = s.arg, s.other
    if n is None or (m is not None and m > n):
        m, n, first, second = n, m, second, first
    both = [d for d in over if d in a and d in b] or [d for d in over if d in a or d in b]
    k = both[-1] if both else None
    pieces = next((d for d in reversed(over) if d != k), None)
    inner = {d for d in (m, n, k, pieces) if d is not None}
    outer = tuple(d for d in sorted({*kept, *over}) if d not in inner)
    tail = tuple(d for d in (m, n) if d is not None)
    return Shape(first, second, m, n, k, pieces, outer, (*(d for d in kept if d not in tail), *tail))


def direct_loads(program: TileProgram, tiles: Tiles, spans: dict[int, frozenset[int]]) -> dict[int, dict[int, Expr]]:
    """Loads that a Dot can read where they are: {local: {tile dim: elements between neighbours}}."""
    operands: dict[int, set[DType]] = {}
    for s in program.walk():
        if isinstance(s, Dot):
            for k in (s.arg, s.other):
                operands.setdefault(k, set()).add(s.operand)
    out: dict[int, dict[int, Expr]] = {}
    for s in program.walk():
        if not isinstance(s, Load) or s.out not in operands or s.guard:
            continue
        held, used = program.buffers[s.buffer], operands[s.out]
        exact = all(held.dtype is t or held.dtype.compute is t for t in used)
        strides = _strides(s, tiles, spans)
        if exact and held.role == "in" and strides is not None:
            out[s.out] = strides
    return out


def _strides(s: Load, tiles: Tiles, spans: dict[int, frozenset[int]]) -> dict[int, Expr] | None:
    if any(tiles.of(spans[k]) for k in s.address.values()):
        return None
    dims = tiles.of(s.span)
    strides = {d: s.address.substitute({ix.axis_atom(d): ix.axis(d) + 1}) - s.address for d in dims}
    return strides if not any(e.axes() or e.values() for e in strides.values()) else None


class DotEmitter:
    """Renders calls of plait::dot."""

    def __init__(self, scope: Scope, tiles: Tiles, store: Store, direct: dict[int, dict[int, Expr]]) -> None:
        self.scope, self.tiles, self.store, self.direct = scope, tiles, store, direct
        self.loads = {s.out: s for s in scope.program.walk() if isinstance(s, Load)}

    def corner(self, shape: Shape) -> list[str]:
        """Declarations of the tile's first point along rows, columns and depth, as direct addresses name it."""
        used: set[int] = set()
        for k in (shape.first, shape.second):
            if k in self.direct:
                used |= set(self.direct[k])
        dims = [d for d in (shape.m, shape.n, shape.k, shape.pieces) if d in used]
        return [f"const int64_t {self.scope.dims[d]} = {self.scope.dims[d]}_lo;" for d in dims if d is not None]

    def call(self, s: Dot, shape: Shape, add: str) -> str:
        """The product of one pair of matrices at the current point of the outer dims, added to what is there where `add` holds."""
        inner = [d for d in (shape.m, shape.n, shape.k, shape.pieces) if d is not None]
        acc = self.store.accumulator(s)
        c = acc.pointer(self.scope.dims, inner)
        row = acc.stride(shape.m) if shape.m is not None else "0"
        a = self._factor(shape.first, (shape.m, shape.k, shape.pieces), inner)
        b = self._factor(shape.second, (shape.k, shape.n, shape.pieces), inner)
        dims = (shape.m, shape.n, shape.k, shape.pieces)
        counts = ", ".join(self.tiles.count(d) if d is not None else "1" for d in dims)
        most = ", ".join(str(self.tiles.sizes[d]) if d is not None else "1" for d in (shape.m, *dims[2:]))
        ctype = CTYPE[s.dtype]
        room = self.store.room(ctype, f"plait::dot_room<{ctype}>({most})")
        return f"plait::dot({add}, {c}, {row}, {a}, {b}, {counts}, {room});"

    def _factor(self, k: int, dims: tuple[int | None, ...], inner: list[int]) -> str:
        """A factor's type, address and strides along its rows, its columns and from piece to piece."""
        if k in self.direct:
            load = self.loads[k]
            kind = self.scope.program.buffers[load.buffer].dtype.value
            strides = self.direct[k]
            steps = [self.scope.expr(strides[d]) if d is not None and d in strides else "0" for d in dims]
            at = f"{self.scope.buffers[load.buffer]} + {self.scope.expr(load.address)}"
        else:
            place, kind = self.store.places[k], self.scope.types[k].value
            steps = [place.stride(d) if d is not None else "0" for d in dims]
            at = place.pointer(self.scope.dims, inner)
        return f"plait::Factor<plait::Of_{kind}>{{{at}, {', '.join(steps)}}}"
