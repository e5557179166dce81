"""Emits parts that hold contractions: everything is done a tile at a time.

A thread takes one combination of grid tiles after the other; sweeps are loops over tiles. Inside, statements over the same
tile dims share one loop nest (a *run*) whose innermost loop is a vector loop; what another statement needs is kept in small
arrays (cpp_tiles_store). Reductions and Dots work on such arrays, and combine with accumulators that sweeps carry.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack

from plait.emit.cpp_frame import items, part_frame
from plait.emit.cpp_scope import Scope
from plait.emit.cpp_tiles_dot import DotEmitter, Shape, direct_loads, shape_of
from plait.emit.cpp_tiles_mask import Masks, with_implied_conditions
from plait.emit.cpp_tiles_once import reduced_at_once, without_carrying
from plait.emit.cpp_tiles_plan import Run, Step, Tiles, prepare, steps
from plait.emit.cpp_tiles_run import RunEmitter
from plait.emit.cpp_tiles_store import Place, Store
from plait.emit.cpp_tiles_sum import ReduceEmitter
from plait.emit.writer import Writer
from plait.errors import LowerFailed
from plait.tile.program import Dot, Let, Load, Reduce, Stmt, Sweep, TileProgram


def is_tiled(program: TileProgram) -> bool:
    """True for programs that this emitter is for: those with contractions, or with accumulators that are read on the way."""
    return any(
        isinstance(s, Reduce)
        and (isinstance(s, Dot) or s.scale is not None)
        or isinstance(s, Let)
        and s.op in ("running", "before")
        for s in program.walk()
    )


def emit_tiled_part(out: Writer, name: str, number: int, program: TileProgram) -> None:
    """Write a part's functions."""
    sizes = Tiles(program, ())
    once = reduced_at_once(program, sizes.whole)
    program = with_implied_conditions(prepare(without_carrying(program, once)))
    scope = Scope(program, None)
    body = Writer()
    part = _Part(scope, body, once)
    grid = [i for i, d in enumerate(program.dims) if d.role == "grid"]
    if any(b.role == "scratch" for b in program.buffers) and part.tiles.of(tuple(grid)):
        raise LowerFailed("a C++ kernel with tiles of grid dims has no scratch buffers")
    dims = scope.program.dims
    counters = [(f"{scope.dims[i]}_tile", f"{scope.dims[i]}_tiles") for i, d in enumerate(dims) if d.role == "grid"]
    with items(body, number, counters):
        part.emit()
    with part_frame(out, name, number, scope, 1):
        for i, d in enumerate(dims):
            size, at = part.tiles.sizes[i], scope.dims[i]
            if d.role == "grid":
                out.line(f"const int64_t {at}_tiles = plait::ceildiv({at}_n, {size});")
            elif part.tiles.whole(i) and size > 1:
                out.line(f"[[maybe_unused]] constexpr int64_t {at}_lo = 0;")
        part.store.declare(out)
        out.line(body.text().rstrip("\n"))


