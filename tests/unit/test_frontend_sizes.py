"""sympy to Expr: values agree at random points, ranges hold, and what an Expr cannot say gets a formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy import functions as sf

from plait.errors import ImportFailed
from plait.frontend.sizes import Sizes
from plait.ir.bindings import bind_symbols, sym_values

Env = tuple[ShapeEnv, list[torch.SymInt]]


def symbols(*hints: int) -> Env:
    """A ShapeEnv with one size symbol a hint."""
    env = ShapeEnv()
    out = []
    for k, hint in enumerate(hints):
        source = ConstantSource(f"size{k}")
        s = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
        out.append(env.create_symintnode(s, hint=hint, source=source))
    return env, out


_BINARY: dict[str, tuple[Callable[[Any, Any], Any], Callable[[int, int], int]]] = {
    "add": (lambda a, b: a + b, lambda a, b: a + b),
    "sub": (lambda a, b: a - b, lambda a, b: a - b),
    "mul": (lambda a, b: a * b, lambda a, b: a * b),
    "floordiv": (sf.FloorDiv, lambda a, b: a // b),
    "mod": (sf.PythonMod, lambda a, b: a % b),
    "max": (sf.Max, max),
    "min": (sf.Min, min),
}


@st.composite
def _tree(draw: st.DrawFn, depth: int = 3) -> Any:
    """("name", left, right) | symbol number | constant."""
    if depth == 0 or draw(st.booleans()):
        return draw(st.one_of(st.sampled_from(["a", "b", "c"]), st.integers(1, 7)))
    name = draw(st.sampled_from(sorted(_BINARY)))
    left = draw(_tree(depth - 1))
    # divisors stay positive
    right = (
        draw(st.one_of(st.integers(1, 6), st.sampled_from(["a", "b"])))
        if name in ("floordiv", "mod")
        else draw(_tree(depth - 1))
    )
    return (name, left, right)


def _build(tree: Any, leaves: dict[str, Any], which: int) -> Any:
    if isinstance(tree, tuple):
        return _BINARY[tree[0]][which](_build(tree[1], leaves, which), _build(tree[2], leaves, which))
    if isinstance(tree, str):
        return leaves[tree]
    return sympy.Integer(tree) if which == 0 else tree


@settings(max_examples=150, deadline=None, derandomize=True)
@given(_tree(), st.tuples(*[st.integers(2, 40)] * 3))
def test_values_agree(tree: Any, at: tuple[int, int, int]) -> None:
    env, (a, b, c) = symbols(5, 6, 7)
    sizes = Sizes(env)
    sizes.bind_all((x, ("size", 0, d)) for d, x in enumerate((a, b, c)))
    leaves = {"a": a.node.expr, "b": b.node.expr, "c": c.node.expr}
    expr = sizes.expr(_build(tree, leaves, 0))
    sizes.finish(expr.symbols())
    values = bind_symbols(sizes.bindings, [torch.empty(at, device="meta")])
    got = expr.evaluate(sym_values(values))
    assert got == _build(tree, dict(zip("abc", at, strict=True)), 1)
    assert all(low <= values[name] for name, (low, _) in sizes.ranges.items() if name in values)


def test_a_compound_size_is_solved_for() -> None:
    env, (a, b) = symbols(5, 3)
    sizes = Sizes(env)
    sizes.bind_all([(b, ("size", 0, 1)), (a * 2 + b, ("size", 0, 0))])
    expr = sizes.expr(a + 1)
    sizes.finish(expr.symbols())
    values = bind_symbols(sizes.bindings, [torch.empty(2 * 9 + 4, 4)])
    assert expr.evaluate(sym_values(values)) == 10


def test_ranges_and_hints_come_from_the_shape_env() -> None:
    env, (a,) = symbols(5)
    sizes = Sizes(env)
    expr = sizes.expr(a * 4)
    (name,) = expr.symbols()
    assert sizes.hints == {name: 5}
    assert sizes.ranges[name] == (2, None)
    assert not env.guards


def test_translating_adds_no_guard() -> None:
    env, (a, b) = symbols(5, 6)
    before = len(env.guards)
    Sizes(env).shape([a * b, sf.Max(a.node.expr, b.node.expr), a // 2])
    assert len(env.guards) == before


def test_a_size_nobody_tells_is_an_error() -> None:
    env, (a,) = symbols(5)
    sizes = Sizes(env)
    with pytest.raises(ImportFailed, match="nothing at run time"):
        sizes.finish(sizes.expr(a).symbols())


def test_a_function_without_a_formula_is_an_error() -> None:
    env, (a,) = symbols(5)
    with pytest.raises(ImportFailed, match="no formula"):
        Sizes(env).expr(sympy.Function("strange")(a.node.expr))
