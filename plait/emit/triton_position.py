"""Positions as floats, without a conversion a point: rows and columns are converted on their own.

float(i - j) = float(i) - float(j), exact while everything is below 2^23, and the conversion of an integer n there is
the float whose bits are 2^23's plus n, less 2^23: no use of the slow unit that converts.
"""

from __future__ import annotations

from plait.emit.triton_index import Axes, Indexer
from plait.emit.triton_softmax import Defs
from plait.ir.index import Expr
from plait.tile.positions import position_of

_EXACT = 2**23


def position_as_float(k: int, axes: Axes, defs: Defs, indexer: Indexer) -> str | None:
    """Text of an integer local as f32, or None where it is no position that varies over several axes."""
    e = position_of(k, defs)
    if e is None or len(axes) < 2:
        return None
    size = indexer.magnitude(e)
    if size is None or size >= _EXACT:
        return None
    if (apart := _difference(e, axes, indexer)) is not None:
        return apart
    out = ""
    for monomial, c in sorted(e.terms, key=lambda term: term[1] < 0):
        if len(monomial) > 1 or any(a.kind != "axis" for a in monomial):
            return None
        text = _term(monomial[0].args[0], abs(c), axes, indexer) if monomial else repr(float(abs(c)))
        out = f"{out} {'-' if c < 0 else '+'} {text}" if out else text if c > 0 else f"{text} * -1.0"
    return out


def _difference(e: Expr, axes: Axes, indexer: Indexer) -> str | None:
    """Text of i - j for two dims in tiles: 2^23 is left on both."""
    ends = {c: monomial for monomial, c in e.terms if len(monomial) == 1 and monomial[0].kind == "axis"}
    if len(e.terms) != 2 or set(ends) != {1, -1}:
        return None
    out: list[str] = []
    for c in (1, -1):
        i = ends[c][0].args[0]
        assert isinstance(i, int)
        d = indexer.dims[i]
        if not d.blocked or (i,) == axes:
            return None
        out.append(indexer.widen(f"_bits({d.name})", (i,), axes))
    return " - ".join(out)


def _term(i: object, c: int, axes: Axes, indexer: Indexer) -> str:
    assert isinstance(i, int)
    d = indexer.dims[i]
    text = indexer.widen(f"_whole({d.name})", (i,), axes) if d.blocked else f"tl.cast({d.name}, tl.float32)"
    return text if c == 1 else f"{text} * {float(c)!r}"
