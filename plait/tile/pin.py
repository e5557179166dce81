"""Schedules that the user pins: read, judged against the program and the device, and refused with the reason where they do not fit."""

from __future__ import annotations

import math
from collections.abc import Callable

from plait.errors import BadOption, CheckFailed, LowerFailed
from plait.ir.index import Expr
from plait.plan.device import LIMITS, DeviceSpec
from plait.tile.alternatives import shared_bytes
from plait.tile.check import check_program
from plait.tile.lower import Lowered
from plait.tile.program import Dot, Let, Load, Reduce, Scan, TileProgram
from plait.tile.schedule import EVERY, Schedule, parse_schedule, power_of_two

_MOST_POINTS = 1 << 20  # of one tile, on a GPU: Triton's limit
_WARPS = (1, 2, 4, 8, 16, 32)


def pinned(text: str, default: Lowered, lower_under: Callable[[Schedule], Lowered], spec: DeviceSpec) -> Lowered:
    """A group under the schedule that `text` says. `default`: the group as it is lowered by itself. Raises BadOption."""
    name = default.program.name
    try:
        schedule = parse_schedule(text)
    except ValueError as error:
        raise BadOption(f"the schedule pinned for {name} cannot be read: {error}", hint=_hint(default)) from error
    reason = why_not_schedule(default.program, schedule, spec)
    if reason is None:
        try:
            lowered = lower_under(schedule)
            check_program(lowered.program)
            return lowered
        except LowerFailed as error:
            reason = error.message
        except CheckFailed as error:
            reason = str(error).splitlines()[0]
    raise BadOption(f"the schedule pinned for {name} does not fit: {reason}", hint=_hint(default))


def _hint(default: Lowered) -> str:
    dims = ", ".join(f"{d.name} ({d.role}, {d.extent})" for d in default.program.dims)
    return f"by itself it takes {default.program.schedule}; its dims are {dims or 'none'}"


def why_not_schedule(program: TileProgram, schedule: Schedule, spec: DeviceSpec) -> str | None:
    """What is wrong with a schedule for a program on a device, as far as that is known before compiling."""
    dims = {d.name: d for d in program.dims}
    named = [d for d, _ in schedule.tile] + ([schedule.vector] if schedule.vector else [])
    unknown = [d for d in named if d not in dims]
    if unknown:
        return f"there is no dim {unknown[0]!r}"
    if len({d for d, _ in schedule.tile}) < len(schedule.tile):
        return "a dim is tiled twice"
    if schedule.form not in ("flat", "swept"):
        return f"there is no form {schedule.form!r} (flat, swept)"
    odd = [f"{d}:{n}" for d, n in schedule.tile if n != 0 and (n < 0 or power_of_two(n) != n)]
    if odd:
        return f"tile {odd[0]} is no power of two"
    cut = [d.name for d in program.dims if d.role == "row" and _is_cut(d.extent, schedule.size(d.name))]
    if schedule.form == "flat" and cut:
        return f"the flat form has rows whole ({cut[0]}:all)"
    return _why_not_on_gpu(program, schedule, spec) if spec.kind == "cuda" else _why_not_on_cpu(schedule)


def _is_cut(extent: Expr, tile: int) -> bool:
    return tile != 0 and (extent.const is None or tile < extent.const)


def _why_not_on_cpu(schedule: Schedule) -> str | None:
    return "blocks are for GPUs" if schedule.blocks else None


def _why_not_on_gpu(program: TileProgram, schedule: Schedule, spec: DeviceSpec) -> str | None:
    if schedule.warps not in _WARPS:
        return f"{schedule.warps} warps: a block has 1, 2, 4, 8, 16 or 32"
    if not 1 <= schedule.stages <= 8:
        return f"{schedule.stages} stages: from 1 to 8"
    dots = any(isinstance(s, Dot) for s in program.walk())
    if schedule.blocks and not (dots and spec.descriptors):
        return "only products, on cards that move whole tiles, have persistent blocks"
    if not (schedule.blocks == EVERY or schedule.blocks >= 0):
        return f"{schedule.blocks} blocks"
    moving = [d for d in program.dims if schedule.size(d.name) == 0 and d.extent.const is None]
    if moving:
        return f"{moving[0].name} is as long as the call says: a block cannot hold all of it"
    tile = [_points(schedule.size(d.name), d.extent) for d in program.dims]
    values = (s for s in program.walk() if isinstance(s, Let | Load | Reduce | Scan))
    points = max((math.prod(tile[d] for d in s.span) for s in values), default=1)
    if points > _MOST_POINTS:
        return f"a block would hold {points} points at once, at most {_MOST_POINTS} can be"
    shared = shared_bytes(program, schedule)
    most = LIMITS[spec.name].most_shared
    if shared > most:
        return f"it takes {shared >> 10} KB of shared memory, a block of a {spec.name} has {most >> 10}"
    return None


def _points(tile: int, extent: Expr) -> int:
    whole = extent.const
    return tile if tile else power_of_two(whole or 1)
