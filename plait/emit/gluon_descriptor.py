"""Where the tiles of a factor lie in memory: an address as a descriptor of up to five dims and the place of a tile in it.

    address = offset + sum of stride * coordinate        (coordinates: batches, then the two sides of the tile)

Batches that lie one after the other are one dim. What lies beyond a dim's size reads as zero.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.emit.triton_index import DimPlan, Indexer
from plait.errors import LowerFailed
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.index import Atom, Expr
from plait.tile.program import Load, Store

_MOST_DIMS = 5
_LINE = 16  # bytes that bases and strides are multiples of


@dataclass(frozen=True)
class Descriptor:
    """A view of a buffer that the hardware copies tiles from: `offset` (elements), sizes, strides (elements, the last is 1)
    and the tile's shape. `name` is the kernel's parameter."""

    name: str
    buffer: int
    dtype: DType
    offset: int
    shape: tuple[Expr, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """A tile in a descriptor: texts of its coordinates for the batches, and whether the tile lies transposed (its inner side,
    the summed one, is not the contiguous one)."""

    descriptor: Descriptor
    batches: tuple[str, ...]
    turned: bool

    def at(self, start: str, inner: str = "0") -> str:
        """Coordinates of the tile whose outer side starts at `start`, and whose inner side at `inner`."""
        sides = (inner, start) if self.turned else (start, inner)
        return f"[{', '.join((*self.batches, *sides))}]"


def place_of(s: Load | Store, dtype: DType, outer: DimPlan, inner: DimPlan, name: str, indexer: Indexer) -> Place:
    """The descriptor of an access to tiles outer x inner. Raises LowerFailed for an address that is none."""
    coefficients, rest = s.address.linear()
    strides: dict[int, int] = {}
    batches: list[tuple[int, Expr, Expr]] = []  # (stride, coordinate, size)
    for atom, c in coefficients.items():
        if c.const is None or c.const <= 0:
            raise LowerFailed(f"a factor's stride is {c}")
        sides = Expr.make({(atom,): 1}).axes() & {outer.index, inner.index}
        if atom.kind == "axis" and sides:
            strides[min(sides)] = c.const
        elif sides:
            raise LowerFailed("a side of a factor is split")
        else:
            batches.append((c.const, Expr.make({(atom,): 1}), _size(atom, indexer)))
    turned = strides.get(inner.index) != 1
    if set(strides) != {outer.index, inner.index} or (turned and strides[outer.index] != 1):
        raise LowerFailed("a factor has no contiguous side")
    if rest.const is None:
        raise LowerFailed("a factor starts at an offset known at run time only")
    merged = _merged(batches)
    sides_in_memory = (inner, outer) if turned else (outer, inner)
    all_strides = (*(b[0] for b in merged), *(strides[d.index] for d in sides_in_memory))
    if len(all_strides) > _MOST_DIMS:
        raise LowerFailed(f"a factor has {len(merged)} separate batch dims")
    if any(n * dtype.nbytes % _LINE for n in (*all_strides[:-1], rest.const)):
        raise LowerFailed("a factor's strides are no multiples of 16 bytes")
    descriptor = Descriptor(
        name,
        s.buffer,
        dtype,
        rest.const,
        (*(b[2] for b in merged), *(d.extent for d in sides_in_memory)),
        all_strides,
        (*(1 for _ in merged), *(d.tile for d in sides_in_memory)),
    )
    return Place(descriptor, tuple(_coordinate(b[1], indexer) for b in merged), turned)


def _coordinate(e: Expr, indexer: Indexer) -> str:
    text = indexer.text(e, ())
    return text if indexer.is_narrow(e) else f"gl.cast({text}, gl.int32)"


def _size(atom: Atom, indexer: Indexer) -> Expr:
    """How many values a batch coordinate takes."""
    k = atom.args[0]
    if atom.kind == "axis":
        assert isinstance(k, int)
        return indexer.dims[k].extent
    if atom.kind in ("div", "mod"):
        x, n = atom.args
        assert isinstance(x, Expr) and isinstance(n, Expr)
        i = x.as_axis()
        if atom.kind == "mod":
            return n
        if i is not None:
            return ix.floordiv(indexer.dims[i].extent + (n - 1), n)
    raise LowerFailed("a factor's batch is no dim, part of a dim or remainder of one")


def _merged(batches: list[tuple[int, Expr, Expr]]) -> list[tuple[int, Expr, Expr]]:
    """Batches from the widest stride to the narrowest, neighbours in memory as one."""
    out: list[tuple[int, Expr, Expr]] = []
    for stride, place, size in sorted(batches, key=lambda b: -b[0]):
        if out and ix.const(out[-1][0]) is size * stride:
            _, above, more = out.pop()
            place, size = above * size + place, more * size
        out.append((stride, place, size))
    return out
