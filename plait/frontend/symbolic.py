"""Python arithmetic on SymInts and SymFloats in an FX graph, and the symbols that a Graph depends on."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from plait.errors import ImportFailed
from plait.frontend.context import Context
from plait.frontend.sizes import Sizes
from plait.ir.dtype import DType
from plait.ir.graph import Graph
from plait.ir.index import Expr

_FLOAT_OPS: dict[Any, str] = {
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.truediv: "div",
    operator.pow: "pow",
    operator.neg: "neg",
    operator.abs: "abs",
    math.sqrt: "sqrt",
    torch.sym_max: "maximum",
    torch.sym_min: "minimum",
}
_SAME = (torch.sym_float, float, operator.pos)
_UNARY_NAMES = ["sqrt", "cos", "sin", "tan", "cosh", "sinh", "tanh", "acos", "asin", "atan", "log2"]


def python_function(ctx: Context, sizes: Sizes, fn: Callable[..., Any], args: Sequence[Any], val: Any) -> Any:
    """The value of a call of a Python function on numbers. Integers are read off the fake value; floats become f64
    nodes, computed in the order the program has."""
    if isinstance(val, (bool, int, float)):
        return val
    if isinstance(val, (torch.SymInt, torch.SymBool)):
        return sizes.expr(val)
    if isinstance(val, torch.SymFloat):
        operands = [ctx.scalar(a, DType.f64) for a in args]
        if fn in _SAME:
            return replace(operands[0], is_number=True)
        op = _FLOAT_OPS.get(fn) or _unary(fn)
        if op is not None:
            return replace(ctx.map(op, *operands), is_number=True)
    raise ImportFailed(f"a call of {getattr(fn, '__name__', fn)!r} on {list(args)}, which is no operator plait knows")


def _unary(fn: Callable[..., Any]) -> str | None:
    """torch.sym_sqrt and friends, and math's own."""
    name = getattr(fn, "__name__", "").removeprefix("_").removeprefix("sym_")
    return name if name in _UNARY_NAMES else None


def symbols_of(graph: Graph) -> set[str]:
    """Every symbol that running the graph needs."""
    found: set[str] = set()
    for n in graph.nodes():
        _collect((n.axes, n.attrs), found)
        for r in n.reads:
            _collect((r.index, r.guard, r.domain, r.strides), found)
    for o in graph.outputs:
        _collect((o.read.index, o.read.guard, o.read.domain, o.strides), found)
    _collect(graph.returns, found)
    return found


def _collect(tree: Any, found: set[str]) -> None:
    if isinstance(tree, Expr):
        found |= tree.symbols()
    elif isinstance(tree, Iterable) and not isinstance(tree, str):
        for t in tree:
            _collect(t, found)
