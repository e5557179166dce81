"""`scaled_dot_product_attention` opened and kept: the same results and gradients, and what was decided is said with both times."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import plait
from plait.errors import FusionRefused
from plait.frontend import open_attention
from plait.frontend.attention import TARGETS
from plait.oracle.compare import check
from plait.plan.attention_cost import Attention, attention_ns, choose
from plait.plan.device import SPECS
from plait.runtime import report
from tests.attention_calls import CALLS, RANDOM, arguments, qkv, sdpa
from tests.attention_variants import widened

NAME = "scaled_dot_product_attention"
WAYS = {"opened": {"force": [NAME]}, "kept": {"forbid": [NAME]}}


def step(fn: Any, args: Any, train: bool) -> list[Tensor]:
    """The result, and the gradients of all floats."""
    given = [a.detach().clone().requires_grad_(train and a.is_floating_point()) for a in args]
    with torch.set_grad_enabled(train):
        out = fn(*given)
    if not train:
        return [out]
    grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, [a for a in given if a.requires_grad], grad)]


def compiled(fn: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    report.reset()
    return torch.compile(fn, backend="plait", fullgraph=True, options={"strict": True, **options})


def calls() -> list[str]:
    """Attention that is the library's in what was compiled."""
    found = [n for r in report.all() for n in r.details["compiled"].graph.nodes() if n.kind == "extern"]
    return [n.attr("target") for n in found if "dot_product" in n.attr("target")]


def kernels() -> int:
    return sum(bool(x.parts) for r in report.all() for x in r.details["compiled"].launches)


def openings() -> list[Any]:
    return [o for r in report.all() for o in r.details["compiled"].openings if o.call_ns is not None or o.why]


# programs that are run each time; the others are long
FORWARD = ("causal", "gated", "mask_of_positions")
TRAINING = ("bool_mask", "float_mask")
KEPT = ("bool_mask",)


