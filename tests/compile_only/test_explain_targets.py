"""explain for cards that are not here: resources read off real binaries of every architecture, failures said of their kernel."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
import torch
from arch.tree import ROOT

import plait
from plait.plan.device import LIMITS, SPECS
from plait.runtime import binary


def _norm(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1) * 2


@pytest.mark.parametrize("target", [t for t, s in SPECS.items() if s.kind == "cuda"])
def test_resources_of_every_target(target: str) -> None:
    report = plait.explain(_norm, torch.randn(512, 1024), target=target)
    (kernel,) = report.graphs[0].kernels
    assert kernel.failure == "" and kernel.resources is not None
    assert 8 < kernel.resources.registers <= 255 and kernel.resources.spills == 0
    assert 0 < kernel.resources.occupancy <= 1
    assert report.predicted and report.target == target and kernel.measured_us is None
    assert f"on {target} (predicted, nothing ran there)" in str(report)
    assert f"{kernel.resources.registers} registers" in " ".join(str(report).split())


def test_the_documented_page_is_the_page(tmp_path: pathlib.Path) -> None:
    text = (ROOT / "docs" / "explain.md").read_text()
    program = text.partition("```python\n")[2].partition("```")[0]
    page = text.partition("--target a100\n")[2].partition("```")[0]
    path = tmp_path / "l2.py"
    path.write_text(program)
    command = [sys.executable, "-m", "plait", "explain", str(path), "--target", "a100"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == page


@pytest.mark.gpu
def test_what_a_card_knows() -> None:
    x, w = torch.randn(16384, 4096, device="cuda", dtype=torch.bfloat16), torch.randn(4096, device="cuda").bfloat16()

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w

    report = plait.explain(fn, x, w)
    (kernel,) = report.graphs[0].kernels
    assert not report.predicted and kernel.resources is not None and kernel.resources.registers > 8
    assert kernel.measured_us is not None and kernel.roofline_share is not None
    assert 0.3 < kernel.roofline_share < 1.1
    assert sum(v.chosen for v in kernel.variants) == 1


def test_a_kernel_that_does_not_compile_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(source: object, arch: int) -> None:
        raise RuntimeError("first line\nPassManager::run failed")

    monkeypatch.setattr(binary, "cross_compile", broken)
    report = plait.explain(_norm, torch.randn(512, 1024), target="a100")
    (kernel,) = report.graphs[0].kernels
    assert kernel.failure == "does not compile: RuntimeError: PassManager::run failed" and kernel.resources is None
    page = " ".join(str(report).split())
    assert "1 kernel does not compile" in page and "does not compile: RuntimeError: PassManager::run failed" in page


def test_a_kernel_that_wants_more_than_there_is_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binary, "usage_of", lambda compiled: binary.Usage(64, 0, 200_000, 4))
    x = torch.randn(512, 1024)
    assert plait.explain(_norm, x, target="h100").graphs[0].kernels[0].failure == ""
    (kernel,) = plait.explain(_norm, x, target="a100").graphs[0].kernels
    assert kernel.failure == "does not run: 200000 B of shared memory a block, the device has 166912"
    assert kernel.resources is not None and kernel.resources.occupancy == 0


@pytest.mark.parametrize(
    "warps, registers, shared, expected",
    [
        (4, 32, 0, 1.0),  # warps alone
        (4, 64, 0, 0.5),  # 65536 registers hold 8 blocks of 128 threads
        (8, 255, 0, 0.125),  # one block of 256 threads
        (4, 40, 0, 0.75),  # 40 registers a thread are 1280 a warp: 12 blocks
        (4, 16, 100 << 10, 2 * 128 / 2048),  # two blocks of shared memory
        (8, 128, 230 << 10, 0.0),  # more than there is
    ],
)
def test_occupancy(warps: int, registers: int, shared: int, expected: float) -> None:
    assert LIMITS["h100"].occupancy(warps, registers, shared) == pytest.approx(expected)


def test_every_cuda_target_has_limits() -> None:
    assert set(LIMITS) == {name for name, s in SPECS.items() if s.kind == "cuda"}
