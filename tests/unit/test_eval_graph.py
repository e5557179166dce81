"""The graph evaluator against torch on hand-built graphs."""

from __future__ import annotations

import pytest
import torch

from plait.errors import CheckFailed
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.graph import Builder, Graph, Input, Layout, Node, Output, Read, contiguous_strides, identity
from plait.oracle.eval_graph import evaluate, evaluate_nodes

torch.manual_seed(0)


class G:
    """A little graph maker: inputs by position, pointwise nodes by identity reads."""

    def __init__(self) -> None:
        self.b = Builder()
        self.inputs: list[Input] = []

    def input(self, *shape: int | ix.Expr, dtype: DType = DType.f32) -> Node:
        axes = tuple(ix.to_expr(n) for n in shape)
        k = len(self.inputs)
        n = self.b.node("input", axes, dtype=dtype, name=f"x{k}")
        self.inputs.append(Input(n, k, Layout(contiguous_strides(axes))))
        return n

    def map(self, op: str, *sources: Node, **attrs: object) -> Node:
        axes = max((s.shape for s in sources), key=len)
        return self.b.node(op, axes, [Read(s, identity(s.shape)) for s in sources], **attrs)

    def graph(self, *nodes: Node, **fields: object) -> Graph:
        outs = tuple(
            Output(f"o{i}", Read(n, identity(n.shape), domain=n.shape), contiguous_strides(n.shape))
            for i, n in enumerate(nodes)
        )
        return Graph(tuple(self.inputs), outs, **fields)  # type: ignore[arg-type]


def test_softmax() -> None:
    g = G()
    x = g.input(3, 5)
    i, j = ix.axis(0), ix.axis(1)
    m = g.b.node("max", x.shape, [Read(x, (i, j))], reduce=1)
    e = g.map("exp", g.b.node("sub", x.shape, [Read(x, (i, j)), Read(m, (i,))]))
    t = g.b.node("sum", x.shape, [Read(e, (i, j))], reduce=1)
    y = g.b.node("div", x.shape, [Read(e, (i, j)), Read(t, (i,))])
    a = torch.randn(3, 5)
    torch.testing.assert_close(evaluate(g.graph(y), [a])[0], torch.softmax(a, -1))
    d = evaluate(g.graph(y), [a], dtype_mode="float64")[0]
    assert d.dtype is torch.float64
    torch.testing.assert_close(d, torch.softmax(a.double(), -1))
    assert evaluate_nodes(g.graph(y), [a])[m].shape == (3,)


def test_views_as_index_maps() -> None:
    g = G()
    x = g.input(4, 6)
    i, j = ix.axis(0), ix.axis(1)
    c = ix.const
    flip = g.b.node("copy", (c(4), c(6)), [Read(x, (c(3) - i, j))])
    transposed = g.b.node("copy", (c(6), c(4)), [Read(x, (j, i))])
    flat = ix.flatten((i, j), (c(8), c(3)))
    back = ix.unflatten(flat, (c(4), c(6)), ix.Facts(axes=(c(8), c(3))))
    reshaped = g.b.node("copy", (c(8), c(3)), [Read(x, back)])
    padded = g.b.node("copy", (c(4), c(8)), [Read(x, (i, j - 1), guard=(j - 1, c(6) - j), fill=7.0)])
    a = torch.randn(4, 6)
    outs = evaluate(g.graph(flip, transposed, reshaped, padded), [a])
    want = [a.flip(0), a.T, a.reshape(8, 3), torch.nn.functional.pad(a, (1, 1), value=7.0)]
    for got, w in zip(outs, want, strict=True):
        assert torch.equal(got, w) and got.is_contiguous()


def test_pieces_take_the_read_whose_guard_holds() -> None:
    g = G()
    x, y = g.input(3), g.input(2)
    i = ix.axis(0)
    cat = g.b.node("pieces", (ix.const(5),), [Read(x, (i,), guard=(2 - i,)), Read(y, (i - 3,), guard=(i - 3,))])
    a, b = torch.randn(3), torch.randn(2)
    assert torch.equal(evaluate(g.graph(cat), [a, b])[0], torch.cat([a, b]))


