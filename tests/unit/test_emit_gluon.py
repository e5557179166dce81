"""Emitted Gluon: the shape of the text, and what it compiles to for sm_90 (no card is needed)."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

from gluon_resources import Binary, compile_gluon, stores_over_barriers

from plait.emit.gluon import GluonSource, emit_gluon
from plait.emit.gluon_shape import loads_beside_factors
from tests.attention_variants import VARIANTS, Sizes, qkv
from tests.unit.test_attention_variants import planned

LARGE = Sizes(b=2, h=8, m=2048, n=2048, d=128)


def source(name: str, sizes: Sizes = LARGE) -> GluonSource:
    (launch,) = (launch for launch in planned(name, sizes).launches if launch.parts)
    return emit_gluon(launch.parts[0].program, "kernel")


def function(text: str, name: str) -> str:
    """The text of one function."""
    return text.split(f"def {name}(")[1].split("\n@gluon.jit")[0]


def test_only_cut_tiles_are_masked_and_one_loop_serves_all() -> None:
    text = source("causal").text
    masked, plain = function(text, "any_tile").split("    else:")
    assert "p1[:, None] >= r0[None, :]" in masked
    assert ">=" not in plain
    loops = [line.strip() for line in text.splitlines() if line.strip().startswith("for t in range(")]
    assert loops == ["for t in range(1, count):", "for t in range(count):"]


@pytest.mark.parametrize(
    ("name", "beside"),
    [(n, False) for n in ("full", "causal", "window", "alibi", "softcap", "grouped_query")]
    + [(n, True) for n in ("documents", "padding", "bias_of_windows")],
)
def test_what_is_loaded_along_the_stream_is_told_apart(name: str, beside: bool) -> None:
    """Those without it are the kinds that are tried by default."""
    (launch,) = (launch for launch in planned(name, LARGE).launches if launch.parts)
    assert loads_beside_factors(launch.parts[0].program) is beside


@pytest.mark.parametrize("name", ["window", "documents"])
def test_masks_of_several_conditions_bound_the_loop(name: str) -> None:
    """(j > i) | (i - j > 128), and one side of an or that is not of positions."""
    text = source(name).text
    assert "count = gl.maximum(((gl.minimum(2048, p1_start + 128) - first + " in text
    assert ("low = " in text) is (name == "window")


def test_scores_are_divided_in_the_exponent_and_positions_are_not_converted_point_by_point() -> None:
    assert "_quotient(scores" not in source("full").text
    text = source("alibi").text
    assert "_bits(p2)[:, None] - _bits(r0)[None, :]" in text
    assert ".to(gl.float32)" not in function(text, "any_tile")


def test_a_bias_by_distance_is_one_multiply_add_a_point_and_scales_with_the_scores_in_the_exponent() -> None:
    tile = function(source("alibi").text, "any_tile")
    assert re.search(r"gl.fma\(v\d+, \(v\d+ \* -1.0\), scores\)", tile)
    assert "scores *" not in tile


def test_caps_take_the_hardwares_power_only_where_exponents_take_them() -> None:
    assert "libdevice.tanh" not in source("softcap").text
    tile = function(source("softcap").text, "whole_tile")
    assert "_tanh_rest(scores, " in tile
    # what scales and shifts it is in the exponent, and with the maxima of rows
    assert re.search(r"gl.fma\(v\d+, [\d.]+, v\d+_b\[:, None\]\)", tile) and "+ 30.0" not in tile


def test_tanh_that_is_a_factor_itself_is_relatively_near(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.tanh((q @ k.transpose(-1, -2)).float()).to(v.dtype) @ v

    monkeypatch.setitem(VARIANTS, "tanh", (fn, qkv))
    assert "_tanh_near(" in source("tanh").text


def test_no_mask_no_cut_tile() -> None:
    text = source("full").text
    assert "cut_tile" not in text
    assert text.count("whole_tile(") == 3  # itself, the first tile, the loop


def test_scores_are_issued_before_the_last_tiles_sums_and_waited_for_alone() -> None:
    loop = function(source("full").text, "consumer").split("for t in")[1]
    order = [
        "warpgroup_mma(left",
        "warpgroup_mma(weights",
        "warpgroup_mma_wait(1",
        "whole_tile(",
        "warpgroup_mma_wait(0",
    ]
    places = [loop.index(x) for x in order]
    assert places == sorted(places)


def test_batches_that_lie_one_after_the_other_are_one_dim() -> None:
    for d in source("full").descriptors:
        assert [str(n) for n in d.shape] == ["16", "2048", "128"]
        assert d.strides == (2048 * 128, 128, 1)


def test_heads_inside_a_projection_are_a_dim_of_their_own() -> None:
    left, right, values = source("sliced_projection", Sizes(b=2, h=4, m=512, n=512, d=64)).descriptors
    assert left.strides == right.strides == values.strides == (512 * 768, 64, 768, 1)
    assert (left.offset, right.offset, values.offset) == (0, 256, 512)
    assert [str(n) for n in left.shape] == ["2", "4", "512", "64"]


@pytest.mark.parametrize(
    ("name", "d"), [("causal", 128), ("softcap", 128), ("documents", 128), ("bias_of_windows", 128), ("sigmoid", 64)]
)
def test_compiles_for_hopper_without_spills(name: str, d: int) -> None:
    made: Binary = compile_gluon(source(name, Sizes(b=2, h=8, m=2048, n=2048, d=d)))
    assert made.registers == 168  # of 384 threads; the groups then share them out
    assert made.stack == made.counts["STL"] == made.counts["LDL"] == 0
    assert made.counts["USETMAXREG"] > 0
    assert made.shared <= 227 * 1024
    # both computing groups issue both products in every copy of the loop's body
    assert made.counts["HGMMA"] % 2 == 0
    assert made.counts["UTMALDG"] > 0


@pytest.mark.parametrize("name", ["full", "causal", "window"])
def test_no_barrier_that_is_waited_at_is_stored_over(name: str) -> None:
    """The window's loop has two ends, which the groups are given in shared memory."""
    made = compile_gluon(source(name, Sizes(b=2, h=8, m=2048, n=2048, d=64)))
    assert not stores_over_barriers(made.sass)
