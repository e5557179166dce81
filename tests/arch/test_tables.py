"""Every operator of the Graph has a meaning, a C++ form and a Triton form; the documentation's tables are the code's."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from arch.tree import ROOT

from plait.emit import cpp_body, cpp_ops, triton_ops, triton_reduce
from plait.errors import LowerFailed
from plait.ir.dtype import DType
from plait.ir.ops import OPS, OpDef, TypeMismatch
from plait.options import ENVIRONMENT, Options
from plait.oracle import semantics
from plait.plan.reasons import UNLOCK, Why
from plait.tile.program import Let

# Their meaning is in how they are read or built, not in a table of functions of values.
STRUCTURAL = {"const", "index", "cast", "bitcast", "pieces", "gather"}
# Split into guarded loads and addresses before any text is emitted.
LOWERED_AWAY = {"pieces", "gather"}


def _of_kind(*kinds: str) -> list[OpDef]:
    return [d for d in OPS.values() if d.kind in kinds]


def _a_type(defn: OpDef) -> tuple[DType, DType]:
    """An operand type that the operator takes, and its result."""
    for dtype in (DType.f32, DType.i32, DType.b1):
        operands = [DType.b1, dtype, dtype] if defn.name == "where" else [dtype] * (defn.arity or 0)
        try:
            return dtype, defn.infer(operands, {"dtype": dtype, "implicit": False})
        except TypeMismatch:
            continue
    raise AssertionError(f"no type fits {defn.name}")


def _cpp_text(name: str) -> str:
    defn = OPS[name]
    dtype, result = _a_type(defn)
    attrs = (("dtype", result), ("value", 1), ("draw", 0))
    let = Let(0, name, (), result, (), attrs if name != "round" else ())
    count = defn.arity or 0
    types = [DType.b1, dtype, dtype] if name == "where" else [dtype] * max(count, 1)
    return cpp_ops.let_expression(let, ["a", "b", "c"][: max(count, 1)], types, "i")


@pytest.mark.parametrize("name", [d.name for d in _of_kind("map") if d.name not in STRUCTURAL])
def test_every_pointwise_operator_has_a_meaning(name: str) -> None:
    assert name in semantics.MAPS


@pytest.mark.parametrize("name", [d.name for d in _of_kind("map", "random") if d.name not in LOWERED_AWAY])
def test_every_pointwise_operator_has_cpp_and_triton_text(name: str) -> None:
    assert _cpp_text(name)
    assert name in triton_ops.RULES


def test_an_operator_without_cpp_text_is_refused() -> None:
    with pytest.raises(LowerFailed):
        cpp_ops.let_expression(Let(0, "nonsense", (), DType.f32, ()), ["a"], [DType.f32])


@pytest.mark.parametrize("name", [d.name for d in _of_kind("reduce")])
def test_every_reduction_has_all_three(name: str) -> None:
    x = torch.tensor([[True, False]]) if name in ("any", "all") else torch.tensor([[2.0, 3.0]])
    assert semantics.reduce_trailing(name, x, 1).shape == (1,)
    assert name in cpp_body._MONOIDS
    assert triton_reduce.identity(name, DType.b1 if name in ("any", "all") else DType.f32)


@pytest.mark.parametrize("name", [d.name for d in _of_kind("scan")])
def test_every_scan_has_all_three(name: str) -> None:
    assert semantics.scan_along(name, torch.tensor([2.0, 3.0]), 0).shape == (2,)
    assert name in cpp_body._SCANS
    assert name in triton_reduce._SCAN


def test_every_reason_says_what_would_unlock_it() -> None:
    assert set(UNLOCK) == set(Why)


def _table_names(document: str, heading: str) -> list[str]:
    """First cells of the table under a heading of a document."""
    text = (ROOT / "docs" / document).read_text()
    part = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [r for r in part.splitlines() if r.startswith("| `")]
    return [r.split("`")[1] for r in rows]


def test_documented_options_are_the_options() -> None:
    assert _table_names("options.md", "Options") == [f.name for f in fields(Options)]
    assert _table_names("options.md", "Environment variables") == list(ENVIRONMENT)


def test_every_reason_has_an_entry_or_is_said_to_have_no_law() -> None:
    text = (ROOT / "docs" / "reasons.md").read_text().partition("## Laws and examples")[2]
    unbuilt = text.partition("no plan")[0]
    for why in Why:
        entry = f"**`{why.value}`** · " in text
        assert entry != (f"`{why.name}`" in unbuilt), why
        used = [f for f in (ROOT / "plait").rglob("*.py") if f"Reason(Why.{why.name}" in f.read_text()]
        assert bool(used) == entry, why


def test_documented_reasons_are_the_reasons() -> None:
    assert _table_names("reasons.md", "Reasons") == [w.value for w in Why]
