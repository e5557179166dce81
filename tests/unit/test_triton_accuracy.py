"""What the Triton emitter knows of values: lower bounds, tolerance, contraction; and the order in which reductions go."""

from __future__ import annotations

import pytest
import torch
from tile_make import Make, randn

from plait.emit.triton import emit_triton
from plait.emit.triton_accuracy import Accuracy
from plait.ir.index import axis

AT = axis(0) * 16 + axis(1)


def _make() -> Make:
    return Make("p0 r0", [4, 16], "form=flat tile=p0:1,r0:all vector=r0")


def test_divisors_with_a_lower_bound_take_one_product() -> None:
    m = _make()
    x = m.load(randn(4, 16), AT)
    total = m.let("add", m.reduce("sum", m.let("mul", x, x), (1,)), m.const(1e-12))
    m.store(torch.zeros(4, 16, dtype=torch.bfloat16), AT, m.let("div", x, m.let("sqrt", total)))
    text = emit_triton(m.program(), "k").text
    assert "_scale_of" not in text and "_quotient" not in text and "tl.div_rn(1.0, " in text


def test_divisors_without_one_are_scaled_first() -> None:
    m = _make()
    x = m.load(randn(4, 16), AT)
    m.store(torch.zeros(4, 16), AT, m.let("div", x, m.reduce("sum", x, (1,))))
    text = emit_triton(m.program(), "k").text
    assert "_scale_of(" in text and "_quotient(" in text


@pytest.mark.parametrize(("dtype", "fast"), [(torch.bfloat16, True), (torch.float32, False)])
def test_approximations_only_where_the_store_hides_them(dtype: torch.dtype, fast: bool) -> None:
    m = _make()
    x = m.load(randn(4, 16), AT)
    one = m.const(1.0)
    m.store(torch.zeros(4, 16, dtype=dtype), AT, m.let("div", x, m.let("add", one, m.let("exp", m.let("neg", x)))))
    text = emit_triton(m.program(), "k").text
    assert ("tl.exp2(" in text) is fast
    assert ("tl.div_rn(" in text) is not fast


def test_exponentials_that_are_compared_are_exact() -> None:
    m = _make()
    e = m.let("exp", m.load(randn(4, 16), AT))
    from tile_make import B1

    m.store(torch.zeros(4, 16, dtype=torch.bool), AT, m.let("gt", e, m.const(1.0), dtype=B1))
    assert "libdevice.exp" in emit_triton(m.program(), "k").text


@pytest.mark.parametrize(
    ("dtype", "capped", "helper"),
    [
        (torch.bfloat16, False, "_tanh_near("),
        (torch.float32, False, "_same_near_zero(libdevice.tanh("),
        (torch.bfloat16, True, "_tanh_absolute("),
        (torch.float32, True, "_same_near_zero(libdevice.tanh("),
    ],
)
def test_tanh_is_approximated_where_neither_a_store_nor_an_exponent_shows_it(
    dtype: torch.dtype, capped: bool, helper: str
) -> None:
    m = _make()
    t = m.let("mul", m.let("tanh", m.load(randn(4, 16), AT)), m.const(30.0))
    if capped:
        e = m.let("exp", m.let("sub", t, m.reduce("max", t, (1,))))
        t = m.let("div", e, m.reduce("sum", e, (1,)))
    m.store(torch.zeros(4, 16, dtype=dtype), AT, t)
    assert f"= {helper}" in emit_triton(m.program(), "k").text


@pytest.mark.parametrize(
    "op", ["tanh", "expm1", "log1p", "tan", "asin", "atan", "sinh", "asinh", "atanh", "sin", "erf"]
)
def test_what_libdevice_flushes_to_zero_is_taken_past_it(op: str) -> None:
    m = _make()
    m.store(torch.zeros(4, 16), AT, m.let(op, m.load(randn(4, 16), AT)))
    assert (
        f"_same_near_zero({'tl' if op in ('sin', 'erf') else 'libdevice'}.{op}(" in emit_triton(m.program(), "k").text
    )


def test_a_tanh_that_an_exponential_magnifies_is_exact() -> None:
    m = _make()
    t = m.let("mul", m.let("tanh", m.load(randn(4, 16), AT)), m.const(3000.0))
    e = m.let("exp", m.let("sub", t, m.reduce("max", t, (1,))))
    m.store(torch.zeros(4, 16, dtype=torch.bfloat16), AT, m.let("div", e, m.reduce("sum", e, (1,))))
    assert "libdevice.tanh(" in emit_triton(m.program(), "k").text


def test_contraction_only_where_no_products_meet() -> None:
    m = _make()
    a, b = m.load(randn(4, 16), AT), m.load(randn(4, 16), AT)
    m.store(torch.zeros(4, 16), AT, m.let("add", m.let("mul", a, b), m.const(1.0)))
    assert Accuracy(m.program()).may_contract
    m.store(torch.zeros(4, 16), AT, m.let("sub", m.let("mul", a, a), m.let("mul", b, b)))
    assert not Accuracy(m.program()).may_contract
    assert dict(emit_triton(m.program(), "k").options) == {"enable_fp_fusion": False}


def test_independent_reductions_go_together() -> None:
    m = _make()
    x = m.load(randn(4, 16), AT)
    for monoid in ("sum", "max"):
        m.store(torch.zeros(4), axis(0), m.reduce(monoid, x, (1,)))
    text = emit_triton(m.program(), "k").text
    assert "v1, v2 = tl.reduce((v0, v0), 0, _each_sum_max)" in text


def test_rounding_to_the_stored_type_is_left_to_the_store() -> None:
    from plait.ir.dtype import DType
    from plait.tile.program import Let

    m = _make()
    x = m.load(randn(4, 16), AT)
    n = m._new({0, 1}, DType.f32)
    m.body.append(Let(n, "round", (x,), DType.f32, (0, 1), (("dtype", DType.bf16),)))
    m.store(torch.zeros(4, 16, dtype=torch.bfloat16), AT, n)
    assert emit_triton(m.program(), "k").text.count("tl.bfloat16") == 1
