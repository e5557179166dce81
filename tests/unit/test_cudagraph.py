"""CUDA graphs: what is recorded, what is not and why, and that replays are indistinguishable from runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import plait
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.graph import Arg, Graph
from plait.runtime import executable as ex
from plait.runtime import report
from plait.runtime.cudagraph import overwritten, why_not_recordable

WHOLE = ex.OperandView(0, whole=True)


def call(*args: Any, **kwargs: Any) -> Any:
    return ("call", ("tuple", args), ("dict", tuple(kwargs.items())))


def script(*steps: Any, returns: tuple[Any, ...] = (), **fields: Any) -> ex.Script:
    given: dict[str, Any] = {"arity": 2, "slots": 8, "device": "cuda"}
    given["inputs"] = (ex.InputSlot(0, 0), ex.InputSlot(1, 1))
    return ex.Script(**{**given, **fields}, steps=steps, returns=returns)


def extern(target: str, *args: Any, inplace: int | None = None, **kwargs: Any) -> ex.ExternStep:
    return ex.ExternStep(target, call(*args, **kwargs), (WHOLE,), (2,), inplace=inplace)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (script(device="cpu"), "not a CUDA graph"),
        (script(bindings={"n": ("slot", 2, 0)}), "depend on data"),
        (script(returns=(ex.ItemOut(0),)), "read on the host"),
        (script(inputs=(ex.InputSlot(0, 0, DType.f64),)), "Python number"),
        (script(ex.EagerStep(Graph((), ()), (), (), (), reason="because")), "in eager: because"),
        (script(ex.AllocStep(2, (ix.ONE,), (ix.ONE,), DType.f32, "cpu")), "host"),
        (script(extern("aten.bernoulli.default", Arg(0))), "random"),
        (script(extern("higher_order.cond", Arg(0))), "effects"),
        (script(extern("aten.full.default", ("list", ()), 1, device=("device", "cpu"))), "host's memory"),
    ],
)
def test_what_cannot_be_recorded(given: ex.Script, words: str) -> None:
    assert words in why_not_recordable(given)


def test_what_can_be_recorded() -> None:
    steps = (
        ex.AllocStep(2, (ix.ONE,), (ix.ONE,), DType.f32, "cuda:0"),
        extern("aten.mm.default", Arg(0), Arg(0)),
        extern("aten.full.default", ("list", ()), 1, device=("device", "cuda:0")),
        ex.KernelStep(0, (0, 2)),
    )
    assert why_not_recordable(script(*steps, returns=(ex.SlotOut(2),))) is None


def test_overwritten_arguments_are_known() -> None:
    assert overwritten(script(ex.KernelStep(0, (0, 1)))) == set()
    assert overwritten(script(ex.CopyStep(ex.OperandView(1, whole=True), WHOLE))) == {1}
    first = extern("aten.index_put.default", Arg(0), inplace=0)
    assert overwritten(script(first)) == {0}
    again = ex.ExternStep("aten.add.Tensor", call(Arg(0)), (ex.OperandView(2, whole=True),), (3,), inplace=0)
    assert overwritten(script(first, again)) == {0}


def _graphed() -> Any:
    return report.last().details["executable"]()


@pytest.mark.gpu
def test_replays_give_what_runs_give() -> None:
    w = torch.randn(32, 32, device="cuda")
    cache = torch.zeros(8, 32, device="cuda")

    def step(x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = torch.relu(x @ w) + 1
        cache.index_copy_(0, at, h[:1])
        return h, (cache * 2).sum(0), x

    with torch.no_grad():
        fn = plait.compile(step, mode="max", strict=True)
        kept = []
        for k in range(8):
            x, at = torch.randn(4, 32, device="cuda"), torch.tensor([k], device="cuda")
            before = cache.clone()
            got = fn(x, at)
            after = cache.clone()
            cache.copy_(before)
            want = step(x, at)
            torch.testing.assert_close(after, cache)
            for g, e in zip(got, want, strict=True):
                torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-4)
            assert got[2] is x
            kept.append((got[0], want[0]))
        for got, want in kept:  # later replays left earlier results alone
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert _graphed().why_not_graphed() == []
    assert any(c.graphed.recordings for c in _graphed()._closed.values())


@pytest.mark.gpu
def test_random_numbers_and_host_scalars_run_as_before() -> None:
    torch._dynamo.reset()
    with torch.no_grad():
        fn = plait.compile(lambda x: torch.nn.functional.dropout(x, 0.5) * 2, mode="max", strict=True)
        x = torch.ones(1000, device="cuda")
        draws = [fn(x) for _ in range(5)]
    assert not any(torch.equal(a, b) for a, b in zip(draws, draws[1:], strict=False))
    assert _graphed().why_not_graphed()
