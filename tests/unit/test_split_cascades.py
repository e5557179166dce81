"""Cascades split over blocks: the graph before and after gives the same, and the plan is a partial and a merge kernel."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from frontend_eval import imported
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from plait.compiler import all_levels
from plait.frontend.externs import decompositions
from plait.frontend.fx_import import import_fx
from plait.ir.check import check_graph
from plait.ir.graph import Graph
from plait.ir.index import axis, const
from plait.options import Options
from plait.oracle.compare import check, check_call
from plait.oracle.eval_graph import evaluate
from plait.oracle.reference import reference
from plait.plan.device import SPECS
from plait.rewrite.passes.formula_nodes import inverse
from plait.rewrite.passes.open_contractions import can_open, open_contractions
from plait.rewrite.passes.split_cascades import split_cascades

# memory so slow that small rows are worth splitting
SPEC = replace(SPECS["h200"], bytes_per_ns=0.5, launch_ns=1)
INF = math.inf


def _randn(*shape: int, dtype=torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).to(dtype)


def _opened(fn, args) -> Graph:
    graph, _ = imported(torch.func.functionalize(fn, remove="mutations"), list(args))
    return open_contractions(graph, can_open)


def _split(fn, *args, spec=SPEC) -> tuple[Graph, Graph]:
    """Before and after, the latter checked for its laws and for what it computes."""
    before = _opened(fn, args)
    after = split_cascades(before, spec, "fused")
    check_graph(after, level=2)
    if after is not before:
        got = evaluate(after, list(args), dtype_mode="fused")
        check(got, evaluate(before, list(args), dtype_mode="eager"), reference(fn, args))
    return before, after


def _partials(graph: Graph) -> list[str]:
    return sorted(n.op for n in graph.partials)


def _attention(q, k, v):
    s = (q @ k.transpose(-1, -2)).float() * 0.3
    return torch.softmax(s, -1).to(v.dtype) @ v


def _grouped(q, k, v):
    b, h, m, d = q.shape
    g = k.shape[1]
    return _attention(q.view(b, g, h // g * m, d), k, v).view(b, h, m, d)


def _masked(q, k, v):
    s = q @ k.transpose(-1, -2)
    seen = torch.arange(k.shape[-2])[None, :] < 700 * torch.arange(q.shape[-2])[:, None]
    return torch.softmax(torch.where(seen, s, -INF), -1) @ v


def _safe(q, k, v):
    s = q @ k.transpose(-1, -2)
    seen = torch.arange(k.shape[-2])[None, :] < 700 * torch.arange(q.shape[-2])[:, None]
    return torch.ops.aten._safe_softmax(torch.where(seen, s, -INF), -1) @ v


def _grouped_safe(q, k, v):
    b, h, m, d = q.shape
    g = k.shape[1]
    s = (q.view(b, g, h // g * m, d) @ k.transpose(-1, -2)).float() * 0.3
    return (torch.ops.aten._safe_softmax(s, -1).to(v.dtype) @ v).view(b, h, m, d)


def _capped(q, k, v):
    return torch.softmax(5.0 * torch.tanh(q @ k.transpose(-1, -2) / 5.0), -1) @ v


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", [2048, 1664 + 37])
@pytest.mark.parametrize("rows", [1, 3])
def test_attention(dtype, keys, rows) -> None:
    args = (_randn(2, rows, 8, dtype=dtype), _randn(2, keys, 8, dtype=dtype), _randn(2, keys, 4, dtype=dtype))
    before, after = _split(_attention, *args)
    assert _partials(after) == ["dot", "max", "sum"]
    count = [sum(n.kind == "contract" for n in g.nodes()) for g in (before, after)]
    assert count == [2, 2]
    products = [n for n in after.nodes() if n.kind == "contract"]
    assert all(r.source.dtype is before.inputs[0].node.dtype for n in products for r in n.reads)


@pytest.mark.parametrize("fn", [_masked, _safe, _capped], ids=lambda f: f.__name__)
@pytest.mark.parametrize("keys", [2048, 1500])
def test_scores_with_masks_and_caps(fn, keys) -> None:
    # the first row is all -inf: NaN from softmax, 0 from the safe one; whole parts of the second are
    _, after = _split(fn, _randn(2, 3, 8, scale=4.0), _randn(2, keys, 8), _randn(2, keys, 4))
    assert _partials(after) == ["dot", "max", "sum"]


def test_groups_of_heads_share_keys() -> None:
    _, after = _split(_grouped, _randn(2, 8, 1, 8), _randn(2, 2, 2048, 8), _randn(2, 2, 2048, 8))
    assert _partials(after) == ["dot", "max", "sum"]


@pytest.mark.parametrize("extent", [8192, 5000])
def test_logsumexp(extent) -> None:
    x = _randn(3, extent, scale=3.0)
    x[1] = -INF
    x[2, :2000] = -INF
    _, after = _split(lambda x: torch.logsumexp(x, -1), x)
    assert _partials(after) == ["max", "sum"]


@pytest.mark.parametrize("extent", [4096, 4100])
def test_softmax_of_long_rows(extent) -> None:
    _, after = _split(lambda x: torch.softmax(x * 2.0, -1), _randn(2, extent, dtype=torch.bfloat16))
    assert _partials(after) == ["max", "sum"]


@pytest.mark.parametrize("vocabulary", [4096, 3001])
def test_linear_cross_entropy(vocabulary) -> None:
    target = torch.tensor([5, 2999, 7, 0])

    def fn(x, w, target):
        return F.cross_entropy((x @ w.t()).float(), target)

    _, after = _split(fn, _randn(4, 16), _randn(vocabulary, 16), target)
    assert {"max", "sum"} <= set(_partials(after))


def test_what_fills_the_machine_stays_whole() -> None:
    before, after = _split(lambda x: torch.logsumexp(x, -1), _randn(132, 2048))
    assert after is before
    before, after = _split(_attention, _randn(2, 3, 8), _randn(2, 512, 8), _randn(2, 512, 4))
    assert after is before


def test_scores_that_are_wanted_too_are_padded_nowhere() -> None:
    def fn(q, k, v):
        s = q @ k.transpose(-1, -2)
        return s, torch.softmax(s, -1) @ v

    before, after = _split(fn, _randn(2, 3, 8), _randn(2, 1701, 8), _randn(2, 1701, 4))
    assert after is before
    _, after = _split(fn, _randn(2, 3, 8), _randn(2, 2048, 8), _randn(2, 2048, 4))
    assert _partials(after) == ["dot", "max", "sum"]


def test_places_are_inverted() -> None:
    space = (const(12), const(5))
    flat = axis(0)
    assert inverse((flat, axis(1)), space, space) == {0: flat, 1: axis(1)}
    # (12, 5) read as (3, 5, 4): the reader's axes 0 and 2 are digits of the space's axis 0
    found = inverse(_digits(), (const(3), const(5), const(4)), space)
    assert found is not None
    assert all(
        found[0].evaluate(_at(a // 4, b, a % 4)) == a and found[1].evaluate(_at(a // 4, b, a % 4)) == b
        for a in range(12)
        for b in range(5)
    )
    assert inverse((_digits()[0],), (const(3),), space) is None


def _digits():
    from plait.ir.index import floordiv, mod

    return floordiv(axis(0), 4), axis(1), mod(axis(0), 4)


def _at(*point: int):
    from plait.ir.index import axis_atom

    return {axis_atom(d): p for d, p in enumerate(point)}


def _launches(fn, shapes, spec, dtype=torch.bfloat16):
    with FakeTensorMode(allow_non_fake_inputs=True):
        args = [torch.empty(s, dtype=dtype) for s in shapes]
        gm = make_fx(torch.func.functionalize(fn), decomposition_table=decompositions())(*args)
    compiled = all_levels(import_fx(gm, args), spec, Options.make(None, {}))
    return [step.groups[0] for step in compiled.launches]


@pytest.mark.parametrize("keys", [32768, 30000])
@pytest.mark.parametrize("fn", [_grouped, _grouped_safe], ids=lambda f: f.__name__)
def test_decode_attention_is_two_kernels(fn, keys) -> None:
    shapes = ((8, 32, 1, 128), (8, 8, keys, 128), (8, 8, keys, 128))
    groups = _launches(fn, shapes, SPECS["h200"])
    assert [g.kind for g in groups] == ["kernel", "kernel"]
    cost = groups[0].cost
    assert cost is not None and cost.bytes_read < 1.01 * 2 * 8 * 8 * keys * 128 * 2
    assert groups[1].predicted_ns < 2 * SPECS["h200"].launch_ns


def test_the_loss_of_a_few_rows_is_two_kernels() -> None:
    def fn(x, w):
        return torch.logsumexp((x @ w.t()).float(), -1)

    groups = _launches(fn, ((16, 2048), (131072, 2048)), SPECS["h200"])
    assert [g.kind for g in groups] == ["kernel", "kernel"]
    cost = groups[0].cost  # a round length of the parts leaves no block of the card idle
    assert cost is not None and 0.95 * SPECS["h200"].units <= cost.blocks <= SPECS["h200"].units


@pytest.mark.parametrize("keys", [4096, 3000])
@pytest.mark.parametrize("fn", [_attention, _safe], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_for_the_cpu(fn, keys, dtype) -> None:
    args = (
        _randn(1, 2, 64, dtype=dtype, scale=0.2),
        _randn(1, keys, 64, dtype=dtype),
        _randn(1, keys, 32, dtype=dtype),
    )
    torch._dynamo.reset()
    check_call(torch.compile(fn, backend="plait"), fn, args)
