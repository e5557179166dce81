"""sympy → Expr: the only place where torch's symbolic sizes are read.

`Sizes` translates SymInts, collects the symbols in use with their ranges and hints, and says how each is bound at run
time. What an Expr cannot express (Max, Min, powers, floats) becomes a derived symbol with a formula (ir/bindings.py).
Nothing here asks a SymInt for its truth or value, so that importing never adds a guard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import sympy
import torch
from torch.utils._sympy import functions as sf

from plait.errors import ImportFailed
from plait.ir import index as ix
from plait.ir.bindings import Formula, evaluate_formula, names_of
from plait.ir.graph import Shape
from plait.ir.index import Expr, Facts

Range = tuple[int, int | None]
_LEAST = -(2**62)


class _NotAnExpr(Exception):
    """A sympy function that only a formula can say."""


class Sizes:
    """Symbols of one graph. `ranges`, `hints` and `bindings` go into the Graph; they grow as expressions are translated."""

    def __init__(self, shape_env: Any = None) -> None:
        self.env = shape_env
        self.ranges: dict[str, Range] = {}
        self.hints: dict[str, int] = {}
        self.bindings: dict[str, tuple[Any, ...]] = {}
        self.facts = Facts(symbols=self.ranges)
        self.unbacked: set[str] = set()
        self._memo: dict[sympy.Basic, Expr] = {}
        self._numbers: dict[int, Expr] = {}
        self._derived: dict[str, Expr] = {}
        self._pending: dict[str, tuple[Any, ...]] = {}  # derived symbols, until everything they need is bound

    # ---------------------------------------------------------------- translation
    def expr(self, x: Any) -> Expr:
        """An int, a SymInt or a sympy expression as an Expr."""
        if isinstance(x, (bool, int)):
            number = self._numbers.get(x)
            if number is None:
                number = self._numbers[x] = ix.const(int(x))
            return number
        if isinstance(x, (torch.SymInt, torch.SymBool)):
            x = self.sympy_of(x)
        found = self._memo.get(x)
        if found is None:
            try:
                found = self._walk(x)
            except _NotAnExpr:
                found = self._derive(x)
            self._memo[x] = found
        return found

    def shape(self, xs: Iterable[Any]) -> Shape:
        """Several at once."""
        return tuple(self.expr(x) for x in xs)

    def is_contiguous(self, val: torch.Tensor) -> bool:
        """Whether symbolic strides are spelled as torch spells row-major ones, where an extent of 0 counts as 1."""
        step: Any = sympy.Integer(1)
        maximum: Any = sf.Max
        if val.layout is not torch.strided or not any(isinstance(s, torch.SymInt) for s in val.stride()):
            return False
        for size, stride in zip(reversed(val.shape), reversed(val.stride()), strict=True):
            have = self.sympy_of(stride) if isinstance(stride, torch.SymInt) else sympy.Integer(stride)
            if have != step and self.env.simplify(have - step) != 0:
                return False
            extent = self.sympy_of(size) if isinstance(size, torch.SymInt) else sympy.Integer(size)
            step = step * maximum(1, extent)
        return True

    def is_known(self, x: Any) -> bool:
        """Whether every symbol of x already has a value at run time."""
        return not any(name in self.unbacked and name not in self.bindings for name in self.expr(x).symbols())

    def sympy_of(self, x: Any) -> Any:
        """The simplified sympy expression of a SymInt, SymFloat or SymBool."""
        if self.env is None:
            self.env = x.node.shape_env
        e = x.node.expr
        return self.env.simplify(e) if self.env is not None and isinstance(e, sympy.Expr) else e

    def _walk(self, e: Any) -> Expr:
        if isinstance(e, sympy.Integer):
            return ix.const(int(e))
        if isinstance(e, sympy.Symbol):
            self._declare(e)
            if not e.is_integer:
                raise _NotAnExpr
            return ix.sym(str(e))
        if isinstance(e, sympy.Add) and not _has_fraction(e):
            total = ix.ZERO
            for a in e.args:
                total = total + self.expr(a)
            return total
        if isinstance(e, sympy.Mul) and not _has_fraction(e):
            return ix.product(self.expr(a) for a in e.args)
        if isinstance(e, (sympy.Pow, sf.PowByNatural)) and isinstance(e.args[1], sympy.Integer) and 0 <= e.args[1] <= 8:
            return ix.product([self.expr(e.args[0])] * int(e.args[1]))
        if isinstance(e, (sympy.Add, sympy.Mul)):
            # a fraction that is an integer all the same
            top, bottom = sympy.fraction(sympy.together(e))
            if bottom == 1:
                raise _NotAnExpr
            return self._divide(top, bottom)
        return self._walk_function(e)

    def _walk_function(self, e: Any) -> Expr:
        if isinstance(e, sf.Identity):
            return self.expr(e.args[0])
        if isinstance(e, (sf.FloorDiv, sf.CleanDiv)):
            return self._divide(e.args[0], e.args[1])
        if isinstance(e, sf.CeilDiv):
            return -self._divide(-e.args[0], e.args[1])
        if isinstance(e, sympy.floor) and sympy.fraction(sympy.together(e.args[0]))[1] != 1:
            return self._divide(*sympy.fraction(sympy.together(e.args[0])))
        if isinstance(e, (sf.Mod, sf.PythonMod, sympy.Mod)):
            return ix.mod(self.expr(e.args[0]), self._positive(self.expr(e.args[1])), self.facts)
        if isinstance(e, sf.ModularIndexing):
            whole = self._divide(e.args[0], e.args[1])
            return ix.mod(whole, self._positive(self.expr(e.args[2])), self.facts)
        if isinstance(e, (sf.Max, sf.Min, sympy.Max, sympy.Min)):
            return self._extreme([self.expr(a) for a in e.args], isinstance(e, (sf.Max, sympy.Max)))
        raise _NotAnExpr

    def _divide(self, top: Any, bottom: Any) -> Expr:
        n, d = self.expr(top), self.expr(bottom)
        if d.const is not None and d.const < 0:
            n, d = -n, -d
        return ix.floordiv(n, self._positive(d), self.facts)

    def _positive(self, d: Expr) -> Expr:
        if not self.facts.is_less(ix.ZERO, d):
            raise _NotAnExpr
        return d

    def _extreme(self, xs: list[Expr], largest: bool) -> Expr:
        best = xs[0]
        for x in xs[1:]:
            if self.facts.is_nonneg(x - best):
                best = x if largest else best
            elif self.facts.is_nonneg(best - x):
                best = best if largest else x
            else:
                raise _NotAnExpr
        return best

    def _derive(self, e: Any) -> Expr:
        formula = self.formula(e)
        key = repr(formula)
        if key not in self._derived:
            name = f"d{len(self._derived)}"
            self._derived[key] = ix.sym(name)
            self.ranges[name] = self._bounds(e)
            if all(n in self.hints for n in names_of(formula)):
                self.hints[name] = int(evaluate_formula(formula, self.hints))
            self._pending[name] = ("derived", formula)
        return self._derived[key]

    def formula(self, e: Any) -> Formula:
        """A sympy expression, of integers or floats, as a formula of ir/bindings.py."""
        if isinstance(e, sympy.Integer):
            return int(e)
        if isinstance(e, (sympy.Float, sympy.Rational)):
            return float(e)
        if isinstance(e, sympy.Symbol):
            self._declare(e)
            return ix.sym(str(e)) if e.is_integer else str(e)
        if e in (sympy.true, sympy.false):
            return bool(e)
        op = _FORMULA.get(type(e))
        if op is None:
            raise ImportFailed(f"a size is computed by {type(e).__name__}, which plait has no formula for: {e}")
        args = [self.formula(a) for a in e.args]
        if op == "ceildiv":
            return ("mul", -1, ("floordiv", ("mul", -1, args[0]), args[1]))
        if op in ("gt", "ge"):
            return ({"gt": "lt", "ge": "le"}[op], args[1], args[0])
        if op == "modular":
            return ("mod", ("floordiv", args[0], args[1]), args[2])
        return args[0] if op == "same" else (op, *args)

    # ---------------------------------------------------------------- symbols
    def _declare(self, s: sympy.Symbol) -> None:
        name = str(s)
        if name in self.ranges:
            return
        self.ranges[name] = self._bounds(s)
        hint = _hint(self.env, s)
        if hint is not None:
            self.hints[name] = hint
        elif s.is_integer:
            self.unbacked.add(name)

    def _bounds(self, e: Any) -> Range:
        if not isinstance(e, sympy.Expr):
            return (0, 1)  # a truth value
        found = None
        if self.env is not None:
            found = self.env.var_to_range.get(e) if isinstance(e, sympy.Symbol) else self.env.bound_sympy(e)
        if found is None:
            return (_LEAST, None)
        low, high = _bound(found.lower, math.floor), _bound(found.upper, math.ceil)
        return (_LEAST if low is None else low, high)

    def bind_all(self, sources: Iterable[tuple[Any, tuple[Any, ...]]]) -> None:
        """The run time finds each value (int, SymInt, SymFloat) at its place: bind the symbols that stand alone, then those
        that can be solved for."""
        compound: list[tuple[Any, tuple[Any, ...]]] = []
        for x, how in sources:
            if not isinstance(x, (torch.SymInt, torch.SymFloat)):
                continue
            e = self.sympy_of(x)
            if isinstance(e, sympy.Symbol):
                self._declare(e)
                self.unbacked.discard(str(e))
                self.bindings.setdefault(str(e), how)
            elif isinstance(e, sympy.Expr) and e.free_symbols:
                compound.append((e, how))
        for e, how in compound:
            free = [s for s in e.free_symbols if str(s) not in self.bindings]
            if len(free) == 1 and e.is_polynomial(free[0]):
                self._solve(e, free[0], how)

    def from_extern(self, x: Any, node: Any, item: int) -> Expr:
        """An integer that an extern returns: its (data-dependent) symbol, bound to that result."""
        out = self.expr(x)
        for name in sorted(out.symbols()):
            if name in self.unbacked:
                self.bindings.setdefault(name, ("extern", node, item, None))
        return out

    def bind_sizes(self, shape: Shape, node: Any, item: int) -> None:
        """Data-dependent extents of an extern's result are bound to its shape."""
        for d, n in enumerate(shape):
            for name in sorted(n.symbols()):
                if name in self.unbacked and n is ix.sym(name):
                    self.bindings.setdefault(name, ("extern", node, item, d))

    def _solve(self, e: Any, s: sympy.Symbol, how: tuple[Any, ...]) -> None:
        poly = sympy.Poly(e, s)
        if poly.degree() != 1:
            return
        a, b = poly.all_coeffs()
        if not (a.is_Integer and int(a) > 0) or any(str(t) not in self.bindings for t in b.free_symbols):
            return
        self._declare(s)
        known = f"in{len(self.bindings)}"
        self.ranges[known] = self._bounds(e)
        if str(s) in self.hints:
            self.hints[known] = int(a) * self.hints[str(s)] + self.expr(b).evaluate(
                {t: self.hints[str(t.args[0])] for t in self.expr(b).leaves()}
            )
        self.bindings[known] = how
        self.bindings[str(s)] = ("derived", ix.floordiv(ix.sym(known) - self.expr(b), int(a)))

    def finish(self, used: Iterable[str]) -> None:
        """Bind the derived symbols in use; ImportFailed for a symbol in use whose value no input gives."""
        needed: set[str] = set()
        wanted = sorted(used)
        while wanted:
            name = wanted.pop()
            if name in needed:
                continue
            needed.add(name)
            how = self.bindings.get(name) or self._pending.get(name)
            if how is None:
                raise ImportFailed(f"nothing at run time tells the size {name}")
            if how[0] == "derived":
                wanted.extend(sorted(names_of(how[1])))
        for name, how in self._pending.items():
            if name in needed:
                self.bindings[name] = how
            else:
                self.ranges.pop(name)
                self.hints.pop(name, None)
        self._pending.clear()


