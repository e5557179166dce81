"""The Triton emitter: every case of tests/triton_cases and triton_pipeline run by Triton's interpreter against torch,
and the tables."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
import triton_cases
import triton_losses
import triton_pipeline
import triton_rows
import triton_training
from tile_make import Make
from triton_module import interpreted

from plait.emit.triton import emit_triton
from plait.emit.triton_ops import RULES, rule_of
from plait.errors import LowerFailed, TableIncomplete
from plait.ir.dtype import DType
from plait.ir.index import axis, const
from plait.ir.ops import OPS
from plait.tile.program import Buffer, TileProgram
from plait.tile.schedule import Schedule

pytestmark = pytest.mark.timeout(300)  # the first case of a kind waits for all of them


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    return interpreted("triton_cases.py")


@pytest.fixture(scope="module")
def pipeline_results() -> dict[str, str]:
    return interpreted("triton_pipeline.py")


@pytest.fixture(scope="module")
def training_results() -> dict[str, str]:
    return interpreted("triton_training.py")


@pytest.mark.parametrize("name", triton_training.CASES)
def test_training(name: str, training_results: dict[str, str]) -> None:
    assert name in training_results, training_results[""]
    assert not training_results[name], training_results[name]


@pytest.fixture(scope="module")
def loss_results() -> dict[str, str]:
    return interpreted("triton_losses.py")


@pytest.mark.parametrize("name", triton_losses.CASES)
def test_losses(name: str, loss_results: dict[str, str]) -> None:
    assert name in loss_results, loss_results[""]
    assert not loss_results[name], loss_results[name]


@pytest.fixture(scope="module")
def row_results() -> dict[str, str]:
    return interpreted("triton_rows.py")


@pytest.mark.parametrize("name", triton_rows.CASES)
def test_rows_apart(name: str, row_results: dict[str, str]) -> None:
    assert name in row_results, row_results[""]
    assert not row_results[name], row_results[name]


@pytest.mark.parametrize("name", list(triton_pipeline.FUNCTIONS))
def test_pipeline(name: str, pipeline_results: dict[str, str]) -> None:
    assert name in pipeline_results, pipeline_results[""]
    assert not pipeline_results[name], pipeline_results[name]


@pytest.mark.parametrize("name", list(triton_cases.CASES))
def test_case(name: str, results: dict[str, str]) -> None:
    assert name in results, results[""]
    assert not results[name], results[name]


def test_every_operator_has_a_rule() -> None:
    missing = [n for n, d in OPS.items() if d.kind in ("map", "random") and n not in RULES]
    assert not missing
    with pytest.raises(TableIncomplete):
        rule_of("no_such_operator")


def test_large_buffers_are_addressed_in_64_bits() -> None:
    m = Make("p0 p1", [70000, 65536], "form=flat tile=p0:1,p1:1024 vector=p1")
    x = torch.empty(70000, 65536, device="meta")
    at = axis(0) * 65536 + axis(1)
    m.store(torch.empty(70000, 65536, device="meta"), at, m.load(x, at))
    text = emit_triton(m.program(), "k").text
    assert text.count("tl.cast(p0, tl.int64) * 65536") == 2
    small = Make("p0 p1", [700, 65536], "form=flat tile=p0:1,p1:1024 vector=p1")
    small.store(torch.empty(700, 65536, device="meta"), at, small.load(x[:700], at))
    assert "int64" not in emit_triton(small.program(), "k").text


def test_scratch_is_refused() -> None:
    program = TileProgram("k", (), (Buffer("b", DType.f32, "scratch", const(4)),), (), (), Schedule())
    with pytest.raises(LowerFailed):
        emit_triton(program, "k")
