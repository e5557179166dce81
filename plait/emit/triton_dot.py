"""Matrix products, and accumulators that a loop body reads, in Triton text.

A Dot whose factors are matrices once dims of one point are left out becomes tl.dot; `without_small_dots` makes every other
one a sum of products. Its accumulator is a matrix, rows x columns, whatever axes these are made of.

An accumulator that is scaled, or read while its loop runs, has the axes of the result: it is combined across lanes every
step. (Others keep a block of partial results, see triton_reduce.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from plait.emit.triton_index import Axes, Indexer, Local, spans
from plait.emit.triton_ops import convert, tl_type
from plait.emit.triton_reduce import Reducer, combine, identity
from plait.errors import InternalError, LowerFailed
from plait.ir.dtype import DType
from plait.tile.program import Dot, Let, Load, Reduce, Span, Stmt, Store, Sweep, TileProgram, operands, walk

_OPERANDS = (DType.f16, DType.bf16, DType.f32, DType.f8e4m3, DType.f8e5m2)
_SAME_ZERO = ("round", "cast", "copy", "neg")


@dataclass(frozen=True)
class Matrix:
    """A Dot as (rows, inner) x (inner, columns): the locals of both factors, and the block axes that make up each side.
    The result's axes are `axes`."""

    left: int
    right: int
    rows: Axes
    inner: Axes
    columns: Axes
    axes: Axes
    operand: DType

    @property
    def direct(self) -> bool:
        """The accumulator's axes are the result's."""
        return self.axes == (*self.rows, *self.columns) and len(self.axes) == 2


def matrix_of(s: Dot, span: Mapping[int, Span], indexer: Indexer) -> Matrix | None:
    """How a Dot is a product of two matrices, or None."""
    a, b, inner = indexer.ordered(span[s.arg]), indexer.ordered(span[s.other]), indexer.ordered(s.dims)
    if s.operand not in _OPERANDS or s.dtype is not DType.f32 or not set(inner) <= set(a) & set(b):
        return None
    rows = tuple(i for i in a if i not in inner)
    columns = tuple(i for i in b if i not in inner)
    least = 32 if s.operand.nbytes == 1 else 16
    if set(rows) & set(columns) or any(
        math.prod(indexer.dims[i].tile for i in side) < n for side, n in ((rows, 16), (columns, 16), (inner, least))
    ):
        return None
    axes = indexer.ordered((*rows, *columns))
    if axes[0] in columns:
        return Matrix(s.other, s.arg, columns, inner, rows, axes, s.operand)
    return Matrix(s.arg, s.other, rows, inner, columns, axes, s.operand)


