"""Index algebra: cases that random search found, kept by name."""

from __future__ import annotations

from plait.ir import index as ix


def test_division_of_a_negative_by_a_symbol_is_not_nonneg() -> None:
    """-1 // s0 is -1 for every s0 >= 1: a positive coefficient alone does not make a division positive."""
    facts = ix.Facts(symbols={"s0": (1, None)})
    e = ix.floordiv(ix.const(-1), ix.sym("s0"), facts)
    assert e.evaluate({ix.Atom.make("sym", "s0"): 4}) == -1
    assert not facts.is_nonneg(e) and not facts.in_range(e, ix.const(5))
    assert facts.is_nonneg(ix.floordiv(ix.sym("s0") - 1, ix.const(3), facts))