def cases() -> list[Any]:
    """(name, training, opened) of all programs."""
    out = []
    for name in CALLS:
        for train, opened in ((False, True), (True, True), (True, False)):
            quick = name in (FORWARD if not train else TRAINING if opened else KEPT)
            words = f"{name}-{'training' if train else 'forward'}-{'opened' if opened else 'kept'}"
            marks = () if quick else (pytest.mark.long,)
            if name not in RANDOM:
                out.append(pytest.param(name, train, opened, id=words, marks=marks))
    return out


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call that can be is opened, though the user asks for no single kernel."""
    monkeypatch.setattr(open_attention, "choose", lambda *given: replace(choose(*given), state="open"))


@pytest.mark.parametrize(("name", "train", "opens"), cases())
def test_a_call(name: str, train: bool, opens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    state = "open" if opens else "closed"
    monkeypatch.setattr(open_attention, "choose", lambda *given: replace(choose(*given), state=state))
    fn, args = CALLS[name][0], arguments(name)
    got = step(compiled(fn), args, train)
    eager = step(fn, args, train)
    check(got, eager, step(fn, widened(args), train))
    assert got[0].stride() == eager[0].stride()
    assert {o.state for o in openings()} == {state}
    if opens:
        assert not calls()
        assert train or kernels() == 1
    else:  # a mask that wants gradients, and three dimensions, have no kernel of the library's
        assert calls() or name in ("three_dimensions", "float_mask")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["bool_mask", "grouped"])
@pytest.mark.long
def test_in_half_precision(name: str, dtype: torch.dtype, opened: None) -> None:
    fn, args = CALLS[name][0], arguments(name, dtype)
    got = step(compiled(fn), args, True)
    check(got, step(fn, args, True), step(fn, widened(args), True))


def test_dropout_is_drawn_again_and_keeps_as_many(opened: None) -> None:
    """The gradient of the values says which weights were kept, and by how much they were scaled."""
    q, k = torch.zeros(2, 4, 40, 16), torch.zeros(2, 4, 300, 16)
    v = torch.eye(300).expand(2, 4, 300, 300)
    fn = compiled(lambda q, k, v: sdpa(q, k, v, dropout_p=0.25))
    torch.manual_seed(1)
    out, _, _, grad = step(fn, (q, k, v), True)
    weights = out * 300 * 0.75
    check(
        [weights[weights != 0]],
        [torch.ones_like(weights[weights != 0])],
        [torch.ones_like(weights[weights != 0]).double()],
    )
    share = (weights != 0).double().mean()
    assert abs(share - 0.75) < 5 * (0.75 * 0.25 / weights.numel()) ** 0.5
    given = torch.linspace(-1, 1, out.numel()).view(out.shape)
    double = out.double().transpose(-1, -2) @ given.double()
    check([grad], [out.transpose(-1, -2) @ given], [double])
    again = step(fn, (q, k, v), True)[0]
    assert not torch.equal(again != 0, out != 0)


@pytest.mark.long
def test_sizes_that_vary(opened: None) -> None:
    fn = torch.compile(
        lambda q, k, v: sdpa(q, k, v, is_causal=True), backend="plait", dynamic=True, options={"strict": True}
    )
    for m, n in ((33, 70), (64, 21)):
        args = qkv(m, n)
        check(step(fn, args, True), step(CALLS["causal"][0], args, True), step(CALLS["causal"][0], widened(args), True))


def test_under_autocast_it_works_in_the_type_that_eager_does() -> None:
    args = qkv()
    fn = compiled(CALLS["plain"][0], **WAYS["opened"])
    with torch.autocast("cpu", torch.bfloat16):
        got, eager = step(fn, args, False), step(CALLS["plain"][0], args, False)
    assert not calls()
    check(got, eager, step(CALLS["plain"][0], widened(args), False))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"numerics": "eager"}, "eager's bits"),
        ({"plan": "none"}, "nothing is to be fused"),
        ({"mode": "O1"}, "leaves products"),
    ],
)
def test_what_keeps_a_call(options: dict[str, str], why: str) -> None:
    step(compiled(CALLS["plain"][0], **options), arguments("plain"), False)
    (found,) = openings()
    assert calls() and why in found.why


def test_random_numbers_of_eager_keep_a_call() -> None:
    args = arguments("dropped")
    fn = compiled(CALLS["dropped"][0], rng="eager")
    torch.manual_seed(3)
    got = step(fn, args, False)
    torch.manual_seed(3)
    eager = step(CALLS["dropped"][0], args, False)
    check(got, eager, eager)
    assert "random numbers" in openings()[0].why


def test_a_region_opens_it_with_its_neighbours() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, gate: Tensor) -> Tensor:
        with plait.fuse("attention"):
            q, k = (x * cos + torch.cat([-x[..., 8:], x[..., :8]], -1) * sin for x in (q, k))
            return sdpa(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 33, 64) * torch.sigmoid(gate)

    args = (*arguments("rotated"), torch.randn(2, 33, 64))
    got = step(compiled(fn), args, False)
    assert not calls() and kernels() == 1
    check(got, step(fn, args, False), step(fn, widened(args), False))


def test_a_region_that_cannot_be_one_kernel_names_the_law() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with plait.fuse("attention"):
            return sdpa(q, k, v) * 2

    with pytest.raises(Exception, match="opaque operator") as raised:
        step(compiled(fn, numerics="eager"), arguments("plain"), False)
    assert FusionRefused.__name__ in repr(raised.value) or "cannot be one kernel" in str(raised.value)


# ----------------------------------------------------------------------------------------------------------- the choice
def test_what_tells_the_forms_apart() -> None:
    """Alone a call stays; the traffic of neighbours, and dropped weights, open it."""
    alone = Attention(8192, 1024, 1024, 64, 64, 4, 8e6)
    cpu = SPECS["cpu"]
    assert choose("x", alone, cpu).state == "closed"
    for change in ({"saved_bytes": 1e8}, {"fused": False}):
        assert choose("x", Attention(8192, 1024, 1024, 64, 64, 4, 8e6, **change), cpu).state == "open"
    assert choose("x", Attention(8192, 1024, 1024, 512, 512, 4, 6e7, saved_bytes=1e9), cpu).state == "closed"
    card = SPECS["h200"]
    for causal in (False, True):
        big = Attention(128 * 4096, 4096, 4096, 128, 128, 2, 5.4e8, causal)
        call, opened = attention_ns(big, card)
        assert choose("x", big, card).state == "closed" and 0.5e6 < call < opened < 3e6
    assert choose("x", Attention(128 * 4096, 4096, 4096, 128, 128, 2, 5.4e8, saved_bytes=2e9), card).state == "open"


def test_neighbours_count_where_a_kernel_takes_them_in() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        return sdpa(q, k, v) * gate

    q, k, v = qkv(300, 300)
    step(compiled(fn), (q, k, v, torch.randn_like(q)), False)
    (gated,) = openings()
    step(compiled(CALLS["plain"][0]), (q, k, v), False)
    (alone,) = openings()
    assert gated.open_ns == alone.open_ns and gated.call_ns > alone.call_ns


@pytest.mark.parametrize("target", ["cpu", "h200"])
def test_explain_says_both_times(target: str) -> None:
    fn, args = CALLS["gated"][0], arguments("gated")
    opened = plait.explain(fn, *args, target=target, options=WAYS["opened"])
    kept = plait.explain(fn, *args, target=target, options=WAYS["kept"])
    (why,) = [k.why for g in opened.graphs for k in g.kernels if k.why]
    assert why.startswith(f"{NAME} is opened: option force (predicted ") and "us as a call" in why
    (why,) = [k.why for g in kept.graphs for k in g.kernels if k.kind == "call" and "dot_product" in k.name]
    assert why.startswith("stays the library's: option forbid (predicted ") and "us opened" in why
    assert "is opened: option force" in " ".join(str(opened).split())
    assert "us as a call" in json.dumps(opened.to_json())
    assert opened.totals.operators == kept.totals.operators


def test_both_names_of_the_call_are_known() -> None:
    assert F.scaled_dot_product_attention in TARGETS and torch.ops.aten.scaled_dot_product_attention.default in TARGETS
