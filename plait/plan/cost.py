"""The time model: bytes, operations and parallelism of a group -> nanoseconds. Legality and search never look inside.

time = launch + max(bytes / bandwidth, operations / throughput), both slowed when there are fewer blocks than units.
Rows that do not stay on chip are read again by every sweep, from the last-level cache when they fit there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from plait.ir.graph import Graph, Node, Read
from plait.ir.index import Expr
from plait.plan.align import Alignment
from plait.plan.contract_cost import Tiling, product_ns, share
from plait.plan.device import DeviceSpec
from plait.plan.inline import Reading
from plait.plan.opcost import op_cost

_EXPOSED = 0.75  # of the time of other work is not hidden behind products (bias and GELU after one, on an H200)

Pass = tuple[int, frozenset[int]]  # rank by dependency, and the row axes that stay outside the reduction


@dataclass(frozen=True, slots=True)
class Cost:
    """What one kernel moves and does."""

    bytes_read: float
    bytes_written: float
    cache_bytes: float  # re-reads served by the last-level cache
    ops: float
    blocks: float  # independent pieces of work
    launches: int = 1
    products_ns: float = 0.0  # contractions, at the throughput of generated code

    def terms(self, spec: DeviceSpec) -> tuple[float, float]:
        """Nanoseconds of moving and of computing, each as if the other took none."""
        share = min(1.0, max(self.blocks, 1.0) / spec.units)
        memory = (self.bytes_read + self.bytes_written) / spec.bytes_per_ns + self.cache_bytes / spec.cache_bytes_per_ns
        ops = self.ops / spec.ops_per_ns
        work = self.products_ns + (_EXPOSED if self.products_ns else 1.0) * ops
        return memory / share, work / share

    def time_on(self, spec: DeviceSpec) -> float:
        """Predicted nanoseconds."""
        return spec.launch_ns * self.launches + max(self.terms(spec))


class CostModel:
    """Costs of groups of one graph at its hinted sizes."""

    def __init__(
        self, graph: Graph, spec: DeviceSpec, reading: Reading, stored: Callable[[frozenset[Node]], list[Node]]
    ) -> None:
        self._graph, self.spec, self.reading, self._stored = graph, spec, reading, stored

    def size(self, extents: Iterable[Expr]) -> float:
        """Product of extents at the hinted sizes."""
        return size_at_hints(self._graph, extents)

    def row_and_grid(self, al: Alignment) -> tuple[set[int], set[int]]:
        """Atoms that blocks sweep, and the others."""
        row: set[int] = set()
        every: set[int] = set()
        floating = al.floating(self._stored(frozenset(al.nodes)), self.reading.reads)
        for n in al.nodes:
            if n in floating:
                continue
            every.update(al.span(n))
            if n.reduces or n.kind == "scan":
                row.update(al.reduced(n))
        return row, every - row

    def cost(self, al: Alignment) -> Cost:
        """Bytes, operations and blocks of a group as one kernel."""
        inside = frozenset(al.nodes)
        stored = self._stored(inside)
        row, grid = self.row_and_grid(al)
        if any(n.kind == "contract" for n in al.nodes):
            return self._contract_cost(al, inside, stored, grid)
        row_elems = self.size(al.extent[a] for a in row)
        kept = row_elems <= self.spec.row_elems
        passes = {} if kept else self._passes(al, inside, stored, row)
        points: dict[Node, float] = {}
        swept: dict[Node, set[Pass]] = {}
        for n in al.nodes:
            for r in self.reading.reads(n):
                if r.source not in inside:
                    points[r.source] = points.get(r.source, 0.0) + self.size(n.axes)
                    swept.setdefault(r.source, set()).update(passes.get(n, ()))
        read = cache = 0.0
        for source, count in points.items():
            nbytes = min(count, self.size(source.shape)) * source.dtype.nbytes
            read += nbytes
            if not kept and count >= row_elems:
                cache += nbytes * max(_sweeps(swept[source]) - 1, 0)
        written = sum(self.size(n.shape) * n.dtype.nbytes for n in stored)
        loose = 2.0 if al.loose else 1.0
        ops = sum(self.size(n.axes) * op_cost(n.op) for n in al.nodes) * loose
        blocks = self.size(al.extent[a] for a in grid)
        if not row:
            blocks /= 256.0
        return Cost(read, written, cache, ops, blocks)

    def tiling(self, al: Alignment, grid: Iterable[int]) -> Tiling:
        """How blocks cut a group with contractions."""
        return Tiling(al, grid, {a: self.size([al.extent[a]]) for a in grid}, self.spec)

    def _contract_cost(self, al: Alignment, inside: frozenset[Node], stored: list[Node], grid: set[int]) -> Cost:
        tiling = self.tiling(al, grid)
        read = cache = ops = products = 0.0
        times: dict[Node, float] = {}
        inline: dict[Node, float] = {}  # at how many points each is evaluated: once for all its readers
        for n in al.nodes:
            again = tiling.repeats(n)
            size = self.size(n.axes)
            if n.kind == "contract":
                products += again * product_ns(self.spec, n, size) / share(self.spec, n, tiling.crowded)
                points = [self._factor_points(tiling, n, r) for r in n.reads]
            else:
                ops += again * size * op_cost(n.op)
                points = [again * size] * len(n.reads)
            # beside a stream cheap values are formed while products of other warps run
            for r, count in zip(n.reads, points, strict=True) if not tiling.streams else ():
                self._evaluated(r.source, count, inline)
            for r in self.reading.reads(n):
                if r.source not in inside:
                    touched = min(size, self.size(r.source.shape))
                    along = _again(tiling, n, r)
                    times[r.source] = max(times.get(r.source, 0.0), along * touched * r.source.dtype.nbytes)
        for source, total in times.items():
            once = min(total, self.size(source.shape) * source.dtype.nbytes)
            read += once
            cache += total - once
        ops += sum(points * op_cost(n.op) for n, points in inline.items())
        written = sum(self.size(n.shape) * n.dtype.nbytes for n in stored)
        return Cost(read, written, cache, ops, tiling.blocks, products_ns=products)

    def _factor_points(self, tiling: Tiling, n: Node, r: Read) -> float:
        """Points of a contraction's factor where it is read: again for every tile that it does not vary over."""
        return _again(tiling, n, r) * self.size(n.axes[i] for i in {i for e in r.index for i in e.axes()})

    def _evaluated(self, n: Node, points: float, found: dict[Node, float]) -> None:
        """Note an inline node, and those that it is made of, as evaluated at that many points."""
        if n in self.reading.inline and found.get(n, 0.0) < points:
            found[n] = points
            for r in n.reads:
                self._evaluated(r.source, points, found)

    def _passes(
        self, al: Alignment, inside: frozenset[Node], stored: list[Node], row: set[int]
    ) -> dict[Node, set[Pass]]:
        """In which passes over the row each member is evaluated, when rows do not stay on chip: a reduction in the pass after
        those it depends on, a map in each pass that wants it. Reductions whose results have different row axes (sums of rows
        and of columns) are different loops, of equal rank or not."""
        first: dict[Node, int] = {}
        for n in al.nodes:
            ends = (first[s] + (s.reduces) for s in self._inner(n, inside))
            first[n] = max(ends, default=0)
        wanted: dict[Node, set[Pass]] = {n: set() for n in al.nodes}
        for n in reversed(al.nodes):
            if n.reduces or n in stored:
                outer = set(al.span(n)) & row - set(al.reduced(n)) if n.reduces else ()
                wanted[n].add((first[n], frozenset(outer)))
            for s in self._inner(n, inside):
                if not s.reduces:
                    wanted[s] |= wanted[n]
        return wanted

    def _inner(self, n: Node, inside: frozenset[Node]) -> list[Node]:
        return [r.source for r in self.reading.reads(n) if r.source in inside]

    def time(self, al: Alignment) -> float:
        """Predicted nanoseconds of a group as one kernel."""
        return self.cost(al).time_on(self.spec)


def _again(tiling: Tiling, n: Node, r: Read) -> float:
    """Tiles that read the same points: those along axes that the read does not vary over."""
    return tiling.beside(a for e in r.index for i in e.axes() for a in tiling.al.atoms_of(n, i))


def _sweeps(passes: set[Pass]) -> int:
    """How many loops over the row those passes are: one with no axis outside it shares the loops of another of its rank."""
    ranks = {rank for rank, _ in passes}
    return sum(max(1, sum(bool(outer) for r, outer in passes if r == rank)) for rank in ranks)


def size_at_hints(graph: Graph, extents: Iterable[Expr]) -> float:
    """Product of extents at the hinted sizes."""
    out = 1.0
    for e in extents:
        c = e.const
        out *= graph.hint(e) if c is None else c
    return out
