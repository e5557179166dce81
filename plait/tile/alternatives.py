"""Schedules worth measuring beside a program's default one."""

from __future__ import annotations

from plait.tile.program import Dot, Sweep, TileProgram
from plait.tile.schedule import Schedule


def alternatives(program: TileProgram) -> list[Schedule]:
    """Half and twice the warps; of a persistent product, blocks that take one tile each, and the tile of the other width."""
    default = program.schedule
    if default.blocks:
        return [default.having(blocks=0, stages=3), *_other_widths(program)]
    return [default.having(warps=w) for w in (default.warps // 2, default.warps * 2) if 1 <= w <= 32]


def _other_widths(program: TileProgram) -> list[Schedule]:
    """A tile of 128 x 128 instead of 128 x 256, or the other way round."""
    default = program.schedule
    swept = {program.dims[s.dim].name for s in program.walk() if isinstance(s, Sweep)}
    sides = [(name, n) for name, n in default.tile if name not in swept and n >= 128]
    if len(sides) != 2 or sum(isinstance(s, Dot) for s in program.walk()) > 1:
        return []
    (_, _), (column, n) = sides
    if n == 256:
        return [default.having(tile=_with(default, column, 128), stages=4)]
    extent = next(d.extent.const or 0 for d in program.dims if d.name == column)
    return [default.having(tile=_with(default, column, 256), stages=3)] if extent >= 256 else []


def _with(schedule: Schedule, name: str, n: int) -> tuple[tuple[str, int], ...]:
    return tuple((each, n if each == name else old) for each, old in schedule.tile)