def _has_fraction(e: Any) -> bool:
    """Whether a direct argument is not an integer expression: 1/2, 1/s0, or a product with one."""
    for a in e.args:
        if isinstance(a, sympy.Rational) and not isinstance(a, sympy.Integer):
            return True
        if isinstance(a, sympy.Pow) and not (isinstance(a.exp, sympy.Integer) and a.exp >= 0):
            return True
        if isinstance(a, sympy.Mul) and _has_fraction(a):
            return True
        if isinstance(a, (sympy.Float, sf.FloatTrueDiv, sf.IntTrueDiv, sf.ToFloat)):
            raise _NotAnExpr
    return False


def _bound(x: Any, to_int: Callable[[Any], int]) -> int | None:
    try:
        value = to_int(x)
    except (TypeError, ValueError, OverflowError, AttributeError):
        return None  # one of sympy's or torch's infinities
    return value if abs(value) < -_LEAST else None


def _hint(env: Any, s: sympy.Symbol) -> int | None:
    """The example value of a symbol; torch renamed the table between releases."""
    table: Any = getattr(env, "backed_var_to_val" if hasattr(env, "backed_var_to_val") else "var_to_val", None)
    found = table.get(s) if isinstance(table, Mapping) else None
    return int(found) if found is not None and s.is_integer else None


