"""Reductions and scans in Triton text: inside a block, and carried through loops.

In a loop a reduction keeps a whole block of partial results, combined point by point, and reduces across lanes once, after
the loop; a block that would fill the registers is reduced in every step. A scan in a loop carries the running total of the
points before the block.
"""

from __future__ import annotations

import math
from dataclasses import replace

from plait.emit.triton_index import Axes, Indexer, Local
from plait.emit.triton_ops import literal, tl_type
from plait.errors import LowerFailed
from plait.ir.dtype import DType
from plait.tile.program import Reduce, Scan

_HELPER = {"prod": "_mul", "max": "_max", "min": "_min", "any": "_or", "all": "_and", "sum": "_add"}
_SCAN = {"cumsum": "sum", "cumprod": "prod", "cummax": "max", "cummin": "min", "logcumsumexp": "logaddexp"}
_INDEX_LAST = 2**63 - 1
_MOST_PARTIALS = 32  # partial results that a thread keeps of one reduction: an eighth of its registers
EXPSUMS = ("expsum", "expsum_low")
"""Sums of exp(x - max x) with their maxima (triton_online). Where the maximum is -inf the first is NaN, the second 0."""


def _limit(d: DType, greatest: bool) -> float | int:
    if d.is_float:
        return float("inf") if greatest else float("-inf")
    if d in (DType.u8, DType.b1):
        return (1 if d is DType.b1 else 255) if greatest else 0
    top = 1 << (8 * d.nbytes - 1)
    return top - 1 if greatest else -top


def identity(monoid: str, d: DType) -> str:
    """Text of the value that a monoid ignores (L3)."""
    if monoid in ("sum", "any", "prod", "all", *EXPSUMS):
        return literal(1 if monoid in ("prod", "all") else 0, d)
    if monoid == "logaddexp":
        return 'float("-inf")'
    return literal(_limit(d, greatest=monoid in ("min", "argmin")), d)


def combine(monoid: str, a: str, b: str) -> str:
    """Text of a combined with b, point by point."""
    ops = {"sum": "+", "prod": "*", "any": "|", "all": "&"}
    if monoid in ops:
        return f"{a} {ops[monoid]} {b}"
    return f"_{monoid}({a}, {b})"


def across(monoid: str, text: str, axis: int, d: DType) -> str:
    """Text of a block reduced along one of its axes."""
    if d is DType.b1:
        return f"(tl.reduce({text}.to(tl.int32), {axis}, {_HELPER[monoid]}) != 0)"
    if monoid == "sum" and d.nbytes >= 4:
        return f"tl.sum({text}, axis={axis})"
    return f"tl.reduce({text}, {axis}, {_HELPER.get(monoid, '_' + monoid)})"


def _exp(text: str) -> str:
    return f"tl.exp2(({text}) * 1.4426950408889634)"


def _every_step(s: Reduce, axes: Axes, of: Reducer) -> bool:
    """Whether the lanes are combined in every step, because a block of partial results would take too many registers."""
    points = math.prod(of.ix.dims[i].tile for i in axes)
    return s.monoid not in ("argmax", "argmin", *EXPSUMS) and points > _MOST_PARTIALS * of.threads


