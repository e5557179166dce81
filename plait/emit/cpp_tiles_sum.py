"""Reductions of a tile into carried accumulators, and the life of accumulators: opening, scaling, closing."""

from __future__ import annotations

from contextlib import ExitStack

from plait.emit.cpp_ops import CTYPE
from plait.emit.cpp_scope import Scope
from plait.emit.cpp_tiles_plan import Tiles
from plait.emit.cpp_tiles_store import Place, Store
from plait.emit.writer import Writer
from plait.tile.program import Dot, Reduce


class ReduceEmitter:
    """Writes what Reduce statements do."""

    def __init__(self, scope: Scope, tiles: Tiles, store: Store, out: Writer, once: frozenset[int]) -> None:
        self.scope, self.tiles, self.store, self.out, self.once = scope, tiles, store, out, once
        self.later: dict[int, str] = {}  # of Dots whose first step sets the accumulator: what holds in the others
        self.reductions = {s.out: s for s in scope.program.walk() if isinstance(s, Reduce)}

    def is_set(self, s: Reduce) -> bool:
        """Whether the first step, or the only one, gives the accumulator its value, so that it needs none before."""
        if not self.store.accumulator(s).dims or s.linear is not None:
            return False
        if isinstance(s, Dot):
            return s.out in self.later
        if s.out not in self.once:
            return False
        dims = self.store.orders.get(s.arg, self.tiles.of(self.scope.spans[s.arg]))
        return self.tiles.of(s.dims) == dims[-1:]

    def open(self, s: Reduce) -> None:
        """Give an accumulator its identity."""
        if self.is_set(s):
            return
        acc = self.store.accumulator(s)
        if acc.dims:
            self.out.line(f"plait::fill({acc.name}, {acc.elems()}, {self.store.identity(s)});")
        else:
            self.out.line(f"{acc.ctype} {acc.name} = {self.store.identity(s)};")

    def close(self, s: Reduce) -> None:
        """Give a scalar result its name; arrays are read where they are."""
        if not self.store.accumulator(s).dims:
            self.out.line(f"const {CTYPE[s.dtype]} {self.scope.locals[s.out]} = {self.store.result(s)};")

    def scale(self, s: Reduce) -> None:
        """Multiply what was added up before this step."""
        if s.scale is None:
            return
        acc = self.store.accumulator(s)
        factor = self._source(s.scale)
        with self.out.block("{", "}"), ExitStack() as stack:
            name = f"{self.scope.locals[s.scale]}_now"
            read = f"const {acc.ctype} {name} = {factor.element(self.scope.dims)};"
            inner = [d for d in acc.dims if d not in factor.dims]
            tail = acc.dims[len(acc.dims) - len(inner) :] if inner else ()
            if inner and tuple(inner) == tail:
                # whole rows have one factor, which is 1 most of the time
                for d in acc.dims[: len(acc.dims) - len(inner)]:
                    self._loop(stack, d)
                self.out.line(read)
                self.out.line(f"if ({name} == 1) continue;" if len(acc.dims) > len(inner) else "")
                for d in inner[:-1]:
                    self._loop(stack, d)
                self._loop(stack, inner[-1], simd=True)
            else:
                for d in acc.dims[:-1]:
                    self._loop(stack, d)
                if acc.dims:
                    self._loop(stack, acc.dims[-1], simd=True)
                self.out.line(read)
            self.out.line(f"{acc.element(self.scope.dims)} *= {name};")

    def emit(self, s: Reduce) -> None:
        """One step: reduce over the tile and combine with the accumulator."""
        self.scale(s)
        acc, arg = self.store.accumulator(s), self._source(s.arg)
        dims = tuple(sorted({*self.tiles.of(s.span), *self.tiles.of(s.dims)}))
        total, names = acc.element(self.scope.dims), self.scope.dims
        with self.out.block("{", "}"), ExitStack() as stack:
            if s.linear is not None:
                for d in dims:
                    self._loop(stack, d)
                where = self.scope.expr(s.linear)
                self.out.line(f"{total}.add(0, {arg.element(names)}, {where});")
                return
            inner = arg.dims[-1] if arg.dims else None
            for d in dims:
                if d != inner:
                    self._loop(stack, d)
            rule, ctype = self.store.rule(s)
            combine = f"{total} = {rule}<{ctype}>::combine({total},"
            if inner is None:
                self.out.line(f"{combine} {arg.element(names)});")
            elif inner in s.dims:
                row = f"plait::along<{rule}, {ctype}>({arg.pointer(names, [inner])}, {self.tiles.count(inner)})"
                self.out.line(f"{total} = {row};" if self.is_set(s) else f"{combine} {row});")
            else:
                # neighbouring points have accumulators of their own
                self._loop(stack, inner, simd=True)
                self.out.line(f"{combine} {arg.element(names)});")

    def _source(self, k: int) -> Place:
        if k in self.reductions:
            acc = self.store.accumulator(self.reductions[k])
            return acc if acc.dims else Place(self.scope.locals[k], "", (), ())
        return self.store.places[k]

    def _loop(self, stack: ExitStack, d: int, simd: bool = False) -> None:
        name = self.scope.dims[d]
        at = f"{name}_at"
        if simd:
            self.out.line("#pragma omp simd")
        stack.enter_context(self.out.block(f"for (int64_t {at} = 0; {at} < {self.tiles.count(d)}; ++{at}) {{", "}"))
        self.out.line(f"[[maybe_unused]] const int64_t {name} = {name}_lo + {at};")
