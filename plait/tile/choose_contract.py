"""The default schedule of a program with contractions: which dims blocks own, which they stream over, which stay whole.

rows, columns   free dims of a Dot's two factors that blocks own: a tile of each
batch           dims that both factors (or none) vary over, or the factor that is streamed: one point a block
stream          row dims that a Dot's result varies over (keys of attention, a vocabulary): swept, a tile at a time
depth           summed dims: whole where another reduction waits for the sum in every step of a stream, else swept
width           free dims of a Dot over a stream that its inner Dots lack (attention's value dim): whole, because each
                tile of it would do the inner products again
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from plait.errors import LowerFailed
from plait.ir.index import Expr
from plait.plan.contract_cost import FEW, columns_a_block
from plait.plan.device import DeviceSpec
from plait.tile.flat import Flat
from plait.tile.program import Dot, Load, Store, draw_of
from plait.tile.schedule import Schedule, power_of_two

Hint = Callable[[Expr], int]
WIDEST = 256  # points of a dim that a block holds whole
_LONG = 1024  # summed points from which on a product keeps a persistent block busy
# rows up to which -> (points a step of 16-bit factors, warps, stages) of a product that streams its other factor: many bytes
# in flight
_SKINNY = {1: (512, 2, 4), FEW["cuda"]: (128, 4, 6)}
_LEAST = 16  # summed points of a step, which tensor cores need
_SPILLED = 1.25  # times its extent is what a summed dim may take in whole tiles
_PANEL = 256  # summed points that a CPU's packed factor holds
_UNPACKED = 4096  # and of a step where few rows read the other factor where it lies
_NARROW = 64  # columns of a tile there
_VECTOR = 8  # points of a CPU's vector
_WASTE = 0.9  # of the better use of the last wave of blocks is worth twice the tile


@dataclass(frozen=True)
class Roles:
    """Dims by what contractions make of them."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    stream: tuple[int, ...]
    depth: tuple[int, ...]
    width: tuple[int, ...]


def has_dots(flat: Flat) -> bool:
    """Whether this file is the one to ask."""
    return any(isinstance(s, Dot) for s in flat.stmts)


def roles(flat: Flat) -> Roles:
    """Sort the dims of a program with contractions."""
    spans = _spans(flat)
    dots = [s for s in flat.stmts if isinstance(s, Dot)]
    row = {i for i, d in enumerate(flat.dims) if d.role == "row"}
    stream = {d for s in dots for d in s.span if d in row}
    inner = [s for s in dots if stream & set(s.span)]
    outer = [s for s in dots if not stream & set(s.span)]
    rows: dict[int, None] = {}
    columns: dict[int, None] = {}
    width: dict[int, None] = {}
    for s in (*inner, *outer):
        a, b = (spans[k] - row for k in (s.arg, s.other))
        for d in sorted(a - b):
            (rows if d not in columns else columns).setdefault(d)
        for d in sorted(b - a):
            lacks = inner and s in outer and not any(d in t.span for t in inner)
            (width if lacks else rows if d in rows else columns).setdefault(d)
    if inner:
        for s in outer:  # a product of the stream with the rows may stand on either side
            for d in [d for d in rows if d in s.span and not any(d in t.span for t in inner)]:
                del rows[d]
                width.setdefault(d)
    for d in _batch(dots, spans, row, stream):
        for found in (rows, columns, width):
            found.pop(d, None)
    depth = {d for s in dots for d in s.dims} - stream
    return Roles(tuple(rows), tuple(columns), tuple(sorted(stream)), tuple(sorted(depth)), tuple(width))


def _spans(flat: Flat) -> dict[int, frozenset[int]]:
    return {getattr(s, "out", -1): frozenset(getattr(s, "span", ())) for s in flat.stmts}


def _batch(dots: list[Dot], spans: dict[int, frozenset[int]], row: set[int], stream: set[int]) -> set[int]:
    """Dims of which a block has one point: both factors of some product vary over them, or the one that streams by does."""
    out: set[int] = set()
    for s in dots:
        a, b = spans[s.arg], spans[s.other]
        out |= (a & b) - row
        for x in (a - b, b - a):
            if x & stream:
                out |= x - row
    return out


