"""Where values lie in memory: strides of every buffer, and views of buffers as strides and offset."""

from __future__ import annotations

from dataclasses import dataclass

from plait.ir import index as ix
from plait.ir.graph import Graph, Node, Read, Shape, contiguous_strides
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

    def view(self, read: Read) -> Strided | None:
        """A read (over its domain) as a strided view of its source's buffer, if it is one."""
        return as_strided(read, self.strides(read.source), self._graph.facts(read.domain or ()))

    def _strides(self, n: Node) -> Shape:
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


def as_strided(read: Read, strides: Shape, facts: Facts) -> Strided | None:
    """The read (over its domain) as a strided view of a buffer with `strides`; None when it is no such view."""
    if read.guard or read.domain is None:
        return None
    address = ix.ZERO
    for e, s in zip(read.index, strides, strict=True):
        address = address + e * s
    coeffs, offset = recombine(address, facts).linear()
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
