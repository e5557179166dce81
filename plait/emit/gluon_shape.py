"""Which TilePrograms the Gluon emitter takes, and how it cuts them.

    for every tile of the stream:   s = rows x depth . depth x stream;   p = points(s);   acc += rows x stream . stream x width

The first product is formed whole every step, something made of it point by point (with reductions along the stream that the
loop carries) is a factor of the second. Factors that are read as they lie in memory come through descriptors. Everything
else raises LowerFailed, and the program is emitted as plain Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from plait.emit.triton_index import DimPlan, Indexer, plan_dims, spans
from plait.errors import LowerFailed
from plait.ir.dtype import DType
from plait.tile.program import Check, Dot, Let, Load, Reduce, Scan, Store, Sweep, TileProgram, draw_of, walk

PARTS = 2
"""Groups of four warps that share a block's rows."""
GROUP_ROWS = 64
_SHARED_BYTES = 220 * 1024
HALF = (DType.f16, DType.bf16)
"""Types of factors."""


@dataclass(frozen=True)
class Stream:
    """The dims that make up the two products, by index, and the four factors' loads but the one made of points."""

    rows: int
    stream: int
    depth: int
    width: int
    first: Dot
    second: Dot
    left: Load  # rows x depth
    right: Load  # stream x depth
    values: Load  # stream x width
    points: int  # the local that is rows x stream
    operand: DType

    def loads(self) -> tuple[Load, Load, Load]:
        """What comes through descriptors."""
        return self.left, self.right, self.values


def stream_of(program: TileProgram) -> Stream:
    """The two products of a program and their dims. Raises LowerFailed where it has another shape."""
    _plain(program)
    dots = [s for s in program.walk() if isinstance(s, Dot)]
    if len(dots) != 2:
        raise LowerFailed(f"{len(dots)} products, not two")
    first, second = dots if set(dots[1].dims) & set(dots[0].span) else dots[::-1]
    if first.operand not in HALF or second.operand is not first.operand:
        raise LowerFailed("factors are not of one 16-bit type")
    if len(first.dims) != 1 or len(second.dims) != 1 or second.dims[0] not in first.span:
        raise LowerFailed("no product is summed over one dim of the other")
    depth, stream = first.dims[0], second.dims[0]
    many = {i for i, d in enumerate(program.dims) if program.schedule.size(d.name) != 1}
    rows = many & set(first.span) - {stream}
    width = many & set(second.span) - rows
    if len(rows) != 1 or len(width) != 1 or many != rows | width | {depth, stream}:
        raise LowerFailed("a block is not rows, a stream, a depth and a width")
    row, column = min(rows), min(width)
    span = spans(program)
    left, right = _sides(first, span, row, stream)
    points, values = _sides(second, span, row, column)
    defs = {s.out: s for s in program.walk() if isinstance(s, (Let, Load, Reduce, Scan))}
    left_load, right_load, values_load = (loaded(k, first.operand, defs, program) for k in (left, right, values))
    return Stream(
        row,
        stream,
        depth,
        column,
        first,
        second,
        left_load,
        right_load,
        values_load,
        points,
        first.operand,
    )


def loads_beside_factors(program: TileProgram) -> bool:
    """Whether something is loaded along a stream that is no factor of a product: biases, masks, ids."""
    defs = {s.out: s for s in program.walk() if isinstance(s, (Let, Load))}
    factors: set[int] = set()
    for s in program.walk():
        for k in (s.arg, s.other) if isinstance(s, Dot) else ():
            d = defs.get(k)
            while isinstance(d, Let) and d.op in ("round", "cast", "copy"):
                d = defs.get(d.args[0])
            factors |= {d.out} if isinstance(d, Load) else set()
    swept = {s.dim for s in program.walk() if isinstance(s, Sweep)}
    return any(isinstance(s, Load) and swept & set(s.span) and s.out not in factors for s in program.walk())


def _plain(program: TileProgram) -> None:
    """Nothing in the program that only the plain emitter writes."""
    if program.schedule.form != "swept":
        raise LowerFailed("nothing is swept")
    for s in program.walk():
        if isinstance(s, (Check, Scan)) or draw_of(s) is not None:
            raise LowerFailed("a check, a scan or a random draw")
        if isinstance(s, Reduce) and s.monoid in ("argmax", "argmin"):
            raise LowerFailed(f"an {s.monoid}")
    if any(isinstance(s, Store) for x in program.body if isinstance(x, Sweep) for s in walk((x,))):
        raise LowerFailed("the loop over the stream stores")


def _sides(s: Dot, span: Mapping[int, tuple[int, ...]], a: int, b: int) -> tuple[int, int]:
    """The factors of a product, the one that varies over dim a first."""
    for x, y in ((s.arg, s.other), (s.other, s.arg)):
        if a in span[x] and b in span[y] and a not in span[y] and b not in span[x]:
            return x, y
    raise LowerFailed("both factors vary over one side of a product")


