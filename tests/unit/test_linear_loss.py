"""A linear layer and a loss of its result: no logits in memory, and the values of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from frontend_eval import imported
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from plait.compiler import Compiled
from plait.ir.check import check_graph
from plait.ir.graph import Graph, Node
from plait.options import Options
from plait.oracle.compare import FAIL, check, check_call, compare
from plait.oracle.eval_graph import evaluate
from plait.oracle.reference import reference
from plait.plan import contract_cost
from plait.plan.device import SPECS
from plait.rewrite.passes.gathered_products import gathered_products
from plait.rewrite.passes.open_contractions import can_open, open_contractions
from plait.rewrite.passes.single_points import single_points
from plait.runtime import report
from tests.loss_variants import FORMS, Sizes, arguments
from tests.passes import planning

# forms of which no value as large as the logits is needed
STREAMED = (
    "plain",
    "as_it_comes",
    "ignored",
    "ignored_words",
    "each_row",
    "biased",
    "capped",
    "weighted",
    "smooth_and_weighted",
    "with_z_loss",
    "by_hand",
    "log_softmax_picked",
    "smooth",
)
# of these only the targets themselves are
GIVEN_WHOLE = ("soft_targets", "taught")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products as fast as the vendor's, so that the traffic alone decides."""
    for kind in contract_cost.OWN:
        monkeypatch.setitem(contract_cost.OWN, kind, 1.0)


def logits_in(compiled: Compiled, words: int) -> list[Node]:
    """Stored values and results of calls with an axis of words and one of rows."""
    stored = [n for launch in compiled.launches for g in launch.groups for n in g.stored]
    calls = [n for n in compiled.graph.nodes() if n.kind == "extern"]
    return [n for n in (*stored, *calls) if len(n.shape) > 1 and n.shape[-1].const == words]


def planned(name: str, sizes: Sizes, train: bool = False) -> dict[str, Compiled]:
    """The passes of a form, planned for a card."""
    out: dict[str, Compiled] = {}
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x, w, y, extra = (mode.from_tensor(a) for a in arguments(name, sizes))
        x, w = x.requires_grad_(train), w.requires_grad_(train)
        loss = torch.compile(FORMS[name], backend=planning(out, Options.make(None, {})), dynamic=False)(x, w, y, extra)
        if train:
            loss.sum().backward()
    return out


@pytest.mark.parametrize("name", (*STREAMED, *GIVEN_WHOLE))
def test_a_card_has_no_logits_in_memory(name: str, opened: None) -> None:
    sizes = Sizes(rows=2048, depth=512, words=32000, dtype=torch.bfloat16)
    assert not logits_in(planned(name, sizes)["inference"], sizes.words)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMS)
def test_values(name: str, dtype: torch.dtype, opened: None) -> None:
    """Compiled for this machine, sizes that no tile divides."""
    sizes = Sizes(rows=70, depth=40, words=1300, dtype=dtype)
    torch._dynamo.reset()
    report.reset()
    args = arguments(name, sizes)
    fn = torch.compile(FORMS[name], backend="plait", dynamic=False, options={"strict": True})
    check_call(fn, FORMS[name], args)
    if name in STREAMED:
        assert not logits_in(report.all()[0].details["compiled"], sizes.words)


@pytest.mark.parametrize("name", (*STREAMED, *GIVEN_WHOLE))
def test_training_has_no_logits_in_memory(name: str, opened: None) -> None:
    """Where a block can hold the rows of the operands: both passes form the logits for themselves."""
    sizes = Sizes(rows=8192, depth=128, words=128256, dtype=torch.bfloat16)
    levels = planned(name, sizes, train=True)
    assert sorted(levels) == ["backward", "forward"]
    for compiled in levels.values():
        assert not logits_in(compiled, sizes.words)
        # targets that are given, as the user gave them
        given = [i for i in compiled.graph.inputs if [e.const for e in i.node.shape] == [sizes.rows, sizes.words]]
        assert len(given) <= (name in GIVEN_WHOLE)
    products = sorted(sum(n.kind == "contract" for n in g.nodes) for g in levels["backward"].plan.kernels())
    assert products[-2:] == [2, 2] and sum(products) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMS)
def test_gradients(name: str, dtype: torch.dtype, opened: None) -> None:
    sizes = Sizes(rows=300, depth=24, words=1300, dtype=dtype)
    torch._dynamo.reset()
    report.reset()

    def step(x: Tensor, w: Tensor, y: Tensor, extra: Tensor) -> tuple[Tensor, ...]:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        loss = fn(x, w, y, extra)
        return loss.detach(), *torch.autograd.grad(loss, (x, w), torch.ones_like(loss))

    args = arguments(name, sizes)
    wide = [a.double() if a.is_floating_point() else a for a in args]
    fn = FORMS[name]
    eager, exact = step(*args), step(*wide)
    fn = torch.compile(FORMS[name], backend="plait", dynamic=False, options={"strict": True})
    for got, a, b in zip(step(*args), eager, exact, strict=True):
        assert compare(got, a, b).status is not FAIL, f"{name}: {compare(got, a, b)}"


