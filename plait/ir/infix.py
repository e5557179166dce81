"""Index expressions as infix text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

from plait.ir.atom import Atom


class Polynomial(Protocol):
    """What an index expression is, to a printer."""

    terms: tuple[tuple[tuple[Atom, ...], int], ...]


def render(e: Polynomial, name: Callable[[Atom], str], div: str, mod: str) -> str:
    """The text of an expression whose leaves `name` renders; `div` and `mod` are operators, or functions' names."""
    if not e.terms:
        return "0"
    out: list[str] = []
    for m, c in e.terms:
        factors = [_atom(a, name, div, mod) for a in m]
        if c != 1 or not factors:
            factors.insert(0, str(c) if c >= 0 or not factors else f"({c})")
        out.append("*".join(factors))
    return " + ".join(out)


def _atom(a: Atom, name: Callable[[Atom], str], div: str, mod: str) -> str:
    if a.kind not in ("div", "mod"):
        return name(a)
    left, right = (render(cast(Polynomial, e), name, div, mod) for e in a.args)
    op = div if a.kind == "div" else mod
    return f"{op}({left}, {right})" if op.isidentifier() or "::" in op else f"(({left}) {op} ({right}))"
