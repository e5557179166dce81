"""Products of matrices compile for sm_90 to what they should: warp-group products, no spills, asynchronous loads."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from triton_dot_cases import attention_make, causal, gemm_make
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


@pytest.mark.parametrize("masked", [False, True])
def test_attention(masked: bool) -> None:
    schedule = "form=swept tile=p0:1,p1:128,p2:all,r0:64,r1:all warps=8 stages=3 vector=p2"
    q = torch.empty(128, 4096, 128, dtype=BF16, device=META)
    guards = (causal(0),) if masked else ()
    with META:
        mk, _ = attention_make(128, 4096, 4096, 128, 128, BF16, schedule, guards, data=(q, q, q))
    r = compile_sm90(emit_triton(mk.program(), "kernel"))
    assert r.stack == 0
    assert r.registers <= 168
    assert r.ptx.count("wgmma.mma_async") == 12 * (2 if masked else 1)
    assert "cp.async" in r.ptx
