"""Merge neighbouring dims that every address walks as one: (i, j) -> one dim of extent |i|*|j| wherever i*|j| + j is all there is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from plait.ir import index as ix
from plait.ir.index import Expr
from plait.tile.flat import Flat
from plait.tile.program import Check, Dim, Let, Load, Reduce, Scan, Span, Stmt, Store, exprs_of


def coalesce(flat: Flat) -> Flat:
    """The same statements over the fewest dims."""
    merged = True
    while merged:
        merged = False
        for a in range(len(flat.dims)):
            for b in range(len(flat.dims)):
                if a != b and _may_merge(flat, a, b):
                    flat = _merge(flat, a, b)
                    merged = True
                    break
            if merged:
                break
    return flat


def map_exprs(s: Stmt, fn: Any) -> Stmt:
    """The statement with every index expression replaced by fn(it)."""
    if isinstance(s, Load | Store):
        return replace(s, address=fn(s.address), guard=tuple(fn(g) for g in s.guard))
    if isinstance(s, Check):
        return replace(s, index=fn(s.index), guard=tuple(fn(g) for g in s.guard))
    if isinstance(s, Reduce) and s.linear is not None:
        return replace(s, linear=fn(s.linear))
    if isinstance(s, Let) and s.attrs:
        return replace(s, attrs=tuple((k, _map_attr(v, fn)) for k, v in s.attrs))
    return s


def _map_attr(v: Any, fn: Any) -> Any:
    if isinstance(v, Expr):
        return fn(v)
    if isinstance(v, tuple) and any(isinstance(e, Expr) for e in v):
        return tuple(fn(e) for e in v)
    return v


def _may_merge(flat: Flat, a: int, b: int) -> bool:
    da, db = flat.dims[a], flat.dims[b]
    if da.role != db.role or da.extent.const == 0 or db.extent.const == 0:
        return False
    for s in flat.stmts:
        for dims in _dim_sets(s):
            if (a in dims) != (b in dims):
                return False
        if isinstance(s, Scan) and s.dim in (a, b):
            return False
        if not all(_walks_as_one(e, a, b, db.extent) for e in exprs_of(s)):
            return False
    return True


def _dim_sets(s: Stmt) -> Iterable[Span]:
    if isinstance(s, Reduce):
        return (s.span, s.dims)
    return (s.span,) if isinstance(s, Let | Load | Store | Check | Scan) else ()


def _walks_as_one(e: Expr, a: int, b: int, inner: Expr) -> bool:
    axes = e.axes()
    if a not in axes and b not in axes:
        return True
    coeffs, _ = e.linear()
    ca = coeffs.get(ix.axis_atom(a), ix.ZERO)
    cb = coeffs.get(ix.axis_atom(b), ix.ZERO)
    if ca is not cb * inner or _mixed(ca, a, b) or _mixed(cb, a, b):
        return False
    for atom, c in coeffs.items():
        if _mixed(c, a, b):
            return False
        if atom.kind in ("div", "mod") and not all(
            _walks_as_one(x, a, b, inner) for x in atom.args if isinstance(x, Expr)
        ):
            return False
    return True


def _mixed(c: Expr, a: int, b: int) -> bool:
    return bool(c.axes() & {a, b})


def _merge(flat: Flat, a: int, b: int) -> Flat:
    """Drop dim a; dim b stands for both."""
    da = flat.dims[a]
    number = {i: i - (i > a) for i in range(len(flat.dims))}
    env = {ix.axis_atom(i): ix.axis(number[i]) for i in range(len(flat.dims))}
    env[ix.axis_atom(a)] = ix.ZERO
    dims = [
        Dim(d.name, d.extent * da.extent if i == b else d.extent, d.role) for i, d in enumerate(flat.dims) if i != a
    ]
    names = _renamed(dims)
    facts = ix.Facts(axes=tuple(d.extent for d in names), symbols=flat.symbols)

    def fix_span(span: Span) -> Span:
        return tuple(sorted(number[i] for i in span if i != a))

    def fix(s: Stmt) -> Stmt:
        s = map_exprs(s, lambda e: e.substitute(env, facts))
        if isinstance(s, Reduce):
            return replace(s, span=fix_span(s.span), dims=fix_span(s.dims))
        if isinstance(s, Scan):
            return replace(s, span=fix_span(s.span), dim=number[s.dim])
        if isinstance(s, Let | Load | Store | Check):
            return replace(s, span=fix_span(s.span))
        raise AssertionError("flat statements hold no sweeps")

    return replace(flat, dims=tuple(names), stmts=tuple(fix(s) for s in flat.stmts))


def _renamed(dims: list[Dim]) -> list[Dim]:
    count = {"grid": 0, "row": 0}
    out: list[Dim] = []
    for d in dims:
        out.append(Dim(f"{'p' if d.role == 'grid' else 'r'}{count[d.role]}", d.extent, d.role))
        count[d.role] += 1
    return out
