"""Whole numbers that are expressions of a program's dims."""

from __future__ import annotations

from collections.abc import Mapping

from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.index import Expr
from plait.tile.program import Let, Stmt


def position_of(k: int, defs: Mapping[int, Stmt]) -> Expr | None:
    """An integer local as an expression of the dims, or None."""
    d = defs.get(k)
    if not isinstance(d, Let) or d.dtype is not DType.i64:
        return None
    if d.op == "index":
        e: Expr = d.attr("expr")
        return None if e.values() else e
    if d.op == "const":
        return ix.const(int(d.attr("value")))
    if d.op not in ("add", "sub", "neg", "copy"):
        return None
    found = [position_of(a, defs) for a in d.args]
    x, y = found[0], found[-1]
    if x is None or y is None:
        return None
    return {"add": x + y, "sub": x - y, "neg": -x, "copy": x}[d.op]
