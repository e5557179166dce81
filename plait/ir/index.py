"""Integer index expressions: polynomials over axes, symbols, gathered values, and floor-divisions and remainders of those.

An `Expr` is kept in one canonical form, a sum of integer multiples of monomials, and is interned, so structural equality
is identity. Leaves: `axis(i)` (the i-th axis of the reader), `sym(name)` (a run-time size), `value(k)` (the integer that
the reader's k-th read yields: indirect addressing). `floordiv` and `mod` follow Python (the divisor is positive
everywhere they are used).

Extents are Exprs without axes. Facts about leaves come in a `Facts` object; simplification is sound with respect to it
(A1: bounds hold; A2: simplification preserves the value at every point), property-tested against brute force.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from plait.ir.atom import Atom as Atom
from plait.ir.infix import render

Monomial = tuple[Atom, ...]


class Expr:
    """A polynomial with integer coefficients over Atoms; interned, immutable. Build with the functions below or + - *."""

    __slots__ = ("_atoms", "_leaves", "_linear", "key", "terms")
    _table: dict[tuple[tuple[Monomial, int], ...], Expr] = {}
    terms: tuple[tuple[Monomial, int], ...]
    key: tuple[object, ...]
    _atoms: frozenset[Atom]
    _leaves: frozenset[Atom] | None
    _linear: tuple[Mapping[Atom, Expr], Expr] | None

    @classmethod
    def make(cls, terms: Mapping[Monomial, int]) -> Expr:
        items = [t for t in terms.items() if t[1]]
        if len(items) > 1:
            items.sort(key=_term_key)
        return cls._of(tuple(items))

    @classmethod
    def _of(cls, items: tuple[tuple[Monomial, int], ...]) -> Expr:
        """The Expr of terms in canonical order."""
        found = cls._table.get(items)
        if found is None:
            found = object.__new__(cls)
            found.terms = items
            found.key = tuple((tuple(a.key for a in m), c) for m, c in items)
            found._atoms = frozenset(a for m, _ in items for a in m)
            found._leaves = found._linear = None
            found = cls._table.setdefault(items, found)
        return found

    @property
    def const(self) -> int | None:
        """The value when this is a constant, else None."""
        if not self.terms:
            return 0
        m, c = self.terms[0]  # a constant term comes last
        return None if m else c

    @property
    def offset(self) -> int:
        """The constant term."""
        return next((c for m, c in self.terms if not m), 0)

    def atoms(self) -> frozenset[Atom]:
        """Direct factors (not those inside div and mod)."""
        return self._atoms

    def leaves(self) -> frozenset[Atom]:
        """All axis, sym and value atoms, those inside div and mod included."""
        if self._leaves is None:
            inner = (e.leaves() for a in self._atoms if a.kind in ("div", "mod") for e in a.args if isinstance(e, Expr))
            own = (a for a in self._atoms if a.kind not in ("div", "mod"))
            self._leaves = frozenset(own).union(*inner)
        return self._leaves

    def axes(self) -> frozenset[int]:
        """Indices of the axes this depends on."""
        return frozenset(a.args[0] for a in self.leaves() if a.kind == "axis")  # type: ignore[misc]

    def values(self) -> frozenset[int]:
        """Indices of the gathered values this depends on."""
        return frozenset(a.args[0] for a in self.leaves() if a.kind == "value")  # type: ignore[misc]

    def symbols(self) -> frozenset[str]:
        """Names of the run-time sizes this depends on."""
        return frozenset(a.args[0] for a in self.leaves() if a.kind == "sym")  # type: ignore[misc]

    def as_axis(self) -> int | None:
        """i when this is exactly axis(i)."""
        if len(self.terms) != 1 or self.terms[0][1] != 1 or len(self.terms[0][0]) != 1:
            return None
        (a,) = self.terms[0][0]
        return a.args[0] if a.kind == "axis" else None  # type: ignore[return-value]

    def linear(self) -> tuple[Mapping[Atom, Expr], Expr]:
        """Split into {axis/value/div/mod atom: coefficient over symbols} and the rest (symbols and constants only).

        A monomial with two non-symbol factors is filed under its first factor with the other in the coefficient.
        """
        if self._linear is not None:
            return self._linear
        coeffs: dict[Atom, dict[Monomial, int]] = {}
        rest: dict[Monomial, int] = {}
        for m, c in self.terms:
            lead = next((a for a in m if a.kind != "sym"), None)
            if lead is None:
                rest[m] = rest.get(m, 0) + c
            else:
                i = m.index(lead)
                part = m[:i] + m[i + 1 :]
                bucket = coeffs.setdefault(lead, {})
                bucket[part] = bucket.get(part, 0) + c
        self._linear = found = {a: Expr.make(t) for a, t in coeffs.items()}, Expr.make(rest)
        return found

    # ---------------------------------------------------------------- arithmetic
    def __add__(self, other: Expr | int) -> Expr:
        other = to_expr(other)
        if not other.terms:
            return self
        if not self.terms:
            return other
        out = dict(self.terms)
        for m, c in other.terms:
            out[m] = out.get(m, 0) + c
        return Expr.make(out)

    __radd__ = __add__

    def __neg__(self) -> Expr:
        return _scaled(self, -1)

    def __sub__(self, other: Expr | int) -> Expr:
        return self + (-to_expr(other))

    def __rsub__(self, other: int) -> Expr:
        return to_expr(other) - self

    def __mul__(self, other: Expr | int) -> Expr:
        other = to_expr(other)
        for x, y in ((self, other), (other, self)):
            if (c := y.const) is not None:
                return _scaled(x, c)
        out: dict[Monomial, int] = {}
        for m, c in self.terms:
            for n, d in other.terms:
                key = tuple(sorted(m + n, key=_atom_key))
                out[key] = out.get(key, 0) + c * d
        return Expr.make(out)

    __rmul__ = __mul__

    # ---------------------------------------------------------------- meaning
    def evaluate(self, env: Mapping[Atom, int]) -> int:
        """The value at one point; `env` maps every axis, sym and value atom in use to an int."""
        total = 0
        for m, c in self.terms:
            for a in m:
                c *= _atom_value(a, env)
            total += c
        return total

    def substitute(self, env: Mapping[Atom, Expr], facts: Facts | None = None) -> Expr:
        """Replace leaves; divisions and remainders are simplified again under `facts` (of the new leaves)."""
        if not self.terms or not (self.leaves() & env.keys()):
            return self
        total: dict[Monomial, int] = {}
        for m, c in self.terms:
            part = ONE
            for a in m:
                part = _substitute_atom(a, env, facts) * part
            for n, d in part.terms:
                total[n] = total.get(n, 0) + c * d
        return Expr.make(total)

    def render(self, name: Callable[[Atom], str], div: str = "//", mod: str = "%") -> str:
        """Infix text; `name` renders leaves. Used by printers and emitters alike (pass a function name as div for C++)."""
        return render(self, name, div, mod)

    def __repr__(self) -> str:
        return self.render(repr).replace(" ", "")


@functools.cache
def _monomial_key(m: Monomial) -> tuple[object, ...]:
    return (len(m) == 0, tuple(a.key for a in m))


def _term_key(term: tuple[Monomial, int]) -> tuple[object, ...]:
    return _monomial_key(term[0])  # terms of one Expr differ in it


def _atom_key(a: Atom) -> tuple[object, ...]:
    return a.key


def _atom_value(a: Atom, env: Mapping[Atom, int]) -> int:
    if a.kind in ("div", "mod"):
        x, y = a.args
        assert isinstance(x, Expr) and isinstance(y, Expr)
        n, d = x.evaluate(env), y.evaluate(env)
        return n // d if a.kind == "div" else n % d
    return env[a]


def _substitute_atom(a: Atom, env: Mapping[Atom, Expr], facts: Facts | None) -> Expr:
    if a.kind in ("div", "mod"):
        x, y = a.args
        assert isinstance(x, Expr) and isinstance(y, Expr)
        n, d = x.substitute(env, facts), y.substitute(env, facts)
        return floordiv(n, d, facts) if a.kind == "div" else mod(n, d, facts)
    return env[a] if a in env else _single(a)


def _scaled(e: Expr, k: int) -> Expr:
    return e if k == 1 else Expr._of(tuple((m, c * k) for m, c in e.terms) if k else ())


def _single(a: Atom) -> Expr:
    return Expr._of((((a,), 1),))


def const(value: int) -> Expr:
    """A constant."""
    return Expr._of((((), int(value)),) if value else ())


def axis(i: int) -> Expr:
    """The i-th axis of the reader."""
    return _single(Atom.make("axis", i))


def sym(name: str) -> Expr:
    """A run-time size."""
    return _single(Atom.make("sym", name))


def value(k: int) -> Expr:
    """The integer yielded by the reader's k-th read (indirect addressing)."""
    return _single(Atom.make("value", k))