class Reducer:
    """Writes reductions and scans into `lines`, which the emitter owns."""

    def __init__(self, indexer: Indexer, spans: dict[int, tuple[int, ...]], threads: int, lanes: int) -> None:
        """`lanes`: neighbouring points that a thread loads at once."""
        self.ix, self.threads, self.lanes = indexer, threads, lanes
        self.spans = spans
        self.functions: dict[str, str] = {}  # combine functions made for this program

    # ---------------------------------------------------------------- pieces
    def _full_axes(self, s: Reduce) -> Axes:
        return self.ix.ordered((*self.spans[s.arg], *s.dims))

    def _argument(self, s: Reduce, axes: Axes) -> str:
        """The argument with every reduced axis, and the identity on lanes outside the reduced dims."""
        v = self.ix.locals[s.arg]
        text = self.ix.widen(v.text, v.axes, axes)
        inside = self.ix.inside(s.dims, axes)
        if inside:
            monoid = "max" if s.monoid in EXPSUMS else s.monoid
            value_type = v.dtype if s.monoid in ("argmax", "argmin") else s.dtype
            text = f"tl.where({' & '.join(inside)}, {text}, {identity(monoid, value_type)})"
        if v.axes != axes and not set(self.ix.ordered(s.dims)) <= set(v.axes):
            text = f"tl.broadcast_to({text}, {self.ix.shape(axes)})"
        return text

    def _index(self, s: Reduce, axes: Axes) -> str:
        assert s.linear is not None
        text = f"tl.cast({self.ix.text(s.linear, axes)}, tl.int64)"
        inside = self.ix.inside(s.dims, axes)
        if inside:
            text = f"tl.where({' & '.join(inside)}, {text}, {_INDEX_LAST})"
        return f"tl.broadcast_to({text}, {self.ix.shape(axes)})" if axes else text

    def _collapse(self, group: list[Reduce], texts: list[str], axes: Axes) -> list[str]:
        """Lines that reduce `texts` (blocks with axes `axes`) across lanes, together: one exchange between warps for all."""
        dims = self.ix.ordered(group[0].dims)[::-1]
        left = tuple(a for a in axes if a not in dims)
        for r in group:
            self.ix.locals[r.out] = Local(f"v{r.out}", left, r.dtype)
        if len(group) == 1 or not dims:
            out: list[str] = []
            for r, text in zip(group, texts, strict=True):
                rest = axes
                for i in dims:
                    text = across(r.monoid, text, rest.index(i), r.dtype)
                    rest = tuple(a for a in rest if a != i)
                out.append(f"v{r.out} = {text}")
            return out
        operands = ", ".join(
            f"{t}.to(tl.int32)" if r.dtype is DType.b1 else t for r, t in zip(group, texts, strict=True)
        )
        names = ", ".join(f"v{r.out}" for r in group)
        function = self._together(tuple(r.monoid for r in group))
        out, rest = [], axes
        for i in dims:
            out.append(f"{names} = tl.reduce(({operands}), {rest.index(i)}, {function})")
            operands, rest = names, tuple(a for a in rest if a != i)
        return [*out, *(f"v{r.out} = v{r.out} != 0" for r in group if r.dtype is DType.b1)]

    def _together(self, monoids: tuple[str, ...]) -> str:
        """The name of a function that combines several pairs, each by its monoid."""
        name = "_each_" + "_".join(monoids)
        left, right = [f"a{k}" for k in range(len(monoids))], [f"b{k}" for k in range(len(monoids))]
        results = ", ".join(combine(m, a, b) for m, a, b in zip(monoids, left, right, strict=True))
        self.functions[name] = f"@triton.jit\ndef {name}({', '.join((*left, *right))}):\n    return {results}\n"
        return name

    def _collapse_indexed(self, s: Reduce, value: str, index: str, axes: Axes, out: list[str]) -> Axes:
        for i in self.ix.ordered(s.dims)[::-1]:
            out.append(f"{value}, {index} = tl.reduce(({value}, {index}), {axes.index(i)}, _{s.monoid})")
            axes = tuple(a for a in axes if a != i)
        return axes

    # ---------------------------------------------------------------- reductions
    def whole(self, reductions: list[Reduce]) -> list[str]:
        """Lines of reductions whose dims are all inside the block; none needs another's result."""
        out: list[str] = []
        groups: dict[tuple[Axes, Axes], list[Reduce]] = {}
        for s in reductions:
            # lanes the argument has anyway, and the reduced ones
            axes = self.ix.ordered((*self.ix.locals[s.arg].axes, *s.dims))
            if s.monoid in ("argmax", "argmin"):
                out += self._whole_indexed(s, axes)
            else:
                groups.setdefault((axes, self.ix.ordered(s.dims)), []).append(s)
        for (axes, _), group in groups.items():
            out += self._collapse(group, [self._argument(s, axes) for s in group], axes)
        return out

    def across_lanes(self, s: Reduce) -> tuple[str, Axes]:
        """Text of this step's points reduced, and its axes."""
        rest = self.ix.ordered((*self.ix.locals[s.arg].axes, *s.dims))
        text = self._argument(s, rest)
        for i in self.ix.ordered(s.dims)[::-1]:
            text = across(s.monoid, text, rest.index(i), s.dtype)
            rest = tuple(a for a in rest if a != i)
        return text, rest

    def _whole_indexed(self, s: Reduce, axes: Axes) -> list[str]:
        value, index = f"best{s.out}", f"v{s.out}"
        text = self._argument(s, axes)
        out = [
            f"{value} = tl.broadcast_to({text}, {self.ix.shape(axes)})" if axes else f"{value} = {text}",
            f"{index} = {self._index(s, axes)}",
        ]
        left = self._collapse_indexed(s, value, index, axes, out)
        self.ix.locals[s.out] = Local(index, left, DType.i64)
        return out

    def begin(self, s: Reduce, arg_type: DType) -> list[str]:
        """Lines before the loop."""
        shape = self._carried_shape(s)
        d = arg_type if s.monoid in ("argmax", "argmin") else s.dtype
        out = [f"acc{s.out} = tl.full({shape}, {identity(s.monoid, d)}, {tl_type(d)})"]
        if s.monoid in ("argmax", "argmin"):
            out.append(f"at{s.out} = tl.full({shape}, {_INDEX_LAST}, tl.int64)")
        if s.monoid in EXPSUMS:
            out.append(f"top{s.out} = tl.full({shape}, {identity('max', d)}, {tl_type(d)})")
        return out

    def _lanes(self, s: Reduce, axes: Axes) -> int:
        """How many neighbouring points a thread combines among themselves before it touches the accumulator."""
        tiles = math.prod(self.ix.dims[i].tile for i in axes)
        fits = axes and axes[-1] in s.dims and self.ix.dims[axes[-1]].name == self.ix.vector
        return self.lanes if fits and s.monoid not in ("argmax", "argmin") and tiles >= self.lanes * self.threads else 1

    def _carried_shape(self, s: Reduce, tail: str = "") -> str:
        axes = self._full_axes(s)
        if _every_step(s, axes, self):
            return self.ix.shape(tuple(a for a in axes if a not in s.dims))
        sizes = [self.ix.dims[i].tile for i in axes]
        if axes:
            sizes[-1] //= self._lanes(s, axes)
        return "[" + ", ".join([*map(str, sizes), *([tail] if tail else [])]) + "]"

    def step(self, s: Reduce) -> list[str]:
        """Lines inside the loop."""
        axes, acc = self._full_axes(s), f"acc{s.out}"
        text, lanes = self._argument(s, axes), self._lanes(s, axes)
        if s.monoid in ("argmax", "argmin"):
            pair = f"{acc}, at{s.out}"
            return [f"{pair} = _{s.monoid}({pair}, {text}, {self._index(s, axes)})"]
        if _every_step(s, axes, self):
            return [f"{acc} = {combine(s.monoid, acc, self.across_lanes(s)[0])}"]
        if lanes > 1:
            text = f"tl.reshape({text}, {self._carried_shape(s, str(lanes))})"
        if s.monoid in EXPSUMS:
            return self._online(s, text, len(axes), lanes)
        if lanes > 1:
            text = across(s.monoid, text, len(axes), s.dtype)
        return [f"{acc} = {combine(s.monoid, acc, text)}"]

    def _online(self, s: Reduce, text: str, rank: int, lanes: int) -> list[str]:
        """The step of a sum of exp(x - max x so far): rescaled where the maximum moves."""
        acc, top, x = f"acc{s.out}", f"top{s.out}", f"x{s.out}"
        most = across("max", x, rank, s.dtype) if lanes > 1 else x
        widened = f"base{s.out}[{', '.join([':'] * rank)}, None]" if lanes > 1 else f"base{s.out}"
        terms = _exp(f"{x} - {widened}")
        return [
            f"{x} = {text}",
            f"new{s.out} = _max({top}, {most})",
            # before any finite value everything is exp(-inf) = 0, not exp(-inf + inf)
            f'base{s.out} = tl.where(new{s.out} == float("-inf"), 0.0, new{s.out})',
            f"terms{s.out} = {terms}",
            f"{acc} = {acc} * {_exp(f'{top} - base{s.out}')} + "
            + (f"tl.sum(terms{s.out}, axis={rank})" if lanes > 1 else f"terms{s.out}"),
            f"{top} = new{s.out}",
        ]

    def _end_online(self, s: Reduce) -> list[str]:
        assert s.linear is not None
        (top,) = s.linear.values()
        axes = self._full_axes(s)
        out = self._collapse([replace(s, monoid="max", out=top)], [f"top{s.out}"], axes)
        most = f"v{top}"
        if s.monoid == "expsum_low":
            most = f"base{s.out}"
            out.append(f'{most} = tl.where(v{top} == float("-inf"), 0.0, v{top})')
        most = self.ix.widen(most, self.ix.locals[top].axes, axes)
        out.append(f"acc{s.out} = acc{s.out} * {_exp(f'top{s.out} - {most}')}")
        return [*out, *self._collapse([replace(s, monoid="sum")], [f"acc{s.out}"], axes)]

    def end(self, reductions: list[Reduce]) -> list[str]:
        """Lines after the loop that carried them."""
        out: list[str] = []
        groups: dict[tuple[Axes, Axes], list[Reduce]] = {}
        for s in reductions:
            axes = self._full_axes(s)
            if s.monoid in ("argmax", "argmin"):
                left = self._collapse_indexed(s, f"acc{s.out}", f"at{s.out}", axes, out)
                self.ix.locals[s.out] = Local(f"v{s.out}", left, DType.i64)
                out.append(f"v{s.out} = at{s.out}")
            elif s.monoid in EXPSUMS:
                out += self._end_online(s)
            elif _every_step(s, axes, self):
                self.ix.locals[s.out] = Local(f"v{s.out}", tuple(a for a in axes if a not in s.dims), s.dtype)
                out.append(f"v{s.out} = acc{s.out}")
            else:
                groups.setdefault((axes, self.ix.ordered(s.dims)), []).append(s)
        for (axes, _), group in groups.items():
            out += self._collapse(group, [f"acc{s.out}" for s in group], axes)
        return out

    # ---------------------------------------------------------------- scans
    def scan_axes(self, s: Scan) -> Axes:
        """Axes of a scan's values."""
        return self.ix.ordered((*self.spans[s.arg], s.dim))

    def begin_scan(self, s: Scan) -> list[str]:
        """Lines before the loop: nothing scanned yet."""
        axes = tuple(a for a in self.scan_axes(s) if a != s.dim)
        start = identity(_SCAN[s.scan], s.dtype)
        return [f"carry{s.out} = tl.full({self.ix.shape(axes)}, {start}, {tl_type(s.dtype)})"]

    def scan(self, s: Scan, looped: bool) -> list[str]:
        """Lines of a scan, of the block and (in a loop) of everything before it."""
        axes, monoid = self.scan_axes(s), _SCAN[s.scan]
        v = self.ix.locals[s.arg]
        text = self.ix.widen(v.text, v.axes, axes)
        self.ix.locals[s.out] = Local(f"v{s.out}", axes, s.dtype)
        carry = f"carry{s.out}"
        if s.dim not in axes:
            # the loop takes one point at a time
            if not looped:
                return [f"v{s.out} = {text}"]
            return [f"{carry} = {combine(monoid, carry, text)}", f"v{s.out} = {carry}"]
        if v.axes != axes:
            text = f"tl.broadcast_to({text}, {self.ix.shape(axes)})"
        axis = axes.index(s.dim)
        if s.dtype is DType.b1:
            raise LowerFailed(f"{s.scan} of bool")
        block = f"tl.associative_scan({text}, {axis}, {_HELPER.get(monoid, '_' + monoid)})"
        if not looped:
            return [f"v{s.out} = {block}"]
        left = tuple(a for a in axes if a != s.dim)
        inside = self.ix.inside((s.dim,), axes)
        if inside:
            text = f"tl.where({' & '.join(inside)}, {text}, {identity(monoid, s.dtype)})"
        total = across(monoid, text, axis, s.dtype)
        return [
            f"v{s.out} = {combine(monoid, self.ix.widen(carry, left, axes), block)}",
            f"{carry} = {combine(monoid, carry, total)}",
        ]
