"""Accesses that run on into the gaps between rows, in Triton text.

A mask that ends inside a vector of 16 bytes makes Triton move every element by itself. Where a buffer's rows lie apart
(Buffer.rows) an access may end at the next multiple of 16 bytes, or have no mask at all where tiles end within the gap:
what it finds there goes to lanes beyond the extent, which no result hangs on, and what it writes there nobody reads.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.emit.triton_index import Indexer
from plait.ir import index as ix
from plait.tile.program import Dot, Load, Store, TileProgram

_VECTOR = 16  # bytes


@dataclass(frozen=True)
class Room:
    """Along dim `dim` an access needs no mask, or (`end`) only has to stay before that point."""

    dim: int
    end: int | None

    def text(self, indexer: Indexer) -> list[str]:
        """The condition along the dim, with its axis alone."""
        return [] if self.end is None else [f"({indexer.dims[self.dim].name} < {self.end})"]


class Gaps:
    """Which accesses of a program have room. `used`: not in programs whose masks are made elsewhere."""

    def __init__(self, program: TileProgram, indexer: Indexer, used: bool = True) -> None:
        self.ix, self.buffers, self.used = indexer, program.buffers, used
        # a product adds up whole tiles: beyond the summed extents both factors are zeros that the loads put there
        self.summed = {i for s in program.walk() if isinstance(s, Dot) for i in s.dims}

    def room(self, s: Load | Store) -> Room | None:
        """Along which dim an access may run on, if it steps through rows element by element along that."""
        buffer = self.buffers[s.buffer]
        if not self.used or buffer.rows is None:
            return None
        extent, pitch = buffer.rows
        inner = [i for i in s.address.axes() if ((ix.axis_atom(i),), 1) in s.address.terms]
        if len(inner) != 1 or inner[0] in self.summed:
            return None
        (dim,) = inner
        d = self.ix.dims[dim]
        row = s.address - ix.axis(dim)
        if d.extent.const != extent or not d.blocked or d.wide or any(c % pitch for _, c in row.terms):
            return None
        if any(dim in self.ix.axes_of(e) for e in (row, *s.guard)):
            return None  # which row, or whether at all, may be anything beyond the extent
        if -(-extent // d.block) * d.block <= pitch:
            return Room(dim, None)
        lanes = _VECTOR // buffer.dtype.nbytes
        return Room(dim, min(-(-extent // lanes) * lanes, pitch))
