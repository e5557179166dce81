"""The default schedule of a flat program on a device: which dim is the vector, how large the tiles are.

Start from what memory wants: the dim that most loads and stores walk with stride 1 is the vector dim. A tuner may try
others; these are the ones it must beat.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from plait.ir import index as ix
from plait.ir.index import Expr
from plait.plan.device import DeviceSpec
from plait.tile.choose_contract import choose_contract, has_dots
from plait.tile.flat import Flat
from plait.tile.program import Dim, Load, Reduce, Scan, Store
from plait.tile.schedule import Schedule, power_of_two

Hint = Callable[[Expr], int]

_CPU_TILE = (
    4096  # points of a pointwise tile: a few pages, so that threads share no line and the loop overhead vanishes
)
_CPU_LANES = 256  # columns a thread reduces at once: 1 KB of f32, a row of it is 16 cache lines
_GPU_TILE = 1024
_GPU_ROW_TILE = 4096  # elements a block of short rows holds


def choose(flat: Flat, spec: DeviceSpec, hint: Hint) -> Schedule:
    """The default schedule. Raises LowerFailed where there is none."""
    if has_dots(flat):
        return choose_contract(flat, spec, hint, vector_dim(flat, hint))
    return _choose_cpu(flat, hint) if spec.kind == "cpu" else _choose_gpu(flat, spec, hint)


def vector_dim(flat: Flat, hint: Hint) -> int | None:
    """The dim with most stride-1 traffic; ties go to the later dim. None when there are no dims."""
    best: tuple[float, int] | None = None
    for i, d in enumerate(flat.dims):
        if hint(d.extent) == 1:
            continue
        score = sum(
            _affinity(s.address, i) * _points(flat, s.span, hint) for s in flat.stmts if isinstance(s, Load | Store)
        )
        if any(isinstance(s, Scan) and s.dim == i for s in flat.stmts):
            score = min(score, 0.0) - 1.0  # a scan runs point by point
        if hint(d.extent) < 8:
            score *= 0.1
        if best is None or (score, i) >= best:
            best = (score, i)
    return None if best is None else best[1]


def _points(flat: Flat, span: Iterable[int], hint: Hint) -> float:
    out = 1.0
    for i in span:
        out *= hint(flat.dims[i].extent)
    return out


def _affinity(address: Expr, dim: int) -> float:
    """How well a dim suits one address: 1 for stride 1, 0 where it does not move, negative for jumps."""
    if dim not in address.axes():
        return 0.0
    coeffs, _ = address.linear()
    c = coeffs.get(ix.axis_atom(dim))
    if c is None:
        return -0.25
    return 1.0 if c is ix.ONE else -0.5


def _choose_cpu(flat: Flat, hint: Hint) -> Schedule:
    v = vector_dim(flat, hint)
    rows = [d for d in flat.dims if d.role == "row"]
    form = "swept" if rows else "flat"
    if v is None:
        return Schedule(form=form)
    dim = flat.dims[v]
    if dim.role == "row":
        return Schedule(form=form, tile=((dim.name, 0),), vector=dim.name)
    others = 1
    for i, d in enumerate(flat.dims):
        if i != v and d.role == "grid":
            others *= hint(d.extent)
    most = _CPU_LANES if rows else _CPU_TILE
    # at least four tiles in all, so that two threads balance
    want = max(16, min(most, -(-hint(dim.extent) * others // 4)))
    return Schedule(form=form, tile=((dim.name, 1 << (want - 1).bit_length() if want > 16 else 16),), vector=dim.name)


def _choose_gpu(flat: Flat, spec: DeviceSpec, hint: Hint) -> Schedule:
    """The rules of docs/design/gpu-schedules.md, which has the measurements behind them."""
    rows = [d for d in flat.dims if d.role == "row"]
    v = vector_dim(flat, hint)
    if v is None:
        return Schedule(form="flat", tile=tuple((d.name, 0) for d in rows), warps=1)
    if not rows:
        return _pointwise_gpu(flat, v, hint)
    static = all(d.extent.const is not None for d in rows)
    row_elems = math.prod(power_of_two(hint(d.extent)) for d in rows) if static else 1 << 30
    if flat.dims[v].role == "grid":
        return _columns_gpu(flat, v, row_elems, hint)
    if row_elems <= spec.row_elems:
        return _rows_gpu(flat, row_elems, rows, hint, flat.dims[v].name)
    return _long_rows_gpu(flat, rows, v, hint)


def _width(flat: Flat, v: int) -> int:
    """Bytes of the widest element that is loaded along the vector dim."""
    loads = [s for s in flat.stmts if isinstance(s, Load) and v in s.span]
    return max((flat.buffers[s.buffer].dtype.nbytes for s in loads), default=4)


def _pointwise_gpu(flat: Flat, v: int, hint: Hint) -> Schedule:
    dim = flat.dims[v]
    extent = power_of_two(hint(dim.extent))
    other = _second_vector(flat, v, hint)
    if other is not None:
        return Schedule(tile=((flat.dims[other].name, 32), (dim.name, 32)), warps=4, vector=dim.name)
    streams = sum(isinstance(s, Load) and len(s.span) == len(flat.dims) for s in flat.stmts)
    want = _GPU_TILE * (2 if streams == 1 and _width(flat, v) <= 2 else 1)
    tile = [(dim.name, min(want, extent))]
    left = want // min(want, extent)
    outer = [d for i, d in enumerate(flat.dims) if i != v]
    if left > 1 and outer:
        # short inner dims: a block takes several of the next dim out
        tile.insert(0, (outer[-1].name, min(left, power_of_two(hint(outer[-1].extent)))))
    return Schedule(tile=tuple(tile), warps=4, vector=dim.name)


def _second_vector(flat: Flat, v: int, hint: Hint) -> int | None:
    """Another dim that some access walks with stride 1 (a transpose): tile both."""
    for i, d in enumerate(flat.dims):
        if i == v or hint(d.extent) < 16:
            continue
        for s in flat.stmts:
            if isinstance(s, Load | Store) and _affinity(s.address, i) == 1.0 and _affinity(s.address, v) < 0:
                return i
    return None


def _rows_gpu(flat: Flat, row_elems: int, rows: list[Dim], hint: Hint, vector: str) -> Schedule:
    """Rows on chip, a few dozen elements a thread; short rows several to a block."""
    tile = [(d.name, 0) for d in rows]
    grid = [d for d in flat.dims if d.role == "grid"]
    if row_elems < 1024 and grid:
        row_elems *= _copies(flat)  # a row cut into pieces is held in as many values
        several = min(_GPU_ROW_TILE // row_elems, power_of_two(hint(grid[-1].extent)))
        tile.insert(0, (grid[-1].name, several))
        return Schedule(
            form="flat", tile=tuple(tile), warps=_warps(several * row_elems, 32, least=1, most=4), vector=vector
        )
    v = next(i for i, d in enumerate(flat.dims) if d.name == vector)
    reductions = sum(isinstance(s, Reduce) for s in flat.stmts)
    each = 64 if reductions >= 4 else 32
    each = each if _width(flat, v) <= 2 else each // 2
    return Schedule(form="flat", tile=tuple(tile), warps=_warps(row_elems, each, least=1, most=32), vector=vector)


def _copies(flat: Flat) -> int:
    """Into how many pieces the row dims were cut: stores of one buffer."""
    stores = [s.buffer for s in flat.stmts if isinstance(s, Store)]
    return max((stores.count(b) for b in stores), default=1)


def _warps(elems: int, each: int, *, least: int, most: int) -> int:
    return max(least, min(most, power_of_two(elems // (32 * each))))


def _columns_gpu(flat: Flat, v: int, row_elems: int, hint: Hint) -> Schedule:
    """Reductions over an outer axis: neighbouring threads take neighbouring columns, a tile of rows at a time."""
    width = min(64, power_of_two(hint(flat.dims[v].extent)))
    rows = [d for d in flat.dims if d.role == "row"]
    name = flat.dims[v].name
    if len(rows) == 1 and row_elems <= 256 and not any(isinstance(s, Scan) for s in flat.stmts):
        return Schedule(form="flat", tile=((name, width), (rows[0].name, 0)), warps=4, vector=name)
    depth = max(1, 4096 // width)
    tile = [(name, width), *((r.name, 1) for r in rows[:-1]), (rows[-1].name, depth)]
    return Schedule(form="swept", tile=tuple(tile), warps=8, vector=name)


def _long_rows_gpu(flat: Flat, rows: list[Dim], v: int, hint: Hint) -> Schedule:
    """Chunks of a row at a time, 16 elements of two bytes a thread, so that all threads are resident."""
    chunk = 8192 if hint(flat.dims[v].extent) % 8192 == 0 else 4096
    covered = flat.dims[v].extent.const is not None and hint(flat.dims[v].extent) <= chunk
    vector = flat.dims[v].name
    tile = [(r.name, 1) for r in rows if r.name != vector]
    tile.append((vector, 0 if covered else chunk))
    return Schedule(form="swept", tile=tuple(tile), warps=16 if chunk == 8192 else 8, vector=vector)
