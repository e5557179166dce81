"""Large values in blocks: which axes have them, the Graph of one block, and that a loop means what the graph meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from plait.frontend.externs import decompositions
from plait.frontend.fx_import import import_fx
from plait.ir.check import check_graph
from plait.ir.graph import Graph
from plait.ir.loop import loop_of
from plait.ir.text import print_graph
from plait.oracle.compare import check
from plait.oracle.eval_graph import evaluate
from plait.rewrite.passes.block_values import Blocked, block_values
from plait.rewrite.passes.blocking import CannotBlock, blocking

Fn = Callable[..., Any]


def graph_of(fn: Fn, *args: Tensor) -> Graph:
    gm = make_fx(torch.func.functionalize(fn), decomposition_table=decompositions())(*args)
    return import_fx(gm, args)


def factors(dtype: torch.dtype = torch.float32, rows: int = 1024, depth: int = 8, words: int = 2048) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(n, depth, generator=g).to(dtype) for n in (rows, words)]


def both_gradients(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    d = torch.tanh(x @ w.t()) - (torch.arange(w.shape[0]) == torch.arange(x.shape[0])[:, None]).to(x.dtype)
    return d.t() @ x, d @ w, d.float().sum(0), d.float().sum(1)


def rows_first(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """What sums a row is needed by the row."""
    p = (x @ w.t()).float()
    e = (p - p.amax(1, keepdim=True)).exp()
    s = (e / e.sum(1, keepdim=True)).to(x.dtype)
    return s @ w, s.t() @ x


def added(x: Tensor, w: Tensor) -> Tensor:
    return torch.addmm(w[:, 0], x, w.t()).relu() @ w


def batched(x: Tensor, w: Tensor) -> Tensor:
    a = torch.stack([x, x + 1])
    b = torch.stack([w, -w])
    return torch.sigmoid(torch.bmm(a, b.transpose(1, 2))) @ b


FORMS = {
    "both_gradients": (both_gradients, 1),
    "rows_first": (rows_first, 0),
    "added": (added, 0),
    "batched": (batched, 1),
}


DTYPES = (torch.float32, torch.bfloat16)
SHORT = {"both_gradients": DTYPES, "rows_first": DTYPES[:1], "batched": DTYPES[:1]}
CASES = [pytest.param(n, d, marks=[] if d in SHORT.get(n, ()) else pytest.mark.long) for n in FORMS for d in DTYPES]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_loop_means_what_the_graph_meant(name: str, dtype: torch.dtype) -> None:
    fn, _ = FORMS[name]
    args = factors(dtype)
    graph = graph_of(fn, *args)
    blocked, said = block_values(graph, limit=1 << 20)
    check_graph(blocked, level=2)
    loops = [found for n in blocked.nodes() if (found := loop_of(n)) is not None]
    assert len(loops) == 1 and [s.why for s in said] == [""]
    check_graph(loops[0].body, level=2)
    exact = evaluate(graph, args, dtype_mode="float64")
    for mode in ("eager", "fused", "float64"):
        found = evaluate(blocked, args, dtype_mode=mode)
        for got, want, wide in zip(found, evaluate(graph, args, dtype_mode="eager"), exact, strict=True):
            check(got.to(want.dtype), want, wide)


def test_nothing_as_large_is_left() -> None:
    args = factors()
    blocked, (said,) = block_values(graph_of(both_gradients, *args), limit=6 << 20)
    assert all(
        len(n.shape) < 2 or {e.const for e in n.shape} != {1024, 2048} or n.op in ("eq",) for n in blocked.nodes()
    )
    (loop,) = [found for n in blocked.nodes() if (found := loop_of(n)) is not None]
    assert (said.nbytes, said.count, loop.count) == (1024 * 2048 * 4, 4, 4)
    assert "512*block" in print_graph(loop.body)


def test_why_not() -> None:
    args = factors()
    for fn, axis, words in (
        (lambda x, w: (x @ w.t()).relu(), 1, "returned whole"),
        (lambda x, w: (p := x @ w.t()) / p.sum(1, keepdim=True) @ w, 1, "what follows needs the sum"),
        (rows_first, 1, "which is no sum"),
        (lambda x, w: torch.cumsum(x @ w.t(), 1) @ w, 1, "runs along it"),
        (lambda x, w: (x @ w.t()).prod(1), 1, "which is no sum"),
        (lambda x, w: (x @ w.t()).flip(1) @ w, 1, "other places than its own"),
        (lambda x, w: torch.addmm(w[0], x @ w.t(), w), 1, "adds a term to the sum"),
        (lambda x, w: torch.sort(x @ w.t(), 1)[0] @ w, 0, "takes it whole"),
    ):
        graph = graph_of(fn, *args)
        seed = next(n for n in graph.nodes() if n.kind == "extern")
        with pytest.raises(CannotBlock, match=words):
            blocking(graph, seed, axis)


def test_what_cannot_be_blocked_is_left_alone_and_said() -> None:
    graph = graph_of(lambda x, w: (x @ w.t()).relu(), *factors())
    same, said = block_values(graph, limit=1000)
    assert same is graph
    assert [type(s) for s in said] == [Blocked] and "returned whole" in said[0].why
    few = graph_of(lambda x, w: torch.tanh(x @ w.t()) @ w, *factors(rows=3, words=2053))
    assert "no divisor" in block_values(few, limit=1000)[1][0].why