class _Part:
    """Walks a part's body."""

    def __init__(self, scope: Scope, out: Writer, once: frozenset[int]) -> None:
        self.scope, self.out, self.program = scope, out, scope.program
        self.tiles = Tiles(self.program, scope.dims)
        self.store = Store(scope, self.tiles)
        self.direct = direct_loads(self.program, self.tiles, scope.spans)
        self.dots = DotEmitter(scope, self.tiles, self.store, self.direct)
        self.runs = RunEmitter(scope, self.tiles, self.store, self.direct, out)
        self.sums = ReduceEmitter(scope, self.tiles, self.store, out, once)
        self.masks = Masks(scope, self.tiles)
        self.shapes: dict[int, Shape] = {}
        self.carried: dict[int, list[Reduce]] = {}  # id of a Sweep -> reductions that begin and end with it
        self._place(self.program.body, [])
        for s in self.program.walk():
            if isinstance(s, Let | Load) and not self.tiles.of(s.span):
                self.store.places[s.out] = Place(scope.locals[s.out], "", (), ())

    def _place(self, body: Sequence[Stmt], sweeps: list[Sweep]) -> None:
        for s in body:
            if isinstance(s, Sweep):
                self._place(s.body, [*sweeps, s])
            elif isinstance(s, Reduce):
                if not set(s.dims) <= {w.dim for w in sweeps}:
                    raise LowerFailed("a C++ kernel reduces inside sweeps over the dims concerned")
                outermost = next(w for w in sweeps if w.dim in s.dims)
                self.carried.setdefault(id(outermost), []).append(s)
                if isinstance(s, Dot):
                    self._start(s, [w for w in sweeps if w.dim in s.dims])

    def _start(self, s: Dot, sweeps: list[Sweep]) -> None:
        """Find out whether the first step of a product's sweeps can set the accumulator: nothing scales it, and masks leave
        no step out."""
        shape = shape_of(s, self.tiles, self.scope.spans)
        self.shapes[s.out], self.store.orders[s.out] = shape, shape.order
        plain = s.scale is None and not set(shape.outer) & set(s.dims)
        if plain and all(
            (self.program.dims[w.dim].extent.const or 0) > 0 and not any(self.masks.bounds(w)) for w in sweeps
        ):
            at = [
                self.scope.dims[w.dim] + ("_lo" if self.tiles.sizes[w.dim] > 1 else "")
                for w in sweeps
                if not self.tiles.whole(w.dim)
            ]
            self.sums.later[s.out] = " || ".join(f"{x} > 0" for x in at) or "false"

    def emit(self) -> None:
        """Write the work on one combination of grid tiles."""
        for i, d in enumerate(self.program.dims):
            if d.role == "grid":
                name, size = self.scope.dims[i], self.tiles.sizes[i]
                if size == 1:
                    self.out.line(f"[[maybe_unused]] const int64_t {name} = {name}_tile;")
                else:
                    self.out.line(f"const int64_t {name}_lo = {name}_tile * {size};")
                    self._count(i)
        self._body(self.program.body)

    def _count(self, i: int) -> None:
        name, size = self.scope.dims[i], self.tiles.sizes[i]
        if not self.tiles.even(i):
            self.out.line(f"const int64_t {name}_to = plait::lesser<int64_t>({size}, {name}_n - {name}_lo);")

    # ---------------------------------------------------------------- statements
    def _body(self, body: Sequence[Stmt]) -> None:
        for s in steps(body, self.tiles):
            self._step(s)

    def _step(self, s: Step) -> None:
        if isinstance(s, Sweep):
            self._sweep(s)
        elif isinstance(s, Dot):
            self._dot(s)
        elif isinstance(s, Reduce):
            self.sums.emit(s)
        else:
            self._run(s)

    def _run(self, s: Run) -> None:
        self.runs.emit(s)

    def _sweep(self, s: Sweep) -> None:
        carried = self.carried.get(id(s), [])
        for r in carried:
            self.sums.open(r)
        name, size = self.scope.dims[s.dim], self.tiles.sizes[s.dim]
        extremes: list[str] = []
        if size == 1:
            opening = f"for (int64_t {name} = 0; {name} < {name}_n; ++{name}) {{"
        elif self.tiles.whole(s.dim):
            opening = "{"
        else:
            first, end = self._range(s)
            extremes = self._extremes(f"{first} {end}")
            opening = f"for (int64_t {name}_lo = {first}; {name}_lo < {end}; {name}_lo += {size}) {{"
        with ExitStack() as stack:
            if extremes:
                stack.enter_context(self.out.block("{", "}"))
                for k in extremes:
                    self._extreme(k)
            stack.enter_context(self.out.block(opening, "}"))
            if size > 1:
                self._count(s.dim)
            self._body(s.body)
        for r in carried:
            self.sums.close(r)

    def _range(self, s: Sweep) -> tuple[str, str]:
        """The first point of a sweep's tiles and their end, without tiles at either side that masks leave nothing of."""
        name, size = self.scope.dims[s.dim], self.tiles.sizes[s.dim]
        lower, upper = self.masks.bounds(s)
        first, end = "0", f"{name}_n"
        for text in lower:
            first = f"plait::most_of({first}, {text})"
        for text in upper:
            end = f"plait::at_most_of({end}, {text})"
        return f"{first} / {size} * {size}" if lower else first, end

    def _extremes(self, text: str) -> list[str]:
        """The extremes over a tile that the bounds of a loop speak of."""
        return [name for name in self.masks.extremes if re.search(rf"\b{name}\b", text)]

    def _extreme(self, name: str) -> None:
        k, greatest = self.masks.extremes[name]
        self.out.line(f"int64_t {name} = INT64_{'MIN' if greatest else 'MAX'};")
        element = self.store.places[k].element(self.scope.dims)
        with self.runs.loops(self.tiles.of(self.scope.spans[k])):
            self.out.line(f"{name} = plait::{'most_of' if greatest else 'at_most_of'}({name}, int64_t({element}));")

    def _dot(self, s: Dot) -> None:
        self.sums.scale(s)
        shape = self.shapes[s.out]
        with self.out.block("{", "}"):
            self.out.lines(*self.dots.corner(shape))
            with self.runs.loops(shape.outer):
                self.out.line(self.dots.call(s, shape, self.sums.later[s.out] if self.sums.is_set(s) else "true"))
