"""Loops under masks of the tokens' numbers: what is said of a block is true whatever the numbers, and tight where they are in
order; values through C++ and Triton's interpreter, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton_segments
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from triton_module import interpreted

from plait.compiler import Compiled, all_levels
from plait.emit.cpp import CppKernel, emit_cpp
from plait.frontend.externs import decompositions
from plait.frontend.fx_import import import_fx
from plait.ir.check import check_graph
from plait.ir.graph import Graph, Node
from plait.options import Options
from plait.oracle.compare import FAIL, compare
from plait.oracle.eval_graph import evaluate_nodes
from plait.plan.device import SPECS
from plait.rewrite.passes import block_bounds as pass_
from plait.rewrite.passes.open_contractions import open_contractions
from plait.tile.program import Dot
from tests.attention_segments import SEGMENTS, sorted_ids
from tests.attention_variants import Sizes, training_step, widened

ROWS, COLUMNS, BLOCK = 22, 27, 4
MASKS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "eq": lambda a, b, i, j: a == b,
    "ne": lambda a, b, i, j: a != b,
    "ge": lambda a, b, i, j: a >= b,
    "lt": lambda a, b, i, j: a < b,
    "not le": lambda a, b, i, j: ~(a <= b),
    "within": lambda a, b, i, j: (a - b).abs() < 3,
    "window": lambda a, b, i, j: (a - b <= 4) & (b <= a),
    "and causal": lambda a, b, i, j: (a == b) & (j <= i),
    "or prefix": lambda a, b, i, j: (a == b) | (j < 5),
    "sum": lambda a, b, i, j: a + b + a > 7,
    "greatest": lambda a, b, i, j: torch.maximum(a, b) < 4,
    "least": lambda a, b, i, j: torch.minimum(-a, b) == b,
    "parity": lambda a, b, i, j: (a > 2) ^ (b > 2),
    "alike": lambda a, b, i, j: (a > 2) == (b > 2),
    "chosen": lambda a, b, i, j: torch.where(b > 1, a == b, a < b),
    "kept": lambda a, b, i, j: (b > 3).expand(ROWS, COLUMNS),
}
NUMBERS: dict[str, Callable[[int], Tensor]] = {
    "in order": lambda n: torch.arange(n) // 5,
    "in no order": lambda n: torch.randint(-3, 9, (n,), generator=torch.Generator().manual_seed(n)),
    "at the ends": lambda n: torch.tensor([-(2**31), 2**31 - 1, 2, 2**31 - 2, 0])[torch.arange(n) // 4 % 5],
}


def opened(mask: Callable[..., Tensor], a: Tensor, b: Tensor) -> tuple[Graph, list[Any]]:
    """Attention of one head under the mask, its products open."""

    def fn(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        i, j = torch.arange(ROWS)[:, None], torch.arange(COLUMNS)[None]
        s = (q @ k.t()).masked_fill(~mask(a[:, None], b[None], i, j), -math.inf)
        return torch.softmax(s, -1) @ v

    torch.manual_seed(0)
    args = [torch.randn(ROWS, 8), torch.randn(COLUMNS, 8), torch.randn(COLUMNS, 8), a, b]
    gm = make_fx(fn, decomposition_table=decompositions())(*args)
    return open_contractions(import_fx(gm, args), lambda n: True), args


def bounded(graph: Graph, monkeypatch: pytest.MonkeyPatch, block: int = BLOCK) -> Graph:
    monkeypatch.setattr(pass_, "BLOCK", block)
    monkeypatch.setattr(pass_, "_FEWEST", 2)
    monkeypatch.setattr(pass_, "_SHARE", math.inf)
    out = pass_.block_bounds(graph, SPECS["cpu"])
    check_graph(out, level=2)
    return out


def choices(graph: Graph) -> list[tuple[Node, Node]]:
    """Each implied condition with the choice that it is put on."""
    return [
        (n.reads[0].source, n.reads[1].source) for n in graph.nodes() if n.reads and n.reads[0].source.op == "between"
    ]


@pytest.mark.parametrize("name", MASKS)
def test_nothing_is_left_out_that_a_mask_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.int32, torch.float32):
        graph, args = opened(MASKS[name], torch.zeros(ROWS).to(dtype), torch.zeros(COLUMNS).to(dtype))
        graph = bounded(graph, monkeypatch)
        assert choices(graph), f"{dtype}: no bounds"
        for make in NUMBERS.values():
            a, b = make(ROWS).to(dtype), make(COLUMNS).to(dtype)
            if dtype.is_floating_point:
                a[5], b[7], b[1] = math.nan, math.nan, -math.inf
            values = evaluate_nodes(graph, [*args[:3], a, b])
            for near, choice in choices(graph):
                hidden = ~values[near].expand(ROWS, COLUMNS)
                assert bool((values[choice] == -math.inf)[hidden].all()), f"{dtype} {a} {b}"


def test_a_mask_of_positions_alone_needs_no_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _ = opened(lambda a, b, i, j: (j <= i) | (j < 5), torch.arange(ROWS), torch.arange(COLUMNS))
    assert not choices(bounded(graph, monkeypatch))


def test_a_mask_of_pairs_is_read_point_by_point(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = torch.rand(ROWS, COLUMNS) < 0.5
    graph, _ = opened(lambda a, b, i, j: pairs, torch.arange(ROWS), torch.arange(COLUMNS))
    assert not choices(bounded(graph, monkeypatch))


def documents_of(length: int, count: int) -> tuple[Compiled, list[Any]]:
    fn, _ = SEGMENTS["same_document"]
    sizes = Sizes(b=1, h=4, m=count * length, n=count * length, d=64, dtype=torch.float32)
    args = [torch.randn(1, 4, sizes.n, 64) for _ in range(3)] + [(torch.arange(sizes.n) // length)[None]]
    gm = make_fx(fn, decomposition_table=decompositions())(*args)
    return all_levels(import_fx(gm, args), SPECS["cpu"], Options.make(None, {"check": 2})), args


def test_documents_in_order_are_visited_alone() -> None:
    """Of 8 x 8 blocks, 4 documents of 2 blocks each: 4 x 2 x 2."""
    compiled, args = documents_of(128, 4)
    values = evaluate_nodes(compiled.graph, args)
    (near,) = [n for n in compiled.graph.nodes() if n.op == "between"]
    first, end = (values[r.source].reshape(8, 64) for r in near.reads[1:])
    visited = (end.amax(1) - first.amin(1)) // pass_.BLOCK
    assert visited.sum() == 4 * 2 * 2
    programs = [p.program for launch in compiled.launches for p in launch.parts]
    (walker,) = [p for p in programs if any(isinstance(s, Dot) for s in p.walk())]
    assert len(programs) == 3, "the summary, the bounds, the products"
    text = emit_cpp([CppKernel("k", (walker,))])
    (loop,) = [line for line in text.split("\n") if "for (int64_t r0_lo" in line]
    assert "_least" in loop and "_most" in loop


def test_short_streams_have_no_summary() -> None:
    compiled, _ = documents_of(16, 8)
    assert not [n for n in compiled.graph.nodes() if n.op == "between"]


@pytest.mark.parametrize("name", SEGMENTS)
def test_values_in_cpp(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_, "_FEWEST", 2)
    monkeypatch.setattr(pass_, "_SHARE", math.inf)
    torch.manual_seed(3)
    torch._dynamo.reset()
    fn, make = SEGMENTS[name]
    args = make(Sizes(b=2, h=4, m=300, n=300, d=16, dtype=torch.float32))
    got = torch.compile(fn, backend="plait", dynamic=False, options={"strict": True})(*args)
    verdict = compare(got, fn(*args), fn(*widened(args)))
    assert verdict.status != FAIL, str(verdict)


def test_gradients_in_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_, "_FEWEST", 2)
    monkeypatch.setattr(pass_, "_SHARE", math.inf)
    torch.manual_seed(3)
    torch._dynamo.reset()
    fn, make = SEGMENTS["padded_and_causal"]
    args = [
        x.requires_grad_(x.is_floating_point()) for x in make(Sizes(b=2, h=2, m=300, n=300, d=16, dtype=torch.float32))
    ]
    g = torch.randn_like(fn(*args))
    compiled = torch.compile(fn, backend="plait", dynamic=False, options={"strict": True})
    found = (training_step(f, a, g) for f, a in ((compiled, args), (fn, args), (fn, widened(args))))
    for got, eager, exact in zip(*found, strict=True):
        verdict = compare(got, eager, exact)
        assert verdict.status != FAIL, str(verdict)


@pytest.fixture(scope="module")
def in_triton() -> dict[str, str]:
    pytest.importorskip("triton")
    return interpreted("triton_segments.py")


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", triton_segments.CASES)
def test_values_in_triton(name: str, in_triton: dict[str, str]) -> None:
    assert name in in_triton, in_triton[""]
    assert not in_triton[name], in_triton[name]


def test_the_numbers_of_the_tests_leave_something_out() -> None:
    ids = sorted_ids(Sizes(b=2, n=300))
    assert ids.shape == (2, 300) and bool((ids.diff(dim=-1) >= 0).all()) and ids.unique().numel() > 8
