"""Runs: straight-line statements over the same tile dims in one loop nest, the innermost loop a vector loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from plait.emit.cpp_leaf import State, Statements
from plait.emit.cpp_ops import CTYPE
from plait.emit.cpp_scope import Scope
from plait.emit.cpp_tiles_plan import Run, Tiles
from plait.emit.cpp_tiles_store import Store
from plait.emit.writer import Writer
from plait.ir.dtype import DType
from plait.ir.index import Expr
from plait.tile.program import Dot, Let, Load, Reduce, Stmt, operands


class _Lines(Statements):
    """Single statements of a run. Failures are collected in flags, so that a vector loop has no jumps."""

    def __init__(self, state: State, store: Store, reductions: dict[int, Reduce], vector: bool) -> None:
        super().__init__(state, state.scope.expr, state.scope.holds, "")
        self.store, self.reductions, self.vector = store, reductions, vector
        self.flags: list[str] = []

    def lines(self, s: Stmt) -> list[str]:
        """C++ statements for one tile statement."""
        if isinstance(s, Let) and s.op in ("running", "before"):
            return [self._define(s.out, self.store.result(self.reductions[s.args[0]]))]
        return super().lines(s)

    def _failure(self, condition: str, code: int) -> str:
        if not self.vector:
            return super()._failure(condition, code)
        flag = f"fault_{code}"
        if flag not in self.flags:
            self.flags.append(flag)
        return f"{flag} |= {condition};"

    def _element(self, buffer: int, address: Expr) -> str:
        return f"{self.scope.buffers[buffer]}[{self.render(address)}]"


class RunEmitter:
    """Writes loop nests."""

    def __init__(
        self, scope: Scope, tiles: Tiles, store: Store, direct: dict[int, dict[int, Expr]], out: Writer
    ) -> None:
        self.scope, self.tiles, self.store, self.direct, self.out = scope, tiles, store, direct, out
        self.state = State(scope, out, 1, False)
        self.reductions: dict[int, Reduce] = {}
        self.users: dict[int, set[int]] = {}  # local -> ids of statements that read its value from a register or array
        for s in scope.program.walk():
            if isinstance(s, Reduce):
                self.reductions[s.out] = s
            if isinstance(s, Let) and s.op == "const":
                self.state.constants[s.out] = s.attr("value")
            in_place = {s.arg, s.other} & direct.keys() if isinstance(s, Dot) else set()
            for k in operands(s):
                if k not in in_place or (isinstance(s, Dot) and s.scale == k):
                    self.users.setdefault(k, set()).add(id(s))

    @contextmanager
    def loops(self, dims: Sequence[int]) -> Iterator[None]:
        """A loop nest over tile dims: each has its place in the tile (_at) and its coordinate."""
        with ExitStack() as stack:
            for d in dims:
                self.open(stack, d)
            yield

    def open(self, stack: ExitStack, d: int, padded: bool = False) -> None:
        """One loop, over whole vectors of points if `padded`."""
        name = self.scope.dims[d]
        at, count = f"{name}_at", self.tiles.count(d)
        if padded:
            count = f"plait::whole_vectors({count})"
        stack.enter_context(self.out.block(f"for (int64_t {at} = 0; {at} < {count}; ++{at}) {{", "}"))
        self.out.line(f"[[maybe_unused]] const int64_t {name} = {name}_lo + {at};")

    def emit(self, run: Run) -> None:
        """Write a run. Values that are used elsewhere too are kept in arrays; Loads that only Dots read are left to them."""
        run = [s for s in run if not (isinstance(s, Load) and s.out in self.direct and not self.users.get(s.out))]
        if not run:
            return
        dims = self.tiles.of(run[0].span)
        if not dims:
            lines = _Lines(self.state, self.store, self.reductions, vector=False)
            for s in run:
                self.out.lines(*lines.lines(s))
            return
        with self.out.block("{", "}"):
            self._nest(run, dims)

    def _nest(self, run: Run, dims: tuple[int, ...]) -> None:
        lines = _Lines(self.state, self.store, self.reductions, vector=True)
        here = {id(s) for s in run}
        made = {s.out for s in run if isinstance(s, Let | Load)}
        body: list[str] = []
        for s in run:
            body += lines.lines(s)
            if isinstance(s, Let | Load) and self.users.get(s.out, set()) - here:
                place = self.store.keep(s.out, s.span)
                body.append(f"{place.element(self.scope.dims)} = {self.scope.locals[s.out]};")
        self.out.lines(*(f"bool {f} = false;" for f in lines.flags))
        wanted = [k for k in dict.fromkeys(k for s in run for k in self._fetched(s)) if k not in made]
        with ExitStack() as stack:
            bound: set[int] = set()
            padded = self._is_padded(run, dims[-1], wanted) and not lines.flags
            for depth, d in enumerate(dims):
                if depth == len(dims) - 1:
                    reduction = f" reduction(|:{', '.join(lines.flags)})" if lines.flags else ""
                    self.out.line(f"#pragma omp simd{reduction}")
                self.open(stack, d, padded and depth == len(dims) - 1)
                bound.add(d)
                for k in [k for k in wanted if set(self._dims(k)) <= bound]:
                    wanted.remove(k)
                    self._fetch(k)
            self.out.lines(*body)
        self.out.lines(*(f"if ({f}) plait::raise(fault, {f.removeprefix('fault_')});" for f in lines.flags))

    def _is_padded(self, run: Run, inner: int, wanted: Sequence[int]) -> bool:
        """Whether the innermost loop may run on to a whole number of vectors: it computes floats from nothing but arrays, and
        all arrays have room there."""
        types = {self.scope.types[s.out] for s in run if isinstance(s, Let)} | {self.scope.types[k] for k in wanted}
        if not all(isinstance(s, Let) for s in run) or not all(t.is_float or t is DType.b1 for t in types):
            return False
        sources = {s.args[0] for s in run if isinstance(s, Let) and s.op in ("running", "before")} | set(wanted)
        return all(self._is_dense(k, inner) for k in sources)

    def _is_dense(self, k: int, inner: int) -> bool:
        """Whether neighbours along a dim are neighbours in the array (or are one value) and whole vectors of them are there."""
        if k in self.reductions:
            r = self.reductions[k]
            return r.linear is None and self._ends_with(self.store.accumulator(r).dims, inner)
        return self._ends_with(self.store.places[k].dims, inner)

    @staticmethod
    def _ends_with(dims: tuple[int, ...], inner: int) -> bool:
        return inner not in dims or dims[-1] == inner

    def _fetched(self, s: Stmt) -> list[int]:
        """Operands that lie in arrays; accumulators of open sweeps are read in place."""
        if isinstance(s, Let) and s.op in ("running", "before"):
            return []
        return [k for k in operands(s) if self._dims(k)]

    def _dims(self, k: int) -> tuple[int, ...]:
        return self.tiles.of(self.scope.spans[k])

    def _fetch(self, k: int) -> None:
        """Read an array's element into a variable of the local's name."""
        name, ctype = self.scope.locals[k], CTYPE[self.scope.types[k]]
        if k in self.reductions:
            value = self.store.result(self.reductions[k])
        else:
            value = self.store.places[k].element(self.scope.dims)
        self.out.line(f"const {ctype} {name} = {value};")