def loaded(k: int, operand: DType, defs: Mapping[int, Let | Load | Reduce | Scan], program: TileProgram) -> Load:
    """The load that a factor is, as it lies in memory. Raises LowerFailed where it is none."""
    d = defs[k]
    while isinstance(d, Let) and d.op == "round" and d.attr("dtype") is operand:
        d = defs[d.args[0]]
    if not isinstance(d, Load) or d.fill != 0:
        raise LowerFailed("a factor is computed, not loaded")
    b = program.buffers[d.buffer]
    if b.dtype is not operand or b.role != "in":
        raise LowerFailed("a factor is not an input of its type")
    if d.guard or d.address.values():
        raise LowerFailed("a factor is read under a guard or through an index")
    return d


def _size(program: TileProgram, i: int, what: str) -> int:
    n = program.dims[i].extent.const
    if n is None:
        raise LowerFailed(f"the {what} is known at run time only")
    return n


def _tile(program: TileProgram, s: Stream) -> int:
    """Points of the stream in a step. Scores, their rounded form and the sums share 240 registers a thread with what is loaded
    along the stream: of 128 points a thread has 32 columns, and 64 points of the tile."""
    words = 0
    for x in program.walk():
        if isinstance(x, Load) and s.stream in x.span and x not in s.loads():
            words += (64 if s.rows in x.span else 32) * max(1, program.buffers[x.buffer].dtype.nbytes // 4)
    return 128 if words <= 32 else 64


def _stages(program: TileProgram, s: Stream, tile: int) -> int:
    """Tiles of both streamed factors that are under way at once."""
    d, w = _size(program, s.depth, "depth"), _size(program, s.width, "width")
    if {d, w} - {32, 64, 128}:
        raise LowerFailed(f"a depth of {d} and a width of {w}")
    rows = GROUP_ROWS * PARTS
    # the last part of the block's result passes through what is left
    room = _SHARED_BYTES - rows * d * 2 - rows * w * 2
    stages = min(4, room // (tile * (d + w) * 2))
    if stages < 2:
        raise LowerFailed(f"two stages of depth {d} and width {w} do not fit shared memory")
    return stages


def rescheduled(program: TileProgram, s: Stream) -> TileProgram:
    """The program with the tiles that this backend takes: 64 rows for each group of warps. `stages` of its schedule are those
    of the rings."""
    tile = _tile(program, s)
    for i, n, what in ((s.rows, GROUP_ROWS * PARTS, "number of rows"), (s.stream, tile, "stream")):
        if _size(program, i, what) <= n:
            raise LowerFailed(f"the {what} is one tile")
    tiles = {s.rows: GROUP_ROWS, s.stream: tile, s.depth: 0, s.width: 0}
    named = tuple((program.dims[i].name, n) for i, n in sorted(tiles.items()))
    stages = _stages(program, s, tile)
    return replace(program, schedule=program.schedule.having(tile=named, warps=4, stages=stages, vector="", blocks=0))


class TileIndexer(Indexer):
    """Index expressions whose vectors lie as the tiles that they meet do. Layouts, by their names in the text: SCORES (rows x
    stream) and ACC (rows x width) as the products have them, OUT (rows x width) as it is stored; rows and columns of each."""

    def __init__(self, program: TileProgram, s: Stream) -> None:
        self.parts = s
        dims = [self._cut(d) for d in plan_dims(program)]
        super().__init__(tuple(dims), "")
        self.order = (s.rows, s.stream, s.depth, s.width)
        self.stored = False  # writing what is stored
        self.same = self.dims[s.stream].tile == self.dims[s.width].tile  # then ACC and SCORES are one layout

    def _cut(self, d: DimPlan) -> DimPlan:
        return replace(d, parts=PARTS) if d.index == self.parts.rows else d

    def __hash__(self) -> int:
        return id(self)

    def matrix(self, axes: tuple[int, ...]) -> str:
        """The name of the layout of a tile."""
        s = self.parts
        if axes == (s.rows, s.stream):
            return "SCORES"
        if axes == (s.rows, s.width):
            return "OUT" if self.stored else "ACC"
        raise LowerFailed("a value varies over other dims than a product does")

    def layout(self, axes: tuple[int, ...]) -> str:
        """The name of the layout that a value with these axes is kept in."""
        s = self.parts
        vectors = {s.rows: "SCORE_ROWS", s.stream: "SCORE_COLUMNS", s.width: "ACC_COLUMNS"}
        if len(axes) == 1:
            if axes[0] not in vectors:
                raise LowerFailed("a value varies over the depth")
            return vectors[axes[0]]
        return "ACC" if self.matrix(axes) == "OUT" else self.matrix(axes)

    def widen(self, text: str, axes: tuple[int, ...], to: tuple[int, ...]) -> str:
        """See Indexer.widen; a vector is brought into the layout of the tile first."""
        if not axes or (axes == to and not (self.stored and len(axes) == 2)):
            return super().widen(text, axes, to)
        if axes == to:
            return f"gl.convert_layout({text}, OUT)"
        kept, tile = self.layout(axes), self.matrix(to)
        wanted = {"SCORES": "SCORE", "ACC": "ACC", "OUT": "OUT"}[tile]
        wanted += "_ROWS" if axes[0] == self.parts.rows else "_COLUMNS"
        if kept != wanted and not (self.same and "OUT" not in wanted):
            text = f"gl.convert_layout({text}, {wanted})"
        return super().widen(text, axes, to)
