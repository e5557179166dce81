"""Loops of online softmax in Triton text: cheaper exponents, and loops that leave out what a mask leaves nothing of.

    t = where(h, s*c, -inf);  m = max t;  p = exp(t - m)
 -> u = where(h, s, -inf);    m = c * max u;  p = exp2(u * (c*log2 e) - m*log2 e), one fused multiply-add and one exp2

Multiplication by c > 0 is monotonous, rounded or not, so that the maxima are the same to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from plait.emit.triton_dot import walk
from plait.emit.triton_index import DimPlan, Indexer, block_part
from plait.ir.dtype import DType
from plait.ir.index import Expr
from plait.tile.program import Check, Dot, Let, Load, Reduce, Scan, Stmt, Store, Sweep, TileProgram

Defs = Mapping[int, Let | Load | Reduce | Scan]
_LOG2E = 1.4426950408889634


def definitions(program: TileProgram) -> Defs:
    """What every local is."""
    return {s.out: s for s in program.walk() if isinstance(s, (Let, Load, Reduce, Scan))}


def _constant(defs: Defs, k: int) -> float | None:
    d = defs.get(k)
    return float(d.attr("value")) if isinstance(d, Let) and d.op == "const" else None


def _scaled(defs: Defs, k: int) -> tuple[int, float] | None:
    """(x, c) when local k is x * c in f32, c a positive normal constant."""
    d = defs.get(k)
    if isinstance(d, Let) and d.op == "mul" and d.dtype is DType.f32:
        for x, c in (d.args, d.args[::-1]):
            value = _constant(defs, c)
            if value is not None and 1e-30 < value < 1e30:
                return x, value
    return None


class _LateScale:
    """Moves multiplications by constants behind masks and maxima."""

    def __init__(self, program: TileProgram) -> None:
        self.program, self.defs = program, dict(definitions(program))
        self.next = max(self.defs, default=-1) + 1
        self.read = {s.args[0] for s in program.walk() if isinstance(s, Let) and s.op == "running"}
        self.moved: dict[int, tuple[Reduce, float]] = {}  # by the old maximum: the new one, and what it lacks

    def fresh(self) -> int:
        self.next += 1
        return self.next - 1

    def times(self, s: Let | Reduce, x: int, c: float) -> list[Stmt]:
        """s.out = x * c."""
        const = Let(self.fresh(), "const", (), s.dtype, (), (("dtype", s.dtype), ("value", c)))
        return [const, Let(s.out, "mul", (x, const.out), s.dtype, s.span)]

    def visit(self, body: tuple[Stmt, ...], open_dims: frozenset[int] = frozenset()) -> tuple[Stmt, ...]:
        out: list[Stmt] = []
        for s in body:
            if isinstance(s, Sweep):
                out.append(replace(s, body=self.visit(s.body, open_dims | {s.dim})))
                for x in walk(s):
                    if (
                        isinstance(x, Reduce)
                        and x.out in self.moved
                        and s.dim in x.dims
                        and not open_dims & set(x.dims)
                    ):
                        new, c = self.moved[x.out]
                        out += self.times(x, new.out, c)
                continue
            for made in self.statement(s):
                out.append(made)
                if isinstance(made, (Let, Load, Reduce, Scan)):
                    self.defs[made.out] = made
        return tuple(out)

    def statement(self, s: Stmt) -> list[Stmt]:
        if isinstance(s, Let) and s.op == "where" and s.dtype is DType.f32:
            factors, other = _scaled(self.defs, s.args[1]), _constant(self.defs, s.args[2])
            if factors is not None and other is not None and math.isinf(other):
                u = Let(self.fresh(), "where", (s.args[0], factors[0], s.args[2]), s.dtype, s.span)
                return [u, *self.times(s, u.out, factors[1])]
        if isinstance(s, Reduce) and s.monoid == "max" and s.out in self.read:
            factors = _scaled(self.defs, s.arg)
            if factors is not None:
                new = replace(s, out=self.fresh(), arg=factors[0])
                self.moved[s.out] = (new, factors[1])
                return [new]
        if isinstance(s, Let) and s.op in ("running", "before"):
            moved = self.moved.get(s.args[0])
            if moved is not None:
                now = replace(s, out=self.fresh(), args=(moved[0].out,))
                return [now, *self.times(s, now.out, moved[1])]
        return [s]


def scale_late(program: TileProgram) -> TileProgram:
    """The program with scores masked, and their carried maxima taken, before they are multiplied by a constant."""
    pass_ = _LateScale(program)
    early = any(isinstance(s, Let) and s.op == "before" and _precedes(program, s) for s in program.walk())
    return program if early or not pass_.read else replace(program, body=pass_.visit(program.body))


def _precedes(program: TileProgram, before: Let) -> bool:
    """A "before" that stands before its reduction."""
    return next(s for s in program.walk() if s is before or getattr(s, "out", -1) == before.args[0]) is before


def exp_of_difference(s: Let, defs: Defs, indexer: Indexer) -> tuple[list[str], str] | None:
    """(lines, text) of exp(x - b) as one exp2 of one fused multiply-add, or None. Only where x comes from a product of
    matrices, whose own rounding is as coarse as that of b * log2 e, and b varies over fewer axes."""
    d = defs.get(s.args[0])
    if not isinstance(d, Let) or d.op != "sub" or s.dtype is not DType.f32:
        return None
    x, b = d.args
    axes, base = indexer.locals[s.args[0]].axes, indexer.locals[b]
    if base.axes == axes or not _from_product(x, defs):
        return None
    factor = _LOG2E
    scaled = _scaled(defs, x)
    if scaled is not None:
        x, factor = scaled[0], scaled[1] * _LOG2E
    name = f"v{s.out}_b"
    text = f"tl.exp2(tl.fma({indexer.operand(x, axes)}, {factor!r}, {indexer.widen(name, base.axes, axes)}))"
    return [f"{name} = {base.text} * {-_LOG2E!r}"], text


def _from_product(k: int, defs: Defs) -> bool:
    d = defs.get(k)
    if isinstance(d, Let) and d.op in ("mul", "add", "sub", "where", "neg", "copy", "round"):
        return any(_from_product(a, defs) for a in d.args)
    return isinstance(d, Dot)


# -------------------------------------------------------------------- bounds of loops
@dataclass(frozen=True)
class Segment:
    """One loop: texts of its first point and its end, guards that hold all through it, and whether no tile of it reaches
    beyond the extent."""

    start: str
    end: str
    true: frozenset[Expr] = frozenset()
    whole: bool = False


def segments(s: Sweep, defs: Defs, indexer: Indexer) -> list[Segment]:
    """The loops that a swept dim becomes. Tiles that a guard excludes from every block of points, to which nothing carried
    would change, are not visited; the mask is left out of those that it excludes nothing of, when these come first."""
    d = indexer.dims[s.dim]
    extent = indexer.text(d.extent, ())
    found = [b for g in _guards(s) if (b := _bound(g, s, indexer)) is not None and _excludes(g, s, defs)]
    lower = [b for b in found if b.rising]
    upper = [b for b in found if not b.rising]
    start, end = "0", extent
    for b in lower:
        first = b.text(indexer, most=True)
        start = first if start == "0" else f"tl.maximum({start}, {first})"
    if lower:
        start = f"tl.maximum({start}, 0) // {d.tile} * {d.tile}"
    for b in upper:
        end = f"tl.minimum({end}, {b.text(indexer, most=True)})"
    if lower or not (upper or not d.even) or not any(isinstance(x, Reduce) and x.scale is not None for x in walk(s)):
        return [Segment(start, end)]
    full = extent
    for b in upper:
        full = f"tl.minimum({full}, {b.text(indexer, most=False)})"
    name = f"{d.name}_full"
    return [
        Segment("0", f"tl.maximum({full}, 0) // {d.tile} * {d.tile}", frozenset(b.guard for b in upper), True),
        Segment(name, end),
    ]


@dataclass(frozen=True)
class _Bound:
    """guard = slope * axis(dim) + rest >= 0, over a block: `most` and `least` are the rest's extremes."""

    guard: Expr
    dim: DimPlan
    slope: int
    most: Expr
    least: Expr

    @property
    def rising(self) -> bool:
        return self.slope > 0

    def text(self, indexer: Indexer, most: bool) -> str:
        """The first point that may hold (rising), or the end of those that may (most) or must hold."""
        rest = self.most if most else self.least
        step = abs(self.slope)
        e = (-rest + (step - 1)) if self.rising else rest + step
        wide = not indexer.is_narrow(e)
        out = indexer.text(e, (), wide)
        if step > 1:
            out = f"_floor_div({out}, {step})"
        return f"tl.cast({out}, tl.int32)" if wide and not self.dim.wide else out


