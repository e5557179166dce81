"""Emitted Triton compiles for sm_90 without a GPU, and takes what it should: registers, no spills, wide loads."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton_cases
from triton_resources import compile_sm90

from plait.emit.triton import emit_triton


@pytest.mark.parametrize("name", ["softmax_swept", "arg_extremes", "scans", "random_numbers", "gather_checked"])
def test_compiles(name: str) -> None:
    r = compile_sm90(emit_triton(triton_cases.CASES[name]().make.program(name), "kernel"))
    assert r.registers <= 64
    assert r.stack == 0


def test_every_unary_operator_compiles() -> None:
    # f32 sine and cosine keep a small table in local memory for huge arguments
    r = compile_sm90(emit_triton(triton_cases.CASES["unary_f32"]().make.program("k"), "kernel"))
    assert r.stack <= 64


@pytest.mark.parametrize(
    ("schedule", "most"),
    [
        ("form=flat tile=p0:1,r0:all warps=4 vector=r0", 64),
        ("form=flat tile=p0:1,r0:all warps=8 vector=r0", 40),
        ("form=swept tile=p0:1,r0:1024 warps=4 vector=r0", 40),
    ],
)
def test_rmsnorm_ledger(schedule: str, most: int) -> None:
    make = triton_cases.rmsnorm_make(16384, 4096, schedule, torch.bfloat16)
    if schedule.startswith("form=swept"):
        make = triton_cases.rmsnorm_swept_make(16384, 4096, schedule, torch.bfloat16)
    r = compile_sm90(emit_triton(make.program("rmsnorm"), "kernel"))
    assert r.stack == 0
    assert r.registers <= most
    assert r.widest_load == 4, "16 bytes a thread"
