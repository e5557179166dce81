"""The tiles of the stream that a block visits, in Gluon text, and which of them no mask and no end cuts.

first            first point of the first tile
low, high        tiles [low, high) are whole: every guard holds in them, no point lies beyond the extent
count            tiles that are visited, at least one
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.emit.triton_bounds import Bound, Segment, bounds_of, tiles_in, whole_tiles
from plait.emit.triton_index import Indexer
from plait.emit.triton_softmax import Defs
from plait.tile.program import Sweep


@dataclass(frozen=True)
class Tiles:
    """Lines of a kernel that define the names above, and the segments: the one for any tile, and the one for whole tiles
    (None: there are no such tiles to tell apart). `below`: some tiles before the whole ones may be cut. `rows`: the locals
    whose extremes over the block the lines want."""

    lines: tuple[str, ...]
    cut: Segment
    whole: Segment | None
    below: bool
    rows: tuple[int, ...] = ()

    @property
    def test(self) -> str:
        """Whether tile t is cut."""
        return "(t < low) | (t >= high)" if self.below else "t >= high"

    @property
    def loops(self) -> tuple[tuple[str, str, bool], ...]:
        """(start, end, whether the tiles are whole) of the loops behind the first tile."""
        if self.whole is None:
            return (("1", "count", False),)
        if self.whole == self.cut:
            return (("1", "count", True),)
        before = (("1", "low", False),) if self.below else ()
        start = "gl.maximum(low, 1)" if self.below else "1"
        after = f"gl.maximum(high, {start})"
        return (*before, (start, "high", True), (after, "count", False))


def tiles_of(s: Sweep, defs: Defs, indexer: Indexer) -> Tiles:
    """The tiles that a block visits of a swept dim whose extent is known."""
    d = indexer.dims[s.dim]
    extent, tile = d.extent.const, d.tile
    assert extent is not None
    found = bounds_of(s, defs, indexer)
    rows = tuple(dict.fromkeys(k for b in found for k in b.rows))
    lower, upper = [b for b in found if b.rising], [b for b in found if not b.rising]
    cut = Segment("", "")
    whole = Segment("", "", frozenset(b.guard for b in found if not b.implied), True)
    if not found:
        tiles = -(-extent // tile)
        lines = ["first = 0", f"count = {tiles}"]
        if d.even:
            return Tiles(tuple(lines), whole, whole, False)
        return Tiles((*lines, f"high = {extent // tile}"), cut, whole, False)
    lines = ["first = 0"]
    if lower:
        start = _extreme("maximum", "0", lower, indexer, True)
        lines = [f"first = {whole_tiles(f'tl.minimum({start}, {extent - 1})', tile)}"]
    end = _extreme("minimum", str(extent), upper, indexer, True)
    # a block that a mask hides whole still takes one tile, all of it masked
    covered = tiles_in(f"({end} - first + {tile - 1})", tile)
    lines.append(f"count = tl.maximum({covered}, 1)")
    before = tiles_in("first", tile)
    full = _extreme("minimum", str(extent), upper, indexer, False)
    lines.append(f"high = tl.minimum({tiles_in(f'tl.maximum({full}, 0)', tile)} - {before}, count)")
    if lower:
        least = _extreme("maximum", "0", lower, indexer, False)
        low = f"{tiles_in(f'({least} + {tile - 1})', tile)} - {before}"
        # numbers of the rows may leave less between them than positions do
        lines.append(f"low = tl.minimum({low}, count)" if rows else f"low = {low}")
    return Tiles(tuple(lines), cut, whole, bool(lower), rows)


def _extreme(name: str, start: str, bounds: list[Bound], indexer: Indexer, most: bool) -> str:
    out = start
    for b in bounds:
        out = f"tl.{name}({out}, {b.text(indexer, most=most or b.implied)})"
    return out