def _guards(s: Sweep) -> Iterator[Expr]:
    seen: set[Expr] = set()
    for x in walk(s):
        if isinstance(x, Let) and x.op == "holds":
            yield from (g for g in x.attr("guard") if g not in seen)
            seen.update(x.attr("guard"))


def _bound(g: Expr, s: Sweep, indexer: Indexer) -> _Bound | None:
    """A guard that is linear in the swept dim and in dims of which the loop knows the block."""
    inside = {x.dim for x in walk(s) if isinstance(x, Sweep) and indexer.dims[x.dim].looped}
    if s.dim not in g.axes() or g.values() or not g.axes() - {s.dim} <= set(range(len(indexer.dims))) - inside:
        return None
    coefficients, rest = g.linear()
    most = least = rest
    slope = 0
    for a, c in coefficients.items():
        if a.kind != "axis" or c.const is None:
            return None
        i = a.args[0]
        assert isinstance(i, int)
        if i == s.dim:
            slope = c.const
            continue
        first, last = block_part(indexer.dims[i])
        most = most + (last if c.const > 0 else first) * c
        least = least + (first if c.const > 0 else last) * c
    return _Bound(g, indexer.dims[s.dim], slope, most, least) if slope else None


def _excludes(g: Expr, s: Sweep, defs: Defs) -> bool:
    """Where g does not hold, nothing that the loop carries changes."""
    value = _values_outside(g, defs)
    identity = {"max": -math.inf, "min": math.inf, "sum": 0.0, "prod": 1.0, "any": False, "all": True}
    some = False
    for x in walk(s):
        if isinstance(x, (Store, Check, Scan)):
            return False
        if isinstance(x, Reduce) and s.dim in x.dims:
            some = True
            factors = [value(x.arg), *([value(x.other)] if isinstance(x, Dot) else [])]
            neutral = 0.0 if isinstance(x, Dot) else identity.get(x.monoid)
            if neutral is None or neutral not in factors or (x.scale is not None and not _keeps(x.scale, defs)):
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
        if d.op == "holds":
            return False if g in d.attr("guard") else None
        if d.op == "const":
            return d.attr("value")  # type: ignore[no-any-return]
        if d.op == "sub" and value(d.args[0]) == -math.inf and _never_lowest(d.args[1], defs):
            return -math.inf
        args = [value(a) for a in d.args]
        if d.op == "where":
            return args[2] if args[0] is False else args[1] if args[0] is True or args[1] == args[2] else None
        if d.dtype is DType.b1 and d.op in ("mul", "bit_and"):
            return False if False in args else None
        if any(a is None for a in args):
            return None
        return _arithmetic(d.op, [float(a) for a in args if a is not None])

    return value


