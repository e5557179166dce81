"""Regions of user code that force or forbid a fusion: `with plait.fuse(...)` and `with plait.no_fuse(...)`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import plait
from plait.errors import FusionRefused
from plait.ir.graph import Graph
from plait.ir.parse import parse_graph
from plait.ir.text import print_graph
from plait.report.report import Report
from plait.runtime import report


def explained(fn: Any, *args: Any, **settings: Any) -> Report:
    torch._dynamo.reset()
    return plait.explain(fn, *args, **settings)


def kernels(r: Report, kind: str = "inference") -> list[tuple[str, ...]]:
    """Operators of every step of the graphs of a kind."""
    return [tuple(m.name for m in k.members) for g in r.graphs if g.kind == kind for k in g.kernels]


def graphs() -> list[Graph]:
    return [r.details["compiled"].graph for r in report.all() if "compiled" in r.details]


def agrees(fn: Callable[..., Any], *args: torch.Tensor) -> None:
    """Compiled in one graph, the program gives eager's results and gradients."""
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="plait", fullgraph=True, options={"strict": True})
    copies = [[a.detach().clone().requires_grad_() for a in args] for _ in range(2)]
    results = [f(*given) for f, given in zip((compiled, fn), copies, strict=True)]
    for out in results:
        out.square().sum().backward()
    torch.testing.assert_close(results[0], results[1])
    for mine, theirs in zip(*copies, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


# ---------------------------------------------------------------------------------------------------- programs
def walled(x: torch.Tensor) -> torch.Tensor:
    a = x * 2
    with plait.no_fuse("norm"):
        b = torch.softmax(a, -1)
        c = b * torch.sigmoid(b)
    return c.cos()


def free(x: torch.Tensor) -> torch.Tensor:
    b = torch.softmax(x * 2, -1)
    return (b * torch.sigmoid(b)).cos()


def sums(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.sum(0), x.sum(1)


def sums_forced(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with plait.fuse("sums"):
        return x.sum(0), x.sum(1)


SQUARE = torch.randn(512, 512)


# ---------------------------------------------------------------------------------------------------- no_fuse
def test_a_region_is_kept_apart_and_whole() -> None:
    assert kernels(explained(free, SQUARE)) == [("mul", "softmax", "sigmoid", "mul", "cos")]
    r = explained(walled, SQUARE)
    assert kernels(r) == [("mul",), ("softmax", "sigmoid", "mul"), ("cos",)]
    r.assert_not_fused("norm", "cos")
    why = [f.sentence for g in r.graphs for f in g.refusals]
    assert len(why) == 2 and all("forbidden by user: no_fuse 'norm'" in w for w in why)


def test_a_region_costs_no_graph_and_changes_no_result() -> None:
    agrees(walled, torch.randn(64, 32))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_other_backends_pay_regions_no_heed(backend: str) -> None:
    torch._dynamo.reset()
    x = torch.randn(8, 16, requires_grad=True)
    y = torch.compile(walled, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(y, walled(x))
    y.sum().backward()


def test_in_eager_a_region_is_nothing() -> None:
    torch.testing.assert_close(walled(SQUARE), free(SQUARE), rtol=0, atol=0)
    assert torch.fx.traceback.current_meta.get("custom") is None
    with plait.fuse("a"), plait.no_fuse():
        assert torch.fx.traceback.current_meta.get("custom") is None


def test_gradients_lie_where_their_operators_lie() -> None:
    r = explained(walled, SQUARE, train=True)
    inside = {"softmax", "sigmoid", "mul"}
    backward = kernels(r, "backward")
    assert backward and not any("cos" in k and inside & set(k) for k in backward)
    # the sum of the two gradients of b, of which autograd does not say where it lies, is in the region's kernel
    assert ["sigmoid" in k and "softmax" in k for k in backward].count(True) == 1


def test_recomputed_values_do_not_cross_the_edge() -> None:
    """A cast is evaluated where it is read, but not on the other side of an edge."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        with plait.no_fuse():
            return y.exp()

    assert kernels(explained(fn, SQUARE.bfloat16())) == [("float",), ("exp",)]


def test_parts_of_one_launch_do_not_cross_the_edge() -> None:
    """Independent kernels share launches, but not those of a region."""

    def fn(x: torch.Tensor, y: torch.Tensor, wall: bool) -> tuple[torch.Tensor, torch.Tensor]:
        a = x.exp()
        if not wall:
            return a, y.sin()
        with plait.no_fuse():
            return a, y.sin()

    args = torch.randn(300, 7), torch.randn(11, 130)
    assert len(kernels(explained(lambda x, y: fn(x, y, False), *args))) == 1
    assert len(kernels(explained(lambda x, y: fn(x, y, True), *args))) == 2


# ---------------------------------------------------------------------------------------------------- fuse
def test_a_region_is_one_kernel_though_it_does_not_pay() -> None:
    (free,) = explained(sums, SQUARE).graphs
    assert free.kernels[0].name == "k0_sum_and_1" and [f.reason for f in free.refusals] == ["does not pay"]
    (forced,) = explained(sums_forced, SQUARE).graphs
    assert forced.kernels[0].name == "k0_sum" and not forced.refusals
    compiled = torch.compile(sums_forced, backend="plait", fullgraph=True)
    torch.testing.assert_close(compiled(SQUARE), sums(SQUARE))


def test_a_product_in_a_region_is_opened() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x @ y) * 2

    def forced(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with plait.fuse("scaled"):
            return (x @ y) * 2

    args = torch.randn(96, 2048), torch.randn(2048, 64)
    assert any("aten" in k.name for g in explained(lambda x, y: x @ y, *args).graphs for k in g.kernels)
    assert kernels(explained(forced, *args)) == [("matmul", "mul")]
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(forced, backend="plait")(*args), fn(*args), rtol=1e-4, atol=1e-3)


def test_cheap_values_of_a_region_are_not_formed_in_its_readers_kernels() -> None:
    def free(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(torch.softmax(x, -1).relu() + 1).sin()

    def forced(x: torch.Tensor) -> torch.Tensor:
        with plait.fuse():
            y = torch.softmax(x, -1).relu()
        with plait.no_fuse():
            z = y + 1
        return torch.linalg.inv(z)

    def walled(x: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(x, -1).relu()
        with plait.no_fuse():
            z = y + 1
        return torch.linalg.inv(z)

    x = torch.randn(64, 64)
    assert kernels(explained(free, x))[0] == ("softmax", "relu", "add")
    assert kernels(explained(forced, x))[:2] == [("softmax", "relu"), ("add",)] == kernels(explained(walled, x))[:2]


def test_a_sum_over_everything_is_not_split_in_a_region() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        with plait.fuse():
            return x - x.sum()

    x = torch.randn(1024, 1024)
    assert kernels(explained(fn, x)) == [("sum", "sub")]
    assert not any(g.partials for g in graphs())


def test_independent_operators_of_a_region_wait_for_each_other() -> None:
    """One could run before the ATen call, the other must run after it: both do."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = torch.linalg.inv(y)
        with plait.fuse("both"):
            return x.sin(), z.cos() + x

    args = torch.randn(64, 64), torch.eye(64) + 0.1 * torch.rand(64, 64)
    found = kernels(explained(fn, *args))
    assert ("sin", "cos", "add") in found
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(fn, backend="plait")(*args), fn(*args))


def opaque(x: torch.Tensor) -> torch.Tensor:
    with plait.fuse("inverse"):
        return torch.linalg.inv(x * 2).cos()


def misaligned(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with plait.fuse("apart"):
        return x.exp(), y.sum(0)


def walled_inside(x: torch.Tensor) -> torch.Tensor:
    with plait.fuse("outer"):
        a = x.exp()
        with plait.no_fuse("inner"):
            return a.sum(-1)


@pytest.mark.parametrize(
    ("fn", "shapes", "law"),
    [
        (opaque, [(32, 32)], "opaque operator: aten.linalg_inv"),
        (misaligned, [(640, 3), (517, 33)], "axes do not align"),
        (walled_inside, [(64, 64)], "forbidden by user: no_fuse 'inner'"),
    ],
)
def test_what_cannot_be_one_kernel_says_which_law_forbids_it(fn: Any, shapes: list[tuple[int, ...]], law: str) -> None:
    args = [torch.randn(s) for s in shapes]
    with pytest.raises(FusionRefused, match=re.escape(law)) as raised:
        explained(fn, *args)
    said = str(raised.value)
    assert re.search(r"at test_regions\.py:\d+ ", said) and "hint:" in said and "cannot be one kernel" in said
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=re.escape(law)) as wrapped:
        torch.compile(fn, backend="plait")(*args)
    assert isinstance(wrapped.value.inner_exception, FusionRefused)


def test_a_call_between_cuts_a_region() -> None:
    """What the region itself does not hold can lie between its parts only by another region; options can do that."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        a = torch.exp(x)
        return torch.sin(torch.linalg.inv(a)) + a

    with pytest.raises(FusionRefused, match="an ATen call runs between them"):
        explained(fn, torch.eye(8), options={"force": [("exp", "add")]})


def test_gradients_of_a_region_are_one_kernel_or_are_left_free() -> None:
    def fn(x: torch.Tensor, c: torch.Tensor, r: torch.Tensor, backward: bool) -> torch.Tensor:
        with plait.fuse("affine", backward=backward):
            return x * c + r

    args = SQUARE, torch.randn(512), torch.randn(512, 1)
    forced = explained(lambda *a: fn(*a, True), *args, train=True).graphs[-1]
    free = explained(lambda *a: fn(*a, False), *args, train=True).graphs[-1]
    assert len(forced.kernels) == 1 and not forced.refusals
    assert "does not pay" in [f.reason for f in free.refusals]
    agrees(lambda *a: fn(*a, True), *args)


def test_a_law_that_forbids_the_gradients_is_named() -> None:
    """A linear layer's two gradients each sum the axis along which the other's results lie."""

    def fn(x: torch.Tensor, w: torch.Tensor, backward: bool) -> torch.Tensor:
        with plait.fuse("linear", backward=backward):
            return torch.nn.functional.gelu(x @ w)

    args = torch.randn(128, 64), torch.randn(64, 96)
    with pytest.raises(FusionRefused, match="in the backward, fuse 'linear' cannot be one kernel: axes do not align"):
        explained(lambda x, w: fn(x, w, True), *args, train=True)
    r = explained(lambda x, w: fn(x, w, False), *args, train=True)
    assert kernels(r, "forward") == [("matmul", "gelu")]


# ---------------------------------------------------------------------------------------------------- what a region is
class Block(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with plait.no_fuse("block"):
            return x.exp() - 1


def test_each_entry_is_a_region_of_its_own() -> None:
    block = Block()

    def fn(x: torch.Tensor) -> torch.Tensor:
        return block(block(x))

    report.reset()
    assert kernels(explained(fn, SQUARE)) == [("exp", "sub"), ("exp", "sub")]
    (graph,) = graphs()
    regions = {r for n in graph.nodes() for r in graph.regions(n)}
    assert sorted(r.number for r in regions) == [0, 1] and {r.label for r in regions} == {"block"}


def test_an_operator_belongs_to_every_region_around_it() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        with plait.no_fuse("outer"):
            a = x.exp()
            with plait.no_fuse("inner"):
                b = a.sin()
            c = b.cos()
        return c.tanh()

    assert kernels(explained(fn, SQUARE)) == [("exp",), ("sin",), ("cos",), ("tanh",)]

    def nested(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with plait.fuse("outer"):
            with plait.fuse("inner"):
                a = x.sum(0)
            return a, x.sum(1)

    assert kernels(explained(nested, SQUARE)) == [("sum", "sum")]


def test_equal_blocks_of_which_one_has_a_region_are_planned_apart() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = torch.softmax(x.exp(), -1)
        b = torch.linalg.inv(a)
        c = b.exp()
        with plait.no_fuse():
            return torch.softmax(c, -1), y

    x = torch.rand(256, 256) + torch.eye(256)
    found = kernels(explained(fn, x, x))
    assert found.count(("exp", "softmax")) == 1 and ("softmax",) in found


def test_regions_are_in_the_graphs_text() -> None:
    report.reset()
    explained(walled_free_pair, SQUARE)
    (graph,) = graphs()
    text = print_graph(graph)
    assert 'within no_fuse 0 "a, b"' in text and 'within fuse 1 ""' in text
    assert print_graph(parse_graph(text)) == text


def walled_free_pair(x: torch.Tensor) -> torch.Tensor:
    with plait.no_fuse("a, b"):
        y = x.exp()
    with plait.fuse():
        return y.sin() + y.sum()
