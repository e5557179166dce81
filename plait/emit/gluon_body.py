"""The text of a Gluon kernel: two groups of four warps that compute, and one warp that copies tiles into shared memory.

A block has 128 rows, each group 64 of them. Both streamed factors go through rings of tiles; a barrier tells when a tile
has come, another when both groups have read it. In every step a group issues the scores of this tile and the sums of the
last one, works on the scores point by point while the sums are formed, and then rescales them:

    scores(t) issued;  sums += weights(t-1) . values(t-1) issued;  wait scores(t);  weights(t) = points(scores(t));  wait sums

What happens point by point is the text of the plain Triton emitter, in functions of their own: one for whole tiles, one for
tiles that a mask or the end of the stream cuts. The first tile's sums come a step later, so it stands before the loops.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait.emit.gluon_descriptor import Place, place_of
from plait.emit.gluon_loop import Tiles, tiles_of
from plait.emit.gluon_merge import defined_in, merged, names_in
from plait.emit.gluon_rows import row_ends
from plait.emit.gluon_shape import GROUP_ROWS, PARTS, Stream, TileIndexer
from plait.emit.gluon_text import accumulator, function, sides_of, specialized
from plait.emit.triton_body import Emitter, begins, reductions_in, without_unused
from plait.emit.triton_bounds import Segment
from plait.emit.triton_grid import needed_for
from plait.emit.triton_index import Axes, Local, size_name
from plait.emit.triton_ops import convert, tl_type
from plait.emit.triton_rows import extremes
from plait.errors import LowerFailed
from plait.ir.index import Expr
from plait.tile.program import Dot, Load, Reduce, Store, Sweep, TileProgram

_RINGS = ("right_ready", "right_free", "values_ready", "values_free")
_SHARED = ("right", "values", *_RINGS, "left_ready")


@dataclass(frozen=True)
class _Points:
    """A function that works on one tile's scores."""

    name: str
    lines: tuple[str, ...]
    results: tuple[str, ...]
    axes: Mapping[str, Axes]  # of what it defines


