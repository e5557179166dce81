"""Random numbers in Triton text: one block of Philox words serves four neighbouring points where a tile has them.

The generator is most of a dropout's time (ten rounds of two wide products), so a block is asked for a quarter of the
points, and its words are laid side by side. Where a tile runs across the linear index, every point makes its block and
takes one word of it: the same numbers.
"""

from __future__ import annotations

from plait.emit.triton_index import Axes, Indexer, block_part
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.index import Expr
from plait.tile.program import Let

WORDS = 4  # of one block
_OF_ONE_WORD = {("rand", DType.f32): "_rand_words", ("randbits", DType.i32): "_randbits_words"}


def by_words(s: Let, args: list[str], axes: Axes, indexer: Indexer, draw: str) -> str | None:
    """The text of a draw (`args`: seed, offset) that makes one block of words for four points, or None where the tile has
    no such neighbours."""
    function = _OF_ONE_WORD.get((s.op, s.dtype))
    if function is None or not axes:
        return None
    last = indexer.dims[axes[-1]]
    block = _block(s.attr("linear"), last.index)
    if block is None or last.tile % WORDS:
        return None
    first, _ = block_part(last)  # a multiple of the tile
    start = indexer.text(first, ())
    lanes = f"(({start}) // {WORDS} + tl.arange(0, {last.tile // WORDS}))"
    lanes = indexer.widen(lanes, (last.index,), axes)
    counter = f"{indexer.text(block, axes)} + {lanes}"
    return f"tl.reshape({function}({', '.join((*args, counter, draw))}), {indexer.shape(axes)})"


def _block(linear: Expr, last: int) -> Expr | None:
    """(linear - axis) / 4 for an index along `last` whose other terms are multiples of four, or None."""
    rest = linear - ix.axis(last)
    if last in rest.axes() or rest.values() or any(c % WORDS for _, c in rest.terms):
        return None
    return Expr.make({m: c // WORDS for m, c in rest.terms})
