"""Products of matrices in Gluon: persistent blocks whose copies run ahead across tiles, and point by point work on results
that overlaps the next products.

A block walks tiles of the result, 128 rows x 256 columns of one product or 128 x 128 of two that share a factor. One warp
copies: it goes on with the next tile's factors while the last tile's results are worked on. Two groups of four warps have
64 rows each and two sums of 64 x 128. Nothing but the ring of tiles holds the groups together, so that one may work on its
results while the other's products run. Results leave through shared memory, copied by the hardware.

What happens point by point is the text of the plain Triton emitter, in a function that is called for each half of a wide tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from plait.emit.gluon_descriptor import Place, place_of
from plait.emit.gluon_merge import defined_in, names_in
from plait.emit.gluon_shape import GROUP_ROWS, HALF, PARTS, loaded
from plait.emit.gluon_text import accumulator, function, indented, sides_of, specialized
from plait.emit.triton_body import Emitter, without_unused
from plait.emit.triton_grid import needed_for
from plait.emit.triton_index import Axes, Indexer, Local, plan_dims, size_name, spans
from plait.emit.triton_ops import convert, tl_type
from plait.errors import LowerFailed
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.index import Expr
from plait.tile.program import (
    Check,
    Dot,
    Let,
    Load,
    Reduce,
    Scan,
    Store,
    Sweep,
    TileProgram,
    draw_of,
)
from plait.tile.schedule import EVERY

_COLUMNS, _DEPTH = 128, 64  # of a sum, and points of a step
_STAGES = 4
_SUMS = 2  # that a group has
_UNITS = 132  # multiprocessors of the cards, where the schedule does not say how many blocks there are


@dataclass(frozen=True)
class Product:
    """One or two products over a depth: rows x depth . depth x columns, and the loads of their factors."""

    rows: int
    columns: int
    depth: int
    dots: tuple[Dot, ...]
    left: Load
    rights: tuple[Load, ...]
    operand: DType

    @property
    def halves(self) -> int:
        """Parts of a tile along the columns."""
        return _SUMS // len(self.dots)


def product_of(program: TileProgram) -> Product:
    """The products of a program that has nothing else in its loop. Raises LowerFailed where it has another shape."""
    sweeps = [s for s in program.body if isinstance(s, Sweep)]
    if len(sweeps) != 1 or any(isinstance(s, Sweep) for s in sweeps[0].body):
        raise LowerFailed("not one loop")
    dots = tuple(s for s in sweeps[0].body if isinstance(s, Dot))
    for s in program.walk():
        if isinstance(s, (Check, Scan)) or (isinstance(s, Reduce) and s not in dots) or draw_of(s) is not None:
            raise LowerFailed("a check, a scan, a random draw or a reduction beside the products")
    if not 1 <= len(dots) <= _SUMS:
        raise LowerFailed(f"{len(dots)} products")
    if len({(s.dims, s.span, s.operand) for s in dots}) != 1 or any(s.scale is not None for s in dots):
        raise LowerFailed("products of several forms")
    first = dots[0]
    if first.operand not in HALF or first.dims != (sweeps[0].dim,):
        raise LowerFailed("factors are not of 16 bits, or summed over other dims than the loop's")
    many = {i for i, d in enumerate(program.dims) if program.schedule.size(d.name) != 1}
    sides = many & set(first.span)
    defs = {s.out: s for s in program.walk() if isinstance(s, (Let, Load, Reduce, Scan))}
    span = spans(program)
    lefts, rights = [], []
    for s in dots:
        for x, y in ((s.arg, s.other), (s.other, s.arg)):
            only = [sides & set(span[k]) for k in (x, y)]
            if all(len(o) == 1 for o in only) and only[0] != only[1] and min(only[0]) < min(only[1]):
                lefts.append((min(only[0]), loaded(x, first.operand, defs, program)))
                rights.append((min(only[1]), loaded(y, first.operand, defs, program)))
    if len(lefts) != len(dots) or len({i for i, _ in lefts}) != 1 or len({i for i, _ in rights}) != 1:
        raise LowerFailed("factors are not rows x depth and depth x columns")
    rows, columns = lefts[0][0], rights[0][0]
    if len({(s.buffer, s.address) for _, s in lefts}) != 1 or sides != {rows, columns}:
        raise LowerFailed("the products share no factor")
    beside = [s for s in sweeps[0].body if isinstance(s, Load) and s not in [x for _, x in (*lefts, *rights)]]
    if beside or any(isinstance(s, Store) for s in sweeps[0].body):
        raise LowerFailed("the loop loads or stores more than factors")
    for i, n in ((rows, GROUP_ROWS), (columns, _COLUMNS), (first.dims[0], _DEPTH)):
        extent = program.dims[i].extent.const
        if extent is None or extent <= n:
            raise LowerFailed(f"{program.dims[i].name} is one tile, or known at run time only")
    return Product(rows, columns, first.dims[0], dots, lefts[0][1], tuple(s for _, s in rights), first.operand)


def rescheduled(program: TileProgram, p: Product) -> TileProgram:
    """The program with the tiles of a group's sums."""
    tiles = {p.rows: GROUP_ROWS, p.columns: _COLUMNS, p.depth: _DEPTH}
    named = tuple((program.dims[i].name, n) for i, n in sorted(tiles.items()))
    return replace(program, schedule=program.schedule.having(tile=named, warps=4, stages=_STAGES, vector="", blocks=0))


