"""Names and index expressions of one part of a C++ kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from plait.emit.writer import identifier
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.index import Atom, Expr, Facts
from plait.tile.program import Check, Let, Load, Reduce, Scan, Stmt, Store, Sweep, TileProgram

_RESERVED = frozenset(
    [
        "bufs",
        "syms",
        "threads",
        "worker",
        "turn",
        "status",
        "fault",
        "begin",
        "end",
        "item",
        "rest",
        "step",
        "lane",
        "int",
        "float",
        "double",
        "bool",
        "char",
        "short",
        "long",
        "auto",
        "const",
        "for",
        "if",
        "else",
        "while",
        "do",
        "return",
        "void",
        "new",
        "delete",
        "this",
        "class",
        "struct",
        "namespace",
        "template",
        "typename",
        "using",
        "operator",
        "and",
        "or",
        "not",
        "xor",
        "signed",
        "unsigned",
        "static",
        "inline",
        "register",
        "default",
        "case",
        "switch",
        "break",
        "continue",
        "goto",
        "union",
        "enum",
        "public",
        "private",
    ]
)


class Scope:
    """C++ names of a part's dims, symbols, buffers and locals, and the rendering of index expressions over them."""

    def __init__(self, program: TileProgram, vector: int | None) -> None:
        self.program = program
        self.vector = vector
        self.facts = Facts(axes=tuple(d.extent for d in program.dims))
        taken: set[str] = set(_RESERVED)
        self.dims = [self._unique(d.name, taken) for d in program.dims]
        taken |= {f"{d}{suffix}" for d in self.dims for suffix in ("_n", "_tile", "_tiles", "_lo", "_hi", "_at", "_to")}
        self.symbols = {s: self._unique(s, taken) for s in program.symbols}
        self.draws = {d: self._unique(f"draw{k}", taken) for k, d in enumerate(program.draws)}
        self.buffers = [self._unique(b.name, taken) for b in program.buffers]
        self.locals: dict[int, str] = {}
        self.types: dict[int, DType] = {}
        self.spans: dict[int, frozenset[int]] = {}
        for s in program.walk():
            if isinstance(s, Let | Load | Reduce | Scan):
                self.locals[s.out] = self._unique(f"{self._stem(s)}_{s.out}", taken)
                self.types[s.out] = s.dtype
                self.spans[s.out] = frozenset(s.span)

    @staticmethod
    def _unique(name: str, taken: set[str]) -> str:
        name = identifier(name)
        while name in taken:
            name += "_"
        taken.add(name)
        return name

    def _stem(self, s: Let | Load | Reduce | Scan) -> str:
        if isinstance(s, Load):
            return self.buffers[s.buffer]
        if isinstance(s, Let):
            return s.op
        return s.monoid if isinstance(s, Reduce) else s.scan

    # ---------------------------------------------------------------- expressions
    def expr(self, e: Expr, quotients: dict[str, str] | None = None) -> str:
        """An int64_t expression; `quotients` names symbols that stand for divisions hoisted out of a loop."""
        if not e.terms:
            return "0"
        out: list[str] = []
        for m, c in e.terms:
            factors = [self._atom(a, quotients) for a in m]
            size = abs(c)
            if size != 1 or not factors:
                factors.insert(0, str(size) if size < 2**31 else f"INT64_C({size})")
            text = "*".join(factors)
            if out:
                out.append(f" - {text}" if c < 0 else f" + {text}")
            else:
                out.append(f"-{text}" if c < 0 else text)
        return "".join(out)

    def _atom(self, a: Atom, quotients: dict[str, str] | None) -> str:
        if a.kind == "axis":
            i = a.args[0]
            assert isinstance(i, int)
            return self.dims[i]
        if a.kind == "sym":
            name = str(a.args[0])
            return quotients[name] if quotients and name in quotients else self.symbols[name]
        if a.kind == "value":
            k = a.args[0]
            assert isinstance(k, int)
            return self.locals[k] if self.types[k] is DType.i64 else f"int64_t({self.locals[k]})"
        n, d = a.args
        assert isinstance(n, Expr) and isinstance(d, Expr)
        return f"plait::{self._division(a.kind, n, d)}({self.expr(n, quotients)}, {self.expr(d, quotients)})"

    def _division(self, kind: str, n: Expr, d: Expr) -> str:
        """The cheapest function that is right for the operands' ranges."""
        if not self.facts.is_nonneg(n):
            return "floordiv" if kind == "div" else "floormod"
        top = self.facts.upper(n)
        small = (
            top is not None and top.const is not None and top.const < 2**31 and d.const is not None and d.const < 2**31
        )
        return ("udiv" if kind == "div" else "umod") + ("32" if small else "")

    def holds(self, guard: tuple[Expr, ...], quotients: dict[str, str] | None = None) -> str:
        """A bool expression: every guard is >= 0."""
        return " & ".join(f"({self.expr(g, quotients)} >= 0)" for g in guard) if guard else "true"


def varies(e: Expr, dim: int, spans: dict[int, frozenset[int]]) -> bool:
    """True when the expression may change along `dim`."""
    return dim in e.axes() or any(dim in spans[k] for k in e.values())