def test_indirect_read_and_its_bounds() -> None:
    g = G()
    k = g.input(3, dtype=DType.i64)
    i = ix.axis(0)
    t = g.input(9, dtype=DType.i64)
    s = g.b.node("add", (ix.const(3),), [Read(t, (ix.value(1),)), Read(k, (i,))])
    idx, table = torch.tensor([6, 0, 2]), torch.arange(9) * 10
    assert torch.equal(evaluate(g.graph(s), [idx, table])[0], table[idx] + idx)
    with pytest.raises(IndexError):
        evaluate(g.graph(s), [torch.tensor([9, 0, 0]), table])


def test_out_of_bounds_is_t1() -> None:
    g = G()
    x = g.input(4)
    y = g.b.node("copy", (ix.const(5),), [Read(x, (ix.axis(0),))])
    with pytest.raises(CheckFailed, match="T1"):
        evaluate(g.graph(y), [torch.zeros(4)])


def test_symbols_bind_from_sizes() -> None:
    g = G()
    n = ix.sym("s0")
    x = g.input(n, 2)
    t = g.b.node("sum", (ix.const(2), n), [Read(x, (ix.axis(1), ix.axis(0)))], reduce=1)
    graph = g.graph(t, symbols={"s0": (2, None)}, bindings={"s0": ("size", 0, 0)})
    a = torch.randn(5, 2)
    torch.testing.assert_close(evaluate(graph, [a])[0], a.sum(0))


def test_strides_of_outputs() -> None:
    g = G()
    x = g.input(2, 3)
    out = Output("o", Read(x, identity(x.shape), domain=x.shape), (ix.const(1), ix.const(2)))
    graph = Graph(tuple(g.inputs), (out,))
    a = torch.randn(2, 3)
    got = evaluate(graph, [a])[0]
    assert got.stride() == (1, 2) and torch.equal(got, a)


def test_rounding_by_mode() -> None:
    g = G()
    x = g.input(64, dtype=DType.bf16)
    up = g.map("cast", x, dtype=DType.f32, implicit=True)
    e = g.map("cast", g.map("exp", up), dtype=DType.bf16, implicit=True)
    y = g.map("cast", g.map("sqrt", g.map("cast", e, dtype=DType.f32, implicit=True)), dtype=DType.bf16, implicit=True)
    jump = g.map("floor", g.map("cast", e, dtype=DType.f32, implicit=True))
    graph = g.graph(y, jump)
    a = torch.randn(64).bfloat16()
    eager, jumped = evaluate(graph, [a])
    assert torch.equal(eager, a.exp().sqrt()) and torch.equal(jumped, a.exp().float().floor())
    fused, jumped = evaluate(graph, [a], dtype_mode="fused")
    assert torch.equal(fused, a.float().exp().sqrt().bfloat16()) and torch.equal(jumped, a.exp().float().floor())
    assert not torch.equal(fused, eager)
    exact, _ = evaluate(graph, [a], dtype_mode="float64")
    assert torch.equal(exact, a.double().exp().sqrt())
    # what the user wrote rounds in every mode
    written = g.map("cast", g.map("exp", up), dtype=DType.bf16, implicit=False)
    for mode in ("eager", "fused", "float64"):
        (got,) = evaluate(g.graph(written), [a], dtype_mode=mode)
        assert torch.equal(got, a.to(got.dtype if mode == "float64" else torch.float32).exp().bfloat16().to(got.dtype))


def test_reductions_of_nothing_and_ties() -> None:
    g = G()
    x = g.input(2, 0)
    y = g.input(2, 4)
    i, j = ix.axis(0), ix.axis(1)
    nodes = [g.b.node(op, x.shape, [Read(x, (i, j))], reduce=1) for op in ("sum", "prod", "max", "min")]
    nodes += [g.b.node(op, y.shape, [Read(y, (i, j))], reduce=r) for op in ("argmax", "argmin") for r in (1, 2)]
    nan = float("nan")
    b = torch.tensor([[1.0, 3.0, 3.0, 0.0], [0.0, nan, 0.0, nan]])
    outs = evaluate(g.graph(*nodes), [torch.zeros(2, 0), b])
    assert [o.tolist() for o in outs[:4]] == [[0, 0], [1, 1], [-torch.inf] * 2, [torch.inf] * 2]
    assert [o.tolist() for o in outs[4:]] == [[1, 1], 5, [3, 1], 5]
