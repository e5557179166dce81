"""Rows of values between kernels at multiples of 16 bytes: which values, what their readers see, and that nobody else notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tile_run import run_compiled
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from triton_resources import compile_sm90

from plait import compiler
from plait.compiler import Compiled
from plait.emit.triton import emit_triton
from plait.errors import LowerFailed
from plait.frontend.saved import mark_private, private_results
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.graph import Builder, Graph, Node, Read
from plait.ir.index import Facts
from plait.oracle.compare import check_call
from plait.plan import contract_cost
from plait.plan.device import SPECS
from plait.plan.layout import Strided, as_strided, is_matrix, rows_apart
from plait.rewrite.passes import even_rows
from plait.runtime import report
from plait.runtime.steps import AllocStep, ExternStep
from tests.passes import planned

Fn = Callable[..., Any]


@pytest.fixture(autouse=True)
def padding(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a card: rows may lie apart."""
    monkeypatch.setitem(SPECS, "cpu", replace(SPECS["cpu"], row_bytes=128))
    monkeypatch.setattr(even_rows, "UNEVEN", 1.0)  # the library's products on a CPU lose nothing
    torch._dynamo.reset()
    report.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """No product is opened."""
    monkeypatch.setitem(contract_cost.OWN, "cpu", 1e-9)


def compiled(kind: str = "inference") -> Compiled:
    (found,) = [r.details["compiled"] for r in report.all() if r.kind == kind]
    assert isinstance(found, Compiled)
    return found


def apart(kind: str = "inference") -> dict[tuple[int, ...], tuple[int, ...]]:
    """Strides of the values in memory whose rows lie apart, by their shapes."""
    c = compiled(kind)
    inside: set[Node] = {n for launch in c.launches for g in launch.groups for n in g.stored}
    inside |= {n for n in c.graph.nodes() if n.kind in ("extern", "source")}
    at = {n: tuple(s.const or 0 for s in strides) for n, strides in c.graph.padded.items() if n in inside}
    return {tuple(e.const or 0 for e in n.shape): strides for n, strides in at.items()}


def steps(kind: str = "inference") -> list[Any]:
    (made,) = [r.details["executable"]() for r in report.all() if r.kind == kind]
    return list(made.script.steps)


def compile_(fn: Fn, **options: object) -> Fn:
    settings = {"strict": True, "check": 2, **options}
    found: Fn = torch.compile(fn, backend="plait", dynamic=False, options=settings)
    return found


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(len(shape) + sum(shape))
    return torch.randn(shape, dtype=dtype)


