"""The loops of one part: sweeps, accumulators, and strips of lanes, down to the innermost loops of cpp_leaf.

The vector dim is walked in one of two ways. As a *leaf*: its Sweep holds straight-line code only, one loop walks it whole,
and accumulators have plait::LANES partial results. As a *strip*: a tile of a grid dim, or pieces of a row dim with sweeps
inside; then statements between sweeps are loops over the strip's points, values that cross a sweep live in lane arrays,
and accumulators have one lane for each point.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from plait.emit.cpp_leaf import Accumulator, Leaf, State, Statements
from plait.emit.cpp_nest import join_sweeps
from plait.emit.cpp_ops import CTYPE
from plait.errors import LowerFailed
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.tile.program import Check, Let, Load, Reduce, Scan, Stmt, Store, Sweep, operands, walk

_MONOIDS = {
    "sum": "Sum",
    "prod": "Prod",
    "max": "Max",
    "min": "Min",
    "any": "Any",
    "all": "All",
    "argmax": "ArgMax",
    "argmin": "ArgMin",
}
_SHORT = 512  # 16 * plait::LANES
_BOOL_MONOIDS = {"sum": "Any", "max": "Any", "any": "Any", "prod": "All", "min": "All", "all": "All"}
_SCANS = {
    "cumsum": "CumSum",
    "cumprod": "CumProd",
    "cummax": "CumMax",
    "cummin": "CumMin",
    "logcumsumexp": "LogCumSumExp",
}


class Body:
    """Emits a statement list. `vector_is_grid`: the caller has opened a strip named by the vector dim's _lo and _hi."""

    def __init__(self, state: State, vector_is_grid: bool) -> None:
        self.state, self.scope, self.out = state, state.scope, state.out
        joined = join_sweeps(self.scope.program, self.scope.vector)
        self.body, self.extents = joined.body, joined.extents
        self.reduced = {s.out: s.dims for s in self.scope.program.walk() if isinstance(s, Reduce)}
        self.vector = self.scope.vector
        self.vector_is_grid = vector_is_grid
        for s in self.scope.program.walk():
            if isinstance(s, Let) and s.op == "const":
                state.constants[s.out] = s.attr("value")
        self.opened_by: dict[int, list[Reduce | Scan]] = {}  # id of a Sweep -> accumulators that live around it
        self._place(self.body, [])
        state.crossing = self._find_crossing()
        state.lane_results = frozenset(
            r.out for rs in self.opened_by.values() for r in rs if isinstance(r, Reduce) and self.vector in r.span
        )

    def emit(self) -> None:
        """Write the whole body."""
        if self.vector_is_grid:
            self._declare_lanes(self.body)
        self._level(self.body, strip=self.vector_is_grid)

    # ---------------------------------------------------------------- analysis
    def _place(self, body: Sequence[Stmt], sweeps: list[Sweep]) -> None:
        """Attach each Reduce and Scan to the outermost sweep over its dims."""
        for s in body:
            if isinstance(s, Sweep):
                self._place(s.body, [*sweeps, s])
            elif isinstance(s, Reduce | Scan):
                dims = s.dims if isinstance(s, Reduce) else (s.dim,)
                if not set(dims) <= {w.dim for w in sweeps}:
                    raise LowerFailed("a C++ kernel reduces and scans inside sweeps over the dims concerned")
                outermost = next(w for w in sweeps if w.dim in dims)
                self.opened_by.setdefault(id(outermost), []).append(s)

    def _is_strip(self, sweep: Sweep) -> bool:
        return sweep.dim == self.vector and any(isinstance(s, Sweep) for s in sweep.body)

    def is_vector(self, s: Stmt) -> bool:
        """True for statements that differ along the vector dim."""
        if isinstance(s, Reduce) and self.vector in s.dims:
            return True
        return not isinstance(s, Sweep) and self.vector in self._span(s)

    def _span(self, s: Stmt) -> frozenset[int]:
        """Dims a statement runs over."""
        if isinstance(s, Reduce | Scan):
            return frozenset(s.span) | self.scope.spans[s.arg]
        return frozenset(s.span) if isinstance(s, Let | Load | Store | Check) else frozenset()

    def _find_crossing(self) -> frozenset[int]:
        """Locals defined in one segment of a strip and used in another."""
        made: dict[int, int] = {}
        used: dict[int, set[int]] = {}
        for number, segment in enumerate(self._segments(self.body, self.vector_is_grid)):
            for s in segment:
                if isinstance(s, Let | Load | Scan):
                    made[s.out] = number
                for k in operands(s):
                    used.setdefault(k, set()).add(number)
        return frozenset(k for k, n in made.items() if used.get(k, set()) - {n})

    def _segments(self, body: Sequence[Stmt], strip: bool) -> Iterator[list[Stmt]]:
        segment: list[Stmt] = []
        for s in body:
            if isinstance(s, Sweep):
                yield segment
                segment = []
                if strip or self._is_strip(s):
                    yield from self._segments(s.body, True)
                else:
                    yield from self._segments(s.body, False)
            elif strip and self.is_vector(s):
                segment.append(s)
        yield segment

    # ---------------------------------------------------------------- levels
    def _level(self, body: Sequence[Stmt], strip: bool) -> None:
        pending: list[Stmt] = []
        scalar = Statements(self.state, self.scope.expr, self.scope.holds, "")

        def flush() -> None:
            if pending:
                name = self.scope.dims[self._vector()]
                Leaf(self.state, list(pending), f"{name}_lo", f"{name}_hi", f"{name}_lo").emit()
                pending.clear()

        for s in body:
            if isinstance(s, Sweep):
                flush()
                self._sweep(s, strip)
            elif strip and self.is_vector(s):
                pending.append(s)
            else:
                self.out.lines(*scalar.lines(s))
        flush()

    def _vector(self) -> int:
        assert self.vector is not None
        return self.vector

    def _sweep(self, sweep: Sweep, strip: bool) -> None:
        carried = self.opened_by.get(id(sweep), [])
        leaf = sweep.dim == self.vector and not self._is_strip(sweep)
        for s in carried:
            self._declare(s, sweep, strip)
        dim = self.scope.dims[sweep.dim]
        if leaf:
            self._leaf_sweep(sweep)
        elif sweep.dim == self.vector:
            width = self.state.width
            with self.out.block(f"for (int64_t {dim}_lo = 0; {dim}_lo < {dim}_n; {dim}_lo += {width}) {{", "}"):
                self.out.line(f"const int64_t {dim}_hi = plait::lesser({dim}_n, {dim}_lo + {width});")
                self._declare_lanes(sweep.body)
                self._level(sweep.body, True)
        else:
            with self.out.block(f"for (int64_t {dim} = 0; {dim} < {dim}_n; ++{dim}) {{", "}"):
                self._level(sweep.body, strip)
        for s in carried:
            if isinstance(s, Reduce) and s.out not in self.state.lane_results:
                name, ctype = self.scope.locals[s.out], CTYPE[s.dtype]
                self.out.line(f"const {ctype} {name} = {ctype}({self.state.accumulators[s.out].name}.result());")

    def _leaf_sweep(self, sweep: Sweep) -> None:
        dim = self.scope.dims[sweep.dim]
        extent = self.extents.get(id(sweep))
        to = f"{dim}_n" if extent is None else self.scope.expr(extent)
        steady = [s for s in sweep.body if not self.is_vector(s)]
        moving = [s for s in sweep.body if self.is_vector(s)]
        scalar = Statements(self.state, self.scope.expr, self.scope.holds, "")
        with self.out.block("{", "}") if steady else _nothing():
            for s in steady:
                self.out.lines(*scalar.lines(s))
            Leaf(self.state, moving, "0", to, "").emit()

    # ---------------------------------------------------------------- accumulators
    def _declare(self, s: Reduce | Scan, outer: Sweep, strip: bool) -> None:
        name = f"{self.scope.locals[s.out]}_acc"
        element = self.scope.types[s.arg]
        lanes, lane = self._lanes(s, outer, strip)
        if isinstance(s, Reduce):
            kind = _BOOL_MONOIDS.get(s.monoid) if element is DType.b1 else None
            kind = kind or _MONOIDS[s.monoid]
        else:
            kind = _SCANS[s.scan]
        # a lone lane adds up in double at once
        lone_sum = kind == "Sum" and lanes == "1" and element is DType.f32
        ctype = "double" if lone_sum else "uint8_t" if element is DType.b1 else CTYPE[element]
        if kind == "Sum" and lane == "lane" and self._is_short(s):
            kind = "ShortSum"
        settles = kind == "Sum" and element.is_float and lane != "0"
        self.out.line(f"plait::{kind}<{ctype}, {lanes}> {name};")
        self.state.accumulators[s.out] = Accumulator(name, lane, settles)

    def _is_short(self, s: Reduce | Scan) -> bool:
        """True when no lane of plait::LANES can get more elements than a float may add up alone."""
        dims = self.reduced[s.out] if isinstance(s, Reduce) else (s.dim,)
        count = ix.product(self.scope.program.dims[d].extent for d in dims).const
        return count is not None and count <= _SHORT

    def _lanes(self, s: Reduce | Scan, outer: Sweep, strip: bool) -> tuple[str, str]:
        """(number of lanes, which one a step works on)."""
        if not self.is_vector(s) or (isinstance(s, Scan) and s.dim == self.vector):
            return "1", "0"
        name = self.scope.dims[self._vector()]
        inner = None if strip else self._vector_sweep(outer, s)
        if strip or (inner is not None and self._is_strip(inner)):
            return str(self.state.width), f"{name} - {name}_lo"
        if inner is None or (isinstance(s, Reduce) and self.vector not in s.dims):
            raise LowerFailed(f"a reduction keeps the vector dim {name} beyond its sweep")
        if any(isinstance(t, Scan) and t.dim == self.vector for t in inner.body):
            return "1", "0"
        return "plait::LANES", "lane"

    def _vector_sweep(self, outer: Sweep, s: Stmt) -> Sweep | None:
        """The sweep over the vector dim that holds `s`, at or under `outer`."""
        if outer.dim == self.vector:
            return outer
        for inner in outer.body:
            if isinstance(inner, Sweep):
                found = self._vector_sweep(inner, s)
                if found is not None and any(t is s for t in walk(found.body)):
                    return found
        return None

    def _declare_lanes(self, body: Sequence[Stmt]) -> None:
        """Lane arrays of a strip."""
        for s in walk(body):
            if isinstance(s, Let | Load | Scan) and s.out in self.state.crossing:
                self.out.line(f"{CTYPE[s.dtype]} {self.scope.locals[s.out]}_lanes[{self.state.width}];")


class _nothing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *unused: object) -> None:
        return None