def choose_contract(flat: Flat, spec: DeviceSpec, hint: Hint, vector: int | None) -> Schedule:
    """The default schedule. Raises LowerFailed for a program whose blocks would not hold what they must."""
    found = roles(flat)
    tile: dict[int, int] = {}
    for d in found.width:
        extent = flat.dims[d].extent.const
        if extent is None or extent > WIDEST:
            raise LowerFailed(f"a block would have to hold all {flat.dims[d].extent} points of the result's rows")
        tile[d] = 0
    if _held(flat, found.width) > WIDEST:
        raise LowerFailed("a block would have to hold the result's rows whole")
    tile |= _depth_tiles(flat, found, spec, hint)
    sizes = _cpu_tiles(flat, found, spec, hint) if spec.kind == "cpu" else _gpu_tiles(flat, found, spec, hint)
    tile |= sizes
    name = flat.dims[vector].name if vector is not None else ""
    tiles = tuple((flat.dims[d].name, tile[d]) for d in sorted(tile))
    if spec.kind == "cpu":
        return Schedule(form="swept", tile=tiles, vector=name)
    rows = 128 if found.stream else _rows(flat, found, hint)
    if (skinny := _skinny(rows)) is not None:
        _, warps, stages = skinny
        return Schedule(form="swept", tile=tiles, warps=warps, stages=stages, vector=name)
    warps = _warps(flat, found, sizes)
    blocks = spec.units if _walks(flat, found, sizes, spec, hint) else 0
    wide = any(sizes.get(d, 0) > 128 for d in found.stream)
    stages = 2 if found.stream and not wide else 4 if blocks and _long_products(flat, tile) == 1 else 3
    return Schedule(form="swept", tile=tiles, warps=warps, stages=stages, vector=name, blocks=blocks)


def _long_products(flat: Flat, tile: dict[int, int]) -> int:
    """Products that are added up in a loop: each holds an accumulator while it runs."""
    return sum(
        isinstance(s, Dot) and any(tile.get(d) and (flat.dims[d].extent.const or WIDEST) > tile[d] for d in s.dims)
        for s in flat.stmts
    )


def _area(found: Roles, sizes: dict[int, int]) -> int:
    """Points of a block's tile of the result."""
    return math.prod(sizes.get(d, 1) for d in (*found.rows[-1:], *found.columns[-1:]))


def _walks(flat: Flat, found: Roles, sizes: dict[int, int], spec: DeviceSpec, hint: Hint) -> bool:
    """Blocks that walk several tiles each: while one is stored, the next one's factors are on their way. It takes more tiles
    than blocks, and products long enough that the start of a tile is little beside it."""
    depth = math.prod(hint(flat.dims[d].extent) for d in found.depth)
    return (
        spec.descriptors
        and not found.stream
        and _operand_bytes(flat) <= 2
        and _area(found, sizes) >= 128 * 128
        and depth >= _LONG
        and _blocks(flat, sizes | dict.fromkeys(found.depth, 0), hint) > spec.units
    )


def _warps(flat: Flat, found: Roles, sizes: dict[int, int]) -> int:
    """Warps that hold a block's tiles of 32-bit values in registers: each has 64 KB less what addresses take. A drawn number
    is made of four words that live together."""
    side = max((sizes.get(d, 1) for d in (*found.rows, *found.columns)), default=1)
    draws = _draws(flat)
    if found.stream:
        return 8 if side >= 128 or draws else 4
    return 8 if _area(found, sizes) >= (128 * 64 if draws else 128 * 128) else 4


def _held(flat: Flat, width: tuple[int, ...]) -> int:
    """Points of the widest result that a block holds whole, along those dims."""
    spans = [frozenset(s.span) & set(width) for s in flat.stmts if isinstance(s, Dot)]
    return max((math.prod(flat.dims[d].extent.const or 1 for d in span) for span in spans), default=1)


def _draws(flat: Flat) -> bool:
    return any(draw_of(s) is not None for s in flat.stmts)


def _operand_bytes(flat: Flat) -> int:
    return max(s.operand.nbytes for s in flat.stmts if isinstance(s, Dot))


def _rows(flat: Flat, found: Roles, hint: Hint) -> int:
    """Rows of the result that share each column of the other factor: few of them make the product a stream of that factor."""
    sides = [dims for dims in (found.rows, found.columns, found.stream) if dims]
    return min((hint(flat.dims[d].extent) for dims in sides for d in dims[-1:]), default=1) if len(sides) > 1 else 1


