"""Questions about strides."""

from __future__ import annotations

from plait.ir import index as ix
from plait.ir.graph import Shape


def is_dense(shape: Shape, strides: Shape) -> bool:
    """Whether the strides are those of a permuted contiguous tensor, provably."""
    left = [(n, s) for n, s in zip(shape, strides, strict=True) if n is not ix.ONE]
    step = ix.ONE
    while left:
        found = next((p for p in left if p[1] is step), None)
        if found is None:
            return False
        left.remove(found)
        step = step * found[0]
    return True