def between(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return torch.tanh(x @ w).square() @ v


def grouped(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """All leading axes are one again, after they were two."""
    h = (x @ w).view(5, 8, 37)
    return (h.float() - h.float().amax(-1, keepdim=True)).exp().to(x.dtype).view(40, 37) @ v


def turned(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Read along rows and along columns, as the gradients of a linear layer are."""
    h = torch.tanh(x @ w)
    return (h @ v) @ (h.t() @ x).sum(0, keepdim=True).t()[:16]


def batched(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    p = torch.softmax(torch.bmm(x.view(4, 10, 24), w.expand(4, 24, 37)), -1)
    return torch.bmm(p, v.expand(4, 37, 16)) + torch.bmm(p.mT, p).sum()


def biased(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """A product that adds is not written with its rows apart; what it adds may lie so."""
    h = torch.tanh(torch.addmm(w[0], x, w))
    return torch.addmm(h, x, w).relu() @ v + h @ v


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("fn", "padded"),
    [
        (between, {(40, 37): (40, 1)}),
        (grouped, {(40, 37): (40, 1), (5, 8, 37): (320, 40, 1)}),
        (turned, {(40, 37): (40, 1)}),
        (batched, {(4, 10, 37): (400, 40, 1), (4, 37, 37): (1480, 40, 1)}),
        (biased, {(40, 37): (40, 1)}),
    ],
)
def test_calls(calls: None, fn: Fn, padded: dict[tuple[int, ...], tuple[int, ...]], dtype: torch.dtype) -> None:
    args = [rand(40, 24, dtype=dtype), rand(24, 37, dtype=dtype), rand(37, 16, dtype=dtype)]
    check_call(compile_(fn), fn, args)
    assert apart() == padded
    # no copy of a matrix whose rows lie apart: the library reads it, and writes it, where it is
    assert not any(n.op == "copy" for n in compiled().graph.nodes() if [e.const for e in n.shape[-2:]] == [40, 37])
    written = [s for s in steps() if isinstance(s, ExternStep) and s.into]
    assert len(written) == {biased: 0, batched: 2}.get(fn, 1)
    strides = {tuple(e.const for e in s.strides) for s in steps() if isinstance(s, AllocStep)}
    assert set(padded.values()) <= strides
    assert "strides (" in str(compiled().plan)


@pytest.mark.filterwarnings("ignore::plait.runtime.report.PlaitFallbackWarning")
@pytest.mark.parametrize("backend", ["cpp", "eval"])
@pytest.mark.parametrize("fn", [between, grouped, turned, batched, biased])
def test_products_in_kernels(fn: Fn, backend: str) -> None:
    """Opened where that pays; kernels run, or are evaluated into the same memory."""
    args = [rand(40, 24), rand(24, 37), rand(37, 16)]
    check_call(compile_(fn, backend=backend, strict=False), fn, args)


def test_one_operator_a_kernel() -> None:
    args = [rand(40, 24), rand(24, 37), rand(37, 16)]
    check_call(compile_(between, plan="none"), between, args)
    assert apart() == {(40, 37): (40, 1)}


def returned(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    h = x @ w
    g = torch.tanh(h)
    return h, g @ v


def seen(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """A view is returned: what it shows is as eager has it."""
    h = torch.tanh(x @ w)
    return h[3:7].t(), h @ v


def updated(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """A scatter writes into its operand, whose layout its result has."""
    h = torch.tanh(x @ w)
    return h.index_put((torch.arange(3),), w.new_ones(())) @ v


def elsewhere(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """An ATen call that is no product of matrices wants eager's strides."""
    h = torch.tanh(x @ w)
    return torch.linalg.svdvals(h).sum() + h @ v


def in_a_row(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Read as one row: with gaps every address would take a division."""
    h = torch.tanh(x @ w)
    return h.view(-1).relu().softmax(0)[:16] + h @ v


@pytest.mark.parametrize(
    ("fn", "ops"),
    [
        (returned, {"tanh"}),
        (seen, {"extern"}),
        (updated, {"extern"}),
        (elsewhere, {"extern"}),
        (in_a_row, {"extern"}),
    ],
)
def test_what_others_see_is_as_eager_has_it(calls: None, fn: Fn, ops: set[str]) -> None:
    """Of the product's result and its hyperbolic tangent one is padded, and the other is somebody else's."""
    args = [rand(40, 24), rand(24, 37), rand(37, 16)]
    check_call(compile_(fn), fn, args)
    assert {n.op for n in compiled().graph.padded} == ops


# ------------------------------------------------------------------------------------------------ which strides
def strides_of(shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType = DType.bf16) -> list[int | None] | None:
    n = Builder().node("input", tuple(map(ix.const, shape)), dtype=dtype, name="x")
    found = rows_apart(Graph((), ()), n, tuple(map(ix.const, strides)), 128)
    return None if found is None else [s.const for s in found]


@pytest.mark.parametrize(
    ("shape", "strides", "apart"),
    [
        ((8192, 50257), (50257, 1), [50304, 1]),
        ((50257, 8192), (1, 50257), [1, 50304]),  # columns lie together
        ((8, 1024, 50257), (1024 * 50257, 50257, 1), [1024 * 50304, 50304, 1]),
        ((4, 3, 50257), (50257, 4 * 50257, 1), [50304, 4 * 50304, 1]),  # rows in another order
        ((8192, 1, 50257), (50257, 50257, 1), [50304, 50304, 1]),
        ((64, 197), (197, 1), [208, 1]),  # multiples of 32 bytes: those of 64 would be too much
        ((64, 41), (41, 1), None),  # 82 bytes: even those of 16 would be
        ((8192, 50304), (50304, 1), None),
        ((50257,), (1,), None),
        ((1, 50257), (50257, 1), None),
        ((8192, 50257), (50300, 1), None),  # gaps of somebody else's
        ((0, 50257), (50257, 1), None),
    ],
)
def test_strides(shape: tuple[int, ...], strides: tuple[int, ...], apart: list[int] | None) -> None:
    assert strides_of(shape, strides) == apart


def test_a_view_of_all_rows_is_one_matrix() -> None:
    """Leading dimensions that were split are one again: a row is a row."""
    n = Builder().node("input", (ix.const(8192), ix.const(50257)), dtype=DType.bf16, name="x")
    shape = (ix.const(8), ix.const(1024), ix.const(50257))
    split = Read(n, (1024 * ix.axis(0) + ix.axis(1), ix.axis(2)), domain=shape)
    view = as_strided(split, (ix.const(50304), ix.ONE), Facts(axes=shape))
    assert view is not None and [s.const for s in view.strides] == [1024 * 50304, 50304, 1] and is_matrix(view)
    flat = Read(n, (ix.floordiv(ix.axis(0), 50257), ix.mod(ix.axis(0), 50257)), domain=(ix.const(8192 * 50257),))
    assert as_strided(flat, (ix.const(50257), ix.ONE), Facts(axes=flat.domain or ())) is not None
    assert as_strided(flat, (ix.const(50304), ix.ONE), Facts(axes=flat.domain or ())) is None


@pytest.mark.parametrize(
    ("shape", "strides", "taken"),
    [
        ((5, 37), (40, 1), True),
        ((37, 5), (1, 40), True),
        ((3, 5, 37), (7, 40, 1), True),
        ((5, 1), (40, 1), True),
        ((5, 37), (36, 1), False),
        ((5, 37), (80, 2), False),
    ],
)
def test_matrices_as_products_take_them(shape: tuple[int, ...], strides: tuple[int, ...], taken: bool) -> None:
    view = Strided(tuple(map(ix.const, shape)), tuple(map(ix.const, strides)), ix.ZERO)
    assert is_matrix(view) is taken


# ------------------------------------------------------------------------------------------------ training
def loss_of_words(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy((x @ w.t()).float(), y)


def loss_of_sequences(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """As language models have it: logits of sequences, and one row for all."""
    logits = F.linear(x.view(4, 10, 24), w).float()
    return F.cross_entropy(logits.view(-1, 37), y, ignore_index=3)


def gradients(fn: Fn) -> Fn:
    def step(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        x, w = (t.detach().requires_grad_() for t in (x, w))
        loss = fn(x, w, y)
        return loss.detach(), *torch.autograd.grad(loss, (x, w))

    return step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", [loss_of_words, loss_of_sequences])
def test_the_backward_finds_what_the_forward_left(calls: None, fn: Fn, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    args = [rand(40, 24, dtype=dtype), rand(37, 24, dtype=dtype), torch.randint(0, 37, (40,))]
    check_call(gradients(compile_(fn)), gradients(fn), args)
    assert apart("forward")[(40, 37)] == (40, 1)
    (logits,) = [i for i in compiled("backward").graph.inputs if i.node in compiled("backward").graph.padded]
    assert logits.layout is not None and [s.const for s in logits.layout.strides] == [40, 1]
    assert [e.const for e in logits.node.shape] == [40, 37]
    gradient = [n for n in compiled("backward").graph.padded if n.kind == "map"]
    assert gradient and not any(n.op == "copy" for n in compiled("backward").graph.nodes())


def shown_too(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    logits = x @ w.t()
    return F.cross_entropy(logits.float(), y), logits


def test_logits_that_are_returned_are_as_eager_has_them(calls: None) -> None:
    torch.manual_seed(0)
    args = [rand(40, 24), rand(37, 24), torch.randint(0, 37, (40,))]

    def step(fn: Fn) -> Fn:
        def both(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            x, w = (t.detach().requires_grad_() for t in (x, w))
            loss, logits = fn(x, w, y)
            return loss.detach(), logits.detach(), *torch.autograd.grad(loss + logits.mean(), (x, w))

        return both

    check_call(step(compile_(shown_too)), step(shown_too), args)
    assert not any(n.kind == "extern" for n in compiled("forward").graph.padded)


class Handed(torch.autograd.Function):
    """A backward that hands a saved tensor on as a gradient, and to a call that is no product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, u: Tensor) -> Tensor:
        h = x @ w.t()
        g = torch.tanh(x @ (w + 1).t())
        ctx.save_for_backward(h, g, w)
        return (h * u + g).sum(-1)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, ...]:
        h, g, w = ctx.saved_tensors
        rank = torch.bucketize(h, given.sort().values)
        return (g * given[:, None]) @ w, rank.sum() * w, h


def handed(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    out: Tensor = Handed.apply(x, w, u)
    return out


def test_what_a_backward_shows_of_what_was_saved(calls: None) -> None:
    """A gradient that is a saved tensor has eager's strides, and so has a call's operand."""

    def step(fn: Fn) -> Fn:
        def grads(x: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, ...]:
            x, w, u = (t.detach().requires_grad_() for t in (x, w, u))
            return torch.autograd.grad(fn(x, w, u).square().sum(), (x, w, u))

        return grads

    args = [rand(*shape, dtype=torch.float64) for shape in ((40, 24), (37, 24), (40, 37))]
    made = step(compile_(handed))
    got, want = made(*args), step(handed)(*args)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()
    graph = compiled("backward").graph
    (h, _) = [i for i in graph.inputs if i.node in graph.padded]
    assert h.layout is not None and [s.const for s in h.layout.strides] == [40, 1]  # 320 bytes
    operands = [(r.source, r) for n in graph.nodes() if n.kind == "extern" for r in n.reads]
    assert h.node in [s.reads[0].source for s, _ in operands if s.op == "copy"]


def flat(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """Its backward sees the saved product as one row."""
    h = x @ w.t()
    return (h.view(-1)[: 37 * 40].view(40, 37).exp() * h.softmax(-1)).sum(-1).mean() + y.sum()


def test_a_saved_tensor_may_come_back_otherwise(calls: None) -> None:
    """As from a hook that keeps it elsewhere."""
    torch.manual_seed(0)
    args = [rand(40, 24), rand(37, 24), torch.randint(0, 37, (40,))]
    got = gradients(compile_(loss_of_words))
    seen: list[tuple[int, ...]] = []

    def kept(t: Tensor) -> Tensor:
        seen.append(t.stride())
        return t.clone(memory_format=torch.contiguous_format)

    got(*args)
    with torch.autograd.graph.saved_tensors_hooks(kept, lambda t: t):
        found = got(*args)
    assert (40, 1) in seen
    torch.testing.assert_close(found, gradients(loss_of_words)(*args))


def test_a_backward_in_eager_finds_what_it_was_traced_with(calls: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    args = [rand(40, 24, dtype=torch.float64), rand(37, 24, dtype=torch.float64), torch.randint(0, 37, (40,))]
    real = compiler.all_levels

    def only_forward(graph: Graph, *rest: Any) -> Compiled:
        if any(i.node in graph.padded for i in graph.inputs):
            raise LowerFailed("not this one")
        return real(graph, *rest)

    monkeypatch.setattr(compiler, "all_levels", only_forward)
    with pytest.warns(report.PlaitFallbackWarning, match="not this one"):
        found = gradients(compile_(flat, strict=False))(*args)
    torch.testing.assert_close(found, gradients(flat)(*args))


def test_memory_that_a_backward_looks_at_is_as_eager_has_it() -> None:
    def forward(x: Tensor) -> tuple[Tensor, ...]:
        return x.sum(), torch.ops.aten.exp(x), torch.ops.aten.sin(x), torch.ops.aten.cos(x)

    def backward(exp: Tensor, sin: Tensor, cos: Tensor) -> tuple[Tensor, ...]:
        return exp + 1, torch.ops.aten.as_strided(torch.ops.aten.t(sin), (3,), (1,)), cos.t().contiguous()

    first = make_fx(forward)(rand(5, 7)).graph
    second = make_fx(backward)(rand(5, 7), rand(5, 7), rand(5, 7)).graph
    results = first.output_node().args[0]
    assert isinstance(results, (list, tuple))
    for placeholder, saved in zip([n for n in second.nodes if n.op == "placeholder"], results[1:], strict=True):
        assert isinstance(saved, torch.fx.Node)
        placeholder.name = saved.name
    mark_private(first, second, 1)
    assert [n.name for n in results if n in private_results(first.output_node())] == ["exp", "cos"]  # type: ignore[union-attr]


def test_eager_numerics_pads_nothing(calls: None) -> None:
    args = [rand(40, 24), rand(24, 37), rand(37, 16)]
    check_call(compile_(between, numerics="eager"), between, args)
    assert not compiled().graph.padded


def test_sizes_that_vary(calls: None) -> None:
    """As many rows as there are: a row's length is a number."""
    step = gradients(torch.compile(loss_of_words, backend="plait", dynamic=True, options={"strict": True}))
    for rows in (40, 23):
        args = [rand(rows, 24), rand(37, 24), torch.randint(0, 37, (rows,))]
        torch._dynamo.mark_dynamic(args[0], 0)
        check_call(step, gradients(loss_of_words), args)


# ------------------------------------------------------------------------------------------------ on a card
def of_a_product(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.gelu((x @ w) @ v, approximate="tanh")


@pytest.mark.parametrize("fn", [between, grouped, batched, biased, of_a_product])
def test_tiles_keep_to_their_rows(fn: Fn) -> None:
    """Kernels as planned for a card, evaluated: every address is watched, and what lies between rows."""
    shapes = ((40, 24), (24, 37), (37, 16))
    c = planned(fn, *shapes, dtype=torch.float64)
    assert c.graph.padded
    args = [rand(*s, dtype=torch.float64) for s in shapes]
    (got,) = run_compiled(c, args).evaluation.returned()
    torch.testing.assert_close(got, fn(*args))


def test_descriptors_step_over_padded_rows() -> None:
    """An odd depth no longer keeps a product with the vendor, nor from persistent tiles."""
    c = planned(of_a_product, (8192, 1024), (1024, 4097), (4097, 8192))
    (call,) = [n for n in c.graph.nodes() if n.kind == "extern"]
    assert [s.const for s in c.graph.padded[call]] == [4160, 1]
    (launch,) = [launch for launch in c.launches if launch.parts]
    source = emit_triton(tuple(p.program for p in launch.parts), "kernel")
    assert "tl.make_tensor_descriptor(b0_ptr, [8192, 4097], [4160, 1]" in source.text
    assert "cp.async.bulk.tensor" in compile_sm90(source).ptx


def given(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """An argument whose rows lie as they do is both factors' side of two products."""
    return (x @ w) + (x.t() @ v).sum()


@pytest.mark.parametrize("opened", [False, True])
def test_products_read_a_copy_of_an_argument_whose_rows_begin_at_odd_places(
    monkeypatch: pytest.MonkeyPatch, opened: bool
) -> None:
    monkeypatch.setattr(even_rows, "UNEVEN", 1e-9)
    monkeypatch.setitem(contract_cost.OWN, "cpu", 1e9 if opened else 1e-9)
    args = [rand(s, t, dtype=torch.bfloat16) for s, t in ((40, 37), (37, 16), (40, 16))]
    check_call(compile_(given), given, args)
    assert apart() == {(40, 37): (40, 1)}
    (copy,) = [n for n in compiled().graph.nodes() if n.op == "copy"]
    readers = [n for n in compiled().graph.nodes() if any(r.source is copy for r in n.reads)]
    assert len(readers) == 2 and {n.kind for n in readers} == {"contract" if opened else "extern"}
    # and the copy is not taken back into a product's kernel
    assert not any(copy in g.nodes and any(n.kind == "contract" for n in g.nodes) for g in compiled().plan.kernels())


def test_a_copy_that_costs_more_than_odd_rows_is_not_made() -> None:
    args = [rand(s, t, dtype=torch.bfloat16) for s, t in ((40, 37), (37, 16), (40, 16))]
    check_call(compile_(given), given, args)
    assert apart() == {}
