"""The one-dimensional grid of an emitted kernel, and the variables that say where in its dims a block stands."""

from __future__ import annotations

import re

from plait.emit.triton_index import DimPlan, Indexer, size_name
from plait.ir import index as ix
from plait.ir.index import Expr


class Grid:
    """The dims of one program as the blocks see them. Definitions are (name, text) pairs."""

    def __init__(self, indexer: Indexer, symbols: tuple[str, ...]) -> None:
        self.ix, self.dims, self.symbols = indexer, indexer.dims, symbols

    def _cut_dims(self) -> list[DimPlan]:
        return [d for d in self.dims if not d.covered and not d.looped]

    @property
    def programs(self) -> Expr:
        """How many blocks there are."""
        if any(d.extent.const == 0 and not d.is_row for d in self.dims):
            return ix.ZERO
        return ix.product(d.tiles for d in self._cut_dims())

    def prologue(self, body: str, block: str) -> list[str]:
        """Definitions of sizes and of the dims' index variables: those that the body uses."""
        defs: list[tuple[str, str]] = []
        defs += [(size_name(s), f"tl.cast({s}, tl.int64)") for s in self.symbols]
        defs += self._coordinates(block)
        for d in self.dims:
            if not d.looped or d.blocked:
                defs += self._variables(d, d.looped)
        needed = set(re.findall(r"\w+", body))
        kept: list[str] = []
        for name, text in reversed(defs):
            if name in needed:
                kept.append(f"    {name} = {text}")
                needed |= set(re.findall(r"\w+", text))
        return kept[::-1]

    def _coordinates(self, block: str) -> list[tuple[str, str]]:
        grid = self._cut_dims()
        out: list[tuple[str, str]] = []
        rest = block
        if any(d.wide for d in grid):
            rest = f"tl.cast({rest}, tl.int64)"
        for n, d in enumerate(reversed(grid)):
            last = n == len(grid) - 1
            tiles = self.ix.text(d.tiles, ())
            name = f"{d.name}_tile" if d.blocked else d.name
            out.append((name, rest if last else f"{rest} % ({tiles})"))
            if not last:
                out.append((f"{d.name}_rest", f"{rest} // ({tiles})"))
                rest = f"{d.name}_rest"
        return out

    def _variables(self, d: DimPlan, in_loop: bool) -> list[tuple[str, str]]:
        """Definitions for one dim; the part that changes with a loop is left to the loop."""
        if not d.blocked:
            return []
        lane = f"{d.name}_lane"
        out = [(lane, f"tl.arange(0, {d.tile})")]
        if in_loop:
            return out
        if d.covered:
            out.append((d.name, lane))
        else:
            out += [(f"{d.name}_start", f"{d.name}_tile * {d.tile}"), (d.name, f"{d.name}_start + {lane}")]
        return [*out, *self.inside(d)]

    def inside(self, d: DimPlan) -> list[tuple[str, str]]:
        """The mask of a dim's points inside its extent, where there can be others."""
        if d.even:
            return []
        extent = self.ix.text(d.extent, ())
        if not d.wide:
            return [(f"{d.name}_ok", f"{d.name} < {extent}")]
        # compared in 32 bits, lane by lane
        return [(f"{d.name}_ok", f"{d.name}_lane < tl.cast(tl.minimum({extent} - {d.name}_start, {d.tile}), tl.int32)")]
