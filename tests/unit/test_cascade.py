"""Cascades of real programs: which form each takes, and that one pass equals pass after pass in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from cascade_run import agree, only, planned, refused
from frontend_eval import imported

from plait.plan.cascade import Cascade, plan_cascade
from plait.plan.cascade_chains import find_chains, plan_passes
from plait.rewrite.passes.open_contractions import open_contractions

D = torch.float64
INF = math.inf


def _rand(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(sum(shape))) * scale


def _kinds(c: Cascade) -> list[str]:
    return [s.kind for s in c.steps]


def _attention(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) * 0.3, -1) @ v


def _alibi(q, k, v):
    at = torch.arange(k.shape[-2], dtype=D)
    return torch.softmax(q @ k.transpose(-1, -2) - 0.5 * (at[None, :] - at[: q.shape[-2], None]).abs(), -1) @ v


def _capped(q, k, v):
    return torch.softmax(5.0 * torch.tanh(q @ k.transpose(-1, -2) / 5.0), -1) @ v


def _causal(q, k, v):
    s = q @ k.transpose(-1, -2)
    seen = torch.arange(k.shape[-2])[None, :] <= torch.arange(q.shape[-2])[:, None]
    return torch.softmax(torch.where(seen, s, -INF), -1) @ v


def _scaled_inside(q, k, v):
    s = q @ k.transpose(-1, -2)
    e = torch.exp(0.25 * (s - s.amax(-1, keepdim=True)))
    return (e / e.sum(-1, keepdim=True)) @ v


def _base_two(q, k, v):
    s = q @ k.transpose(-1, -2)
    e = torch.exp2(s - s.amax(-1, keepdim=True))
    return (e @ v) / e.sum(-1, keepdim=True)


def _by_log_softmax(q, k, v):
    return torch.exp(torch.log_softmax(q @ k.transpose(-1, -2), -1)) @ v


def _dropped(q, k, v):
    keep = torch.arange(q.shape[-2] * k.shape[-2]).reshape(q.shape[-2], -1) % 3 != 0
    return torch.where(keep, torch.softmax(q @ k.transpose(-1, -2), -1) * 1.5, 0.0) @ v


def _safe(q, k, v):
    s = q @ k.transpose(-1, -2)
    seen = torch.arange(k.shape[-2])[None, :] < torch.arange(q.shape[-2])[:, None]
    return torch.ops.aten._safe_softmax(torch.where(seen, s, -INF), -1) @ v


ATTENTIONS = [_attention, _alibi, _capped, _causal, _scaled_inside, _base_two, _by_log_softmax, _dropped]


@pytest.mark.parametrize("fn", ATTENTIONS, ids=lambda f: f.__name__)
def test_attention(fn) -> None:
    args = (_rand(2, 5, 4, scale=3.0), _rand(2, 7, 4), _rand(2, 7, 3))
    graph, c = only(fn, *args)
    assert c.kind == "online" and c.steps[0].kind == "plain"
    assert len(c.slots) == 3 and [s.correction is None for s in c.slots] == [True, False, False]
    # the row statistics do not vary along the columns of the result
    assert sorted(len(s.axes) for s in c.slots) == [2, 2, 3]
    agree(graph, c, args)


def test_heads_reshaped() -> None:
    args = (_rand(2, 3, 4, 4), _rand(2, 3, 5, 4), _rand(2, 3, 5, 2))
    graph, c = only(_attention, *args)
    assert c.kind == "online"
    agree(graph, c, args)


def test_half_precision_keeps_the_unrounded_values() -> None:
    args = tuple(x.to(torch.bfloat16) for x in (_rand(1, 4, 4), _rand(1, 5, 4), _rand(1, 5, 2)))
    graph, c = only(_attention, *args)
    assert c.kind == "online" and len(c.slots) == 3
    refusal = plan_cascade(graph, find_chains(graph)[0], numerics="eager")
    assert not isinstance(refusal, Cascade) and "rounded to bf16" in refusal.text


def test_safe_softmax_masks_whole_rows_at_the_end() -> None:
    args = (_rand(1, 5, 4), _rand(1, 6, 4), _rand(1, 6, 3))
    graph, c = only(_safe, *args)
    assert c.kind == "online"
    agree(graph, c, args)


def _row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=D)


ADVERSE = [
    _row(-INF, -INF, -INF, -INF, -INF),
    _row(-INF, -INF, -800.0, -INF, -801.0),
    _row(1e4, -1e4, 0.0, 3.0, 1e4),
    _row(1.0, math.nan, 2.0, 0.0, -INF),
    _row(-1000.0, 1000.0, 0.0, 5.0, INF),
    _row(7.0),
    _row(-INF),
]


@pytest.mark.parametrize("x", ADVERSE, ids=str)
def test_softmax_of_adverse_rows(x: torch.Tensor) -> None:
    v = _rand(x.shape[1], 3)
    fn = lambda x, v: torch.softmax(x, -1) @ v  # noqa: E731
    graph, c = only(fn, x, v)
    agree(graph, c, (x, v))


@pytest.mark.parametrize("x", ADVERSE, ids=str)
def test_logsumexp(x: torch.Tensor) -> None:
    graph, c = only(lambda x: torch.logsumexp(x, -1), x)
    assert _kinds(c) == ["plain", "online" if x.shape[1] > 1 else "deferral"]
    agree(graph, c, (x,))


@pytest.mark.parametrize("x", [_rand(4, 7, scale=9.0), *ADVERSE], ids=str)
def test_cross_entropy(x: torch.Tensor) -> None:
    t = torch.arange(x.shape[0]) % x.shape[1]
    if x.shape[1] == 1:  # nothing is gathered from a row of one
        x, t = x.expand(1, 2).contiguous(), t + 1
    graph, c = only(lambda x, t: F.cross_entropy(x, t, reduction="none"), x, t)
    assert _kinds(c) == ["plain", "online", "select"] and len(c.slots) == 3
    agree(graph, c, (x, t))


def test_rms_norm_before_linear_defers_the_scale() -> None:
    args = (_rand(2, 3, 7), _rand(7), _rand(4, 7))
    graph, c = only(lambda x, w, l: F.linear(x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w, l), *args)
    assert _kinds(c) == ["plain", "deferral"] and len(c.slots) == 2
    agree(graph, c, args)


def test_l2_norm_before_linear_with_bias() -> None:
    args = (_rand(3, 7), _rand(4, 7), _rand(4))
    graph, c = only(lambda x, w, b: F.linear(F.normalize(x, dim=-1), w, b), *args)
    assert _kinds(c) == ["plain", "deferral"]
    agree(graph, c, args)


def test_amax_scale_before_linear() -> None:
    args = (_rand(3, 7), _rand(4, 7))
    graph, c = only(lambda x, w: F.linear(x / x.abs().amax(-1, keepdim=True), w), *args)
    assert _kinds(c) == ["plain", "deferral"]
    agree(graph, c, args)


@pytest.mark.parametrize("offset", [0.0, 1e3])
@pytest.mark.parametrize("bias", [False, True])
def test_layer_norm_before_linear_has_rank_two(offset: float, bias: bool) -> None:
    args = [_rand(3, 7) + offset, _rand(7), *([_rand(7)] if bias else []), _rand(4, 7)]
    graph, c = only(lambda x, w, *rest: F.linear(F.layer_norm(x, (7,), w, *rest[:-1]), rest[-1]), *args)
    assert _kinds(c) == ["plain", "moments", "moments", "rank"] and c.steps[-1].rank == 2
    assert [s.monoid for s in c.slots] == ["moments", *["sum"] * (3 if bias else 2)]
    # sum of weights alone: no row of x in it
    assert frozenset({1}) in {s.axes for s in c.slots}
    agree(graph, c, args, tolerance=1e-9 if offset else 1e-11)


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_variance_by_moments(offset: float) -> None:
    x = _rand(3, 9) + offset
    graph, c = only(lambda x: torch.var(x, -1), x)
    assert c.kind == "moments" and [s.monoid for s in c.slots] == ["moments"]
    # the middle sum is rounding error alone
    agree(graph, c, (x,), tolerance=1e-13 * max(1.0, offset))


def test_differential_attention_is_one_pass_of_two_exponents() -> None:
    def fn(a, b, v):
        return (torch.softmax(a, -1) - 0.4 * torch.softmax(b, -1)) @ v

    args = (_rand(3, 7, scale=5.0), _rand(3, 7, scale=5.0), _rand(7, 2))
    graph, c = only(fn, *args)
    assert c.kind == "online" and c.steps[-1].rank == 2 and len(c.slots) == 6
    agree(graph, c, args)


def test_differential_attention_in_two_cascades() -> None:
    def fn(a, b, v):
        return torch.softmax(a, -1) @ v - 0.4 * (torch.softmax(b, -1) @ v)

    args = (_rand(3, 7), _rand(3, 7), _rand(7, 2))
    graph, found = planned(fn, *args)
    assert len(found) == 2
    for c in found:
        assert isinstance(c, Cascade) and c.kind == "online" and len(c.slots) == 3
        agree(graph, c, args)


def test_sigmoid_attention_is_no_cascade() -> None:
    _, found = planned(lambda s, v: torch.sigmoid(s) @ v, _rand(3, 7), _rand(7, 2))
    assert found == []


def test_maximum_of_a_shifted_and_of_a_scaled_row() -> None:
    x = _rand(3, 8)
    graph, c = only(lambda x: (x - x.mean(-1, keepdim=True)).amax(-1), x)
    assert _kinds(c) == ["plain", "deferral"]
    agree(graph, c, (x,))
    graph, c = only(lambda x: (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1.0)).amin(-1), x)
    assert _kinds(c) == ["plain", "deferral"]
    agree(graph, c, (x,))


def test_relu_between_norm_and_linear() -> None:
    args = (_rand(3, 7), _rand(7, 2))
    graph, c = only(lambda x, w: torch.relu(x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)) @ w, *args)
    assert _kinds(c) == ["plain", "deferral"]
    agree(graph, c, args)


# ------------------------------------------------------------------------------------------------------------- refusals
REFUSED = {
    "gate": (
        lambda x, w: (x * torch.sigmoid(x.sum(-1, keepdim=True) * x)) @ w,
        "separable",
        "enters sigmoid(sum_2*x_1) non-separably",
    ),
    "quantised": (
        lambda x, w: torch.round(x / x.abs().amax(-1, keepdim=True) * 127) @ w,
        "separable",
        "enters round(",
    ),
    "rounded": (
        lambda x, w: (x / x.abs().amax(-1, keepdim=True)).to(torch.bfloat16).to(D) @ w,
        "separable",
        "is rounded to bf16",
    ),
    "mask by a state": (
        lambda x, w: torch.where(x > x.mean(-1, keepdim=True), x, 0.0) @ w,
        "separable",
        "enters gt(",
    ),
    "unbounded exponent": (
        lambda x, w: torch.exp(x - x.mean(-1, keepdim=True)) @ w,
        "range",
        "bounded by no running maximum",
    ),
    "exponent of another row": (
        lambda x, w: torch.exp(2 * x - x.amax(-1, keepdim=True)) @ w,
        "range",
        "bounded by no running maximum",
    ),
    "scaled squares": (
        lambda x, w: torch.square(x / x.abs().amax(-1, keepdim=True)).sum(-1),
        "range",
        "may overflow",
    ),
    "cancelling square": (
        lambda x, w: ((x - x.mean(-1, keepdim=True)) ** 2) @ w,
        "range",
        "cancel",
    ),
    "a sign unknown": (
        lambda x, w: (x * x.mean(-1, keepdim=True)).amax(-1),
        "separable",
        "could be negative",
    ),
    "temperature from the row": (
        lambda x, w: torch.exp(x / x.abs().amax(-1, keepdim=True)) @ w,
        "separable",
        "enters exp(",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_what_failed(name: str) -> None:
    fn, law, words = REFUSED[name]
    refusal = refused(fn, _rand(3, 7), _rand(7, 2))
    assert refusal.law == law and words in refusal.text, refusal
    assert refusal.nodes and refusal.reduction is not None


def test_refused_chains_take_a_second_pass() -> None:
    graph, _ = imported(REFUSED["gate"][0], [_rand(3, 7), _rand(7, 2)])
    (chain,) = find_chains(graph)
    passes = plan_passes(graph, chain)
    assert len(passes.cascades) == 2 and len(passes.refusals) == 1
    assert passes.cascades[1].kind == "plain" and passes.refusals[0].reduction is chain[-1]


def test_two_softmaxes_in_a_row_need_a_pass_between() -> None:
    graph, _ = imported(lambda x, v: torch.softmax(torch.softmax(x, -1), -1) @ v, [_rand(3, 7), _rand(7, 2)])
    (chain,) = find_chains(graph)
    assert len(chain) == 5
    passes = plan_passes(graph, chain)
    assert [c.kind for c in passes.cascades] == ["online", "online"], passes


def test_nothing_is_seen_through_a_scan() -> None:
    graph, _ = imported(lambda x, w: torch.cumsum(torch.softmax(x, -1), -1) @ w, [_rand(3, 7), _rand(7, 2)])
    reductions = [n for n in graph.nodes() if n.op in ("max", "sum", "extern")]
    refusal = plan_cascade(graph, reductions)
    assert not isinstance(refusal, Cascade) and refusal.law == "opaque" and "passes through cumsum" in refusal.text
    assert [n.op for n in find_chains(graph)[0]] == ["max", "sum"]


def test_siblings_share_the_pass() -> None:
    def fn(x, w):
        e = torch.exp(x - x.amax(-1, keepdim=True))
        return e @ w, e.sum(-1), (e * x).sum(-1), x.argmax(-1)

    args = (_rand(3, 7), _rand(7, 2))
    graph, c = only(fn, *args)
    assert len(c.steps) == 4 and len(c.slots) == 4
    agree(graph, c, args)


def test_a_sink_is_a_floor_under_the_maximum() -> None:
    def fn(s, v, sink):
        m = torch.maximum(s.amax(-1, keepdim=True), sink)
        e = torch.exp(s - m)
        return (e / (e.sum(-1, keepdim=True) + torch.exp(sink - m))) @ v

    args = (_rand(3, 7, scale=4.0), _rand(7, 2), _rand(3, 1))
    graph, c = only(fn, *args)
    assert c.kind == "online" and len(c.slots) == 3
    agree(graph, c, args)


def test_a_cast_of_the_probabilities_moves_only_when_asked() -> None:
    def fn(s, v):
        return torch.softmax(s.float(), -1).to(torch.bfloat16) @ v

    args = (_rand(3, 7).to(torch.bfloat16), _rand(7, 2).to(torch.bfloat16))
    graph, _ = imported(fn, list(args))
    (chain,) = find_chains(graph, numerics="relaxed")
    refusal = plan_cascade(graph, chain)
    assert not isinstance(refusal, Cascade) and refusal.text.endswith("rounded to bf16 together with the data")
    c = plan_cascade(graph, chain, numerics="relaxed")
    assert isinstance(c, Cascade) and c.kind == "online" and [n.op for n in c.steps[-1].body.moved] == ["cast"]


def test_layers_of_one_width_are_chains_of_their_own() -> None:
    def block(x, w):
        x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
        x = x + torch.softmax(x @ w, -1) @ w
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)

    def fn(x, w):
        return block(block(x, w), w)

    args = (_rand(7, 7), _rand(7, 7))
    graph, found = planned(fn, *args)
    assert [isinstance(c, Cascade) and _kinds(c) for c in found] == [
        ["plain", "deferral"],
        ["plain", "online", "online"],
        ["plain", "deferral", "deferral"],  # a norm of a norm, and the projection of both
        ["plain", "online", "online"],
    ]
    for c in found:
        assert isinstance(c, Cascade)
        agree(graph, c, args)


def test_terms_that_may_cancel_are_marked() -> None:
    entropy = lambda x: -(torch.softmax(x, -1) * torch.log_softmax(x, -1)).sum(-1)  # noqa: E731
    graph, c = only(entropy, _rand(3, 7))
    assert c.steps[-1].may_cancel and c.steps[-1].rank == 2
    agree(graph, c, (_rand(3, 7),))
    args = (_rand(2, 5, 4), _rand(2, 7, 4), _rand(2, 7, 3))
    assert not any(s.may_cancel for s in only(_attention, *args)[1].steps)


def test_contractions_as_nodes_are_the_same_chains() -> None:
    args = tuple(x.to(torch.bfloat16) for x in (_rand(2, 3, 4, 4), _rand(2, 3, 5, 4), _rand(2, 3, 5, 2)))
    graph, _ = imported(_attention, list(args))
    opened = open_contractions(graph, lambda n: True)
    (chain,) = find_chains(opened)
    c = plan_cascade(opened, chain)
    assert [n.op for n in chain] == ["max", "sum", "dot"]
    assert isinstance(c, Cascade) and c.kind == "online" and len(c.slots) == 3
