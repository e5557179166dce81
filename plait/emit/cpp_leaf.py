"""Innermost loops: straight-line statements along the vector dim, cut where guards flip, with lanes of accumulators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from plait.emit.cpp_ops import CTYPE, INT_DIVISIONS, let_expression, literal, loaded, memory_type, stored
from plait.emit.cpp_scope import Scope, Splitter, varies
from plait.emit.writer import Writer
from plait.errors import LowerFailed
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.index import Expr
from plait.tile.program import Check, Let, Load, Reduce, Scan, Stmt, Store, draw_of, operands

ZERO_DIVISION = 999
"""The failure code of an integer division by zero."""


@dataclass
class Accumulator:
    """A carried value of a Reduce or Scan: its C++ variable, and the lane that a step works on ("0", "lane", or a position)."""

    name: str
    lane: str
    settles: bool = False


@dataclass
class State:
    """What emission of a part knows so far."""

    scope: Scope
    out: Writer
    width: int  # points of the vector dim in a strip: the size of lane arrays
    lanewise_scratch: bool  # scratch holds one value for each lane of a strip
    accumulators: dict[int, Accumulator] = field(default_factory=dict)
    crossing: frozenset[int] = frozenset()  # locals kept in lane arrays between segments of a strip
    lane_results: frozenset[int] = frozenset()  # reductions whose results differ by lane
    constants: dict[int, float] = field(default_factory=dict)  # locals that are known numbers


Render = Callable[[Expr], str]


class Statements:
    """Renders single statements; `lane` is the driver's lane variable ("" where there is none)."""

    def __init__(self, state: State, render: Render, conditions: Callable[[tuple[Expr, ...]], str], lane: str) -> None:
        self.state, self.scope = state, state.scope
        self.render, self.conditions, self.lane = render, conditions, lane
        self.position = ""  # of a strip: where in lane arrays the current point is
        self.places: dict[tuple[int, Expr], str] = {}  # (buffer, invariant part of an address) -> hoisted pointer
        self.pointers: list[str] = []  # their declarations
        self.unrounded: dict[tuple[int, DType], int] = {}  # (a rounded local made here, its type) -> what was rounded

    def lines(self, s: Stmt) -> list[str]:
        """C++ statements for one tile statement."""
        if isinstance(s, Let):
            return self._let(s)
        if isinstance(s, Load):
            return [self._load(s)]
        if isinstance(s, Store):
            return [self._store(s)]
        if isinstance(s, Check):
            return self._check(s)
        if isinstance(s, Reduce):
            acc = self.state.accumulators[s.out]
            at = f", {self.render(s.linear)}" if s.linear is not None else ""
            lines = [f"{acc.name}.add({acc.lane}, {self.scope.locals[s.arg]}{at});"]
            if acc.lane == "0" and acc.settles:
                lines.append(f"{acc.name}.settle(1);")
            return lines
        if isinstance(s, Scan):
            acc = self.state.accumulators[s.out]
            return [self._define(s.out, f"{acc.name}.step({acc.lane}, {self.scope.locals[s.arg]})")]
        raise LowerFailed(f"a {type(s).__name__} where a straight-line statement belongs")

    def _define(self, out: int, value: str) -> str:
        return f"const {CTYPE[self.scope.types[out]]} {self.scope.locals[out]} = {value};"

    def _let(self, s: Let) -> list[str]:
        args = [self.scope.locals[a] for a in s.args]
        types = [self.scope.types[a] for a in s.args]
        if s.op == "round" and s.attrs:
            self.unrounded[(s.out, s.attr("dtype"))] = s.args[0]
        if s.op == "holds":
            return [self._define(s.out, self.conditions(s.attr("guard")))]
        linear = "".join(self.render(e) for k, e in s.attrs if k in ("expr", "linear"))
        draw = draw_of(s)
        if draw is not None:
            linear += f", {self.scope.draws[draw]}"
        before: list[str] = []
        if s.op in INT_DIVISIONS and not self.state.constants.get(s.args[1]):
            divisor = f"{args[1]}_or_1_{s.out}"
            before = [
                self._failure(f"{args[1]} == 0", ZERO_DIVISION),
                f"const {CTYPE[s.dtype]} {divisor} = {args[1]} == 0 ? {CTYPE[s.dtype]}(1) : {args[1]};",
            ]
            args[1] = divisor
        return [*before, self._define(s.out, let_expression(s, args, types, linear))]

    def _failure(self, condition: str, code: int) -> str:
        if self.lane:
            return f"fault_{code}.add({self.lane}, uint8_t({condition}));"
        return f"if ({condition}) plait::raise(fault, {code});"

    def _check(self, s: Check) -> list[str]:
        bad = f"!plait::in_range({self.render(s.index)}, {self.render(s.extent)})"
        if s.guard:
            bad = f"{self.conditions(s.guard)} & {bad}"
        return [self._failure(bad, s.code)]

    def _element(self, buffer: int, address: Expr) -> str:
        b, name = self.scope.program.buffers[buffer], self.scope.buffers[buffer]
        if b.role == "scratch" and self.state.lanewise_scratch:
            return f"{name}[({self.render(address)})*{self.state.width} + {self.position}]"
        dim = self.scope.vector
        if not self.lane and not self.position and dim is None:
            return f"{name}[{self.render(address)}]"
        moving = Expr.make({m: c for m, c in address.terms if dim is not None and self._moves(Expr.make({m: c}), dim)})
        fixed = address - moving
        if fixed is ix.ZERO or moving is ix.ZERO:
            return f"{name}[{self.render(address)}]"
        pointer = self.places.get((buffer, fixed))
        if pointer is None:
            pointer = self.places[(buffer, fixed)] = f"{name}_at{len(self.pointers)}"
            const = "const " if b.role == "in" else ""
            self.pointers.append(
                f"{const}{memory_type(b.dtype)}* const {pointer} = {name} + {_wrapped(self.render(fixed))};"
            )
        return f"{pointer}[{self.render(moving)}]"

    def _moves(self, e: Expr, dim: int) -> bool:
        return varies(e, dim, self.scope.spans)

    def _load(self, s: Load) -> str:
        stored_type = self.scope.program.buffers[s.buffer].dtype
        value = loaded(stored_type, self._element(s.buffer, s.address))
        if s.guard:
            value = f"{self.conditions(s.guard)} ? {value} : {literal(s.fill, s.dtype)}"
        return self._define(s.out, value)

    def _store(self, s: Store) -> str:
        b = self.scope.program.buffers[s.buffer]
        # rounding to the buffer's type is what the store does anyway
        value = self.unrounded.get((s.value, b.dtype), s.value)
        text = f"{self._element(s.buffer, s.address)} = {stored(b.dtype, self.scope.locals[value])};"
        return f"if ({self.conditions(s.guard)}) {text}" if s.guard else text