@pytest.mark.parametrize("numerics", ["fused", "eager"])
def test_labels_that_do_not_count_or_do_not_exist(numerics: str, opened: None) -> None:
    torch._dynamo.reset()
    x, w, y, extra = arguments("plain", Sizes())
    fn = torch.compile(FORMS["plain"], backend="plait", dynamic=False, options={"strict": True, "numerics": numerics})
    check_call(fn, FORMS["plain"], [x, w, y, extra])
    assert fn(x, w, torch.full_like(y, -100), extra).isnan()
    for bad in (w.shape[0], -1):
        with pytest.raises(IndexError):
            fn(x, w, torch.where(torch.arange(len(y)) == 7, bad, y), extra)


# ------------------------------------------------------------------------------------- products at few points, by itself
def _diagonal(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return (x @ w.t())[:, : x.shape[0]].diagonal().tanh()


def _column(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.relu(x @ w.t())[:, 3] + 1


def _scaled(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    """A factor of the row, one of the column, and a number that follows from the column's place."""
    y = (x @ w.t()) * x.sum(-1, keepdim=True) + w.sum(-1) * torch.arange(w.shape[0])
    return y.gather(1, t[:, None])[:, 0]


def _two_each(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return (x @ w.t()).gather(1, torch.stack([t, t.flip(0)], 1))


def _batched(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    s = torch.bmm(x.view(2, -1, x.shape[1]), w.view(2, -1, w.shape[1]).transpose(1, 2))
    return s.gather(2, (t % s.shape[2]).view(2, -1, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("fn", [_diagonal, _column, _scaled, _two_each, _batched])
def test_products_at_few_points(fn: Callable[..., Tensor], dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    x, w = (torch.randn(n, 24, generator=g).to(dtype) for n in (30, 100))
    args = [x, w, torch.randint(0, 100, (30,), generator=g)]
    before = open_contractions(imported(fn, args)[0], can_open)
    after = gathered_products(before)
    check_graph(after, level=2)
    assert "dot" in _ops(before) and "dot" not in _ops(after)
    check(evaluate(after, args, dtype_mode="fused"), evaluate(before, args, dtype_mode="eager"), reference(fn, args))


def _ops(graph: Graph) -> set[str]:
    return {n.op for n in graph.nodes()}


def _wanted_too(x: Tensor, w: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w.t()
    return y, y.gather(1, t[:, None])


def _many(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return (x @ w.t())[t]


@pytest.mark.parametrize("fn", [_wanted_too, _many])
def test_products_that_are_needed_stay(fn: Callable[..., Any]) -> None:
    x, w = torch.randn(30, 24), torch.randn(100, 24)
    graph = open_contractions(imported(fn, [x, w, torch.randint(0, 30, (30,))])[0], can_open)
    assert [n.op for n in gathered_products(graph).nodes()] == [n.op for n in graph.nodes()]


@pytest.mark.parametrize("name", ["by_hand", "log_softmax_picked"])
def test_picks_have_no_scatter(name: str) -> None:
    """Where the logits are given, too, the gradient of one element a row is chosen, not scattered into zeros."""
    x, _, y, extra = arguments(name, Sizes(rows=30, depth=50, words=50))
    y = y - 50 * (torch.arange(30) % 2) if name == "log_softmax_picked" else y  # indices may count from the end
    eye = torch.eye(50)
    eager, got = x.clone().requires_grad_(), x.clone().requires_grad_()
    FORMS[name](eager, eye, y, extra).backward()
    torch._dynamo.reset()
    report.reset()
    torch.compile(FORMS[name], backend="plait", dynamic=False, options={"strict": True})(got, eye, y, extra).backward()
    assert eager.grad is not None and got.grad is not None
    torch.testing.assert_close(got.grad, eager.grad)
    graphs = [r.details["compiled"].graph for r in report.all()]
    assert len(graphs) == 2
    assert not [n for g in graphs for n in g.nodes() if n.kind == "extern" and "mm" not in n.attr("target")]


def _one_of_each(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    at = torch.arange(x.shape[1]) == t[:, None]
    return torch.where(at & (x > 0), x * 2, 0.0).sum(-1) + torch.where(at, w[0, 0], 0.0).sum(-1)


def test_a_sum_of_one_term_is_read() -> None:
    """Infinite and NaN neighbours do not count; places out of range have no term."""
    g = torch.Generator().manual_seed(2)
    x, w = torch.randn(40, 60, generator=g), torch.randn(1, 1)
    x[:, 7] = torch.nan
    t = torch.randint(-3, 63, (40,), generator=g)
    t = torch.where(t == 7, 8, t)
    before = imported(_one_of_each, [x, w, t])[0]
    after = single_points(before)
    check_graph(after, level=2)
    assert "sum" in _ops(before) and "sum" not in _ops(after)
    assert torch.equal(evaluate(after, [x, w, t])[0], _one_of_each(x, w, t))


@pytest.mark.parametrize("rows", [600, 3000, 8192, 12000])
def test_parts_keep_the_machine_busy(rows: int, opened: None) -> None:
    """Blocks of 128 rows, a multiprocessor each: no last round of few blocks."""
    graph = planned("plain", Sizes(rows=rows, depth=1024, words=128256, dtype=torch.bfloat16))["inference"].graph
    first = next(n for n in graph.nodes() if n.op == "max" and n in graph.partials)
    rounds = (first.axes[0].const or 0) * -(-rows // 128) / SPECS["h200"].units
    assert rounds / -(-rounds // 1) > 0.9
