"""Emitted Gluon kernels, run by tests/gluon_emulator on CPU tensors and judged by float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from plait.compiler import all_levels
from plait.emit.gluon import GluonSource, emit_gluon
from plait.errors import LowerFailed
from plait.frontend.capture import capture
from plait.frontend.externs import decompositions
from plait.frontend.fx_import import import_fx
from plait.options import Options
from plait.oracle.compare import FAIL, compare
from plait.oracle.reference import reference
from plait.plan.device import SPECS
from plait.plan.layout import Layouts
from plait.runtime import assemble as assembling
from plait.runtime.kernel import Launch, Messages, Slots
from plait.runtime.link import link
from tests import gluon_emulator
from tests.attention_rows import capped_causal, saturated
from tests.attention_variants import VARIANTS, Sizes, arguments
from tests.unit.test_attention_variants import planned

OPTIONS = Options.make(None, {"backend": "triton", "strict": True})


class Emulated:
    """A kernel of the emulator's."""

    told = None

    def __init__(self, source: GluonSource) -> None:
        self.source = source

    def bind(self, buffers: tuple[int, ...], symbols: Sequence[int], messages: Messages) -> Launch:
        def launch(slots: Slots) -> None:
            gluon_emulator.run(self.source, [slots[b] for b in buffers], symbols)

        return launch


def emulated(fn: Any, args: Sequence[Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """fn(*args) by kernels in Gluon and nothing else."""

    def compiled(graph: Any, example: Sequence[Any], kind: str) -> Any:
        whole = all_levels(import_fx(graph, example), SPECS["h200"], OPTIONS)
        script = link(whole.graph, whole.plan.reading, whole.launches, Layouts(whole.graph))
        return assembling.assemble(graph, whole, script, OPTIONS)

    def build(launches: Any, whole: Any, options: Any) -> list[Any]:
        return [Emulated(emit_gluon(launch.parts[0].program, launch.name)) for launch in launches]

    monkeypatch.setattr(assembling, "_build_triton", build)
    torch._dynamo.reset()
    with torch.no_grad():
        return torch.compile(
            fn, backend=lambda gm, ins: capture(gm, ins, compiled, decompositions(), lambda *a: None), dynamic=False
        )(*args)


NOT_TAKEN = {
    "learned_position_bias": "a check, a scan or a random draw",
    "dropped": "a check, a scan or a random draw",
    "differential": "4 products, not two",
    "normed": "a factor is computed, not loaded",
    "rotated": "a factor is computed, not loaded",
}


def check(name: str, sizes: Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, args = VARIANTS[name][0], arguments(name, sizes)
    got = emulated(fn, args, monkeypatch)
    verdict = compare(got, fn(*args), reference(fn, args), name=name)
    assert verdict.status != FAIL, verdict.message


@pytest.mark.parametrize("name", [n for n in VARIANTS if n not in NOT_TAKEN])
def test_lengths_that_no_tile_divides(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(name, Sizes(b=2, h=2, m=328, n=328, d=64), monkeypatch)


@pytest.mark.parametrize("name", ["full", "causal", "alibi"])
@pytest.mark.parametrize("d", [32, 128])
def test_head_dims(name: str, d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(name, Sizes(b=1, h=2, m=256, n=384, d=d), monkeypatch)


def test_shared_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    check("grouped_query", Sizes(b=2, h=4, m=256, n=256, d=64), monkeypatch)


def test_caps_far_beyond_which_some_scores_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four values share a reciprocal; what overflows, or is NaN, stays by itself."""
    torch.manual_seed(0)
    args = saturated(Sizes(b=1, h=2, m=300, n=300, d=64))
    got = emulated(capped_causal, args, monkeypatch)
    verdict = compare(got, capped_causal(*args), reference(capped_causal, args))
    assert verdict.status != FAIL, verdict.message
    assert got.isnan().any(-1).sum() < got[..., 0].numel() // 50


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_what_is_not_taken_says_why(name: str) -> None:
    # of these sizes each is one kernel
    sizes = Sizes(m=512, n=512, d=64) if name == "normed" else Sizes(m=2048, n=2048, d=128)
    (launch,) = (launch for launch in planned(name, sizes).launches if launch.parts)
    with pytest.raises(LowerFailed, match=NOT_TAKEN[name]):
        emit_gluon(launch.parts[0].program, "kernel")
