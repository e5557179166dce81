"""Where an emitted kernel may be less exact than f32 and nobody can see it, and where it must not contract a*b+c.

A value is *tolerant* when all it leads to is storage of 16 bits or fewer, through operations that neither jump nor cancel:
an error of a few f32 ulps is then far below the rounding of the store. Divisions and exponentials of such values take the
hardware's approximations. So does a tanh that only shifts exponents (capped scores), where absolute errors count. A
contraction (one rounding instead of two) shows where products cancel, so a kernel that adds a product to more than a
constant is compiled without; a sum reduction of products may contract, it gains accuracy.
"""

from __future__ import annotations

import math

from plait.emit.triton_range import least
from plait.ir.dtype import DType
from plait.tile.program import Dot, Let, Reduce, Stmt, Store, TileProgram, operands

_SMOOTH = frozenset(
    [
        "mul",
        "div",
        "neg",
        "abs",
        "copy",
        "maximum",
        "minimum",
        "fmax",
        "fmin",
        "round",
        "sigmoid",
        "tanh",
        "sqrt",
        "rsqrt",
        "reciprocal",
        "exp",
        "where",
    ]
)

_TANH_ERROR = 5e-7  # of the approximations, absolutely
_EXP_ERROR = 2.0**-12  # of an exponent: an eighth of what rounding to bf16 hides


