"""The plain schedule of a program: what it falls back to where the chosen one is declined, as bisection does.

It is made from as few facts as it can be, so that a rule in tile/choose that errs is not asked again: one vector dim,
tiles of a fixed size, no pipeline.
"""

from __future__ import annotations

import math

from plait.plan.device import DeviceSpec
from plait.tile.choose import Hint, choose, vector_dim
from plait.tile.choose_contract import has_dots
from plait.tile.flat import Flat
from plait.tile.schedule import Schedule, power_of_two

_TILE = 256  # points of a vector dim that a block or thread takes
_ROW = 4096  # points of rows that a GPU's block holds whole


def plain(flat: Flat, spec: DeviceSpec, hint: Hint) -> Schedule:
    """A schedule that is right for every device of its kind. Raises LowerFailed where there is none."""
    if has_dots(flat):
        # tiles of products follow from their shapes: what is left to choose is how loads overlap with them
        return choose(flat, spec, hint).having(blocks=0, stages=1)
    v = vector_dim(flat, hint)
    rows = [d for d in flat.dims if d.role == "row"]
    name = "" if v is None else flat.dims[v].name
    is_row = v is not None and flat.dims[v].role == "row"
    if spec.kind == "cpu":
        one = ((name, 0 if is_row else _TILE),) if name else ()
        return Schedule(form="swept" if rows else "flat", tile=one, vector=name)
    static = all(d.extent.const is not None for d in rows)
    short = static and math.prod(power_of_two(hint(d.extent)) for d in rows) <= _ROW
    if not rows or (short and (is_row or v is None)):
        tile = tuple((d.name, 0) for d in rows)
        return Schedule(form="flat", tile=tile if rows else ((name, _TILE),) if name else (), warps=4, vector=name)
    tile = tuple((d.name, 1) for d in rows if d.name != name)
    return Schedule(form="swept", tile=(*tile, (name, 1024 if is_row else 32)) if name else tile, warps=8, vector=name)
