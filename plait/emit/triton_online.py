"""Two sweeps into one: the maximum of a row, then the sum of exp(x - maximum), carried together.

    sweep r: m = max x                          sweep r: m, s = online(x)
    sweep r: s = sum exp(x - m)         ->

The lanes' sums are taken relative to the lanes' own maxima so far, and rescaled where a maximum moves. In the result the
pair is one Reduce with the monoid "expsum" (this backend's own; "expsum_low" where it was a sum that follows its maximum
already, and counts a maximum of -inf as 0): `out` is s, and `linear` is value(m), the local that
receives the maximum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from plait.emit.triton_softmax import base_of, correction_of
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.tile.program import Check, Dot, Let, Load, Reduce, Scan, Stmt, Store, Sweep, TileProgram, operands, walk

_Defs = Mapping[int, Let | Load | Reduce | Scan]


def merge_passes(program: TileProgram, looped: frozenset[int]) -> tuple[Stmt, ...]:
    """A program's body with such pairs of sweeps merged, where they are `looped` over."""
    defs = {s.out: s for s in program.walk() if isinstance(s, (Let, Load, Reduce, Scan))}
    return _merge(program.body, defs, looped)


def _merge(body: tuple[Stmt, ...], defs: _Defs, looped: frozenset[int]) -> tuple[Stmt, ...]:
    out = [replace(s, body=_merge(s.body, defs, looped)) if isinstance(s, Sweep) else s for s in body]
    out = [_lane_by_lane(s, defs) if isinstance(s, Sweep) and s.dim in looped else s for s in out]
    for b in range(len(out)):
        for a in range(b):
            first, second = out[a], out[b]
            if not (isinstance(first, Sweep) and isinstance(second, Sweep) and first.dim == second.dim):
                continue
            merged = _pair(first, second, defs)
            if merged is not None and first.dim in looped:
                return _merge((*out[:a], merged, *out[a + 1 : b], *out[b + 1 :]), defs, looped)
    return tuple(out)


def _pair(first: Sweep, second: Sweep, defs: _Defs) -> Sweep | None:
    """The first sweep with the second's work in it, or None when they are no such pair."""
    total = _only_sink(second)
    if total is None or total.monoid != "sum" or total.dtype is not DType.f32 or total.scale is not None:
        return None
    e = defs.get(total.arg)
    t = defs.get(e.args[0]) if isinstance(e, Let) and e.op == "exp" else None
    if not isinstance(t, Let) or t.op != "sub":
        return None
    top = defs.get(t.args[1])
    if not isinstance(top, Reduce) or top.monoid != "max" or top.dims != total.dims:
        return None
    inside = [s for s in walk(first.body) if s is top]
    if any(isinstance(s, Let) and s.op in ("running", "before") for s in walk(first.body)):
        return None
    if not inside or not _same(top.arg, t.args[0], defs):
        return None
    both = replace(total, monoid="expsum", arg=top.arg, linear=ix.value(top.out))
    return replace(first, body=_replaced(first.body, top, both))


def _lane_by_lane(sweep: Sweep, defs: _Defs) -> Sweep:
    """A sweep whose one scaled sum follows its maximum across lanes every step, as such a pair; else the sweep."""
    inside = list(walk(sweep.body))
    totals = [s for s in inside if isinstance(s, Reduce) and s.scale is not None]
    if len(totals) != 1 or any(isinstance(s, Dot) for s in inside):
        return sweep
    (total,) = totals
    assert total.scale is not None
    followed = correction_of(total.scale, defs)
    top = defs.get(followed) if followed is not None else None
    e = defs.get(total.arg)
    t = defs.get(e.args[0]) if isinstance(e, Let) and e.op == "exp" else None
    if not isinstance(top, Reduce) or top not in inside or not isinstance(t, Let) or t.op != "sub":
        return sweep
    if (top.dims, total.monoid, total.dtype) != (total.dims, "sum", DType.f32):
        return sweep
    if base_of(t.args[1], defs) != top.out or not _same(top.arg, t.args[0], defs):
        return sweep
    follows = {top.out}
    for s in inside:
        if s is not total and follows & set(operands(s)):
            if not isinstance(s, Let):
                return sweep
            follows.add(s.out)
    both = replace(total, monoid="expsum_low", arg=top.arg, linear=ix.value(top.out), scale=None)
    return replace(sweep, body=_replaced(_without(sweep.body, follows), total, both))


def _without(body: tuple[Stmt, ...], locals_: set[int]) -> tuple[Stmt, ...]:
    kept = [replace(s, body=_without(s.body, locals_)) if isinstance(s, Sweep) else s for s in body]
    return tuple(s for s in kept if getattr(s, "out", -1) not in locals_)


def _only_sink(sweep: Sweep) -> Reduce | None:
    """The one reduction of a sweep that does nothing else."""
    found: Reduce | None = None
    for s in walk(sweep.body):
        if isinstance(s, (Store, Check, Scan)) or (isinstance(s, Reduce) and found is not None):
            return None
        if isinstance(s, Reduce):
            found = s
    return found


def _replaced(body: tuple[Stmt, ...], old: Stmt, new: Stmt) -> tuple[Stmt, ...]:
    return tuple(
        new if s is old else replace(s, body=_replaced(s.body, old, new)) if isinstance(s, Sweep) else s for s in body
    )


def _same(a: int, b: int, defs: _Defs) -> bool:
    """Two locals hold the same value at every point: equal operations on equal operands."""
    if a == b:
        return True
    x, y = defs.get(a), defs.get(b)
    if type(x) is not type(y) or not isinstance(x, (Let, Load)):
        return False
    assert isinstance(y, (Let, Load))
    names = dict(zip(operands(y), operands(x), strict=False))
    if len(operands(x)) != len(operands(y)) or not all(_same(p, q, defs) for q, p in names.items()):
        return False
    return repr(replace(x, out=0)) == repr(_renamed(y, names))


def _renamed(s: Let | Load, names: dict[int, int]) -> Let | Load:
    env = {ix.Atom.make("value", q): ix.value(p) for q, p in names.items()}
    if isinstance(s, Load):
        guard = tuple(g.substitute(env) for g in s.guard)
        return replace(s, out=0, address=s.address.substitute(env), guard=guard)
    attrs = tuple((k, _substituted(v, env)) for k, v in s.attrs)
    return replace(s, out=0, args=tuple(names[k] for k in s.args), attrs=attrs)


def _substituted(v: object, env: dict[ix.Atom, ix.Expr]) -> object:
    if isinstance(v, ix.Expr):
        return v.substitute(env)
    return tuple(_substituted(e, env) for e in v) if isinstance(v, tuple) else v