def guard_by_checks(program: TileProgram) -> TileProgram:
    """Add to each access the range of every Check on the same gathered values or symbols, so that a failing one is not made."""
    checks = [s for s in program.walk() if isinstance(s, Check)]
    if not checks:
        return program

    def covered(s: Load | Store) -> tuple[Expr, ...]:
        extra: list[Expr] = []
        for c in checks:
            shares = (
                c.index.values() & s.address.values()
                if c.index.values()
                else not s.address.values() and c.index.symbols() & s.address.symbols()
            )
            if shares and set(c.guard) <= set(s.guard):
                extra += [g for g in (c.index, c.extent - 1 - c.index) if g not in s.guard and g not in extra]
        return (*s.guard, *extra)

    def visit(s: Stmt) -> Stmt:
        if isinstance(s, Sweep):
            return replace(s, body=tuple(visit(t) for t in s.body))
        return replace(s, guard=covered(s)) if isinstance(s, Load | Store) else s

    return replace(program, body=tuple(visit(s) for s in program.body))


def affine(e: Expr, dim: int, spans: dict[int, frozenset[int]]) -> tuple[int, Expr] | None:
    """(c, r) with e = c*axis(dim) + r, c a nonzero constant and r free of the dim; else None."""
    atom = ix.axis_atom(dim)
    c, rest = 0, {}
    for m, k in e.terms:
        if m == (atom,):
            c = k
        else:
            rest[m] = k
    r = Expr.make(rest)
    return None if c == 0 or varies(r, dim, spans) else (c, r)


class Splitter:
    """Finds where the pieces of an index space lie in which divisions by the vector dim are constant and guards decided."""

    def __init__(self, scope: Scope, dim: int) -> None:
        self.scope, self.dim = scope, dim
        self.names: dict[str, str] = {}  # placeholder symbol -> C++ name of the quotient
        self.quotients: list[tuple[str, Expr, Expr, int, Expr]] = []  # (name, numerator, divisor, c, r)
        self.flags: list[tuple[str, Expr]] = []  # (name, guard)
        self._division: dict[tuple[Expr, Expr], Expr] = {}

    def divided(self, e: Expr) -> Expr:
        """The expression with divisions and remainders along the dim replaced by quotients constant over a piece."""
        return self._map(e) if any(a.kind in ("div", "mod") for a in e.atoms()) else e

    def _map(self, e: Expr) -> Expr:
        total = ix.ZERO
        for m, c in e.terms:
            part = ix.const(c)
            for a in m:
                part = part * self._factor(a)
            total = total + part
        return total

    def _factor(self, a: Atom) -> Expr:
        same = Expr.make({(a,): 1})
        if a.kind not in ("div", "mod"):
            return same
        n, d = a.args
        assert isinstance(n, Expr) and isinstance(d, Expr)
        n = self.divided(n)
        line = affine(n, self.dim, self.scope.spans)
        small = d.const is not None and d.const < 8  # pieces would be too short
        if line is None or small or varies(d, self.dim, self.scope.spans):
            return same
        q = self._division.get((n, d))
        if q is None:
            placeholder = f"@q{len(self.names)}"
            self.names[placeholder] = f"{self.scope.dims[self.dim]}_q{len(self.names)}"
            q = self._division[(n, d)] = ix.sym(placeholder)
            self.quotients.append((self.names[placeholder], n, d, *line))
        return q if a.kind == "div" else n - q * d

    def decided(self, guard: Expr) -> str | None:
        """A condition for guard >= 0 that is constant over a piece: a flag's name or its negation; None when there is none."""
        guard = self.divided(guard)
        if varies(guard, self.dim, self.scope.spans) and affine(guard, self.dim, self.scope.spans) is None:
            return None
        for name, known in self.flags:
            if known is guard:
                return name
            if known is -guard - 1:
                return f"!{name}"
        if len(self.flags) == 3:
            return None
        name = f"{self.scope.dims[self.dim]}_in{len(self.flags)}"
        self.flags.append((name, guard))
        return name

    @property
    def cuts(self) -> bool:
        """True when the loop must be cut into pieces."""
        return bool(self.quotients) or any(affine(g, self.dim, self.scope.spans) for _, g in self.flags)

    def cut_lines(self, at: str, to: str, render: Callable[[Expr], str]) -> list[str]:
        """Statements that set quotients and flags at the piece that begins at `at` and lower `to` to where it ends."""
        out: list[str] = []
        name = self.scope.dims[self.dim]
        for q, n, d, c, r in self.quotients:
            out.append(f"const int64_t {q} = plait::floordiv({render(n)}, {render(d)});")
            out.append(f"{to} = plait::lesser({to}, plait::next_quotient({c}, {render(r)}, {render(d)}, {q}));")
        for f, g in self.flags:
            out.append(f"const bool {f} = {render(g)} >= 0;")
            line = affine(g, self.dim, self.scope.spans)
            if line is not None:
                out.append(f"{to} = plait::lesser({to}, plait::next_flip({at}, {line[0]}, {render(line[1])}));")
        return [f"const int64_t {name} = {at};", *out] if out else []