_FORMULA: dict[Any, str] = {
    sympy.Add: "add",
    sympy.Mul: "mul",
    sympy.Pow: "pow",
    sympy.Max: "max",
    sympy.Min: "min",
    sympy.floor: "floor",
    sympy.ceiling: "ceil",
    sympy.Mod: "mod",
    sympy.Eq: "eq",
    sympy.Ne: "ne",
    sympy.StrictLessThan: "lt",
    sympy.LessThan: "le",
    sympy.StrictGreaterThan: "gt",
    sympy.GreaterThan: "ge",
    sympy.And: "and",
    sympy.Or: "or",
    sympy.Not: "not",
    sf.Max: "max",
    sf.Min: "min",
    sf.FloorDiv: "floordiv",
    sf.CleanDiv: "floordiv",
    sf.CeilDiv: "ceildiv",
    sf.Mod: "mod",
    sf.PythonMod: "mod",
    sf.ModularIndexing: "modular",
    sf.PowByNatural: "pow",
    sf.FloatPow: "pow",
    sf.FloatTrueDiv: "truediv",
    sf.IntTrueDiv: "truediv",
    sf.ToFloat: "float",
    sf.TruncToInt: "trunc",
    sf.TruncToFloat: "trunc",
    sf.FloorToInt: "floor",
    sf.CeilToInt: "ceil",
    sf.RoundToInt: "round",
    sf.LShift: "shl",
    sf.RShift: "shr",
    sf.Identity: "same",
    sf.Where: "where",
    sf.OpaqueUnaryFn_sqrt: "sqrt",
}
