"""Tiles of a tensor that a kernel reads from two sides: one load.

A gradient's kernel takes queries as (position, channel) for the scores, and as (channel', position) for the gradient of the
keys, where both channel dims stand for the same axis of the tensor. Of two loads whose addresses and guards become equal
when such dims are renamed, dims that every block covers whole and that are alike, the second is the first with its axes
renamed, transposed where their order differs: no second copy in shared memory, and none in flight.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from plait.emit.triton_index import Axes, Indexer, Local
from plait.ir import index as ix
from plait.tile.program import Load, TileProgram


@dataclass(frozen=True)
class _Tile:
    """A load that stands, and what it gave."""

    load: Load
    value: Local


class Tiles:
    """The tiles of inputs that are loaded where the emitter stands."""

    def __init__(self, program: TileProgram, indexer: Indexer) -> None:
        self.ix = indexer
        self.inputs = {i for i, b in enumerate(program.buffers) if b.role == "in"}
        self.loaded: list[_Tile] = []

    def note(self, s: Load, value: Local) -> None:
        """The load was emitted. What is gathered is not looked for again."""
        if s.buffer in self.inputs and not s.address.values() and not any(g.values() for g in s.guard):
            self.loaded.append(_Tile(s, value))

    def leave(self, count: int) -> None:
        """A loop ends before which there were `count` tiles."""
        del self.loaded[count:]

    def again(self, s: Load, axes: Axes) -> tuple[list[str], Local] | None:
        """(lines, value) of a load with block axes `axes` as a tile that is there already, or None."""
        for t in self.loaded:
            order = self._order(t, s, axes)
            if order is not None:
                stored = f"v{s.out}s" if t.value.stored else ""
                lines = [f"v{s.out} = {_turned(t.value.text, order)}"]
                lines += [f"{stored} = {_turned(t.value.stored, order)}"] if stored else []
                return lines, Local(f"v{s.out}", axes, s.dtype, stored, t.value.storage)
        return None

    def _order(self, t: _Tile, s: Load, axes: Axes) -> list[int] | None:
        """Which axis of tile t each of `axes` is, or None."""
        if (t.load.buffer, t.load.fill, t.load.dtype) != (s.buffer, s.fill, s.dtype):
            return None
        gone = [i for i in t.value.axes if i not in axes]
        for come in itertools.permutations([i for i in axes if i not in t.value.axes]):
            if len(come) != len(gone) or not all(map(self._alike, gone, come)):
                continue
            renamed = {ix.axis_atom(a): ix.axis(b) for a, b in zip(gone, come, strict=True)}
            guard = {g.substitute(renamed) for g in t.load.guard}
            if t.load.address.substitute(renamed) == s.address and guard == set(s.guard):
                names = dict(zip(gone, come, strict=True))
                return [[names.get(i, i) for i in t.value.axes].index(i) for i in axes]
        return None

    def _alike(self, a: int, b: int) -> bool:
        x, y = self.ix.dims[a], self.ix.dims[b]
        return x.covered and y.covered and x.tile == y.tile and x.extent == y.extent


def _turned(text: str, order: list[int]) -> str:
    """A block with its axes in another order."""
    if order == sorted(order):
        return text
    return f"tl.trans({text})" if len(order) == 2 else f"tl.permute({text}, {order})"
