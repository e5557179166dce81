"""How the symbols of a Graph get their values at run time. Free of torch: arguments are asked for shape and stride only.

A binding is one of
    ("size", position, dim) | ("stride", position, dim) | ("offset", position)    of the tensor at that position
    ("scalar", position)                                                          a Python number
    ("derived", formula)                                                          from symbols bound before it
    ("extern", node, item, dim)      data-dependent: a size of an extern's result; dim None: the (scalar) result itself
A formula is an Expr over symbols, a number, a symbol's name (for symbols that may hold a float), or (operator, formula, …)
with the operators of FORMULA_OPS: arithmetic that an Expr cannot say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from plait.ir.index import Atom, Expr

Number = int | float
Formula = Any  # Expr | Number | str | tuple[str, Formula, ...]

FORMULA_OPS: dict[str, Callable[..., Any]] = {
    "add": lambda *xs: sum(xs),
    "mul": lambda *xs: math.prod(xs),
    "max": max,
    "min": min,
    "pow": lambda a, b: a**b,
    "floordiv": lambda a, b: a // b,
    "truediv": lambda a, b: a / b,
    "mod": lambda a, b: a % b,
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "round": round,
    "float": float,
    "sqrt": math.sqrt,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
    "and": lambda *xs: all(xs),
    "or": lambda *xs: any(xs),
    "not": lambda a: not a,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "where": lambda c, a, b: a if c else b,
}


def evaluate_formula(formula: Formula, symbols: Mapping[str, Number]) -> Any:
    """The value of a formula; KeyError for a symbol without a value or an unknown operator."""
    if isinstance(formula, Expr):
        return formula.evaluate({a: _integer(symbols[str(a.args[0])]) for a in formula.leaves()})
    if isinstance(formula, str):
        return symbols[formula]
    if isinstance(formula, tuple):
        return FORMULA_OPS[formula[0]](*(evaluate_formula(f, symbols) for f in formula[1:]))
    return formula


def bind_symbols(
    bindings: Mapping[str, tuple[Any, ...]],
    arguments: Sequence[Any],
    extern: Callable[[Any, int, int | None], Number] | None = None,
) -> dict[str, Number]:
    """Every symbol's value for these arguments. `extern(node, item, dim)` answers data-dependent bindings; without it they
    are left out, and so is what derives from them."""
    out: dict[str, Number] = {}
    for name, how in bindings.items():
        kind = how[0]
        if kind == "size":
            out[name] = arguments[how[1]].shape[how[2]]
        elif kind == "stride":
            out[name] = arguments[how[1]].stride(how[2])
        elif kind == "offset":
            out[name] = arguments[how[1]].storage_offset()
        elif kind == "scalar":
            out[name] = arguments[how[1]]
        elif kind == "derived":
            if extern is not None or names_of(how[1]) <= out.keys():
                out[name] = evaluate_formula(how[1], out)
        elif kind == "extern":
            if extern is not None:
                out[name] = extern(how[1], how[2], how[3])
        else:
            raise ValueError(f"symbol {name} has the unknown binding {how!r}")
    return out


def names_of(formula: Formula) -> frozenset[str]:
    """Symbols that a formula depends on."""
    if isinstance(formula, Expr):
        return formula.symbols()
    if isinstance(formula, str):
        return frozenset((formula,))
    if isinstance(formula, tuple):
        return frozenset().union(*(names_of(f) for f in formula[1:]))
    return frozenset()


def sym_values(symbols: Mapping[str, Number]) -> dict[Atom, int]:
    """The environment `Expr.evaluate` wants for axis-free expressions."""
    return {Atom.make("sym", name): _integer(v) for name, v in symbols.items() if not isinstance(v, float)}


def _integer(v: Number) -> int:
    if isinstance(v, float):
        raise TypeError("a symbol that holds a float stands in an integer expression")
    return int(v)
