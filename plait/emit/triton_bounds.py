"""Loops under masks in Triton text: tiles of which a mask leaves nothing are not visited, and tiles of which it leaves
everything are not masked.

`segments` gives the loops of a swept dim, off the conditions that tile/masks makes of comparisons. Attention under a causal
mask, say, takes one loop up to the diagonal, and one, with the mask, over it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from plait.emit.triton_index import DimPlan, Indexer, block_part
from plait.emit.triton_rows import extreme, extremes
from plait.emit.triton_softmax import Defs, base_of, correction_of
from plait.ir.dtype import DType
from plait.ir.index import Expr
from plait.tile.masks import is_statistic, logic
from plait.tile.program import Check, Dot, Let, Reduce, Scan, Store, Sweep, TileProgram, walk

_FEW = 16
"""Rows below which a mask costs nothing beside the loads that a second loop would have to wait for again."""


@dataclass(frozen=True)
class Segment:
    """One loop: texts of its first point and its end, guards that hold all through it, whether no tile of it reaches
    beyond the extent, and lines that stand before it."""

    start: str
    end: str
    true: frozenset[Expr] = frozenset()
    whole: bool = False
    before: tuple[str, ...] = ()


def segments(s: Sweep, defs: Defs, indexer: Indexer) -> list[Segment]:
    """The loops that a swept dim becomes. Tiles that a guard excludes from every block of points, to which nothing carried
    would change, are not visited; the mask is left out of those that it excludes nothing of. That costs a second or third
    loop's code, and is done where there is work for every point of a tile: products that the mask is put on."""
    found = bounds_of(s, defs, indexer)
    out = _segments(s, found, indexer)
    text = " ".join(x for part in out for x in (part.start, part.end, *part.before))
    rows = [row for k in dict.fromkeys(k for b in found for k in b.rows) for row in extremes(k, indexer)]
    before = tuple(f"{name} = {line}" for name, line in rows if name in text)
    return [replace(out[0], before=(*before, *out[0].before)), *out[1:]]


def _segments(s: Sweep, found: list[Bound], indexer: Indexer) -> list[Segment]:
    d = indexer.dims[s.dim]
    extent = indexer.text(d.extent, ())
    lower = [b for b in found if b.rising]
    upper = [b for b in found if not b.rising]
    start, end = "0", extent
    for b in lower:
        first = b.text(indexer, most=True)
        start = first if start == "0" else f"tl.maximum({start}, {first})"
    if lower:
        start = whole_tiles(f"tl.maximum({start}, 0)", d.tile)
    for b in upper:
        end = f"tl.minimum({end}, {b.text(indexer, most=True)})"
    asked = [b for b in found if not b.implied]
    if not (asked or not d.even) or not _masks_products(s) or _is_narrow(lower, upper, d.tile):
        return [Segment(start, end)]
    if any(b.rows for b in found) and _rows(s, indexer) < _FEW:
        return [Segment(start, end)]
    full = extent
    for b in upper:
        full = f"tl.minimum({full}, {b.text(indexer, most=b.implied)})"
    full = whole_tiles(f"tl.maximum({full}, 0)", d.tile)
    true = frozenset(b.guard for b in asked)
    out: list[Segment] = []
    first = "0"
    before: tuple[str, ...] = ()
    if lower:
        least = start
        for b in (b for b in lower if not b.implied):
            least = f"tl.maximum({least}, {b.text(indexer, most=False)})"
        first = f"{d.name}_from"
        full = f"tl.maximum({full}, {first})"
        if least != start:
            line = f"{first} = {whole_tiles(f'({least} + {d.tile - 1})', d.tile)}"
            out.append(Segment(start, f"tl.minimum({first}, {end})", before=(line,)))
        else:
            before = (f"{first} = {start}",)
    if not upper and d.even:
        return [*out, Segment(first, end, true, True, before)]
    name = f"{d.name}_full"
    return [*out, Segment(first, name, true, True, (*before, f"{name} = {full}")), Segment(name, end)]


def _rows(s: Sweep, indexer: Indexer) -> int:
    """How many rows of points a tile of the products has that the sweep walks over."""
    dots = [x for x in walk((s,)) if isinstance(x, Dot) and s.dim in x.span]
    sides = [[indexer.dims[i] for i in x.span if i != s.dim and indexer.dims[i].blocked] for x in dots]
    return max(math.prod(min(d.tile, d.extent.const or d.tile) for d in side) for side in sides)


