"""Tiles of a product's factors through tensor descriptors: the copy engine computes addresses, fills what lies beyond the
extents with zeros, and needs no registers.

A block that makes its descriptors once and then walks many tiles of the result hides their cost, so only persistent kernels
(`Schedule.blocks`) use them. A load qualifies when it is a dense box: two blocked dims, one of them contiguous, the other
and all further dims at multiples of 16 bytes, filled with zero. Buffers that are read like this must begin at a multiple of
16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.emit.triton_grid import Grid
from plait.emit.triton_index import Axes, DimPlan
from plait.ir import index as ix
from plait.ir.index import Expr
from plait.tile.program import Buffer, Load
from plait.tile.schedule import EVERY

_ALIGN = 16  # bytes
_WIDEST = 256  # elements of a box along one dim


@dataclass(frozen=True)
class _Box:
    """A tensor seen through (dim, elements between its neighbours) from the widest stride to 1, after `offset` elements."""

    offset: int
    strides: tuple[tuple[int, int], ...]


class Walk:
    """The loop of a persistent kernel over the tiles of its grid, and the descriptors that it reads through: one for every
    way in which a buffer is read. `aligned`: parameters that are read through one. `long_products`: how many are added up in
    a loop inside; with one, Triton makes one pipeline of both loops (with two it gets slower by a quarter)."""

    def __init__(self, grid: Grid, buffers: tuple[Buffer, ...], blocks: int, long_products: int) -> None:
        self.grid, self.ix, self.buffers, self.blocks = grid, grid.ix, buffers, blocks
        self.flat = ", flatten=True" if long_products == 1 and blocks != EVERY else ""
        self.definitions: list[str] = []
        self.aligned: set[str] = set()
        self._names: dict[tuple[int, _Box], str] = {}

    @property
    def programs(self) -> Expr:
        """How many blocks to launch: no more than tiles."""
        tiles = self.grid.programs
        if tiles is ix.ZERO or self.blocks == EVERY:
            return tiles
        return ix.const(self.blocks if tiles.const is None else min(tiles.const, self.blocks))

    def prologue(self, body: str, block: str) -> list[str]:
        """What stands before the statements of a tile: descriptors, the loop's head, where in the dims the tile is."""
        tiles = self.ix.text(self.grid.programs, ())
        head = [*self.definitions, f"for block in tl.range({block}, {tiles}, {self.blocks}{self.flat}):"]
        before = [f"    {line}" for line in head]
        inside = [f"    {line}" for line in self.grid.prologue(body, "block")]
        return [*self.grid.prologue("\n".join(before), ""), *before, *inside]

    def load(self, s: Load, pointer: str, axes: Axes) -> str | None:
        """Text of the tile that `s` reads, with axes `axes`, or None where no descriptor can."""
        box = self._box(s, axes)
        if box is None:
            return None
        name = self._names.get((s.buffer, box))
        if name is None:
            name = self._names[s.buffer, box] = f"d{len(self._names)}"
            self.definitions.append(f"{name} = {self._definition(pointer, box)}")
            self.aligned.add(pointer)
        text = f"{name}.load([{', '.join(map(_place, self._dims(box)))}])"
        order = tuple(d.index for d in self._dims(box) if d.blocked)
        if len(box.strides) > 2:
            text = f"tl.reshape({text}, {self.ix.shape(order)})"
        return text if order == axes else f"tl.trans({text})"

    def _dims(self, box: _Box) -> list[DimPlan]:
        return [self.ix.dims[i] for i, _ in box.strides]

    def _definition(self, pointer: str, box: _Box) -> str:
        dims = self._dims(box)
        base = f"{pointer} + {box.offset}" if box.offset else pointer
        shape = ", ".join(str(d.extent.const) for d in dims)
        strides = ", ".join(str(n) for _, n in box.strides)
        tile = ", ".join(str(d.tile) for d in dims)
        return f"tl.make_tensor_descriptor({base}, [{shape}], [{strides}], [{tile}])"

    def _box(self, s: Load, axes: Axes) -> _Box | None:
        size = self.buffers[s.buffer].dtype.nbytes
        if len(axes) != 2 or s.guard or s.fill != 0 or s.address.values():
            return None
        coefficients, rest = s.address.linear()
        strides: list[tuple[int, int]] = []
        for a, c in coefficients.items():
            i = a.args[0]
            if a.kind != "axis" or c.const is None or not isinstance(i, int) or self.ix.dims[i].wide:
                return None
            strides.append((i, c.const))
        strides = [(i, n) for i, n in strides if self.ix.dims[i].extent is not ix.ONE]
        strides.sort(key=lambda each: -each[1])
        inner = [self.ix.dims[i] for i, _ in strides[-1:]]
        fits = (
            rest.const is not None
            and rest.const * size % _ALIGN == 0
            and 2 <= len(strides) <= 5
            and {i for i, _ in strides if self.ix.dims[i].blocked} == set(axes)
            and strides[-1][1] == 1
            and all(n > 0 and n * size % _ALIGN == 0 for _, n in strides[:-1])
            and all(self.ix.dims[i].tile <= _WIDEST for i, _ in strides)
            and inner[0].tile * size >= _ALIGN
            and inner[0].blocked
        )
        return _Box(rest.const or 0, tuple(strides)) if fits else None


def _place(d: DimPlan) -> str:
    """Where the box begins along a dim."""
    if not d.blocked:
        return d.name
    return "0" if d.covered else f"{d.name}_start"