class GluonEmitter(Emitter):
    """Emits one program that has the shape of a stream."""

    ix: TileIndexer

    def __init__(self, program: TileProgram, stream: Stream) -> None:
        super().__init__(program, 0, 0, True, TileIndexer(program, stream))
        self.stream = stream
        self.stream_name = self.dims[stream.stream].name
        d = self.dims
        sides = {
            "left": (stream.left, d[stream.rows], d[stream.depth]),
            "right": (stream.right, d[stream.stream], d[stream.depth]),
            "values": (stream.values, d[stream.stream], d[stream.width]),
        }
        self.places: dict[str, Place] = {
            name: place_of(load, stream.operand, outer, inner, f"{name}_tiles", self.ix)
            for name, (load, outer, inner) in sides.items()
        }
        self.gaps.used = False
        self.sides.inputs = set()  # steps are functions of their own: no tile of one is known in another
        self.tiles: Tiles | None = None
        # extremes over the block's rows that these want, and what stands before them
        self.ends: list[tuple[str, str]] = []
        self.before: tuple[str, ...] = ()
        self.points: dict[bool, _Points] = {}
        self.carried_names: tuple[str, ...] = ()
        self.scale: Local | None = None

    # ---------------------------------------------------------------- statements
    def load(self, s: Load) -> None:
        if s in self.stream.loads():
            self.ix.locals[s.out] = Local("", self.ix.ordered(s.span), s.dtype)
            return
        super().load(s)

    def store(self, s: Store) -> None:
        b = self.program.buffers[s.buffer]
        stored = self.accuracy.rounded_from(s.value, b.dtype)
        v = self.ix.locals[stored]
        axes = self._access_axes((*s.span, *v.axes), (s.address, *s.guard))
        if v.axes != axes and len(axes) == 2:
            raise LowerFailed("a vector is stored as a tile")
        value = convert(v.text, v.dtype, b.dtype)
        self.ix.stored = True
        mask = self._mask(axes, s.guard, s.address.values(), axes)
        address = self.ix.address(self._pointer(s.buffer), s.address, axes)
        # converted in the narrow type: it passes through shared memory
        value = self.ix.widen(value, axes, axes) if len(axes) == 2 else value
        self.ix.stored = False
        self.put(f"tl.store({address}, {value}{', mask=' + mask if mask else ''})")

    def reduce(self, s: Reduce) -> None:
        if s.out == self.stream.first.out:
            self.ix.locals[s.out] = Local("scores", (self.stream.rows, self.stream.stream), s.dtype)
        elif s.out == self.stream.second.out:
            assert isinstance(s, Dot)
            m = self.carried.matrices[s.out]
            self.put(f"weights = gl.convert_layout({self.carried._factor(m.left, m, m.rows, True)}, WEIGHTS)")
            self.scale = None
            if s.scale is not None:
                v = self.ix.locals[s.scale]
                self.put(f"scale = {v.text}")
                self.scale = Local("scale", v.axes, v.dtype)
        else:
            super().reduce(s)

    def sweep(self, s: Sweep) -> None:
        if s.dim != self.stream.stream:
            super().sweep(s)
            return
        carried = [r for r in reductions_in(s.body) if begins(r, s.dim, self.pending) and isinstance(r, Reduce)]
        second = next(r for r in carried if r.out == self.stream.second.out)
        if second.out in self.carried.read:
            raise LowerFailed("the loop reads the sums of the second product")
        others = [r for r in carried if r is not second]
        own = [r for r in others if self.carried.owns(r)]
        for r in others:
            self.pending.add(r.out)
            lines = self.carried.begin(r) if r in own else self.reducer.begin(r, self.types[r.arg])
            axes = self.ix.ordered(r.span if r in own else self._kept(r))
            self.put(*(f"{line[:-1]}, {self.ix.layout(axes)})" if axes else line for line in lines))
        self.pending.add(second.out)
        self.carried_names = tuple(f"acc{r.out}" for r in others)
        self.tiles = tiles_of(s, self.defs, self.ix)
        wanted = names_in("\n".join(self.tiles.lines))
        self.ends = [end for k in self.tiles.rows for end in extremes(k, self.ix) if end[0] in wanted]
        self.before = tuple(self.lines)
        whole = self.tiles.whole
        if whole != self.tiles.cut:
            self._step(s, "cut", self.tiles.cut, own)
        if whole is not None:
            self._step(s, "whole", whole, own)
        self._merge()
        self.put(*self._pipeline())
        self.pending -= {r.out for r in carried}
        self.put(*self.reducer.end([r for r in others if r not in own]))
        for r in own:
            self.put(*self.carried.end(r))
        self.put(*self.carried.end(second))

    def _kept(self, r: Reduce) -> tuple[int, ...]:
        """Dims of the block of partial results that a plain reduction keeps."""
        shape = self.reducer._carried_shape(r)
        full = self.reducer._full_axes(r)
        return full if shape == self.ix.shape(full) else tuple(i for i in full if i not in r.dims)

    def _step(self, s: Sweep, name: str, part: Segment, own: list[Reduce]) -> None:
        """The function for one kind of tile."""
        d = self.dims[s.dim]
        known = self.ix.true, self.ix.whole, self.true, self.lines, dict(self.ix.locals)
        self.ix.true, self.true, self.lines = self.ix.true | part.true, set(self.true), []
        self.ix.whole = self.ix.whole | ({s.dim} if part.whole else set())
        self.carried.again(own)
        self.body(s.body)
        results = ("weights", *(("scale",) if self.scale else ()), *self.carried_names)
        body = "\n".join(self.lines)
        defs = [(d.name, f"{d.name}_start + {d.name}_lane"), *([] if part.whole else self.grid.inside(d))]
        text = without_unused("\n".join([*needed_for(body, defs), body, f"    return {', '.join(results)}"]))
        axes = {v.text: v.axes for v in self.ix.locals.values()}
        self.points[part.whole] = _Points(f"{name}_tile", tuple(text.split("\n")), results, axes)
        self.ix.true, self.ix.whole, self.true, self.lines, self.ix.locals = known

    def _merge(self) -> None:
        """One function for both kinds of tiles, where one can be."""
        if len(self.points) == 2:
            cut, whole = self.points[False], self.points[True]
            lines = merged(cut.lines, whole.lines, "cut")
            both_have = defined_in("\n".join(cut.lines)) & defined_in("\n".join(whole.lines))
            # branches give what they both define, in one type
            alike = all(cut.axes.get(n) == whole.axes.get(n) for n in both_have)
            if lines is not None and alike:
                both = _Points("any_tile", tuple(lines), cut.results, cut.axes)
                self.points = {False: both}

    # ---------------------------------------------------------------- the loop
    def _pipeline(self) -> list[str]:
        """Lines of the consumer from the first tile to the last sums."""
        assert self.tiles is not None
        s = self.stream
        rows, tile, width = (self.dims[i].tile for i in (s.rows, s.stream, s.width))
        turned = self.places["right"].turned
        sums = f"acc{s.second.out}"
        right = f"right.index(slot).reshape([{sides_of(self.places['right'])}])" + (
            "" if turned else ".permute((1, 0))"
        )
        values = f"values.index(last).reshape([{sides_of(self.places['values'])}])"
        values += ".permute((1, 0))" if self.places["values"].turned else ""
        one = len(self.points) == 1
        first = next(iter(self.points.values()))
        loops = (("1", "count", first),) if one else [(a, b, self.points[w]) for a, b, w in self.tiles.loops]
        out = [
            f"{sums} = gl.zeros([{rows}, {width}], gl.float32, ACC)",
            f"nothing = gl.zeros([{rows}, {tile}], gl.float32, SCORES)",
            "slot = 0",
            # by each group: see _kernel
            "mbarrier.wait(left_ready, 0)",
            "mbarrier.wait(right_ready.index(slot), 0)",
            f"issued = warpgroup_mma(left, {right}, nothing, use_acc=False, is_async=True)",
            "scores = warpgroup_mma_wait(0, deps=(issued,))",
            "mbarrier.arrive(right_free.index(slot), count=1)",
            self._call(first, "first", "True"),
        ]
        for start, end, points in loops:
            out.append(f"for t in range({start}, {end}):")
            out += [
                "    " + line
                for line in (
                    "slot = t % STAGES",
                    "last = (t - 1) % STAGES",
                    "mbarrier.wait(right_ready.index(slot), (t // STAGES) & 1)",
                    f"issued = warpgroup_mma(left, {right}, nothing, use_acc=False, is_async=True)",
                    "mbarrier.wait(values_ready.index(last), ((t - 1) // STAGES) & 1)",
                    f"summed = warpgroup_mma(weights, {values}, {sums}, is_async=True)",
                    "scores = warpgroup_mma_wait(1, deps=(issued,))",
                    "mbarrier.arrive(right_free.index(slot), count=1)",
                    self._call(points, f"first + t * {tile}", self.tiles.test),
                    f"{sums} = warpgroup_mma_wait(0, deps=(summed,))",
                    "mbarrier.arrive(values_free.index(last), count=1)",
                    *self._rescaled(sums),
                )
            ]
        return [
            *out,
            "last = (count - 1) % STAGES",
            "mbarrier.wait(values_ready.index(last), ((count - 1) // STAGES) & 1)",
            f"summed = warpgroup_mma(weights, {values}, {sums}, is_async=True)",
            f"{sums} = warpgroup_mma_wait(0, deps=(summed,))",
        ]

    def _call(self, p: _Points, start: str, cut: str) -> str:
        test = f"{cut}, " if p.name == "any_tile" else ""
        return f"{', '.join(p.results)} = {p.name}({start}, {test}@{p.name}@)"

    def _rescaled(self, sums: str) -> list[str]:
        if self.scale is None:
            return []
        return [f"{sums} = {sums} * {self.carried._flat(self.carried.matrices[self.stream.second.out], self.scale)}"]

    @property
    def programs(self) -> Expr:
        """How many blocks to launch."""
        return self.grid.programs

    # ---------------------------------------------------------------- functions
    def module(self, name: str) -> tuple[str, tuple[str, ...]]:
        """The text of all functions, and the names of the buffers' pointers that the kernel takes."""
        self.body(self.program.body)
        if self.tiles is None:
            raise LowerFailed("the stream is not swept")
        coordinates = [*self.tiles.lines]
        given = {size_name(s) for s in self.program.symbols} | {
            self._pointer(i) for i in range(len(self.program.buffers))
        }
        outer = given | {"first", "low", "high", "count", *self._coordinates()}
        body = "\n".join(self.lines)
        texts = {p.name: "\n".join(p.lines) for p in self.points.values()}
        lanes = needed_for("\n".join([body, *texts.values()]), self._lanes_of_dims())
        inside = defined_in(body) | defined_in("\n".join(lanes)) | outer
        functions: list[str] = []
        for p in self.points.values():
            text = texts[p.name]
            start = f"{self.stream_name}_start"
            local = needed_for(text, [self._lane(self.stream.stream)])
            test = ["cut"] if p.name == "any_tile" else []
            given = {start, "scores", *test, *self.carried_names}
            env = sorted((names_in(text) & inside) - defined_in(text) - defined_in("\n".join(local)) - given)
            env = ["scores", *self.carried_names, *env]
            body = body.replace(f"@{p.name}@", ", ".join(env))
            functions.append(function(p.name, [start, *test, *env], [*self._layouts(text), *local, *p.lines]))
        lanes = needed_for(body, self._lanes_of_dims())
        consumer = "\n".join([*lanes, without_unused(body)])
        shared = ["left", *_SHARED]
        env = sorted(names_in(consumer) & outer)
        functions.append(
            function("consumer", [*shared, *env, "STAGES: gl.constexpr"], [*self._layouts(body), consumer])
        )
        if self.ends:
            start = f"{self.dims[self.stream.rows].name}_start"
            found = row_ends(self.ends, self.before, self._lanes_of_dims(), outer, start, self._layouts)
            coordinates = [*found[0], *coordinates]
            functions.append(found[1])
        functions.append(self._producer())
        functions.append(self._kernel(name, env, coordinates))
        used = names_in("\n".join([consumer, *texts.values(), functions[-1]]))
        pointers = [self._pointer(i) for i in range(len(self.program.buffers)) if self._pointer(i) in used]
        text = "\n\n".join((*self.reducer.functions.values(), *functions)).replace("@pointers@", ", ".join(pointers))
        return text, tuple(pointers)

    def _coordinates(self) -> list[str]:
        """Names that say where a block stands."""
        out: list[str] = []
        for d in self.dims:
            out += [d.name] if not d.blocked else [f"{d.name}_start"] if not d.covered and not d.looped else []
        return out

    def _lane(self, i: int) -> tuple[str, str]:
        d = self.dims[i]
        return f"{d.name}_lane", f"gl.arange(0, {d.tile}, {self.ix.layout((i,))})"

    def _lanes_of_dims(self) -> list[tuple[str, str]]:
        s, out = self.stream, [self._lane(self.stream.rows), self._lane(self.stream.width)]
        for i in (s.rows, s.width):
            d = self.dims[i]
            out.append((d.name, f"{d.name}_lane" if d.covered else f"{d.name}_start + {d.name}_lane"))
            out += self.grid.inside(d)
        return out

    def _layouts(self, text: str) -> list[str]:
        """Definitions of the layouts that a function uses."""
        s = self.stream
        tile, width = self.dims[s.stream].tile, self.dims[s.width].tile
        across = min(32, width // 8)
        defs = [
            ("SCORES", accumulator(tile)),
            ("ACC", accumulator(width)),
            ("OUT", f"gl.BlockedLayout([1, 8], [{32 // across}, {across}], [4, 1], [1, 0])"),
            ("WEIGHTS", "gl.DotOperandLayout(0, ACC, 2)"),
        ]
        for name, matrix in (("SCORE", "SCORES"), ("ACC", "ACC"), ("OUT", "OUT")):
            defs.append((f"{name}_ROWS", f"gl.SliceLayout(1, {matrix})"))
            defs.append((f"{name}_COLUMNS", f"gl.SliceLayout(0, {matrix})"))
        lines = needed_for(
            text + " ".join(f"{t}" for _, t in (self._lane(i) for i in (s.rows, s.stream, s.width))), defs
        )
        return [line.replace(" = ", ": gl.constexpr = ", 1) for line in lines]

    def _producer(self) -> str:
        tile = self.dims[self.stream.stream].tile
        lines = ["for t in range(count):", "    slot = t % STAGES", f"    start = first + t * {tile}"]
        for name in ("right", "values"):
            place = self.places[name]
            lines += [
                f"    mbarrier.wait({name}_free.index(slot), ((t // STAGES) & 1) ^ 1)",
                f"    mbarrier.expect({name}_ready.index(slot), {name}_tiles.block_type.nbytes)",
                f"    tma.async_copy_global_to_shared({name}_tiles, {place.at('start')}, {name}_ready.index(slot), "
                f"{name}.index(slot))",
            ]
        return function("producer", [*self._producer_args(), "STAGES: gl.constexpr"], ["    " + x for x in lines])

    def _producer_args(self) -> list[str]:
        wanted: set[str] = set()
        for name in ("right", "values"):
            wanted |= names_in(" ".join(self.places[name].batches))
        own = ["right_tiles", "values_tiles", "right", "values", *_RINGS, "first", "count"]
        return [*own, *sorted(wanted & {*self._coordinates(), *(size_name(x) for x in self.program.symbols)})]

    def _kernel(self, name: str, env: list[str], bounds: list[str]) -> str:
        rows = self.dims[self.stream.rows]
        start = f"{rows.name}_start"
        operand = tl_type(self.stream.operand)
        lines = [
            *bounds,
            *(
                f"left{k} = gl.allocate_shared_memory({operand}, left_tiles.block_type.shape, left_tiles.layout)"
                for k in range(PARTS)
            ),
            *(
                f"{n} = gl.allocate_shared_memory({operand}, [STAGES] + {n}_tiles.block_type.shape, {n}_tiles.layout)"
                for n in ("right", "values")
            ),
            "left_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())",
            *(f"{n} = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())" for n in _RINGS),
            "mbarrier.init(left_ready, 1)",
            "for slot in gl.static_range(STAGES):",
            *(f"    mbarrier.init({n}.index(slot), {1 if n.endswith('ready') else PARTS})" for n in _RINGS),
            f"mbarrier.expect(left_ready, {PARTS} * left_tiles.block_type.nbytes)",
        ]
        for k in range(PARTS):
            at = self.places["left"].at(f"{start} + {k * GROUP_ROWS}" if k else start)
            lines.append(f"tma.async_copy_global_to_shared(left_tiles, {at}, left_ready, left{k})")
        # Nobody waits before the groups part: what no group uses is dead then, its memory takes what the groups are given, and
        # no barrier of the block's keeps that from being written while slower warps still wait on what was there.
        turned = ".permute((1, 0))" if self.places["left"].turned else ""
        groups: list[str] = []
        for k in range(PARTS):
            left = f"left{k}.reshape([{sides_of(self.places['left'])}]){turned}"
            mine = [f"{start} + {k * GROUP_ROWS}" if k and n == start else n for n in env]
            groups.append(f"(consumer, ({', '.join([left, *_SHARED, *mine, 'STAGES'])}))")
        groups.append(f"(producer, ({', '.join([*self._producer_args(), 'STAGES'])}))")
        lines.append(specialized(groups))
        body = "\n".join(f"    {x}" for x in lines).replace("STAGES", str(self.program.schedule.stages))
        parameters = [*(p.descriptor.name for p in self.places.values()), "@pointers@", *self.program.symbols]
        return function(name, parameters, [*self.grid.prologue(body, "tl.program_id(0)"), body])