def _masks_products(s: Sweep) -> bool:
    """The sweep walks over the points of some product's result."""
    return any(isinstance(x, Dot) and s.dim in x.span for x in walk((s,)))


def _is_narrow(lower: list[Bound], upper: list[Bound], tile: int) -> bool:
    """Lower and upper bounds leave no tile that is full for certain: a window about as wide as a block."""
    lengths = [
        (y.edge(most=False) - x.edge(most=False)).const for x in lower for y in upper if not (x.implied or y.implied)
    ]
    return any(n is not None and n < tile for n in lengths)


def longest_last(program: TileProgram, defs: Defs, indexer: Indexer) -> frozenset[int]:
    """Grid dims along which loops end later and later: their last blocks had better start first."""
    out: set[int] = set()
    for s in program.walk():
        if isinstance(s, Sweep) and indexer.dims[s.dim].looped:
            for b in bounds_of(s, defs, indexer):
                coefficients = b.guard.linear()[0].items()
                more = [a for a, c in coefficients if (c.const or 0) > 0 and not b.rising]
                out |= {a.args[0] for a in more if a.kind == "axis"}  # type: ignore[misc]
                # loaded positions mostly rise as well; where they do not, the order costs nothing
                out |= {i for a in more if a.kind == "value" for i in defs[a.args[0]].span}  # type: ignore[index]
    return frozenset(out)


def bounds_of(s: Sweep, defs: Defs, indexer: Indexer) -> list[Bound]:
    """What a sweep's guards say of its points, where nothing changes outside them."""
    found = [(_bound(g, s, defs, indexer), implied) for g, implied in _guards(s)]
    return [replace(b, implied=implied) for b, implied in found if b is not None and _excludes(b.guard, s, defs)]


@dataclass(frozen=True)
class Bound:
    """guard = slope * axis(dim) + rest >= 0, over a block: `most` and `least` are the rest's extremes, made of those of the
    locals `rows`. `implied`: where it holds, other masks still have to be asked, and it masks nothing itself."""

    guard: Expr
    dim: DimPlan
    slope: int
    most: Expr
    least: Expr
    rows: tuple[int, ...] = ()
    implied: bool = False

    @property
    def rising(self) -> bool:
        return self.slope > 0

    def edge(self, most: bool) -> Expr:
        """`text` times the slope."""
        rest = self.most if most else self.least
        step = abs(self.slope)
        return (-rest + (step - 1)) if self.rising else rest + step

    def text(self, indexer: Indexer, most: bool) -> str:
        """The first point (rising) or the end of those at which the guard may hold (most), or holds all over the block."""
        step, e = abs(self.slope), self.edge(most)
        wide = not indexer.is_narrow(e)
        out = indexer.text(e, (), wide)
        if step > 1:
            out = f"_floor_div({out}, {step})"
        return f"tl.cast({out}, tl.int32)" if wide and not self.dim.wide else out


def tiles_in(points: str, tile: int) -> str:
    """Text of how many whole tiles there are in `points` >= 0; of less than 0, something below 1. Not by a division: where the numbers
    are known to be small the compiler does it, and a maximum behind it, on sixteen bits, and ptxas (of CUDA 12.8, sm_90) then takes a
    comparison with that maximum from the wrong half of the register (VIMNMX.S16x2 that writes one predicate twice)."""
    return f"({points} >> {_log2(tile)})"


def whole_tiles(points: str, tile: int) -> str:
    """Text of `points` rounded down to whole tiles."""
    return f"{points} & -{1 << _log2(tile)}"


def _log2(tile: int) -> int:
    assert tile > 0 and tile & (tile - 1) == 0, tile
    return tile.bit_length() - 1


def _guards(s: Sweep) -> Iterator[tuple[Expr, bool]]:
    """Each guard, and whether it is implied by others."""
    seen: set[Expr] = set()
    for x in walk((s,)):
        if isinstance(x, Let) and (x.op == "holds" or (x.op == "between" and not x.args)):
            yield from ((g, x.op == "between") for g in x.attr("guard") if g not in seen)
            seen.update(x.attr("guard"))


