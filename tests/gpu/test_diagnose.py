"""verify, bisect and tap on a card."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import planted
import pytest
import torch

import plait
from plait.diagnose.replay import replay
from plait.diagnose.selftest import self_test
from plait.oracle.compare import FAIL, compare
from plait.runtime import assemble
from plait.tile import choose
from plait.tile.flat import Flat
from plait.tile.program import Reduce
from plait.tile.schedule import Schedule

pytestmark = pytest.mark.gpu

OPTIONS = {"cache_dir": "0"}


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    weights = torch.softmax(scores, -1)
    return weights.to(v.dtype) @ v


def layer(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    h = torch.nn.functional.rms_norm(x, (x.shape[-1],), scale)
    return torch.nn.functional.silu(h @ w)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def slow_triton(patch: pytest.MonkeyPatch) -> None:
    """A row of its own sums in pieces of sixteen."""
    chosen = choose._choose_gpu

    def slow(flat: Flat, spec: Any, hint: Any) -> Schedule:
        if not any(isinstance(s, Reduce) for s in flat.stmts):
            return chosen(flat, spec, hint)
        (row,) = [d.name for d in flat.dims if d.role == "row"]
        (grid, *_) = [d.name for d in flat.dims if d.role == "grid"]
        return Schedule(form="swept", tile=((grid, 1), (row, 16)), vector=row, warps=1)

    patch.setattr(choose, "_choose_gpu", slow)


def test_right_programs_are_right() -> None:
    qkv = [random(2, 4, 256, 64, dtype=torch.bfloat16) for _ in range(3)]
    for fn, args in (
        (attend, qkv),
        (layer, [random(256, 512), random(512, 384), random(512)]),
        (planted.scored, [random(64, 200)]),
    ):
        torch._dynamo.reset()
        found = plait.verify(fn, *args, train=True, seeds=2, options=OPTIONS)
        assert found.right, str(found)


@pytest.mark.parametrize(
    ("plant", "words"), [(planted.wrong_code, "its code is wrong"), (planted.wrong_tiles, "the tile program is wrong")]
)
def test_a_faulty_kernel_is_named(plant: Any, words: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        found = plait.verify(planted.scored, random(40, 16), seeds=1, options=OPTIONS)
    text = " ".join(str(found).split())
    assert not found.right and "aten.tanh" in text and words in text


@pytest.mark.parametrize("plant", [planted.wrong_code, planted.wrong_tiles])
def test_the_merge_that_makes_it_wrong(plant: Any, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        found = plait.bisect(planted.scored, random(40, 16).t(), seeds=1, options=OPTIONS, folder=tmp_path)
        assert replay(tmp_path) == 1
    assert replay(tmp_path) == 0
    assert (found.fault, found.kind, found.before) == ("wrong", "merge", "right")
    assert "tanh(scores / total)" in found.decision


def test_the_schedule_that_makes_it_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_triton(monkeypatch)
    monkeypatch.setattr(assemble, "alternatives", lambda program: [])  # or a better one is found by timing
    found = plait.bisect(
        lambda x: (x * 2 + 1).square().sum(-1), random(4096, 4096), slow=True, options=OPTIONS, folder=tmp_path
    )
    assert (found.fault, found.kind) == ("slow", "schedule"), str(found)
    assert re.match(r"schedule form=swept tile=p0:1,r0:16", found.decision)


def test_values_inside_kernels() -> None:
    torch._dynamo.reset()
    qkv = [random(1, 2, 128, 64) for _ in range(3)]
    report = plait.explain(attend, *qkv, options={"strict": True})
    scores = (qkv[0] @ qkv[1].transpose(-1, -2)).float() * 64**-0.5
    number = next(k.number for k in report.graphs[0].kernels if any("weights = " in m.line for m in k.members))
    got = report.kernel(number).tap("weights")
    want = torch.softmax(scores, -1)
    assert isinstance(got, torch.Tensor) and got.is_cuda
    assert compare(got, want, torch.softmax(scores.double(), -1)).status != FAIL


def test_every_known_fault_is_caught_on_the_card() -> None:
    found = self_test(on=["cuda"], options=OPTIONS)
    assert found.right, str(found)
