"""Products of matrices and read accumulators in emitted Triton: tests/triton_dot_cases in Triton's interpreter."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import triton_dot_cases
from triton_dot_cases import BF16
from triton_module import interpreted

from plait.emit.triton import emit_triton

pytestmark = pytest.mark.timeout(300)  # the first case waits for all of them


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    return interpreted("triton_dot_cases.py")


@pytest.mark.parametrize("name", list(triton_dot_cases.CASES))
def test_case(name: str, results: dict[str, str]) -> None:
    assert name in results, results[""]
    assert not results[name], results[name]


def _text(name: str) -> str:
    return emit_triton(triton_dot_cases.CASES[name]().make.program(name), "kernel").text


def test_stored_factors_reach_the_product_as_they_are() -> None:
    text = _text("gemm_bfloat16")
    assert "tl.dot(v0s, v1s, acc2)" in text
    assert "float32)\n" not in text.split("tl.dot")[0].split("for ")[1], "nothing is widened in the loop"


def test_what_does_not_change_in_a_loop_is_loaded_before_it() -> None:
    before = _text("attention").split("for ")[0]
    assert before.count("tl.load(b0_ptr") == 1
    assert "b1_ptr +" not in before


def test_full_precision_of_f32() -> None:
    assert 'input_precision="ieee"' in _text("gemm_float32")
    assert "input_precision" not in _text("gemm_bfloat16")


def test_one_row_is_no_matrix() -> None:
    mk, _ = triton_dot_cases.gemm_make(1, 64, 64, BF16, "form=swept tile=p1:16,r0:16 vector=r0")
    assert "tl.dot" not in emit_triton(mk.program(), "kernel").text
