"""Products of matrices compile for sm_90 to what they should: warp-group products, no spills, asynchronous loads."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from triton_dot_cases import gemm_make
from triton_resources import compile_sm90

from plait.emit.triton import emit_triton

META = torch.device("meta")
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("schedule", "most"),
    [
        ("form=swept tile=p0:128,p1:128,r0:64 warps=8 stages=3 vector=p1", 168),
        ("form=swept tile=p0:128,p1:128,r0:64 warps=4 stages=4 vector=p1", 255),
    ],
)
def test_gemm(schedule: str, most: int) -> None:
    with META:
        mk, _ = gemm_make(
            4096, 4096, 4096, BF16, schedule, epilogue=True, data=(torch.empty(4096, 4096, dtype=BF16),) * 3
        )
    r = compile_sm90(emit_triton(mk.program(), "kernel"))
    assert r.stack == 0
    assert "wgmma" in r.ptx
    assert "cp.async" in r.ptx
    assert r.registers <= most
