"""Formulas: the bodies of reductions as expressions, for algebra and for evaluation in double precision.

Leaves are `stream` values (they vary along the reduced axis), `row` values (they do not), the results of earlier
reductions over the same axis (`state k`, and `old k` for its value before a tile), accumulators (`slot`), `count` (how many
elements were seen), named variables and constants. Inner nodes are the map operators of plait/ir/ops.py by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from plait.ir.dtype import DType
from plait.ir.graph import Node, Shape

Number = bool | int | float
LEAVES = frozenset({"const", "stream", "row", "state", "old", "slot", "count", "var"})


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value read at one place: `source` at `index` (over the axes of the cascade); without a source, the integer that
    the single expression of `index` gives. `operands` are the rows that the index's gathered values come from."""

    source: Node | None
    index: Shape

    @property
    def dtype(self) -> DType:
        """The element type."""
        return DType.i64 if self.source is None else self.source.dtype

    @property
    def name(self) -> str:
        """As a reader of a refusal knows it."""
        if self.source is None:
            return repr(self.index[0])
        if self.source.op == "input":
            return str(self.source.attr("name"))
        return f"{self.source.op}_{self.source.serial}"


class Formula:
    """An immutable expression; equal when structurally equal. Build with `const`, `leaf`, `state` … and `apply`."""

    __slots__ = ("_hash", "args", "has_state", "has_stream", "op", "value")
    op: str
    args: tuple[Formula, ...]
    value: Any
    has_stream: bool
    has_state: bool

    def __init__(self, op: str, args: tuple[Formula, ...] = (), value: Any = None) -> None:
        self.op, self.args, self.value = op, args, value
        self._hash = hash((op, args, repr(value) if op == "const" else value))
        self.has_stream = op == "stream" or any(a.has_stream for a in args)
        self.has_state = op == "state" or any(a.has_state for a in args)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Formula) or self._hash != other._hash or self.op != other.op:
            return False
        same = repr(self.value) == repr(other.value) if self.op == "const" else self.value == other.value
        return same and self.args == other.args

    @property
    def is_pure(self) -> bool:
        """Without stream values and states mixed."""
        return not (self.has_stream and self.has_state)

    def __repr__(self) -> str:
        return render(self, lambda f: f"{f.op}{f.value}")


# ------------------------------------------------------------------------------------------------------------ building
def const(value: Number) -> Formula:
    """A number."""
    return Formula("const", (), value)


def state(k: int) -> Formula:
    """The result of the cascade's k-th reduction, as far as it is known."""
    return Formula("state", (), k)


def old(k: int) -> Formula:
    """The same, before the tile at hand."""
    return Formula("old", (), k)


def slot(k: int, part: int = 0) -> Formula:
    """One component of the k-th accumulator."""
    return Formula("slot", (), (k, part))


def var(name: str) -> Formula:
    """A named argument."""
    return Formula("var", (), name)


COUNT = Formula("count")
ZERO, ONE, MINUS_INFINITY = const(0.0), const(1.0), const(-math.inf)


def apply(op: str, *args: Formula, value: Any = None) -> Formula:
    """op(args), with the foldings that are exact (but for the sign of a zero): x*1, x/1, x+0, --x, constants."""
    if op in SEMANTICS and all(a.op == "const" for a in args):
        return const(SEMANTICS[op](*(a.value for a in args)))
    if op == "mul":
        if _is(args[0], 1):
            return args[1]
        if _is(args[1], 1):
            return args[0]
    if op == "div" and _is(args[1], 1):
        return args[0]
    if op in ("add", "sub") and _is(args[1], 0):
        return args[0]
    if op == "add":
        if _is(args[0], 0):
            return args[1]
        if args[1].op == "neg":
            return Formula("sub", (args[0], args[1].args[0]))
        if args[0].op == "neg":
            return Formula("sub", (args[1], args[0].args[0]))
    if op == "sub" and args[1].op == "neg":
        return apply("add", args[1].args[0], args[0]) if args[0].op == "neg" else apply("add", args[0], args[1].args[0])
    if op == "neg" and args[0].op == "neg":
        return args[0].args[0]
    if op == "where" and args[0].op == "const":
        return args[1] if args[0].value else args[2]
    return Formula(op, args, value)


def _is(f: Formula, value: float) -> bool:
    return f.op == "const" and not isinstance(f.value, bool) and f.value == value


def total(parts: Iterable[Formula]) -> Formula:
    """Their sum, from the left; 0 for none."""
    out = ZERO
    for p in parts:
        out = apply("add", out, p)
    return out


def product(parts: Iterable[Formula]) -> Formula:
    """Their product, from the left; 1 for none."""
    out = ONE
    for p in parts:
        out = apply("mul", out, p)
    return out


def substitute(f: Formula, change: Callable[[Formula], Formula | None]) -> Formula:
    """f with every leaf for which `change` gives a formula replaced by it."""
    memo: dict[Formula, Formula] = {}

    def go(g: Formula) -> Formula:
        found = memo.get(g)
        if found is None:
            if g.op in LEAVES:
                found = change(g) or g
            else:
                args = tuple(go(a) for a in g.args)
                same = all(a is b for a, b in zip(args, g.args))
                found = g if same else apply(g.op, *args, value=g.value)
            memo[g] = found
        return found

    return go(f)


def parts_of(*formulas: Formula) -> Iterator[Formula]:
    """Every sub-expression once, leaves included."""
    seen: set[Formula] = set()
    stack = list(formulas)
    while stack:
        f = stack.pop()
        if f not in seen:
            seen.add(f)
            stack.extend(f.args)
            yield f


def states_of(f: Formula) -> list[int]:
    """Which states a formula mentions."""
    return sorted({g.value for g in parts_of(f) if g.op == "state"})