def _wrapped(text: str) -> str:
    return f"({text})" if " " in text else text


class Leaf:
    """One loop over [lo, hi) of the vector dim. `base` names the strip's start when lane arrays are in use, else ""."""

    def __init__(self, state: State, stmts: list[Stmt], lo: str, hi: str, base: str) -> None:
        self.state, self.scope = state, state.scope
        self.stmts, self.lo, self.hi, self.base = stmts, lo, hi, base
        assert self.scope.vector is not None
        self.dim = self.scope.vector
        self.name = self.scope.dims[self.dim]
        self.split = Splitter(self.scope, self.dim)
        self.sequential = any(isinstance(s, Scan) and s.dim == self.dim for s in stmts)
        self.codes = self._failure_codes()
        accs = [self.state.accumulators[s.out] for s in stmts if isinstance(s, Reduce)]
        self.by_lane = not self.sequential and (bool(self.codes) or any(a.lane == "lane" for a in accs))
        self.carried = [a for a in accs if a.lane == "lane"]
        self.strips = [a for a in accs if a.settles and a.lane not in ("lane", "0")]

    def _failure_codes(self) -> list[int]:
        codes = {s.code for s in self.stmts if isinstance(s, Check)}
        if any(
            isinstance(s, Let) and s.op in INT_DIVISIONS and not self.state.constants.get(s.args[1]) for s in self.stmts
        ):
            codes.add(ZERO_DIVISION)
        return sorted(codes)

    # ---------------------------------------------------------------- rendering along the loop
    def _render(self, e: Expr) -> str:
        return self.scope.expr(self.split.divided(e), self.split.names)

    def _conditions(self, guard: tuple[Expr, ...]) -> str:
        parts: list[str] = []
        for g in guard:
            decided = None if self.sequential else self.split.decided(g)
            parts.append(decided if decided is not None else f"({self._render(g)} >= 0)")
        # constant flags first: && lets them drop what follows; between conditions of a lane there are no jumps
        flags = [p for p in parts if p[0] != "("]
        rest = [p for p in parts if p[0] == "("]
        text = " && ".join([*flags, *([" & ".join(rest)] if rest else [])]) or "true"
        return f"({text})" if len(parts) > 1 else text

    # ---------------------------------------------------------------- emission
    def emit(self) -> None:
        """Write the loop, in a scope of its own when it declares anything."""
        body = self._body()
        if self.by_lane or self.split.flags or (self.rendered.pointers and not self.split.cuts):
            with self.state.out.block("{", "}"):
                self._emit(body)
        else:
            self._emit(body)

    def _emit(self, body: list[str]) -> None:
        out = self.state.out
        for code in self.codes if self.by_lane else ():
            out.line(f"plait::Any<bool, plait::LANES> fault_{code};")
        if not self.split.cuts:
            out.lines(*(f"const bool {f} = {self._render(g)} >= 0;" for f, g in self.split.flags))
            out.lines(*self.rendered.pointers)
            self._loop(body, self.lo, self.hi)
        else:
            at, to = f"{self.name}_at", f"{self.name}_to"
            with out.block(f"for (int64_t {at} = {self.lo}, {to}; {at} < {self.hi}; {at} = {to}) {{", "}"):
                out.line(f"{to} = {self.hi};")
                out.lines(*self.split.cut_lines(at, to, self._render))
                out.lines(*self.rendered.pointers)
                self._loop(body, at, to)
        for code in self.codes if self.by_lane else ():
            out.line(f"if (fault_{code}.result()) plait::raise(fault, {code});")
        for a in self.strips:
            out.line(f"{a.name}.settle({self.state.width});")

    def _body(self) -> list[str]:
        lane = "lane" if self.by_lane else ""
        self.rendered = Statements(self.state, self._render, self._conditions, lane)
        self.rendered.position = f"{self.name} - {self.base}" if self.base else ""
        defined = {s.out for s in self.stmts if isinstance(s, Let | Load | Scan)}
        used = dict.fromkeys(k for s in self.stmts for k in operands(s))
        lines = [self._fetch(k) for k in used if k not in defined and self.dim in self.scope.spans[k] and self.base]
        for s in self.stmts:
            lines += self.rendered.lines(s)
            if isinstance(s, Let | Load | Scan) and s.out in self.state.crossing:
                lines.append(
                    f"{self.scope.locals[s.out]}_lanes[{self.rendered.position}] = {self.scope.locals[s.out]};"
                )
        return lines

    def _fetch(self, k: int) -> str:
        name, ctype = self.scope.locals[k], CTYPE[self.scope.types[k]]
        if k in self.state.lane_results:
            return f"const {ctype} {name} = {self.state.accumulators[k].name}.result({self.rendered.position});"
        return f"const {ctype} {name} = {name}_lanes[{self.rendered.position}];"

    def _loop(self, body: list[str], lo: str, hi: str) -> None:
        out, flags = self.state.out, [f for f, _ in self.split.flags]
        if not self.by_lane and not flags:
            if not self.sequential:
                out.line("#pragma omp simd")
            with out.block(f"for (int64_t {self.name} = {lo}; {self.name} < {hi}; ++{self.name}) {{", "}"):
                out.lines(*body)
            return
        params = [
            f"const int64_t {self.name}",
            *(["const int64_t lane"] if self.by_lane else []),
            *(f"auto {f}" for f in flags),
        ]
        with out.block(f"auto step = [&]({', '.join(params)}) PLAIT_INLINE {{", "};"):
            out.lines(*body)
        driver = "lanes" if self.by_lane else "each"
        accs = "".join(f", {a.name}" for a in self.carried)
        if not flags:
            out.line(f"plait::{driver}({lo}, {hi}, step{accs});")
            return
        inner = [f"int64_t {self.name}", *(["int64_t lane"] if self.by_lane else [])]
        given = [self.name, *(["lane"] if self.by_lane else []), *flags]
        with out.block(
            f"plait::pick([&]({', '.join(f'auto {f}' for f in flags)}) PLAIT_INLINE {{", f"}}, {', '.join(flags)});"
        ):
            out.line(
                f"plait::{driver}({lo}, {hi}, [&]({', '.join(inner)}) PLAIT_INLINE {{ step({', '.join(given)}); }}{accs});"
            )
