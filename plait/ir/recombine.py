"""Put quotients and remainders back together: c*d*(x // d) + c*(x % d) = c*x, the address of a reshaped dense tensor."""

from __future__ import annotations

from plait.ir.index import Atom, Expr, Facts, floordiv


def recombine(e: Expr, facts: Facts) -> Expr:
    """The same value with as few divisions as that identity allows."""
    changed = True
    while changed and any(a.kind == "mod" for a in e.atoms()):
        changed = False
        coeffs, rest = e.linear()
        for atom, c in coeffs.items():
            if atom.kind != "mod":
                continue
            x, d = atom.args
            assert isinstance(x, Expr) and isinstance(d, Expr)
            quotient = _single_atom(floordiv(x, d, facts))
            if quotient is not None and coeffs.get(quotient) is c * d:
                kept = ((a, k) for a, k in coeffs.items() if a is not atom and a is not quotient)
                e = rest + c * x
                for a, k in kept:
                    e = e + k * Expr.make({(a,): 1})
                changed = True
                break
    return e


def _single_atom(e: Expr) -> Atom | None:
    if len(e.terms) == 1 and e.terms[0][1] == 1 and len(e.terms[0][0]) == 1:
        return e.terms[0][0][0]
    return None
