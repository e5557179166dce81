"""The time model of groups with contractions: what tiles read again, and what products cost.

A block owns a tile of the result and sweeps the summed axes, so an operand is read once for every tile along the axes it
does not vary over; all but the first time the last-level cache serves it. Values that do not vary over an axis are
computed again for every tile of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from plait.ir.graph import Node
from plait.ir.index import Expr
from plait.plan.align import Alignment
from plait.plan.device import DeviceSpec

TILE = 128  # points of an axis that a block takes,
WIDE = 256  # and of the columns of a persistent product that is alone
WIDEST = 256  # points of an axis that a block may hold whole
OWN = {"cuda": 0.8, "cpu": 1.0}  # of the vendor's throughput is what generated products reach,
# and those of 16-bit factors that are alone, where tiles come through descriptors (on an H200, persistent: four shapes, 0.89 to
# 1.2; a row of logits that only a loss reads: 0.97)
WALKED = 1.0
# likewise of its bandwidth, where FEW rows or fewer share what is read (an H200: 1.0 to 1.13; two cores with AVX2, 1 to 8
# rows: 1.5 to 3)
STREAM = {"cuda": 1.05, "cpu": 1.5}
FEW = {"cuda": 16, "cpu": 8}
THIN, THIN_SHARE = (
    32,
    0.8,
)  # rows up to which a CPU's library has less of its throughput (16 and 32 rows, ten shapes: 0.45 to 1.1)
UNEVEN = 0.2  # of its throughput is what the vendor's 16-bit product has whose depth or columns fill no 16 bytes (H200: 0.15 to 0.2)
NARROWEST = 32  # columns of a tile down to which more blocks are made for a machine that has more units
DWARFS = 4.0  # times as large as a product's other tensors is one that had better not be kept in memory


def product_ns(spec: DeviceSpec, n: Node, size: float) -> float:
    """Nanoseconds of a contraction (a node, or the call) over `size` points, a multiplication and an addition each, at the
    vendor's throughput."""
    half = n.reads[0].source.dtype.nbytes <= 2
    return 2.0 * size / (spec.half_flops_per_ns if half else spec.float_flops_per_ns)


def depth_of(call: Node) -> Expr:
    """The summed extent of a call that is a product."""
    domain = call.reads[-1].domain
    assert domain is not None
    return domain[-2]


def call_ns(spec: DeviceSpec, n: Node, size: float, rows: float) -> float:
    """`product_ns` of a call whose factors lie well: a CPU's library packs them whatever few rows make of it."""
    return product_ns(spec, n, size) / (THIN_SHARE if spec.kind == "cpu" and rows <= THIN else 1.0)


def vendor_ns(
    spec: DeviceSpec, n: Node, size: float, rows: float, depth: float, columns: float, ragged: bool = False
) -> float:
    """Nanoseconds of the library's call: `call_ns`, or more where rows, of factors or of the result, begin (`ragged`) or end at
    odd places."""
    nbytes = n.reads[-1].source.dtype.nbytes
    uneven = spec.descriptors and nbytes <= 2 and (ragged or depth * nbytes % 16 > 0 or columns * nbytes % 16 > 0)
    return call_ns(spec, n, size, rows) / (UNEVEN if uneven else 1.0)


def share(spec: DeviceSpec, n: Node, beside: bool) -> float:
    """Of the vendor's throughput, what a generated product reaches. `beside`: others share its stream, or its
    factors come without descriptors."""
    return WALKED if spec.descriptors and not beside and n.reads[0].source.dtype.nbytes <= 2 else OWN[spec.kind]


def columns_a_block(rows: float) -> int | None:
    """Columns that a block of a product on a card takes where this few rows share them: it is a stream of the other factor, and
    all units must read at once (measured on an H200 from 1 to 16 rows). None: rows enough for square tiles."""
    return 4 if rows <= 1 else NARROWEST if rows <= FEW["cuda"] else None


class Tiling:
    """How many tiles a block structure cuts each grid atom of an alignment into."""

    def __init__(self, al: Alignment, grid: Iterable[int], extents: dict[int, float], spec: DeviceSpec) -> None:
        self.al = al
        products = [n for n in al.nodes if n.kind == "contract"]
        free = {a for n in products for a in self._free(n)}
        row = {a for n in al.nodes if n.reduces for a in al.reduced(n)}
        inner = [n for n in products if row & set(al.kept(n))]
        free -= {a for n in products for a in self._beside(n, row)}
        self.streams = bool(inner)
        self.crowded = self.streams and len(products) > 1
        alone = spec.descriptors and not inner and len(products) == 1
        wide = self._sides(products[0])[1] if alone else set()
        few = None if inner or spec.kind == "cpu" else columns_a_block(self._rows(products, free, extents))
        per: dict[int, float] = {}
        for a in grid:
            whole = inner and extents[a] <= WIDEST and not any(a in al.span(n) for n in inner)
            size = few or (WIDE if a in wide else TILE)
            per[a] = extents[a] if whole and a in free else min(size, extents[a]) if a in free else 1
        if not inner and spec.kind != "cpu":
            self._spread(per, extents, spec.units)
        self.tiles = {a: math.ceil(extents[a] / max(n, 1)) for a, n in per.items()}

    def _rows(self, products: list[Node], free: set[int], extents: dict[int, float]) -> float:
        """The fewest points that share a point of a product's other factor."""
        sides = [side & free for n in products for side in self._sides(n)]
        return min((math.prod(extents.get(a, 1.0) for a in side) for side in sides), default=1.0)

    def _spread(self, per: dict[int, float], extents: dict[int, float], units: int) -> None:
        """Halve tiles until every unit has one, as the schedule will."""
        while math.prod(math.ceil(extents[a] / max(n, 1)) for a, n in per.items()) < units:
            a = max(per, key=lambda a: per[a], default=None)
            if a is None or per[a] <= NARROWEST:
                return
            per[a] /= 2

    def _sides(self, n: Node) -> list[set[int]]:
        """Atoms that either factor of a contraction varies over."""
        moving = [frozenset(i for e in r.index for i in e.axes()) for r in n.reads]
        return [{a for i in axes for a in self.al.atoms_of(n, i)} for axes in moving]

    def _free(self, n: Node) -> set[int]:
        """Atoms that one factor of a contraction varies over and the other does not."""
        first, second = self._sides(n)
        return (first ^ second) - set(self.al.reduced(n))

    def _beside(self, n: Node, row: set[int]) -> set[int]:
        """Atoms of which a block has one point: both factors vary over them, or the one that streams by does."""
        first, second = self._sides(n)
        streamed = row - set(self.al.reduced(n))
        alone = {a for x, y in ((first, second), (second, first)) if (x - y) & streamed for a in x - y}
        return (first & second) | alone

    def repeats(self, n: Node) -> float:
        """How many tiles compute the same point of a member."""
        return self.beside(self.al.span(n))

    def beside(self, atoms: Iterable[int]) -> float:
        """Tiles along the grid atoms that are not among these."""
        own = set(atoms)
        return math.prod(t for a, t in self.tiles.items() if a not in own)

    @property
    def blocks(self) -> float:
        """Blocks in all."""
        return math.prod(self.tiles.values())
