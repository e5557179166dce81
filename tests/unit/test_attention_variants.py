"""Attention in many forms, none of which the compiler has a name for: one kernel each on a card, and right on the CPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from plait.compiler import Compiled, all_levels, plan_and_lower, simplify
from plait.errors import CheckFailed
from plait.frontend.externs import decompositions
from plait.frontend.fx_import import import_fx
from plait.options import Options
from plait.oracle.compare import FAIL, compare
from plait.oracle.reference import reference
from plait.plan.device import SPECS
from plait.rewrite.passes.open_contractions import can_open, open_contractions
from plait.tile.check import check_program
from plait.tile.program import Dot, Reduce, Stmt, Sweep
from tests.attention_variants import VARIANTS, Sizes, arguments


def planned(name: str, sizes: Sizes, device: str = "h200", **options: object) -> Compiled:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        args = [mode.from_tensor(x) for x in arguments(name, sizes)]
        fn = torch.func.functionalize(VARIANTS[name][0])
        gm = make_fx(fn, decomposition_table=decompositions())(*args)
    return all_levels(import_fx(gm, args), SPECS[device], Options.make(None, options))


@pytest.mark.parametrize("name", VARIANTS)
def test_one_kernel(name: str) -> None:
    compiled = planned(name, Sizes(m=2048, n=2048, d=128))
    kernels = [launch for launch in compiled.launches if launch.parts]
    calls = [n.attr("target") for n in compiled.graph.nodes() if n.kind == "extern"]
    assert len(kernels) == 1, str(compiled.plan)
    # dropout draws its seed from torch's generator
    assert calls == (["aten.randint.low"] if name == "dropped" else [])


@pytest.mark.parametrize("d", [32, 80, 96, 128, 256])
def test_head_dims(d: int) -> None:
    compiled = planned("causal", Sizes(m=2048, n=2048, d=d))
    assert [len(launch.parts) for launch in compiled.launches] == [1]


def test_scores_are_formed_once_in_one_sweep() -> None:
    (launch,) = planned("causal", Sizes(m=2048, n=2048, d=128)).launches
    (part,) = launch.parts
    statements = list(part.program.walk())
    assert sum(isinstance(s, Dot) for s in statements) == 2
    assert sum(isinstance(s, Sweep) for s in statements) == 1


def test_eager_numerics_move_no_rounding() -> None:
    """The rounded quotient may not be taken apart, so the scores are written once and read again."""
    compiled = planned("full", Sizes(m=2048, n=2048, d=128), numerics="eager")
    assert len([launch for launch in compiled.launches if launch.parts]) > 1


@pytest.mark.parametrize("name", [n for n in VARIANTS if n != "dropped"])
def test_right_on_the_cpu(name: str) -> None:
    torch._dynamo.reset()
    args = arguments(name, Sizes(b=2, m=150, n=150, d=24, dtype=torch.float32))
    fn = VARIANTS[name][0]
    got = torch.compile(fn, backend="plait")(*args)
    verdict = compare(got, fn(*args), reference(fn, args), name=name)
    assert verdict.status != FAIL, verdict.message


def test_rows_without_anything_and_large_scores() -> None:
    torch._dynamo.reset()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        s = (q @ k.transpose(-1, -2)).masked_fill(~keep, -math.inf)
        return torch.softmax(s, -1) @ v

    q, k, v = (torch.randn(2, 64, 32) for _ in range(3))
    q[0, :8] *= 1e4
    keep = torch.rand(64, 64) < 0.5
    keep[5] = False
    args = (q, k, v, keep)
    got = torch.compile(attend, backend="plait")(*args)
    verdict = compare(got, attend(*args), reference(attend, args))
    assert verdict.status != FAIL, verdict.message
    assert got[:, 5].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_of_one_product(dtype: torch.dtype) -> None:
    torch._dynamo.reset()

    def outer(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu((x * 2) @ y + 1)

    args = (torch.randn(40, 1, dtype=dtype), torch.randn(1, 30, dtype=dtype))
    got = torch.compile(outer, backend="plait", options={"strict": True})(*args)
    verdict = compare(got, outer(*args), reference(outer, args))
    assert verdict.status != FAIL, verdict.message


def test_sums_behind_another_product_are_rescaled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that needs a deeper loop before it can go on follows the running maximum of its own loop all the same.
    (Such programs are refused for the repeated product; the law is set aside to see the statements.)"""
    monkeypatch.setattr("plait.tile.lower._once", lambda *a: None)

    def projected(q: torch.Tensor, k: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.T, -1) @ (x @ w)

    args = (torch.randn(96, 32), torch.randn(150, 32), torch.randn(150, 640), torch.randn(640, 32))
    gm = make_fx(torch.func.functionalize(projected), decomposition_table=decompositions())(*args)
    options, spec = Options.make(None, {}), SPECS["h200"]
    graph = simplify(open_contractions(import_fx(gm, args), can_open), spec, options)
    compiled = plan_and_lower(graph, spec, options)
    programs = [part.program for launch in compiled.launches for part in launch.parts]
    followers = [s for p in programs for s in p.walk() if isinstance(s, Reduce) and s.scale is not None]
    assert {s.monoid for s in followers} == {"sum", "dot"}
    for p in programs:
        check_program(p)
        # the checker sees a correction that is missing
        bare = replace(p, body=tuple(_unscaled(s) for s in p.body))
        if bare != p:
            with pytest.raises(CheckFailed, match="not rescaled"):
                check_program(bare)


def _unscaled(s: Stmt) -> Stmt:
    if isinstance(s, Sweep):
        return replace(s, body=tuple(_unscaled(x) for x in s.body))
    return replace(s, scale=None) if isinstance(s, Dot) else s
