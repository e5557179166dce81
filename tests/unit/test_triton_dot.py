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


def test_exponents_take_one_multiply_add_and_one_power_of_two() -> None:
    text = _text("attention")
    assert text.count("tl.exp2(tl.fma(") == 1
    assert "libdevice.exp" not in text


def test_causal_loops_end_at_the_diagonal_and_mask_only_there() -> None:
    loops = _text("attention_causal").split("    for ")
    assert len(loops) == 3
    assert "r0_full" in loops[1]
    assert "tl.minimum(64, p1_start + 16)" in loops[2]
    assert "p1[:, None] >= r0[None, :]" not in loops[1]
    assert "p1[:, None] >= r0[None, :]" in loops[2]


def test_windows_bound_loops_on_both_sides() -> None:
    text = _text("attention_window")
    assert "in tl.range(tl.maximum(p1_start + (-20), 0) & -16, tl.minimum(100, p1_start + 16), 16" in text


def test_a_wide_window_is_masked_at_both_ends() -> None:
    for name in ("gradient_window", "gradient_window_of_keys"):
        loops = _text(name).split("    for ")
        assert len(loops) == 4
        masked = [">= r0[None, :]" in text or ">= p1[:, None]" in text for text in loops[1:]]
        assert masked == [True, False, True]
        assert "in tl.range(r0_from, r0_full, 16" in loops[2]
    assert len(_text("gradient_window_narrow").split("    for ")) == 2


def test_a_mask_before_a_bound_leaves_the_rest_of_the_loop_without() -> None:
    loops = _text("gradient_of_keys").split("    for ")
    assert len(loops) == 3
    assert "r0[None, :] >= p1[:, None]" in loops[1]
    assert "r0[None, :] >= p1[:, None]" not in loops[2]
    assert "tl.range(r0_from, 64, 16" in loops[2]


@pytest.mark.parametrize("name", ["gradient", "gradient_f32", "gradient_of_keys", "gradient_of_keys_turned"])
def test_a_tensor_read_from_two_sides_is_loaded_once(name: str) -> None:
    for loop in _text(name).split("    for ")[1:]:
        assert loop.count("tl.load(b1_ptr") == 1


@pytest.mark.parametrize("name", ["gradient_causal", "gradient_causal_divided"])
def test_saved_statistics_take_the_scale_along(name: str) -> None:
    """exp(where(mask, s * c, -inf) - row), or s / c: no multiplication but the one in the multiply-add."""
    for loop in _text(name).split("    for ")[1:]:
        assert "0.36067376022224085, " in loop.split("tl.fma(")[1], "0.25 * log2 e"
        assert "0.25" not in loop and "4.0" not in loop


def test_only_the_last_step_is_masked_at_an_odd_length() -> None:
    loops = _text("attention_odd").split("    for ")
    assert len(loops) == 3
    assert "r0_ok" not in loops[1]
    assert "r0_ok" in loops[2]


def test_compared_indices_are_a_mask_as_well() -> None:
    for name in ("attention_compared", "attention_compared_not"):
        loops = _text(name).split("    for ")
        assert len(loops) == 3
        assert "p1[:, None] >= r0[None, :]" not in loops[1]
        assert "tl.minimum(53, p1_start + 16)" in loops[2]


def test_a_sum_that_follows_a_maximum_stays_in_its_lanes_without_products() -> None:
    text = _text("logsumexp_lanes")
    assert "top16 = tl.full([32], " in text
    assert text.count("for ") == 1


def test_blocks_with_most_to_do_come_first() -> None:
    assert "p1_tile = (4) - 1 - (" in _text("attention_causal")
    assert "p1_tile = tl.program_id(0)" in _text("attention")


def test_products_walk_their_result_in_bands() -> None:
    assert "p1_band" in _text("gemm_bands")


def test_a_persistent_kernel_reads_dense_factors_through_descriptors() -> None:
    source = emit_triton(triton_dot_cases.CASES["gemm_walked_odd"]().make.program("w"), "kernel")
    before, loop = source.text.split("    for block in tl.range(tl.program_id(0), 9, 3, flatten=True):")
    assert "d0 = tl.make_tensor_descriptor(b0_ptr, [77, 56], [56, 1], [32, 16])" in before
    assert "d1 = tl.make_tensor_descriptor(b1_ptr, [88, 56], [56, 1], [32, 16])" in before
    assert "v0s = d0.load([p0_start, r0_start])" in loop
    assert "mask" not in loop.split("tl.dot")[0], "what lies beyond the extents is zero already"
    assert source.programs.const == 3
    assert source.aligned == {"b0_ptr", "b1_ptr"}


def test_rows_that_no_descriptor_can_step_over_are_read_by_pointers() -> None:
    source = emit_triton(triton_dot_cases.CASES["gemm_walked_unaligned_rows"]().make.program("w"), "kernel")
    assert "make_tensor_descriptor" not in source.text
    assert "for block in" in source.text
    assert not source.aligned