def without_small_dots(program: TileProgram, indexer: Indexer) -> TileProgram:
    """The program with every Dot that is no product of matrices written as a sum of products."""
    span = dict(spans(program))
    fresh = max(span, default=-1)

    def visit(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        nonlocal fresh
        out: list[Stmt] = []
        for s in body:
            if isinstance(s, Sweep):
                out.append(replace(s, body=visit(s.body)))
            elif isinstance(s, Dot) and matrix_of(s, span, indexer) is None:
                lines = _product(s, span, fresh + 1)
                fresh += len(lines) - 1
                out += lines
            else:
                out.append(s)
        return tuple(out)

    return replace(program, body=visit(program.body))


def _product(s: Dot, span: Mapping[int, Span], fresh: int) -> list[Stmt]:
    factors: list[int] = []
    out: list[Stmt] = []
    for k in (s.arg, s.other):
        name = k
        if s.operand.is_storage_only:
            name = fresh + len(out)
            out.append(Let(name, "round", (k,), s.operand.compute, span[k], (("dtype", s.operand),)))
        if s.operand.compute is not s.dtype:
            out.append(Let(fresh + len(out), "cast", (name,), s.dtype, span[k], (("dtype", s.dtype),)))
            name = fresh + len(out) - 1
        factors.append(name)
    both = tuple(sorted({*span[s.arg], *span[s.other]}))
    out.append(Let(fresh + len(out), "mul", (factors[0], factors[1]), s.dtype, both))
    arg = fresh + len(out) - 1
    return [*out, Reduce(s.out, "sum", arg, s.dims, s.dtype, s.span, None, s.scale)]


def loads_before_loops(program: TileProgram, looped: frozenset[int]) -> TileProgram:
    """The program with loads that are the same in every step of a loop around a Dot standing before it."""
    inputs = {i for i, b in enumerate(program.buffers) if b.role == "in"}

    def lift(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        out: list[Stmt] = []
        for s in body:
            if isinstance(s, Sweep):
                inner = lift(s.body)
                if s.dim in looped and _only_products(inner):
                    inner = take(inner, s.dim, out)
                s = replace(s, body=inner)
            out.append(s)
        return tuple(out)

    def take(body: tuple[Stmt, ...], dim: int, out: list[Stmt]) -> tuple[Stmt, ...]:
        kept: list[Stmt] = []
        for s in body:
            if isinstance(s, Sweep) and s.dim not in looped:
                kept.append(replace(s, body=take(s.body, dim, out)))
            elif isinstance(s, Load) and s.buffer in inputs and dim not in s.span and not _gathers(s):
                out.append(s)
            else:
                kept.append(s)
        return tuple(kept)

    return replace(program, body=lift(program.body))


def _gathers(s: Load) -> bool:
    return any(e.values() for e in (s.address, *s.guard))


def _only_products(body: tuple[Stmt, ...]) -> bool:
    """A Dot is inside, and nothing is stored that a load could see."""
    inside = list(walk(body))
    return any(isinstance(s, Dot) for s in inside) and not any(isinstance(s, Store) for s in inside)


def products_early(program: TileProgram) -> TileProgram:
    """The program with the products that loops add up standing right behind their factors: the machine goes on to what else
    the step computes while it multiplies. Products do not pass reductions, whose order is what "running" and "before" mean."""

    def visit(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        out: list[Stmt] = []
        for s in body:
            place = len(out)
            if isinstance(s, Sweep):
                s = replace(s, body=visit(s.body))
            elif isinstance(s, Dot):
                needs = set(operands(s))
                while place and isinstance(last := out[place - 1], (Let, Load)) and last.out not in needs:
                    place -= 1
            out.insert(place, s)
        return tuple(out)

    return replace(program, body=visit(program.body))


class Carried:
    """Writes products, and the accumulators that loop bodies read."""

    def __init__(self, program: TileProgram, reducer: Reducer) -> None:
        self.ix, self.reducer = reducer.ix, reducer
        self.defs = {s.out: s for s in program.walk() if isinstance(s, (Let, Load, Reduce))}
        self.matrices: dict[int, Matrix] = {}
        self.read: dict[int, set[str]] = {}
        for s in self.defs.values():
            if isinstance(s, Dot):
                found = matrix_of(s, reducer.spans, self.ix)
                if found is None:
                    raise InternalError(f"v{s.out} is no product of matrices")
                self.matrices[s.out] = found
            if isinstance(s, Let) and s.op in ("running", "before"):
                self.read.setdefault(s.args[0], set()).add(s.op)
        self.factors = {
            self._unrounded(k, m.operand): m.operand for m in self.matrices.values() for k in (m.left, m.right)
        }
        self.stepped: set[int] = set()
        self.open: set[int] = set()

    def _unrounded(self, k: int, operand: DType) -> int:
        """What a factor was rounded from, when that was to the type of the operands."""
        d = self.defs.get(k)
        while isinstance(d, Let) and d.op in ("round", "cast") and dict(d.attrs).get("dtype") is operand:
            if d.op == "cast" and not operand.is_storage_only:
                break
            k = d.args[0]
            d = self.defs.get(k)
        return k

    def owns(self, s: Reduce) -> bool:
        """The accumulator of s is kept here."""
        return s.out in self.matrices or s.scale is not None or s.out in self.read

    def keeps_storage(self, s: Load, storage: DType) -> bool:
        """A product takes what s loads as it is stored."""
        return storage.is_storage_only and self.factors.get(s.out) is storage

    def sides(self) -> list[tuple[set[int], set[int]]]:
        """The axes of rows and of columns of every product."""
        return [(set(m.rows), set(m.columns)) for m in self.matrices.values()]

    # ---------------------------------------------------------------- operands
    def _factor(self, k: int, m: Matrix, outer: Axes, first: bool) -> str:
        """A factor as a matrix, its outer axes first or last, with zeros beyond the extents of the inner ones."""
        ix = self.ix
        k = self._unrounded(k, m.operand)
        v, axes = ix.locals[k], ix.ordered((*outer, *m.inner))
        text = v.stored if v.stored and v.storage is m.operand else convert(v.text, v.dtype, m.operand)
        text = ix.widen(text, v.axes, axes)
        beyond = [i for i in m.inner if not ix.is_even(i) and not self._zero_beyond(k, i)]
        if beyond:
            text = f"tl.where({' & '.join(ix.inside(beyond, axes))}, {text}, 0.0)"
        if v.axes != axes:
            text = f"tl.broadcast_to({text}, {ix.shape(axes)})"
        wanted = (*outer, *m.inner) if first else (*m.inner, *outer)
        if len(axes) == 2:
            return text if axes == wanted else f"tl.trans({text})"
        if axes != wanted:
            text = f"tl.permute({text}, {[axes.index(i) for i in wanted]})"
        sizes = [self._size(side) for side in ((outer, m.inner) if first else (m.inner, outer))]
        return f"tl.reshape({text}, {sizes})"

    def _size(self, axes: Axes) -> int:
        return math.prod(self.ix.dims[i].tile for i in axes)

    def _zero_beyond(self, k: int, i: int) -> bool:
        """Local k is 0 at the points beyond the extent of dim i."""
        d = self.defs[k]
        if isinstance(d, Let) and d.op in _SAME_ZERO:
            return self._zero_beyond(d.args[0], i)
        return isinstance(d, Load) and not d.fill and i in self.ix.locals[k].axes

    def _product(self, m: Matrix, start: str) -> str:
        operands = [self._factor(m.left, m, m.rows, True), self._factor(m.right, m, m.columns, False)]
        if start:
            operands.append(start)
        if m.operand is DType.f32:
            operands.append('input_precision="ieee"')
        elif m.operand.nbytes == 1:
            operands.append("max_num_imprecise_acc=0")
        return f"tl.dot({', '.join(operands)})"

    def _shaped(self, m: Matrix, text: str) -> str:
        """A product of matrices with the axes of the result."""
        if m.direct:
            return text
        sides = (*m.rows, *m.columns)
        text = f"tl.reshape({text}, {self.ix.shape(sides)})"
        return text if m.axes == sides else f"tl.permute({text}, {[sides.index(i) for i in m.axes]})"

    def _flat(self, m: Matrix, v: Local) -> str:
        """A value that varies as the result does (or less), to be used among products of matrices."""
        ix = self.ix
        if m.direct or not v.axes:
            return ix.widen(v.text, v.axes, m.axes)
        for side, unit in ((m.rows, "[:, None]"), (m.columns, "[None, :]")):
            if set(v.axes) <= set(side):
                text = f"tl.broadcast_to({ix.widen(v.text, v.axes, side)}, {ix.shape(side)})"
                return f"tl.reshape({text}, [{self._size(side)}]){unit}"
        text = f"tl.broadcast_to({ix.widen(v.text, v.axes, m.axes)}, {ix.shape(m.axes)})"
        sides = (*m.rows, *m.columns)
        if m.axes != sides:
            text = f"tl.permute({text}, {[m.axes.index(i) for i in sides]})"
        return f"tl.reshape({text}, [{self._size(m.rows)}, {self._size(m.columns)}])"

    # ---------------------------------------------------------------- accumulators
    def value(self, s: Dot) -> list[str]:
        """Lines of a product whose dims are all inside the block."""
        m = self.matrices[s.out]
        self.ix.locals[s.out] = Local(f"v{s.out}", m.axes, s.dtype)
        return [f"v{s.out} = {self._shaped(m, self._product(m, ''))}"]

    def _axes(self, s: Reduce) -> Axes:
        return self.ix.ordered(s.span)

    def again(self, reductions: list[Reduce]) -> None:
        """A loop that carries them is entered."""
        self.stepped -= {r.out for r in reductions}

    def begin(self, s: Reduce) -> list[str]:
        """Lines before the loop."""
        if s.monoid in ("argmax", "argmin"):
            raise LowerFailed(f"a loop body reads the {s.monoid} that it carries")
        self.open.add(s.out)
        m = self.matrices.get(s.out)
        shape = f"[{self._size(m.rows)}, {self._size(m.columns)}]" if m else self.ix.shape(self._axes(s))
        monoid = "sum" if m else s.monoid
        return [f"acc{s.out} = tl.full({shape}, {identity(monoid, s.dtype)}, {tl_type(s.dtype)})"]

    def step(self, s: Reduce) -> list[str]:
        """Lines inside the loop."""
        acc, m = f"acc{s.out}", self.matrices.get(s.out)
        out = [f"prev{s.out} = {acc}"] if "before" in self.read.get(s.out, ()) else []
        self.stepped.add(s.out)
        start = acc
        if s.scale is not None:
            scale = self.ix.locals[s.scale]
            start = f"{acc} * {self._flat(m, scale) if m else self.ix.widen(scale.text, scale.axes, self._axes(s))}"
        if m:
            return [*out, f"{acc} = {self._product(m, start)}"]
        text, axes = self.reducer.across_lanes(s)
        return [*out, f"{acc} = {combine(s.monoid, start, self.ix.widen(text, axes, self._axes(s)))}"]

    def end(self, s: Reduce) -> list[str]:
        """Lines after the loop."""
        self.open.discard(s.out)
        m = self.matrices.get(s.out)
        self.ix.locals[s.out] = Local(f"v{s.out}", m.axes if m else self._axes(s), s.dtype)
        return [f"v{s.out} = {self._shaped(m, f'acc{s.out}') if m else f'acc{s.out}'}"]

    def reading(self, s: Let) -> list[str]:
        """Lines of a "running" or "before"."""
        (k,) = s.args
        r = self.defs[k]
        assert isinstance(r, Reduce)
        m = self.matrices.get(k)
        axes = m.axes if m else self._axes(r)
        if k in self.open:
            text = f"prev{k}" if s.op == "before" and k in self.stepped else f"acc{k}"
            text = self._shaped(m, text) if m else text
        elif s.op == "running":
            text, axes = self.ix.locals[k].text, self.ix.locals[k].axes
        else:
            text, axes = f"tl.full([], {identity('sum' if m else r.monoid, r.dtype)}, {tl_type(r.dtype)})", ()
        self.ix.locals[s.out] = Local(f"v{s.out}", axes, s.dtype)
        return [f"v{s.out} = {text}"]