class _Tiles(Indexer):
    """Index expressions whose vectors lie as the sums do."""

    def __init__(self, program: TileProgram, p: Product) -> None:
        parts = {p.rows: PARTS, p.columns: p.halves}
        super().__init__(tuple(replace(d, parts=parts.get(d.index, 1)) for d in plan_dims(program)), "")
        self.order = (p.rows, p.columns, p.depth)
        self.names = {p.rows: "SUM_ROWS", p.columns: "SUM_COLUMNS"}

    def __hash__(self) -> int:
        return id(self)

    def layout(self, axes: Axes) -> str:
        """The name of the layout that a vector lies in."""
        if len(axes) != 1 or axes[0] not in self.names:
            raise LowerFailed("a value varies over the depth")
        return self.names[axes[0]]


class ProductEmitter(Emitter):
    """Emits one program that has the shape of products."""

    ix: _Tiles

    def __init__(self, program: TileProgram, p: Product) -> None:
        wanted = program.schedule.blocks
        self.blocks = wanted if 0 < wanted < EVERY else _UNITS
        program = rescheduled(program, p)
        super().__init__(program, 0, 0, True, _Tiles(program, p))
        self.p = p
        d = self.dims
        self.places: dict[str, Place] = {
            "left": place_of(p.left, p.operand, d[p.rows], d[p.depth], "left_tiles", self.ix)
        }
        for n, s in enumerate(p.rights):
            self.places[f"right{n}"] = place_of(s, p.operand, d[p.columns], d[p.depth], f"right{n}_tiles", self.ix)
        self.stored: list[Place] = []

    # ---------------------------------------------------------------- statements
    def sweep(self, s: Sweep) -> None:
        """The loop is written elsewhere: here its results have names."""
        for n, dot in enumerate(self.p.dots):
            self.ix.locals[dot.out] = Local(f"sum{n}", (self.p.rows, self.p.columns), dot.dtype)

    def store(self, s: Store) -> None:
        """Through shared memory, by the hardware."""
        b = self.program.buffers[s.buffer]
        if b.dtype.nbytes != 2 or s.guard or s.address.values():
            raise LowerFailed("a result is not of 16 bits, or stored under a guard or through an index")
        place = place_of(
            s, b.dtype, self.dims[self.p.rows], self.dims[self.p.columns], f"out{len(self.stored)}_tiles", self.ix
        )
        if place.turned:
            raise LowerFailed("a result lies transposed")
        self.stored.append(place)
        self.places[place.descriptor.name] = place
        v = self.ix.locals[self.accuracy.rounded_from(s.value, b.dtype)]
        if v.axes != (self.p.rows, self.p.columns):
            raise LowerFailed("a vector is stored as a tile")
        rows, columns = (f"{self.dims[i].name}_start" for i in (self.p.rows, self.p.columns))
        tile = "out" if len(place.descriptor.block) == 2 else f"out.reshape([{sides_of(place)}])"
        self.put(
            "tma.store_wait(0)",
            f"{tile}.store({convert(v.text, v.dtype, b.dtype)})",
            "fence_async_shared()",
            f"tma.async_copy_shared_to_global({place.descriptor.name}, {place.at(rows, columns)}, out)",
        )

    # ---------------------------------------------------------------- functions
    def module(self, name: str) -> tuple[str, tuple[str, ...]]:
        """The text of all functions, and the names of the buffers' pointers that the kernel takes."""
        self.body(self.program.body)
        if (
            len({p.descriptor.dtype for p in self.stored}) != 1
            or len({len(p.descriptor.block) for p in self.stored}) != 1
        ):
            raise LowerFailed("results of several forms")
        body = without_unused("\n".join(self.lines))
        lanes = needed_for(body, self._lanes_of_dims())
        text = "\n".join([*lanes, body])
        pointers = tuple(
            self._pointer(i) for i in range(len(self.program.buffers)) if self._pointer(i) in names_in(text)
        )
        given = {*self._coordinates(), *pointers, *map(size_name, self.program.symbols)}
        given |= {p.descriptor.name for p in self.stored}
        sums = [f"sum{n}" for n in range(len(self.p.dots))]
        env = sorted((names_in(text) & given) - defined_in(text))
        layouts = [("SUM", accumulator(_COLUMNS)), ("SUM_ROWS", "gl.SliceLayout(1, SUM)")]
        layouts.append(("SUM_COLUMNS", "gl.SliceLayout(0, SUM)"))
        used = [line.replace(" = ", ": gl.constexpr = ", 1) for line in needed_for(text, layouts)]
        outer = sorted(set(env) - set(self._coordinates()))
        parts = [
            *self.reducer.functions.values(),
            function("finish", [*sums, *env, "out"], [*used, text]),
            self._consumer(env, outer),
            self._producer(),
            self._kernel(name, outer, pointers),
        ]
        return "\n\n".join(parts), pointers

    @property
    def programs(self) -> Expr:
        """How many blocks to launch."""
        tiles = self.grid.programs
        return ix.const(self.blocks if tiles.const is None else min(tiles.const, self.blocks))

    def _coordinates(self) -> list[str]:
        """Names that say which tile it is."""
        sides = (self.p.rows, self.p.columns)
        return [f"{d.name}_start" if d.index in sides else d.name for d in self.dims if d.index != self.p.depth]

    def _lanes_of_dims(self) -> list[tuple[str, str]]:
        out: list[tuple[str, str]] = []
        for i in (self.p.rows, self.p.columns):
            d = self.dims[i]
            out.append((f"{d.name}_lane", f"gl.arange(0, {d.tile}, {self.ix.layout((i,))})"))
            out += [(d.name, f"{d.name}_start + {d.name}_lane"), *self.grid.inside(d)]
        return out

    def _tile_loop(self, lines: list[str]) -> list[str]:
        """A loop over a block's tiles around lines that stand a level further in."""
        tiles = self.ix.text(self.grid.programs, ())
        inside = indented(self.grid.prologue("\n".join(lines), "block"))
        head = [f"    for block in range(tl.program_id(0), {tiles}, tl.num_programs(0)):"]
        return [*self.grid.prologue("\n".join(head), ""), *head, *inside, *lines]

    def _steps(self) -> int:
        n = self.dims[self.p.depth].extent.const
        assert n is not None
        return -(-n // _DEPTH)

    def _consumer(self, env: list[str], outer: list[str]) -> str:
        two = len(self.p.dots) == _SUMS
        turned = ["right0", "right1"] if two else ["right0", "right0"]
        sums = ", ".join(f"sum{n}" for n in range(_SUMS))
        left = f"left.index(slot).reshape([{sides_of(self.places['left'])}])"
        left += ".permute((1, 0))" if self.places["left"].turned else ""
        products = []
        for n, name in enumerate(turned):
            right = f"right{n}.index(slot).reshape([{sides_of(self.places[name])}])"
            right += "" if self.places[name].turned else ".permute((1, 0))"
            products.append(f"sum{n} = warpgroup_mma(left_tile, {right}, sum{n}, is_async=True)")
        rows, columns = (f"{self.dims[i].name}_start" for i in (self.p.rows, self.p.columns))
        own = {rows: f"{rows} + part * {GROUP_ROWS}"}
        calls = []
        for n in range(1 if two else _SUMS):
            at = {**own, columns: f"{columns} + {n * _COLUMNS}" if n else columns}
            given = [sums] if two else [f"sum{n}"]
            calls.append(f"finish({', '.join([*given, *(at.get(x, x) for x in env), 'out'])})")
        body = [
            *(f"sum{n} = gl.zeros([{GROUP_ROWS}, {_COLUMNS}], gl.float32, SUM)" for n in range(_SUMS)),
            f"for k in range({self._steps()}):",
            *indented(
                [
                    "slot = t % STAGES",
                    "mbarrier.wait(ready.index(slot), (t // STAGES) & 1)",
                    f"left_tile = {left}",
                    *products,
                    # all but this step's products are done, so the last step's tiles are free
                    f"{sums} = warpgroup_mma_wait({_SUMS}, deps=({sums}))",
                    "mbarrier.arrive(free.index((t + STAGES - 1) % STAGES), count=1, pred=k > 0)",
                    "t += 1",
                ]
            ),
            f"{sums} = warpgroup_mma_wait(0, deps=({sums}))",
            "mbarrier.arrive(free.index((t + STAGES - 1) % STAGES), count=1)",
            *calls,
        ]
        lines = [
            f"    SUM: gl.constexpr = {accumulator(_COLUMNS)}",
            "    t = 0",
            *self._tile_loop(indented(body, 2)),
            "    tma.store_wait(0)",
        ]
        parameters = ["left", "right0", "right1", "ready", "free", "out", "part", *outer, "STAGES: gl.constexpr"]
        return function("consumer", parameters, lines)

    def _producer(self) -> str:
        rows, columns = (f"{self.dims[i].name}_start" for i in (self.p.rows, self.p.columns))
        left = self.places["left"]
        copies = []
        for n in range(PARTS):
            at = left.at(f"{rows} + {n * GROUP_ROWS}" if n else rows, f"k * {_DEPTH}")
            copies.append(f"tma.async_copy_global_to_shared(left_tiles, {at}, ready.index(slot), left{n}.index(slot))")
        two = len(self.p.dots) == _SUMS
        for n in range(_SUMS):
            name = f"right{n if two else 0}"
            start = columns if two or not n else f"{columns} + {_COLUMNS}"
            at = self.places[name].at(start, f"k * {_DEPTH}")
            copies.append(
                f"tma.async_copy_global_to_shared({name}_tiles, {at}, ready.index(slot), right{n}.index(slot))"
            )
        body = [
            f"for k in range({self._steps()}):",
            *indented(
                [
                    "slot = t % STAGES",
                    "mbarrier.wait(free.index(slot), ((t // STAGES) & 1) ^ 1)",
                    f"mbarrier.expect(ready.index(slot), {PARTS} * left_tiles.block_type.nbytes + "
                    f"{_SUMS} * right0_tiles.block_type.nbytes)",
                    *copies,
                    "t += 1",
                ]
            ),
        ]
        lines = ["    t = 0", *self._tile_loop(indented(body, 2))]
        return function("producer", [*self._producer_args(), "STAGES: gl.constexpr"], lines)

    def _producer_args(self) -> list[str]:
        descriptors = [p.descriptor.name for p in self.places.values() if p not in self.stored]
        sizes = list(map(size_name, self.program.symbols))
        return [*descriptors, "left0", "left1", "right0", "right1", "ready", "free", *sizes]

    def _kernel(self, name: str, outer: list[str], pointers: tuple[str, ...]) -> str:
        operand, first = tl_type(self.p.operand), self.stored[0].descriptor
        rings = {"left0": "left", "left1": "left", "right0": "right0", "right1": f"right{len(self.p.dots) - 1}"}
        lines = [
            *(
                f"{n} = gl.allocate_shared_memory({operand}, [STAGES] + {d}_tiles.block_type.shape, {d}_tiles.layout)"
                for n, d in rings.items()
            ),
            *(
                f"out{n} = gl.allocate_shared_memory({tl_type(first.dtype)}, {first.name}.block_type.shape, {first.name}.layout)"
                for n in range(PARTS)
            ),
            *(
                f"{n} = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())"
                for n in ("ready", "free")
            ),
            "for slot in gl.static_range(STAGES):",
            "    mbarrier.init(ready.index(slot), 1)",
            f"    mbarrier.init(free.index(slot), {PARTS})",
        ]
        groups = []
        for n in range(PARTS):
            given = [f"left{n}", "right0", "right1", "ready", "free", f"out{n}", str(n), *outer, "STAGES"]
            groups.append(f"(consumer, ({', '.join(given)}))")
        groups.append(f"(producer, ({', '.join([*self._producer_args(), 'STAGES'])}))")
        lines.append(specialized(groups))
        body = "\n".join(indented(lines)).replace("STAGES", str(_STAGES))
        parameters = [*(p.descriptor.name for p in self.places.values()), *pointers, *self.program.symbols]
        return function(name, parameters, [*self.grid.prologue(body, "tl.program_id(0)"), body])
