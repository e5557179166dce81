"""Where values lie in memory: strides of every buffer, and views of buffers as strides and offset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.ir import index as ix
from plait.ir.graph import PRODUCTS, Graph, Node, Read, Shape, contiguous_strides
from plait.ir.index import Expr, Facts
from plait.ir.recombine import recombine


@dataclass(frozen=True, slots=True)
class Strided:
    """A view of a buffer, in elements."""

    shape: Shape
    strides: Shape
    offset: Expr


class Layouts:
    """Strides of every materialised value of a graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._inputs = {i.node: i.layout for i in graph.inputs}
        self._cache: dict[Node, Shape] = {}

    def strides(self, n: Node) -> Shape:
        """Strides, in elements, of the buffer that holds (or would hold) a node's value."""
        found = self._cache.get(n)
        if found is None:
            found = self._cache[n] = self._strides(n)
        return found

    def is_padded(self, n: Node) -> bool:
        """Whether the strides were chosen, and not eager's."""
        return n in self._graph.padded

    def view(self, read: Read) -> Strided | None:
        """A read (over its domain) as a strided view of its source's buffer, if it is one."""
        return as_strided(read, self.strides(read.source), self._graph.facts(read.domain or ()))

    def _strides(self, n: Node) -> Shape:
        padded = self._graph.padded.get(n)
        if padded is not None:
            return padded
        if n.kind == "source":
            layout = self._inputs.get(n)
            return layout.strides if layout is not None else contiguous_strides(n.shape)
        if n.kind in ("extern", "project"):
            call, item = (n, 0) if n.kind == "extern" else (n.reads[0].source, n.attr("item"))
            strides: Shape | None = call.attr("outs")[item][2]
            return strides if strides is not None else contiguous_strides(n.shape)
        wanted = self._graph.layouts.get(n)
        if wanted is not None and is_dense(self._graph, n.shape, wanted):
            return wanted
        return contiguous_strides(n.shape)


def is_dense(graph: Graph, shape: Shape, strides: Shape) -> bool:
    """True when the strides are some order of dimensions packed without gaps or overlap."""
    if any(n.const == 0 for n in shape):
        return True
    dims = [(graph.hint(s), n, s) for n, s in zip(shape, strides, strict=True) if n is not ix.ONE]
    step = ix.ONE
    for _, n, s in sorted(dims, key=lambda t: t[0]):
        if s is not step:
            return False
        step = step * n
    return True


def address(index: Shape, strides: Shape) -> Expr:
    """Where an element lies, in elements."""
    out = ix.ZERO
    for e, s in zip(index, strides, strict=True):
        out = out + e * s
    return out


def as_strided(read: Read, strides: Shape, facts: Facts) -> Strided | None:
    """The read (over its domain) as a strided view of a buffer with `strides`; None when it is no such view."""
    if read.guard or read.domain is None:
        return None
    coeffs, offset = recombine(address(read.index, strides), facts).linear()
    out = [ix.ZERO] * len(read.domain)
    for atom, c in coeffs.items():
        if atom.kind != "axis" or c.axes() or c.values() or any(a.kind in ("div", "mod") for a in c.atoms()):
            return None
        i = atom.args[0]
        assert isinstance(i, int)
        out[i] = c
    if any(a.kind in ("div", "mod") for a in offset.atoms()):
        return None
    return Strided(read.domain, tuple(out), offset)


def same_strides(shape: Shape, a: Shape, b: Shape) -> bool:
    """Equal where it matters: an axis of extent 1 may have any stride, and so may an empty tensor."""
    if any(n.const == 0 for n in shape):
        return True
    return all(n is ix.ONE or x is y for n, x, y in zip(shape, a, b, strict=True))


ALIGNED = 16  # bytes: copy engines, vectorised loads and the vendor's products want rows at multiples of them
WASTE = 1 / 8  # of a row, at most, is the gap behind it


