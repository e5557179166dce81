"""The default schedule of a flat program on a device: which dim is the vector, how large the tiles are.

Start from what memory wants: the dim that most loads and stores walk with stride 1 is the vector dim. A tuner may try
others; these are the ones it must beat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from plait.ir import index as ix
from plait.ir.index import Expr
from plait.plan.device import DeviceSpec
from plait.tile.flat import Flat
from plait.tile.program import Load, Reduce, Scan, Store
from plait.tile.schedule import Schedule

Hint = Callable[[Expr], int]

_CPU_TILE = (
    4096  # points of a pointwise tile: a few pages, so that threads share no line and the loop overhead vanishes
)
_CPU_LANES = 256  # columns a thread reduces at once: 1 KB of f32, a row of it is 16 cache lines
_GPU_TILE = 1024
_GPU_ROW_TILE = 4096  # elements a block of short rows holds


def choose(flat: Flat, spec: DeviceSpec, hint: Hint) -> Schedule:
    """The default schedule."""
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


def _pow2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _choose_gpu(flat: Flat, spec: DeviceSpec, hint: Hint) -> Schedule:
    rows = [(i, d) for i, d in enumerate(flat.dims) if d.role == "row"]
    v = vector_dim(flat, hint)
    if v is None:
        return Schedule(form="flat", warps=1)
    row_elems = 1
    for _, d in rows:
        row_elems *= _pow2(hint(d.extent)) if d.extent.const is not None else 1 << 30
    if not rows:
        return _pointwise_gpu(flat, v, hint)
    if flat.dims[v].role == "grid":
        return _columns_gpu(flat, v, rows_extent=row_elems, hint=hint)
    if row_elems <= spec.row_elems:
        return _rows_gpu(flat, row_elems, [d.name for _, d in rows], hint, flat.dims[v].name)
    return _long_rows_gpu(flat, [d.name for _, d in rows], v)


def _pointwise_gpu(flat: Flat, v: int, hint: Hint) -> Schedule:
    dim = flat.dims[v]
    extent = _pow2(hint(dim.extent))
    other = _second_vector(flat, v, hint)
    if other is not None:
        return Schedule(tile=((flat.dims[other].name, 32), (dim.name, 32)), warps=4, vector=dim.name)
    tile = [(dim.name, min(_GPU_TILE, extent))]
    left = _GPU_TILE // min(_GPU_TILE, extent)
    if left > 1:
        outer = [i for i, d in enumerate(flat.dims) if i != v]
        if outer:
            # short inner dims: a block takes several of the next dim out
            tile.insert(0, (flat.dims[outer[-1]].name, min(left, _pow2(hint(flat.dims[outer[-1]].extent)))))
    return Schedule(tile=tuple(tile), warps=4, vector=dim.name)


def _second_vector(flat: Flat, v: int, hint: Hint) -> int | None:
    """Another dim that some access walks with stride 1 (a transpose): tile both."""
    for i, d in enumerate(flat.dims):
        if (
            i != v
            and hint(d.extent) >= 16
            and any(
                isinstance(s, Load | Store) and _affinity(s.address, i) == 1.0 and _affinity(s.address, v) < 0
                for s in flat.stmts
            )
        ):
            return i
    return None


def _rows_gpu(flat: Flat, row_elems: int, rows: list[str], hint: Hint, vector: str) -> Schedule:
    per_block = max(1, _GPU_ROW_TILE // row_elems) if row_elems < 1024 else 1
    tile = [(r, 0) for r in rows]
    grid = [d for d in flat.dims if d.role == "grid"]
    if per_block > 1 and grid:
        tile.insert(0, (grid[-1].name, min(per_block, _pow2(hint(grid[-1].extent)))))
    elems = row_elems * per_block
    warps = max(1, min(32, elems // 512))
    warps = 1 << (warps.bit_length() - 1)
    return Schedule(form="flat", tile=tuple(tile), warps=max(warps, 1 if elems <= 256 else 4), vector=vector)


def _columns_gpu(flat: Flat, v: int, rows_extent: int, hint: Hint) -> Schedule:
    """Reductions over an outer axis: neighbouring threads take neighbouring columns, a tile of rows at a time."""
    width = min(64, _pow2(hint(flat.dims[v].extent)))
    rows = [d for d in flat.dims if d.role == "row"]
    depth = max(1, 4096 // width)
    if len(rows) == 1 and rows_extent <= 256 and not any(isinstance(s, Scan) for s in flat.stmts):
        return Schedule(
            form="flat", tile=((flat.dims[v].name, width), (rows[0].name, 0)), warps=4, vector=flat.dims[v].name
        )
    tile = [(flat.dims[v].name, width), *((r.name, 1) for r in rows[:-1]), (rows[-1].name, depth)]
    return Schedule(form="swept", tile=tuple(tile), warps=8, vector=flat.dims[v].name)


def _long_rows_gpu(flat: Flat, rows: list[str], v: int) -> Schedule:
    reductions = sum(isinstance(s, Reduce) for s in flat.stmts)
    chunk = 8192 if reductions <= 2 else 4096
    tile = [*((r, 1) for r in rows if r != flat.dims[v].name), (flat.dims[v].name, chunk)]
    return Schedule(form="swept", tile=tuple(tile), warps=16 if chunk >= 8192 else 8, vector=flat.dims[v].name)
