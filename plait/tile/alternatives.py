"""Schedules worth measuring beside a program's default one, on a GPU.

What a block may hold in shared memory is checked here, roughly, so that few of them are built in vain; what it needs of
registers only the compiler knows, and the measurement finds.
"""

from __future__ import annotations

import math

from plait.tile.program import Dot, Load, Sweep, TileProgram, walk
from plait.tile.schedule import EVERY, Schedule

_SHARED = 227 * 1024  # bytes of shared memory that a block may have
_SMALL = 1024  # points of a tile up to which it counts for nothing
_LEFT = 2 * 1024  # of it for exchanges between warps


def alternatives(program: TileProgram) -> list[Schedule]:
    """Of a persistent product: a block for each tile, with descriptors and without, and the tile of the other width. Of a
    skinny one: other tiles. Of one that streams through columns: with descriptors. Of products over a stream: deeper pipelines with wider or narrower steps, and half the rows. Of
    others: half and twice the warps."""
    default = program.schedule
    dots = [s for s in program.walk() if isinstance(s, Dot)]
    if default.blocks:
        found = [default.having(blocks=0, stages=3), default.having(blocks=EVERY), *_other_widths(program)]
    elif (few := _skinny(program, dots)) is not None:
        found = few
    elif len(dots) > 1 and any(s.scale is not None or len(dots) > 2 for s in dots):
        found = _steps(program, len(dots))
    elif len(dots) == 1 and _is_streamed(program):
        found = [default.having(blocks=EVERY), default.having(blocks=EVERY, stages=default.stages + 1)]
    else:
        found = [default.having(warps=w) for w in (default.warps // 2, default.warps * 2) if 1 <= w <= 32]
    return [s for s in found if s != default and shared_bytes(program, s) <= _SHARED - _LEFT]


def shared_bytes(program: TileProgram, schedule: Schedule) -> int:
    """Shared memory that the tiles of products' factors take, one for every stage where they are loaded in a loop: an
    estimate from below."""
    swept = {s.dim for s in program.walk() if isinstance(s, Sweep) and not _covered(program, schedule, s.dim)}
    if not any(isinstance(s, Dot) for s in program.walk()):
        return 0
    tiles: dict[tuple[int, ...], int] = {}  # a tile read from two sides is there once
    for s in program.walk():
        sides = sorted(_points(program, schedule, d) for d in s.span) if isinstance(s, Load) else []
        if isinstance(s, Load) and len(sides) > 1 and math.prod(sides) >= _SMALL:
            stages = schedule.stages if swept & set(s.span) else 1
            size = math.prod(sides) * program.buffers[s.buffer].dtype.nbytes * stages
            tiles[s.buffer, *sides] = max(size, tiles.get((s.buffer, *sides), 0))
    return sum(tiles.values())


def _is_streamed(program: TileProgram) -> bool:
    """Whether a product's loop is inside another."""
    return any(
        isinstance(inner, Sweep) and any(isinstance(s, Dot) for s in walk((inner,)))
        for s in program.walk()
        if isinstance(s, Sweep)
        for inner in s.body
    )


def _skinny(program: TileProgram, dots: list[Dot]) -> list[Schedule] | None:
    """Other (columns, points a step, warps, stages) of a product that streams one factor past 1 to 16 rows; None for others."""
    default = program.schedule
    swept = {program.dims[s.dim].name for s in program.walk() if isinstance(s, Sweep)}
    columns = [name for name, n in default.tile if name not in swept and n > 1]
    steps = [name for name, n in default.tile if name in swept and n > 1]
    sides = sorted(default.size(c) for c in columns)
    if not dots or len(steps) != 1 or any(d.scale is not None for d in dots):
        return None
    if sides == [4]:
        wanted = ((2, 1024, 2, 4), (8, 512, 4, 3), (8, 1024, 8, 3))
    elif len(sides) == 2 and sides[0] <= 16 and sides[1] == 32:
        wanted = ((16, 128, 2, 6), (64, 128, 2, 6), (32, 256, 4, 4))
    else:
        return None
    column = next(c for c in reversed(columns) if default.size(c) == sides[-1])
    return [
        default.having(tile=_with(default, {column: n, steps[0]: step}), warps=warps, stages=stages)
        for n, step, warps, stages in wanted
    ]


def _covered(program: TileProgram, schedule: Schedule, dim: int) -> bool:
    extent, n = program.dims[dim].extent.const, schedule.size(program.dims[dim].name)
    return n == 0 or (extent is not None and extent <= n)


def _points(program: TileProgram, schedule: Schedule, dim: int) -> int:
    """Points of a dim that a block holds at once."""
    extent, n = program.dims[dim].extent.const, schedule.size(program.dims[dim].name)
    return extent if extent is not None and (n == 0 or extent < n) else max(n, 1)


def _other_widths(program: TileProgram) -> list[Schedule]:
    """A tile of 128 x 128 instead of 128 x 256, or the other way round."""
    default = program.schedule
    swept = {program.dims[s.dim].name for s in program.walk() if isinstance(s, Sweep)}
    sides = [(name, n) for name, n in default.tile if name not in swept and n >= 128]
    if len(sides) != 2:
        return []
    column, n = sides[1]
    if n == 256:
        return [default.having(tile=_with(default, {column: 128}), stages=4)]
    extent = next(d.extent.const or 0 for d in program.dims if d.name == column)
    alone = _in_loops(program) == 1
    return [default.having(tile=_with(default, {column: 256}), stages=3)] if extent >= 256 and alone else []


def _in_loops(program: TileProgram) -> int:
    """Products that are added up in loops."""
    return sum(
        isinstance(s, Dot) and not all(_covered(program, program.schedule, d) for d in s.dims)
        for s in walk(program.body)
    )


def _steps(program: TileProgram, dots: int) -> list[Schedule]:
    """(rows, points a step, warps, stages) that were best somewhere on an H200: two products of heads of 128 (attention) and
    three or four (its gradients)."""
    default = program.schedule
    swept = {program.dims[s.dim].name for s in program.walk() if isinstance(s, Sweep)}
    rows = [name for name, n in default.tile if n >= 64 and name not in swept]
    steps = [name for name, n in default.tile if n and name in swept]
    if len(rows) != 1 or len(steps) != 1:
        return []
    wanted = ((128, 128, 8, 3), (128, 64, 8, 3)) if dots == 2 else ((128, 32, 8, 3), (64, 64, 4, 2), (128, 64, 8, 3))
    return [
        default.having(tile=_with(default, {rows[0]: n, steps[0]: step}), warps=warps, stages=stages)
        for n, step, warps, stages in wanted
        if n <= default.size(rows[0])
    ]


def _with(schedule: Schedule, sizes: dict[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple((name, sizes.get(name, old)) for name, old in schedule.tile)
