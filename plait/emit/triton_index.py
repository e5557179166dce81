"""Dims, indices and masks of emitted Triton: which block axis a dim has, and the text of index expressions.

A dim with more than one point a block is *blocked*: it owns one axis of every value that varies over it. Values carry only
the axes they vary over, in one order for the whole kernel (the vector dim last), and are widened where they meet.

Of dim `p0` with a tile of 8: `p0_lane` is arange(0, 8), `p0_start` the scalar first point, `p0` their sum, `p0_ok` the mask
of points inside the extent. Index arithmetic is 32 bits wide where its magnitude provably fits, else 64; addresses are
split into a scalar part, which is cheap at any width, and a block part over lanes, which is small.

`v7_most` and `v7_least` are the extremes of the local 7 over a block (see triton_rows).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from plait.errors import LowerFailed
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.index import Atom, Expr, Facts
from plait.tile.program import Dot, Let, Load, Reduce, Scan, Sweep, TileProgram
from plait.tile.schedule import power_of_two

Axes = tuple[int, ...]
_NARROW = 2**31


@dataclass(frozen=True)
class DimPlan:
    """How one dim is cut. `tile` points a block (`parts` groups of warps take as many each); `covered`: one block takes it
    all; `looped`: walked by a loop."""

    index: int
    name: str
    extent: Expr
    tile: int
    covered: bool
    looped: bool
    is_row: bool
    parts: int = 1

    @property
    def block(self) -> int:
        """Points that a block takes."""
        return self.tile * self.parts

    @property
    def blocked(self) -> bool:
        """Has an axis in values."""
        return self.tile > 1

    @property
    def wide(self) -> bool:
        """Its points may not fit 32 bits."""
        n = self.extent.const
        return n is None or n + self.block >= _NARROW

    @property
    def even(self) -> bool:
        """The tile divides the extent for certain: no mask."""
        return self.tile == 1 or (self.extent.const != 0 and ix.mod(self.extent, self.block) is ix.ZERO)

    @property
    def tiles(self) -> Expr:
        """How many tiles there are."""
        return ix.ONE if self.covered else ix.floordiv(self.extent + (self.block - 1), self.block)


@dataclass(frozen=True)
class Local:
    """An emitted value: its name, the blocked dims it has axes for, its type. `stored`: the name of the same value in
    the type `storage`, as it was loaded."""

    text: str
    axes: Axes
    dtype: DType
    stored: str = ""
    storage: DType | None = None


def plan_dims(program: TileProgram) -> tuple[DimPlan, ...]:
    """Cut the dims as the schedule says. Raises LowerFailed for a tile that Triton cannot have."""
    swept = {s.dim for s in program.walk() if isinstance(s, Sweep)}
    plans = [_plan_dim(program, i, i in swept) for i in range(len(program.dims))]
    for s in program.walk():
        if isinstance(s, Dot) and s.operand is not DType.f64:
            _fit_for_products(s, plans, spans(program))
    return tuple(plans)


def _fit_for_products(s: Dot, plans: list[DimPlan], span: Mapping[int, tuple[int, ...]]) -> None:
    """A few rows or columns, if they are all there is, become (masked) blocks that are large enough for a product of
    matrices."""
    a, b, inner = ({i for i in x if plans[i].blocked} for x in (span[s.arg], span[s.other], s.dims))
    sides = [a - b - inner, b - a - inner, inner & a & b]
    if not all(sides) or a & b - inner:
        return
    for side, least in zip(sides, (16, 16, 32 if s.operand.nbytes == 1 else 16), strict=True):
        if len(side) == 1:
            (i,) = side
            if plans[i].covered and plans[i].tile < least:
                plans[i] = replace(plans[i], tile=least)


def _plan_dim(program: TileProgram, i: int, swept: bool) -> DimPlan:
    d = program.dims[i]
    n, extent = program.schedule.size(d.name), d.extent.const
    if n and n & (n - 1):
        raise LowerFailed(f"{program.name}: tile of {d.name} is {n}, no power of two")
    if n == 0 and extent is None:
        raise LowerFailed(f"{program.name}: {d.name} cannot be covered by a tile: its extent {d.extent} is not known")
    if extent is not None and (n == 0 or extent <= n):
        # an empty dim is one masked tile: reductions over it give the identity
        return DimPlan(
            i,
            d.name,
            d.extent,
            power_of_two(extent) if extent else 2,
            covered=True,
            looped=False,
            is_row=d.role == "row",
        )
    if d.role == "row" and not swept:
        raise LowerFailed(f"{program.name}: row dim {d.name} is neither swept nor covered by its tile of {n}")
    return DimPlan(i, d.name, d.extent, n, covered=False, looped=swept, is_row=d.role == "row")


@dataclass
class Indexer:
    """Renders index expressions. `locals` are the values emitted so far, `bounds` what Checks say of gathered ones."""

    dims: tuple[DimPlan, ...]
    vector: str
    locals: dict[int, Local] = field(default_factory=dict)
    bounds: dict[int, int] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)  # dims whose block is known to lie inside the extent
    true: frozenset[Expr] = frozenset()  # guards known to hold

    def __post_init__(self) -> None:
        order = sorted((d.name == self.vector, d.index) for d in self.dims if d.blocked)
        self.order: Axes = tuple(i for _, i in order)
        self.facts = Facts(axes=tuple(d.extent for d in self.dims))

    # ---------------------------------------------------------------- axes
    def ordered(self, dims: Iterable[object]) -> Axes:
        """The blocked ones of `dims`, in block order."""
        chosen = set(dims)
        return tuple(i for i in self.order if i in chosen)

    def axes_of(self, e: Expr) -> Axes:
        """The block axes an expression varies over."""
        dims = {a.args[0] for a in e.leaves() if a.kind in ("axis", "lane")}
        for k in e.values():
            dims |= set(self.locals[k].axes)
        return self.ordered(dims)

    def shape(self, axes: Axes) -> str:
        """Text of the block shape."""
        return "[" + ", ".join(str(self.dims[i].tile) for i in axes) + "]"

    def widen(self, text: str, axes: Axes, to: Axes) -> str:
        """`text` (which has `axes`) with unit axes put in, so that it broadcasts against values with axes `to`."""
        if not axes or axes == to:
            return text
        text = text if text.isidentifier() or text.endswith(")") else f"({text})"
        return text + "[" + ", ".join(":" if i in axes else "None" for i in to) + "]"

    def operand(self, k: int, to: Axes) -> str:
        """Local k, to be used among values with axes `to`."""
        v = self.locals[k]
        return self.widen(v.text, v.axes, to)

    # ---------------------------------------------------------------- width
    def magnitude(self, e: Expr) -> int | None:
        """A bound on |e| that also holds for its partial sums and products, or None."""
        total = 0
        for monomial, c in e.terms:
            size = abs(c)
            for a in monomial:
                m = self._atom_magnitude(a)
                if m is None:
                    return None
                size *= max(m, 1)
            total += size
        return total

    def _atom_magnitude(self, a: Atom) -> int | None:
        k = a.args[0]
        if a.kind in ("axis", "start", "lane"):
            assert isinstance(k, int)
            d = self.dims[k]
            if a.kind == "lane":
                return d.tile
            return None if d.wide or d.extent.const is None else d.extent.const + d.block
        if a.kind in ("value", "most", "least"):
            assert isinstance(k, int)
            return self.bounds.get(k)
        if a.kind == "sym":
            return None
        x, y = a.args
        assert isinstance(x, Expr) and isinstance(y, Expr)
        top = self.magnitude(x)
        if y.const is None or top is None or y.const >= _NARROW:
            return None
        if top >= _NARROW:
            return None  # the operands would be computed as narrow as the result
        return top // y.const + 1 if a.kind == "div" else min(top, y.const)

    def is_narrow(self, e: Expr) -> bool:
        """Can be computed in 32 bits."""
        m = self.magnitude(e)
        return m is not None and m < _NARROW

    # ---------------------------------------------------------------- text
    def text(self, e: Expr, to: Axes, wide: bool | None = None) -> str:
        """Infix text among values with axes `to`; `wide` None: as narrow as it provably can be."""
        if wide is None:
            wide = not self.is_narrow(e)
        if not e.terms:
            return "0"
        return " + ".join(self._monomial(m, c, to, wide) for m, c in e.terms)

    def _monomial(self, m: tuple[Atom, ...], c: int, to: Axes, wide: bool) -> str:
        factors = [self._atom(a, to, wide) for a in m]
        if c != 1 or not factors:
            factors.append(str(c) if c >= 0 else f"({c})")
        return " * ".join(factors)

    def _atom(self, a: Atom, to: Axes, wide: bool) -> str:
        k = a.args[0]
        if a.kind in ("axis", "start", "lane"):
            assert isinstance(k, int)
            return self._axis(self.dims[k], a.kind, to, wide)
        if a.kind == "sym":
            return size_name(str(k))
        if a.kind in ("value", "most", "least"):
            assert isinstance(k, int)
            v = self.locals[k]
            name, axes = (v.text, v.axes) if a.kind == "value" else (f"v{k}_{a.kind}", ())
            same = v.dtype is (DType.i64 if wide else DType.i32)
            return self.widen(name if same else cast(name, wide), axes, to)
        x, y = a.args
        assert isinstance(x, Expr) and isinstance(y, Expr)
        left, right = self.text(x, to, wide), self.text(y, to, wide)
        if self.facts.is_nonneg(x):
            return f"(({left}) {'//' if a.kind == 'div' else '%'} ({right}))"
        # Triton divides towards zero
        return f"{'_floor_div' if a.kind == 'div' else '_floor_mod'}({left}, {right})"

    def _axis(self, d: DimPlan, kind: str, to: Axes, wide: bool) -> str:
        if d.extent is ix.ONE:
            return "0"
        name = d.name if kind == "axis" else f"{d.name}_{kind}"
        if wide and (kind == "lane" or not d.wide):
            name = cast(name, True)
        return self.widen(name, (d.index,), to) if d.blocked and kind != "start" else name

    # ---------------------------------------------------------------- addresses and masks
    def address(self, pointer: str, e: Expr, to: Axes) -> str:
        """Text of pointer + e, a block with exactly the axes `to`."""
        scalar, block = self._split(e)
        out = pointer
        if scalar.terms:
            out = f"{out} + ({self.text(scalar, ())})"
        if block.terms:
            out = f"{out} + ({self.text(block, to)})"
        if self.axes_of(block) != to:
            out = f"tl.broadcast_to({out}, {self.shape(to)})"
        return out

    def _split(self, e: Expr) -> tuple[Expr, Expr]:
        """(scalar part, part that varies inside the block): a blocked axis outside div and mod is start + lane."""
        env: dict[Atom, Expr] = {}
        for d in self.dims:
            if d.blocked and not d.covered:
                env[ix.axis_atom(d.index)] = _pseudo("start", d.index) + _pseudo("lane", d.index)
        scalar, block = ix.ZERO, ix.ZERO
        for m, c in e.terms:
            part = ix.const(c)
            for a in m:
                part = part * env.get(a, Expr.make({(a,): 1}))
            for pm, pc in part.terms:
                term = Expr.make({pm: pc})
                if self._varies(term):
                    block = block + term
                else:
                    scalar = scalar + term
        return scalar, block

    def _varies(self, e: Expr) -> bool:
        return bool(self.axes_of(e))

    def inside(self, dims: Iterable[int], to: Axes) -> list[str]:
        """Conditions that the blocks' points lie inside the extents of `dims`."""
        return [self.widen(f"{self.dims[i].name}_ok", (i,), to) for i in self.ordered(dims) if not self.is_even(i)]

    def is_even(self, i: int) -> bool:
        """No point of a dim's block lies beyond the extent."""
        return self.dims[i].even or i in self.whole

    def guards(self, guard: Iterable[Expr], to: Axes) -> list[str]:
        """Conditions that the expressions are >= 0."""
        return [self._guard(g, to) for g in guard if g not in self.true]

    def _guard(self, g: Expr, to: Axes) -> str:
        """g >= 0 as a comparison of what it adds with what it subtracts: no arithmetic lane by lane for a - b >= 0."""
        wide = not self.is_narrow(g)
        more = Expr.make({m: c for m, c in g.terms if c > 0})
        less = Expr.make({m: -c for m, c in g.terms if c < 0})
        return f"({self.text(more, to, wide)} >= {self.text(less, to, wide)})"


def block_part(d: DimPlan) -> tuple[Expr, Expr]:
    """The first and the last point of a dim in the current block, or a point beyond the last."""
    if not d.blocked:
        return ix.axis(d.index), ix.axis(d.index)
    first = ix.ZERO if d.covered else _pseudo("start", d.index)
    return first, first + (d.block - 1)


def _pseudo(kind: str, i: int) -> Expr:
    return Expr.make({(Atom.make(kind, i),): 1})


def cast(text: str, wide: bool) -> str:
    """`text` as a 64-bit or 32-bit integer."""
    return f"tl.cast({text}, tl.int{64 if wide else 32})"


def size_name(symbol: str) -> str:
    """The kernel's local that holds a run-time size, as i64."""
    return f"{symbol}_size"


def spans(program: TileProgram) -> Mapping[int, tuple[int, ...]]:
    """Declared span of every local."""
    return {s.out: s.span for s in program.walk() if isinstance(s, (Let, Load, Reduce, Scan))}