# ----------------------------------------------------------------------------------------------------------- evaluating
def _guarded(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A real function as the hardware has it: NaN outside its domain, infinity where it overflows."""

    def call(*xs: Any) -> Any:
        try:
            return fn(*xs)
        except OverflowError:
            return math.inf
        except (ValueError, ZeroDivisionError):
            return math.nan

    return call


def _div(a: float, b: float) -> float:
    if b != 0:
        return a / b
    if a == 0 or math.isnan(a):
        return math.nan
    return math.copysign(math.inf, a) * math.copysign(1.0, b)


def _log(base: Callable[[float], float]) -> Callable[[float], float]:
    def call(x: float) -> float:
        if x == 0:
            return -math.inf
        return math.nan if x < 0 else base(x)

    return call


def _sigmoid(x: float) -> float:
    if x >= 0:
        return 1.0 / (1.0 + math.exp(-x))
    return math.exp(x) / (1.0 + math.exp(x)) if not math.isnan(x) else x


def _maximum(a: Any, b: Any) -> Any:
    return a if a != a else b if b != b else max(a, b)


def _minimum(a: Any, b: Any) -> Any:
    return a if a != a else b if b != b else min(a, b)


def _rsqrt(x: float) -> float:
    return math.inf if x == 0 else 1.0 / math.sqrt(x) if x > 0 else math.nan


def _pow(a: float, b: float) -> float:
    if a == 0 and b < 0:
        return math.inf
    return math.pow(a, b)


def _sign(x: float) -> float:
    return x if x != x else float((x > 0) - (x < 0))


def _round(x: float) -> float:
    return x if math.isinf(x) or math.isnan(x) else float(round(x))


_ONE: dict[str, Callable[..., Any]] = {
    "neg": lambda x: -x,
    "abs": abs,
    "sign": _sign,
    "sqrt": math.sqrt,
    "rsqrt": _rsqrt,
    "reciprocal": lambda x: _div(1.0, x),
    "exp": math.exp,
    "exp2": lambda x: math.pow(2.0, x),
    "expm1": math.expm1,
    "log": _log(math.log),
    "log2": _log(math.log2),
    "log10": _log(math.log10),
    "log1p": math.log1p,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "atan": math.atan,
    "sinh": math.sinh,
    "cosh": math.cosh,
    "tanh": math.tanh,
    "erf": math.erf,
    "erfc": math.erfc,
    "sigmoid": _sigmoid,
    "floor": lambda x: float(math.floor(x)),
    "ceil": lambda x: float(math.ceil(x)),
    "trunc": lambda x: float(math.trunc(x)),
    "round": _round,
    "isnan": lambda x: x != x,
    "isinf": math.isinf,
    "bit_not": lambda x: not x if isinstance(x, bool) else ~x,
}
_MORE: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": _div,
    "pow": _pow,
    "atan2": math.atan2,
    "hypot": math.hypot,
    "copysign": math.copysign,
    "maximum": _maximum,
    "minimum": _minimum,
    "bit_and": lambda a, b: a & b,
    "bit_or": lambda a, b: a | b,
    "bit_xor": lambda a, b: a ^ b,
    "floordiv": lambda a, b: a // b,
    "remainder": lambda a, b: a % b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "where": lambda c, a, b: a if c else b,
}
SEMANTICS: dict[str, Callable[..., Any]] = {n: _guarded(f) for n, f in {**_ONE, **_MORE}.items()}
"""Operators that a body may hold, on Python numbers. A cast is apart: see `cast_value`."""


def cast_value(dtype: DType, x: Any) -> Any:
    """A cast in exact arithmetic: between floats nothing is rounded."""
    if dtype is DType.b1:
        return bool(x)
    return float(x) if dtype.is_float else int(x) if math.isfinite(x) else 0


class Evaluator:
    """Values of formulas where `leaf` gives those of the leaves that are not constants. Shared parts are computed once."""

    def __init__(self, leaf: Callable[[Formula], Any]) -> None:
        self._leaf = leaf
        self._memo: dict[Formula, Any] = {}

    def __call__(self, f: Formula) -> Any:
        if f in self._memo:
            return self._memo[f]
        if f.op == "const":
            return f.value
        if f.op in LEAVES:
            out = self._leaf(f)
        elif f.op == "cast":
            out = cast_value(f.value, self(f.args[0]))
        else:
            out = SEMANTICS[f.op](*(self(a) for a in f.args))
        self._memo[f] = out
        return out


# ------------------------------------------------------------------------------------------------------------ rendering
_INFIX = {"add": (1, " + "), "sub": (1, " - "), "mul": (2, "*"), "div": (2, "/")}


def render(f: Formula, name: Callable[[Formula], str], depth: int = 8) -> str:
    """Infix text; `name` names the leaves that are not constants. What lies deeper than `depth` is "…"."""
    return _render(f, name, depth)[0]


def _render(f: Formula, name: Callable[[Formula], str], depth: int) -> tuple[str, int]:
    if f.op == "const":
        return (f"{f.value:g}" if isinstance(f.value, float) else str(f.value)), 9
    if f.op in LEAVES:
        return name(f), 9
    if depth == 0:
        return "…", 9
    args = [_render(a, name, depth - 1) for a in f.args]
    if f.op in _INFIX:
        level, sign = _INFIX[f.op]
        left = args[0][0] if args[0][1] >= level else f"({args[0][0]})"
        right = args[1][0] if args[1][1] > level else f"({args[1][0]})"
        return left + sign + right, level
    if f.op == "neg":
        return (f"-{args[0][0]}" if args[0][1] > 1 else f"-({args[0][0]})"), 1
    name_of = repr(f.value) if f.op == "cast" else f.op
    return f"{name_of}({', '.join(a[0] for a in args)})", 9