def _skinny(rows: int) -> tuple[int, int, int] | None:
    return next((found for most, found in _SKINNY.items() if rows <= most), None)


def _depth_tile(flat: Flat, rows: int) -> int:
    """Summed points of one step: long ones where few rows share what is read, because then bytes in flight are all."""
    step, *_ = _skinny(rows) or (64,)
    return step * 2 // _operand_bytes(flat)


def _depth_tiles(flat: Flat, found: Roles, spec: DeviceSpec, hint: Hint) -> dict[int, int]:
    """Tiles of the summed dims. A block holds a tile of both factors over all those of a product at once, so only the innermost
    is cut into steps; the others go point by point, as descriptors can."""
    if spec.kind == "cpu":
        return _cpu_depths(flat, found, hint)
    tile: dict[int, int] = {}
    for s in flat.stmts:
        if not isinstance(s, Dot):
            continue
        left = _depth_tile(flat, _rows(flat, found, hint))
        held = 1
        for d in sorted(set(s.dims) & set(found.depth), reverse=True):
            extent = flat.dims[d].extent.const
            if found.stream and extent is not None and held * extent <= WIDEST:
                held *= extent
                tile[d] = 0
                continue
            here = _fitting(hint(flat.dims[d].extent), left) if len(s.dims) > 1 else left
            left = max(1, _LEAST // here)
            tile[d] = min(here, tile.get(d, here))
    return tile


def _fitting(extent: int, most: int) -> int:
    """The largest power of two up to `most` in whose multiples an extent wastes little."""
    size = min(most, power_of_two(extent))
    while size > _LEAST and -(-extent // size) * size > _SPILLED * extent:
        size //= 2
    return size


def _largest(flat: Flat, dims: tuple[int, ...], hint: Hint) -> int | None:
    return max(dims, key=lambda d: (hint(flat.dims[d].extent), d), default=None)


def _blocks(flat: Flat, tile: dict[int, int], hint: Hint) -> int:
    out = 1
    for i, d in enumerate(flat.dims):
        if d.role == "grid" and tile.get(i, 1) != 0:
            out *= -(-hint(d.extent) // tile.get(i, 1))
    return out


def _gpu_tiles(flat: Flat, found: Roles, spec: DeviceSpec, hint: Hint) -> dict[int, int]:
    tile: dict[int, int] = dict.fromkeys(found.width, 0)
    narrow = _operand_bytes(flat) <= 2
    rows = 128 if found.stream else _rows(flat, found, hint)
    chosen: list[int] = []
    for dims in (found.rows, found.columns):
        d = _largest(flat, dims, hint)
        if d is not None:
            most = columns_a_block(rows) or (128 if narrow else 64)
            tile[d] = min(most, power_of_two(hint(flat.dims[d].extent)))
            chosen.append(d)
    if len(chosen) == 2 and not found.stream and narrow and all(tile[d] == 128 for d in chosen):
        depths = _depth_tiles(flat, found, spec, hint)
        if _long_products(flat, depths) + 2 * _draws(flat) == 1:
            _widen(flat, tile, chosen[1], spec, hint)
    while found.stream == () and chosen and _blocks(flat, tile, hint) < spec.units:
        d = max(chosen, key=lambda d: tile[d])
        if tile[d] <= 32:
            break
        tile[d] //= 2
    if found.stream:
        last = _largest(flat, found.stream, hint)
        assert last is not None
        held = _held(flat, found.width) if found.width else math.prod(hint(flat.dims[d].extent) for d in found.depth)
        # tiles of rows x stream that are alive at once: the products of a gradient, the words of a draw
        tiles = sum(isinstance(s, Dot) and last in s.span for s in flat.stmts) + 2 * _draws(flat)
        most = 128 if (held <= 64 and tiles == 1) or not found.width else 64
        if _is_reduced_at_once(flat, found, tiles):
            most = 256  # nothing else is held: operands are read from the cache as seldom as the registers allow
        tile[last] = min(most if narrow else 32, max(16, power_of_two(hint(flat.dims[last].extent))))
        tile |= dict.fromkeys(_stepped(flat, found), 1)
    return {d: n for d, n in tile.items() if d not in found.width}


def _stepped(flat: Flat, found: Roles) -> list[int]:
    """Streamed dims that are taken point by point: both factors of every product vary over them, as over a batch."""
    spans = _spans(flat)
    dots = [s for s in flat.stmts if isinstance(s, Dot)]
    return [d for d in found.stream if all(d in spans[s.arg] & spans[s.other] for s in dots)]


def _is_reduced_at_once(flat: Flat, found: Roles, tiles: int) -> bool:
    """Whether a block does nothing but one long product of 16-bit operands, of which only numbers of rows are kept."""
    last = set(found.stream)
    sides = {*last, *found.rows, *found.columns}
    tiles += sum(isinstance(s, Load | Store) and last < set(s.span) & sides for s in flat.stmts)
    swept = all((flat.dims[d].extent.const or WIDEST + 1) > WIDEST for d in found.depth)
    return not found.width and tiles == 1 and swept and _operand_bytes(flat) <= 2


def _widen(flat: Flat, tile: dict[int, int], column: int, spec: DeviceSpec, hint: Hint) -> None:
    """Twice the columns for one product (whose accumulator then takes half the registers): fewer bytes a point. Not where the
    last wave of blocks would be much emptier."""
    if hint(flat.dims[column].extent) < 256:
        return
    before, after = (_full_waves(_blocks(flat, tile | {column: n}, hint), spec.units) for n in (128, 256))
    if after >= _WASTE * before:
        tile[column] = 256


def _full_waves(blocks: int, units: int) -> float:
    """How full the waves of blocks are on average."""
    return blocks / (-(-blocks // units) * units)


def _cpu_tiles(flat: Flat, found: Roles, spec: DeviceSpec, hint: Hint) -> dict[int, int]:
    tile: dict[int, int] = {}
    # beside a stream several tiles of rows x stream are alive at once
    wide = 128 if found.stream else _NARROW if _is_read_alone(flat, found, hint) else 256
    few = _is_few(flat, found, hint)
    # each tile packs the other factor for itself: tall ones do it less often
    tall = 128 if found.stream else 256
    for dims, most in ((found.rows, tall), (found.columns, wide)):
        d = _largest(flat, dims, hint)
        if d is not None:
            tile[d] = _cut(flat.dims[d].extent, wide if few else most, hint, spec.units if few else 1)
    last = _largest(flat, found.stream, hint)
    if last is not None:
        tile[last] = _cut(flat.dims[last].extent, 128, hint)
        tile |= dict.fromkeys(_stepped(flat, found), 1)
    return tile


def _is_few(flat: Flat, found: Roles, hint: Hint) -> bool:
    """Whether a CPU's product has so few rows that it packs nothing."""
    return not found.stream and _rows(flat, found, hint) <= FEW["cpu"]


def _is_read_alone(flat: Flat, found: Roles, hint: Hint) -> bool:
    """Whether tiles of few rows form nothing: they may be narrow, and all threads get as many."""
    read = {s.out for s in flat.stmts if isinstance(s, Load)}
    return _is_few(flat, found, hint) and all({s.arg, s.other} <= read for s in flat.stmts if isinstance(s, Dot))


def _cpu_depths(flat: Flat, found: Roles, hint: Hint) -> dict[int, int]:
    """Tiles of the summed dims: as many points in all as a panel has, of several dims at once where one is short."""
    tile: dict[int, int] = {}
    for s in flat.stmts:
        left = _UNPACKED if _is_few(flat, found, hint) else _PANEL
        for d in sorted(set(s.dims) & set(found.depth), reverse=True) if isinstance(s, Dot) else ():
            extent = flat.dims[d].extent.const or left
            whole = found.stream and extent <= WIDEST  # what waits for the sum in every step
            here = extent if whole else min(extent, left)
            left = max(1, left // here)
            tile[d] = min(here, tile.get(d, here))
    return tile


def _cut(extent: Expr, most: int, hint: Hint, units: int = 1) -> int:
    """Points of tiles that are all about as large: a last one of few points would cost what a whole one does, as every tile
    packs the other factor for itself. A multiple of `units` of them, where there is much for each."""
    if extent.const is None:
        return min(most, power_of_two(hint(extent)))
    tiles = -(-extent.const // most)
    if tiles > 1:
        tiles = -(-tiles // units) * units
    return -(-extent.const // (tiles * _VECTOR)) * _VECTOR