def _bound(g: Expr, s: Sweep, defs: Defs, indexer: Indexer) -> Bound | None:
    """A guard that is linear in the swept dim, in dims of which the loop knows the block, and in numbers known before it."""
    inside = {x.dim for x in walk((s,)) if isinstance(x, Sweep) and indexer.dims[x.dim].looped}
    made = {getattr(x, "out", -1) for x in walk((s,))}
    if any(k in made or not _is_held(defs.get(k)) for k in g.values()):
        return None
    if s.dim not in g.axes() or not g.axes() - {s.dim} <= set(range(len(indexer.dims))) - inside:
        return None
    coefficients, rest = g.linear()
    most = least = rest
    slope = 0
    for a, c in coefficients.items():
        i = a.args[0]
        if a.kind not in ("axis", "value") or c.const is None or not isinstance(i, int):
            return None
        if a.kind == "value":
            most = most + extreme(i, c.const > 0) * c
            least = least + extreme(i, c.const < 0) * c
            continue
        if i == s.dim:
            slope = c.const
            continue
        first, last = block_part(indexer.dims[i])
        most = most + (last if c.const > 0 else first) * c
        least = least + (first if c.const > 0 else last) * c
    return Bound(g, indexer.dims[s.dim], slope, most, least, tuple(sorted(g.values()))) if slope else None


def _is_held(d: object) -> bool:
    return isinstance(d, Let) and d.op == "within"


def _excludes(g: Expr, s: Sweep, defs: Defs) -> bool:
    """Where g does not hold, nothing that the loop carries changes."""
    value = _values_outside(g, defs)
    identity = {"max": -math.inf, "min": math.inf, "sum": 0.0, "prod": 1.0, "any": False, "all": True}
    some = False
    for x in walk((s,)):
        if isinstance(x, (Store, Check, Scan)):
            return False
        if isinstance(x, Reduce) and s.dim in x.dims:
            some = True
            factors = [value(x.arg), *([value(x.other)] if isinstance(x, Dot) else [])]
            neutral = 0.0 if isinstance(x, Dot) else identity.get(x.monoid)
            if (
                neutral is None
                or neutral not in factors
                or (x.scale is not None and correction_of(x.scale, defs) is None)
            ):
                return False
    return some


def _values_outside(g: Expr, defs: Defs) -> Callable[[int], float | bool | None]:
    """What is known of locals at points where g does not hold: a constant, or None."""
    known: dict[int, float | bool | None] = {}

    def value(k: int) -> float | bool | None:
        if k not in known:
            d = defs.get(k)
            known[k] = _let(d) if isinstance(d, Let) else None
        return known[k]

    def _let(d: Let) -> float | bool | None:
        if d.op in ("holds", "between"):
            return False if g in dict(d.attrs).get("guard", ()) else None
        if d.op == "const":
            return d.attr("value")  # type: ignore[no-any-return]
        row = is_statistic(defs.get(d.args[-1]), g, lambda k: defs[k].span) if d.args else False
        if d.op == "sub" and value(d.args[0]) == -math.inf and (row or base_of(d.args[1], defs) is not None):
            return -math.inf
        if d.op == "div" and row and value(d.args[0]) == 0:
            return 0.0
        args = [value(a) for a in d.args]
        if d.op == "where":
            return args[2] if args[0] is False else args[1] if args[0] is True or args[1] == args[2] else None
        if d.dtype is DType.b1:
            return logic(d.op, args)
        if any(a is None for a in args):
            return None
        return _arithmetic(d.op, [float(a) for a in args if a is not None])

    return value


def _arithmetic(op: str, args: list[float]) -> float | None:
    if op in ("round", "cast", "copy"):
        return args[0] if args[0] == 0 or math.isinf(args[0]) else None
    if op in ("exp", "exp2"):
        return 0.0 if args[0] == -math.inf else None
    if op == "add":
        return sum(args) if math.isinf(sum(args)) else None
    if op == "mul" or (op == "div" and args[1] != 0):
        out = args[0] * args[1] if op == "mul" else args[0] / args[1]
        return out if out == 0 or math.isinf(out) else None
    return None