def _arithmetic(op: str, args: list[float]) -> float | None:
    if op in ("round", "cast", "copy"):
        return args[0] if args[0] == 0 or math.isinf(args[0]) else None
    if op in ("exp", "exp2"):
        return 0.0 if args[0] == -math.inf else None
    if op == "mul":
        out = args[0] * args[1]
        return out if out == 0 or math.isinf(out) else None
    if op == "div" and args[0] == 0 and args[1] != 0:
        return 0.0
    return None


def _running_maximum(k: int, defs: Defs, op: str = "running") -> int | None:
    """The carried maximum that local k is the value of so far."""
    d = defs.get(k)
    scaled = _scaled(defs, k)
    if scaled is not None:
        return _running_maximum(scaled[0], defs, op)
    if isinstance(d, Let) and d.op == op:
        r = defs.get(d.args[0])
        return r.out if isinstance(r, Reduce) and r.monoid == "max" else None
    return None


def _never_lowest(k: int, defs: Defs) -> bool:
    """Local k is where(m == -inf, finite, m), of a maximum so far."""
    return _base_of(k, defs) is not None


def _base_of(k: int, defs: Defs) -> int | None:
    d = defs.get(k)
    if not isinstance(d, Let) or d.op != "where":
        return None
    test, instead = defs.get(d.args[0]), _constant(defs, d.args[1])
    if not isinstance(test, Let) or test.op != "eq" or instead is None or not math.isfinite(instead):
        return None
    if d.args[2] not in test.args or -math.inf not in [_constant(defs, a) for a in test.args]:
        return None
    return _running_maximum(d.args[2], defs)


def _keeps(scale: int, defs: Defs) -> bool:
    """Local `scale` is exp(m before - m now), or multiplies zeros, where the maximum m does not change."""
    d = defs.get(scale)
    t = defs.get(d.args[0]) if isinstance(d, Let) and d.op == "exp" else None
    if not isinstance(t, Let) or t.op != "sub":
        return False
    top = _base_of(t.args[1], defs)
    return top is not None and _running_maximum(t.args[0], defs, "before") == top
