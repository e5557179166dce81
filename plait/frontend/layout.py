"""Questions about strides: density, and the layout eager's elementwise operators give their result."""

from __future__ import annotations

from collections.abc import Sequence

from plait.ir import index as ix
from plait.ir.graph import Shape, contiguous_strides


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


def overlaps(shape: Shape, strides: Shape) -> bool:
    """Whether two indices surely share an element other than by a stride of 0 (an expanded dimension)."""
    pairs = [(n.const, s.const) for n, s in zip(shape, strides, strict=True) if n is not ix.ONE and s is not ix.ZERO]
    reach = 0
    for step, extent in sorted((s, n) for n, s in pairs if n is not None and s is not None):
        if step <= reach:
            return True
        reach += step * (extent - 1)
    return False


def elementwise_strides(operands: Sequence[tuple[Shape, Shape]], shape: Shape) -> Shape | None:
    """Strides of an elementwise result over `shape`, from its operands' (shape, strides), as eager's iterator orders its
    dimensions: the first operand that tells two dimensions apart decides. None where sizes are symbols."""
    exprs = (*shape, *(e for pair in operands for part in pair for e in part))
    if any(e.const is None for e in exprs):
        return None
    if all(s == shape for s, _ in operands) and len({t for _, t in operands}) == 1 and is_dense(shape, operands[0][1]):
        return operands[0][1]
    ndim = len(shape)
    table = [_over(ndim, *pair) for pair in operands]
    extents = [e.const or 0 for e in shape]
    order = list(reversed(range(ndim)))  # fastest first
    for i in range(1, ndim):
        k = i
        for j in range(i - 1, -1, -1):
            which = _slower(table, extents, order[j], order[k])
            if which > 0:
                order[j], order[k], k = order[k], order[j], j
            elif which < 0:
                break
    plain = contiguous_strides(tuple(shape[d] for d in reversed(order)))
    out = [ix.ONE] * ndim
    for d, step in zip(reversed(order), plain, strict=True):
        out[d] = step
    return tuple(out)


def _over(ndim: int, shape: Shape, strides: Shape) -> list[int]:
    """An operand's strides over the broadcast dimensions; 0 where it is stretched."""
    lead = ndim - len(shape)
    return [0] * lead + [0 if n is ix.ONE else (s.const or 0) for n, s in zip(shape, strides, strict=True)]


def _slower(table: list[list[int]], extents: list[int], a: int, b: int) -> int:
    """1 when dimension a is to lie outside b, -1 when inside, 0 when no operand tells."""
    for strides in table:
        if strides[a] == 0 or strides[b] == 0:
            continue
        if strides[a] != strides[b]:
            return 1 if strides[a] > strides[b] else -1
        if extents[a] > extents[b]:
            return 1
    return 0