class Accuracy:
    """What is known of a program's locals."""

    def __init__(self, program: TileProgram) -> None:
        self.defs = {s.out: s for s in program.walk() if isinstance(s, (Let, Reduce))}
        self.uses: dict[int, list[Stmt]] = {}
        for s in program.walk():
            for k in operands(s):
                self.uses.setdefault(k, []).append(s)
        self.stored = {i: b.dtype for i, b in enumerate(program.buffers)}
        self.known: dict[int, bool] = {}
        self.slacks: dict[int, float] = {}

    def constant(self, v: int) -> float | None:
        """The value of a local that is a constant."""
        d = self.defs.get(v)
        return float(d.attr("value")) if isinstance(d, Let) and d.op == "const" else None

    def tolerant(self, v: int) -> bool:
        """Errors of a few ulps in v are invisible."""
        found = self.known.get(v)
        if found is None:
            found = self.known[v] = bool(self.uses.get(v)) and all(self._forgives(s, v) for s in self.uses[v])
        return found

    def _forgives(self, s: Stmt, v: int) -> bool:
        if isinstance(s, Store):
            return s.value == v and self.stored[s.buffer].is_storage_only
        if isinstance(s, Dot) and v != s.scale:
            return s.operand.is_storage_only
        if isinstance(s, Reduce):
            return s.monoid in ("max", "min") and self.tolerant(s.out)
        if not isinstance(s, Let) or not s.dtype.is_float:
            return False
        if s.op == "add" and self._grows(s, v):
            return self.tolerant(s.out)
        if s.op not in _SMOOTH:
            return False
        if s.op == "round" and not any(k == "dtype" for k, _ in s.attrs):
            return False
        if s.op == "where" and s.args[0] == v:
            return False
        return self.tolerant(s.out)

    def _grows(self, s: Let, v: int) -> bool:
        """s adds a positive constant to v, which is not negative: nothing cancels."""
        other = s.args[0] if s.args[1] == v else s.args[1]
        constant, d = self.constant(other), self.defs.get(v)
        return (
            constant is not None and constant > 0 and isinstance(d, Let) and d.op in ("exp", "exp2", "abs", "sigmoid")
        )

    def is_large(self, v: int) -> bool:
        """v is positive and its reciprocal far from overflow."""
        return least(v, self.defs, self._below_maximum) >= 1e-30

    def rounded_from(self, v: int, storage: DType) -> int:
        """What v was rounded from, when it was rounded to `storage`: storing there rounds as well; else v."""
        d = self.defs.get(v)
        if isinstance(d, Let) and d.op == "round" and dict(d.attrs).get("dtype") is storage:
            return d.args[0]
        return v

    def may_approximate(self, s: Let) -> bool:
        """The hardware's approximation of s, or one made with it, does."""
        if s.op == "exp":
            return self.fast_exp(s)
        return self.tolerant(s.out) or (s.op == "div" and s.dtype is DType.f32 and self._is_capped(s))

    def _is_capped(self, s: Let) -> bool:
        """Only tanh that shifts exponents takes s: its slope flattens relative errors."""
        uses = self.uses.get(s.out, [])
        return bool(uses) and all(isinstance(u, Let) and self.shifts_exponents(u) for u in uses)

    def shifts_exponents(self, s: Let) -> bool:
        """s is a tanh that may be off by a small absolute error."""
        return s.op == "tanh" and s.dtype is DType.f32 and self.slack(s.out) >= _TANH_ERROR

    def slack(self, v: int) -> float:
        """An absolute error that v may have and nobody can see: exponentials whose own small relative errors nobody sees turn
        it into such, and what is between only scales it, selects from it or subtracts."""
        if v not in self.slacks:
            self.slacks[v] = min((self._slack_in(s, v) for s in self.uses.get(v, [])), default=math.inf)
        return self.slacks[v]

    def _slack_in(self, s: Stmt, v: int) -> float:
        if isinstance(s, Reduce):
            return self.slack(s.out) if s.monoid in ("max", "min") else 0.0
        if not isinstance(s, Let):
            return 0.0
        if s.op in ("eq", "ne") and math.isinf(self.constant(s.args[1]) or 0.0):
            return math.inf  # what is finite stays so
        if not s.dtype.is_float:
            return 0.0
        if s.op == "exp":
            return _EXP_ERROR if self.fast_exp(s) else 0.0
        if s.op == "mul" and s.args[0] != s.args[1]:
            factor = self.constant(s.args[0] if s.args[1] == v else s.args[1])
            return self.slack(s.out) / max(abs(factor), 1.0) if factor is not None else 0.0
        if s.op == "div" and s.args[0] == v:
            divisor = self.constant(s.args[1])
            return self.slack(s.out) * min(abs(divisor), 1.0) if divisor else 0.0
        if s.op in ("add", "sub", "running", "before", "copy", "neg", "maximum", "minimum") or (
            s.op == "where" and s.args[0] != v
        ):
            return self.slack(s.out)
        return 0.0

    def fast_exp(self, s: Let) -> bool:
        """The hardware's exponential does for s: also for exp(x - max x) that is only summed, where large arguments, of
        which the approximation loses relative accuracy, hardly count."""
        if s.dtype is not DType.f32:
            return False
        below = self._below_maximum(s.args[0])
        uses = self.uses.get(s.out, [])
        return bool(uses) and all((below and self._sums(use)) or self._forgives(use, s.out) for use in uses)

    def _sums(self, s: Stmt) -> bool:
        """s adds up what it is given, or selects from it for such sums."""
        if isinstance(s, Let) and s.op == "where":
            uses = self.uses.get(s.out, [])
            return bool(uses) and all(map(self._sums, uses))
        return isinstance(s, Reduce) and s.monoid in ("sum", "dot")

    def _below_maximum(self, v: int) -> bool:
        d = self.defs.get(v)
        if not isinstance(d, Let) or d.op != "sub":
            return False
        return self._is_maximum(d.args[1])

    def _is_maximum(self, v: int) -> bool:
        d = self.defs.get(v)
        if isinstance(d, Let) and d.op == "where":  # softmaxes that replace the maximum of a fully masked row
            return self._is_maximum(d.args[1]) or self._is_maximum(d.args[2])
        if isinstance(d, Let) and d.op in ("round", "running"):
            return self._is_maximum(d.args[0])
        if isinstance(d, Let) and d.op in ("mul", "div"):  # x * c - c * max x, c > 0
            return (self.constant(d.args[1]) or 0) > 0 and self._is_maximum(d.args[0])
        if isinstance(d, Let) and d.op == "add":  # what a cap adds
            return bool(dict(d.attrs).get("cap")) and self._is_maximum(d.args[0])
        return isinstance(d, Reduce) and d.monoid == "max"

    @property
    def may_contract(self) -> bool:
        """No float sum or difference has a product for one operand and more than a constant for the other."""
        for s in self.defs.values():
            if isinstance(s, Let) and s.op in ("add", "sub") and s.dtype.is_float:
                for k, other in (s.args, s.args[::-1]):
                    if self._is_product(k) and self.constant(other) is None:
                        return False
        return True

    def _is_product(self, v: int) -> bool:
        # a quotient is none: those that end in a product are tolerant, and a sum does not tolerate
        d = self.defs.get(v)
        if isinstance(d, Let) and d.op in ("neg", "copy"):
            return self._is_product(d.args[0])
        return isinstance(d, Let) and d.op == "mul"