def axis_atom(i: int) -> Atom:
    """The atom of axis(i), a key for `substitute`."""
    return Atom.make("axis", i)


def to_expr(x: Expr | int) -> Expr:
    """x, or the constant x."""
    return x if isinstance(x, Expr) else const(x)


ZERO = const(0)
ONE = const(1)


@dataclass
class Facts:
    """What is known of leaves: `axes[i]` is the extent of axis i (0 <= axis < extent); `symbols[name]` its least and greatest
    value (None: unbounded above); `values[k]` the extent a gathered value stays below. Symbols default to >= 0."""

    axes: tuple[Expr, ...] = ()
    symbols: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    values: Mapping[int, Expr] = field(default_factory=dict)

    def upper(self, e: Expr) -> Expr | None:
        """An upper bound (inclusive) over symbols only, or None."""
        return self._bound(e, want_upper=True)

    def lower(self, e: Expr) -> Expr | None:
        """A lower bound over symbols only, or None."""
        return self._bound(e, want_upper=False)

    def _atom_range(self, a: Atom) -> tuple[Expr, Expr | None] | None:
        """(least, greatest or None) of a non-symbol atom, as expressions over symbols."""
        if a.kind == "axis":
            i = a.args[0]
            assert isinstance(i, int)
            return (ZERO, self.axes[i] - 1) if i < len(self.axes) else None
        if a.kind == "value":
            k = a.args[0]
            assert isinstance(k, int)
            return (ZERO, self.values[k] - 1) if k in self.values else None
        x, y = a.args
        assert isinstance(x, Expr) and isinstance(y, Expr)
        if a.kind == "mod":
            return (ZERO, y - 1) if not (y.axes() or y.values()) else None
        low, high, d = self.lower(x), self.upper(x), y.const
        if d is None or low is None or low.const is None:
            return (ZERO, None) if low is not None and self.is_nonneg(low) else None
        return const(low.const // d), const(high.const // d) if high is not None and high.const is not None else None

    def _bound(self, e: Expr, want_upper: bool) -> Expr | None:
        coeffs, total = e.linear()
        for a, c in coeffs.items():
            if c.axes() or c.values() or any(x.kind in ("div", "mod") for x in c.atoms()):
                return None
            ends = self._atom_range(a)
            if ends is None:
                return None
            if self.is_nonneg(c):
                end = ends[1] if want_upper else ends[0]
            elif self.is_nonneg(-c):
                end = ends[0] if want_upper else ends[1]
            else:
                return None
            if end is None:
                return None
            total = total + c * end
        return total

    def is_nonneg(self, e: Expr) -> bool:
        """True when e >= 0 is certain; False means "not proven"."""
        if e.const is not None:
            return e.const >= 0
        if e.axes() or e.values():
            low = self.lower(e)
            return low is not None and self.is_nonneg(low)
        env: dict[Atom, Expr] = {}
        for a in e.leaves():
            least, _ = self.symbols.get(str(a.args[0]), (0, None))
            env[a] = _single(a) + least
        return _has_no_negative(e.substitute(env) if env else e)

    def is_less(self, a: Expr, b: Expr) -> bool:
        """True when a < b is certain."""
        return self.is_nonneg(b - a - 1)

    def in_range(self, e: Expr, extent: Expr) -> bool:
        """True when 0 <= e < extent is certain."""
        low, high = self.lower(e), self.upper(e)
        return low is not None and high is not None and self.is_nonneg(low) and self.is_less(high, extent)


def _has_no_negative(e: Expr) -> bool:
    """e >= 0 when every symbol in it is >= 0: no negative coefficient, and no division of what could be negative."""
    return all(c >= 0 for _, c in e.terms) and all(
        _has_no_negative(a.args[0]) for a in e.atoms() if a.kind == "div" and isinstance(a.args[0], Expr)
    )


NO_FACTS = Facts()


def floordiv(n: Expr, d: Expr | int, facts: Facts | None = None) -> Expr:
    """n // d for d > 0, simplified: multiples of d leave the division when what stays lies in [0, d)."""
    d = to_expr(d)
    if d is ONE:
        return n
    if n.const is not None and d.const is not None:
        return const(n.const // d.const)
    whole, rest = split_multiples(n, d)
    if not rest.terms:
        return whole
    facts = facts or NO_FACTS
    if facts.in_range(rest, d):
        return whole
    inner = _nested_division(rest, d)
    if inner is not None:
        return whole + floordiv(inner[0], inner[1], facts)
    reduced = _common_factor(rest, d, facts)
    if reduced is not None:
        return whole + floordiv(reduced[0], reduced[1], facts)
    return whole + _single(Atom.make("div", rest, d))


def mod(n: Expr, d: Expr | int, facts: Facts | None = None) -> Expr:
    """n % d for d > 0, simplified: multiples of d vanish; what is already in [0, d) is kept as it is."""
    d = to_expr(d)
    if d is ONE:
        return ZERO
    if n.const is not None and d.const is not None:
        return const(n.const % d.const)
    _, rest = split_multiples(n, d)
    if not rest.terms:
        return ZERO
    facts = facts or NO_FACTS
    if facts.in_range(rest, d):
        return rest
    parts = _common_split(rest, d, facts)
    if parts is not None:
        factor, high, high_d, low = parts
        return mod(high, high_d, facts) * factor + low
    return _single(Atom.make("mod", rest, d))


def split_multiples(n: Expr, d: Expr) -> tuple[Expr, Expr]:
    """n = whole*d + rest with every term of `whole` read off syntactically."""
    whole: dict[Monomial, int] = {}
    rest: dict[Monomial, int] = {}
    if len(d.terms) != 1:
        return (ONE, ZERO) if n is d else (ZERO, n)  # a sum as divisor: only the whole polynomial is taken out
    (dm, dc) = d.terms[0]
    for m, c in n.terms:
        cut = _without(m, dm)
        if cut is None:
            rest[m] = c
            continue
        q, r = divmod(c, dc)
        if q:
            whole[cut] = whole.get(cut, 0) + q
        if r:
            rest[m] = r
    return Expr.make(whole), Expr.make(rest)


def _without(m: Monomial, factor: Monomial) -> Monomial | None:
    """m / factor, or None when it does not divide."""
    left = list(m)
    for a in factor:
        if a not in left:
            return None
        left.remove(a)
    return tuple(left)


def _nested_division(n: Expr, d: Expr) -> tuple[Expr, Expr] | None:
    """(x // a) // d = x // (a*d)."""
    if len(n.terms) == 1 and n.terms[0][1] == 1 and len(n.terms[0][0]) == 1:
        a = n.terms[0][0][0]
        if a.kind == "div":
            x, y = a.args
            assert isinstance(x, Expr) and isinstance(y, Expr)
            return x, y * d
    return None


def _common_split(n: Expr, d: Expr, facts: Facts) -> tuple[Expr, Expr, Expr, Expr] | None:
    """n = factor*high + low with factor | d and 0 <= low < factor: then n % d = factor*(high % (d/factor)) + low."""
    for factor in _factor_candidates(n, d):
        high, low = split_multiples(n, factor)
        if high.terms and (not low.terms or facts.in_range(low, factor)):
            quotient, left = split_multiples(d, factor)
            if not left.terms and quotient is not ONE:
                return factor, high, quotient, low
    return None


def _common_factor(n: Expr, d: Expr, facts: Facts) -> tuple[Expr, Expr] | None:
    """(factor*high + low) // (factor*q) = high // q when 0 <= low < factor."""
    parts = _common_split(n, d, facts)
    return None if parts is None else (parts[1], parts[2])


def _factor_candidates(n: Expr, d: Expr) -> Iterable[Expr]:
    """Divisors of d that appear as (factors of) coefficients in n, largest first."""
    if len(d.terms) != 1:
        return
    (dm, dc) = d.terms[0]
    seen: set[Expr] = set()
    found: list[tuple[int, int, Expr]] = []
    for m, c in n.terms:
        shared = tuple(a for a in m if a in dm)
        g = _gcd(c, dc)
        for mono in {shared, ()}:
            e = Expr.make({mono: g})
            if e is not ONE and e is not d and e not in seen:
                seen.add(e)
                found.append((-len(mono), -g, e))
    for _, _, e in sorted(found, key=lambda t: (t[0], t[1], t[2].key)):
        yield e


def _gcd(a: int, b: int) -> int:
    a, b = abs(a), abs(b)
    while b:
        a, b = b, a % b
    return a


def product(extents: Iterable[Expr | int]) -> Expr:
    """The product of extents."""
    out = ONE
    for e in extents:
        out = out * to_expr(e)
    return out


def flatten(indices: Iterable[Expr], shape: Iterable[Expr]) -> Expr:
    """Row-major linear index of `indices` in `shape`."""
    out = ZERO
    for i, n in zip(indices, shape, strict=True):
        out = out * n + i
    return out


def unflatten(linear: Expr, shape: tuple[Expr, ...], facts: Facts | None = None) -> tuple[Expr, ...]:
    """Inverse of `flatten`: one expression a dimension."""
    out: list[Expr] = []
    inner = ONE
    for k in range(len(shape) - 1, -1, -1):
        part = floordiv(linear, inner, facts)
        # the outermost index needs no remainder: the linear index stays below the product of the shape
        out.append(part if k == 0 else mod(part, shape[k], facts))
        inner = inner * shape[k]
    return tuple(ZERO if n is ONE else e for e, n in zip(reversed(out), shape, strict=True))
