"""The one-dimensional grid of an emitted kernel, and the variables that say where in its dims a block stands.

Blocks with neighbouring numbers run together. Those of a product of matrices therefore walk its result in bands of a few
tiles of rows, so that both factors' tiles are found in the cache. Along a dim whose last blocks have most to do, these
come first.
"""

from __future__ import annotations

import re

from plait.emit.triton_index import DimPlan, Indexer, size_name
from plait.ir import index as ix
from plait.ir.index import Expr

_BAND = 8


class Grid:
    """The dims of one program as the blocks see them. Definitions are (name, text) pairs."""

    def __init__(self, indexer: Indexer, symbols: tuple[str, ...]) -> None:
        self.ix, self.dims, self.symbols = indexer, indexer.dims, symbols
        self.backwards: frozenset[int] = frozenset()
        self.in_bands = False

    def order(self, backwards: frozenset[int], products: list[tuple[set[int], set[int]]]) -> None:
        """Choose the order of blocks: dims to walk `backwards`, and the dims of rows and of columns of `products`."""
        self.backwards = backwards
        last = [{d.index} for d in self._cut_dims()[-2:]]
        if len(last) == 2 and not backwards & (last[0] | last[1]):
            a, b = last
            self.in_bands = any((a <= r and b <= c) or (b <= r and a <= c) for r, c in products)

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
        return needed_for(body, defs)

    def _coordinates(self, block: str) -> list[tuple[str, str]]:
        grid = self._cut_dims()
        out: list[tuple[str, str]] = []
        rest = block
        if any(d.wide for d in grid):
            rest = f"tl.cast({rest}, tl.int64)"
        if self.in_bands:
            bands, rest = self._bands(grid[-2], grid[-1], rest, len(grid) == 2)
            out += bands
            grid = grid[:-2]
        for n, d in enumerate(reversed(grid)):
            last = n == len(grid) - 1
            tiles = self.ix.text(d.tiles, ())
            place = rest if last else f"{rest} % ({tiles})"
            if d.index in self.backwards:
                place = f"({tiles}) - 1 - ({place})"
            out.append((_place(d), place))
            if not last:
                out.append((f"{d.name}_rest", f"{rest} // ({tiles})"))
                rest = f"{d.name}_rest"
        return out

    def _bands(self, m: DimPlan, n: DimPlan, rest: str, alone: bool) -> tuple[list[tuple[str, str]], str]:
        """Two dims walked in bands of some tiles of the first, whose tiles a band walks fastest; and what is left."""
        rows, columns = self.ix.text(m.tiles, ()), self.ix.text(n.tiles, ())
        both = f"({rows}) * ({columns})"
        place, band = f"{n.name}_place", f"{n.name}_band"
        out = [
            (place, rest if alone else f"{rest} % ({both})"),
            (f"{n.name}_rest", f"{rest} // ({both})"),
            (band, f"{place} // ({_BAND} * ({columns}))"),
            (f"{band}_rows", f"tl.minimum(({rows}) - {band} * {_BAND}, {_BAND})"),
            (f"{band}_place", f"{place} % ({_BAND} * ({columns}))"),
            (_place(m), f"{band} * {_BAND} + {band}_place % {band}_rows"),
            (_place(n), f"{band}_place // {band}_rows"),
        ]
        return out, f"{n.name}_rest"

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
            out += [(f"{d.name}_start", f"{d.name}_tile * {d.block}"), (d.name, f"{d.name}_start + {lane}")]
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


def needed_for(body: str, defs: list[tuple[str, str]]) -> list[str]:
    """Lines of those (name, text) definitions that a body uses, or that used ones need."""
    needed = set(re.findall(r"\w+", body))
    kept: list[str] = []
    for name, text in reversed(defs):
        if name in needed:
            kept.append(f"    {name} = {text}")
            needed |= set(re.findall(r"\w+", text))
    return kept[::-1]


def _place(d: DimPlan) -> str:
    """The variable that holds the number of a dim's tile."""
    return f"{d.name}_tile" if d.blocked else d.name