def begins_oddly(view: Strided, nbytes: int) -> bool:
    """Whether rows of elements of so many bytes begin at places that are no multiples of ALIGNED."""
    steps = [s for s, extent in zip(view.strides, view.shape, strict=True) if s is not ix.ONE and extent is not ix.ONE]
    return any((s.const or 0) * nbytes % ALIGNED for s in steps)


def rows_apart(graph: Graph, n: Node, strides: Shape, row_bytes: int) -> Shape | None:
    """The strides with rows that begin at multiples of `row_bytes`, or of the largest half of that which wastes no more than
    WASTE; None where the rows are aligned already, or are no rows: there is no other dimension, or sizes are not known."""
    dims = [d for d, extent in enumerate(n.shape) if extent is not ix.ONE]
    inner = next((d for d in dims if strides[d] is ix.ONE), None)
    if inner is None or len(dims) < 2 or not is_dense(graph, n.shape, strides):
        return None
    extent = n.shape[inner].const
    if not extent or any(e.const == 0 for e in n.shape) or extent * n.dtype.nbytes % ALIGNED == 0:
        return None
    nbytes, step = extent * n.dtype.nbytes, row_bytes
    while step > ALIGNED and -nbytes % step > nbytes * WASTE:
        step //= 2
    if -nbytes % step > nbytes * WASTE:
        return None
    out = list(strides)
    out[inner], reach = ix.ONE, ix.const((nbytes + -nbytes % step) // n.dtype.nbytes)
    # dimensions of extent 1 may have any stride: what they would have in a dense tensor
    for d in sorted(set(range(len(out))) - {inner}, key=lambda d: (graph.hint(strides[d]), n.shape[d] is not ix.ONE)):
        out[d] = reach
        reach = reach * n.shape[d]
    return tuple(out)


def rows_of(shape: Shape, strides: Shape) -> tuple[int, int] | None:
    """(extent, pitch) of rows that lie apart, in elements: behind each is a gap. None where there is none."""
    steps = [(s.const, n.const) for s, n in zip(strides, shape, strict=True) if n is not ix.ONE]
    extents = [n for s, n in steps if s == 1]
    pitches = [s for s, _ in steps if s != 1]
    if len(extents) != 1 or not extents[0] or not pitches or None in pitches:
        return None
    extent, pitch = extents[0], min(p or 0 for p in pitches)
    return (extent, pitch) if pitch > extent and all((p or 0) % pitch == 0 for p in pitches) else None


def has_aligned_rows(graph: Graph, shape: Shape, strides: Shape) -> bool:
    """Whether elements are packed but for a few unused ones behind each row, by which the next begins at an aligned place.
    Some operators demand that, and eager pads for them (the bias of attention, to 8 or 16 elements)."""
    rows = rows_of(shape, strides)
    if rows is None or rows[1] - rows[0] >= 16:
        return False
    filled = tuple(ix.const(rows[1]) if s is ix.ONE and n is not ix.ONE else n for n, s in zip(shape, strides))
    return is_dense(graph, filled, strides)


def room(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements that a tensor's memory has: with the gap behind its last row, where rows lie apart."""
    if 0 in shape:
        return 0
    steps = [(s, n) for s, n in zip(strides, shape, strict=True) if n > 1]
    return max([1 + sum((n - 1) * s for s, n in steps), *(n * s for s, n in steps)])


def is_product(n: Node) -> bool:
    """A call that takes matrices whose rows lie apart."""
    return n.kind == "extern" and n.attr("target") in PRODUCTS


def is_matrix(view: Strided) -> bool:
    """Whether products take the view as it is: of its last two dimensions, one runs along memory and the other skips it."""
    pairs = [(e, s) for e, s in zip(view.shape[-2:], view.strides[-2:], strict=True) if e is not ix.ONE]
    if len(pairs) < 2:
        return True  # a vector: copying it would cost nothing
    (e0, s0), (e1, s1) = pairs
    for extent, along, across in ((e0, s0, s1), (e1, s1, s0)):
        if along is ix.ONE and extent.const is not None and across.const is not None and across.const >= extent.const:
            return True
    return False
