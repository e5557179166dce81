"""Printing and parsing of graphs and expressions (G4)."""

from __future__ import annotations

import pytest

from plait.errors import UserError
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.graph import Arg, Builder, Graph, Input, Layout, Origin, Output, Read, contiguous_strides, identity
from plait.ir.parse import parse_expr, parse_graph, parse_value
from plait.ir.text import print_expr, print_graph, print_value

EXAMPLE = """\
graph 1
device "cpu"
arity 2
symbol s0 [2, inf] hint 16
%input_0: f32[s0, 64] = input() {dtype=f32, name="x"}
    argument 0 strides (64, 1) offset 0 on "cpu"
%exp_1: f32[s0, 64] = exp(%input_0[i0, i1])
    layout (64, 1)
    layout padded (68, 1)
    from "exp" in "net.0" at "model.py:12 y = x.exp()"
%sum_2: f32[s0 | 64] = sum(%exp_1[i0, i1])
%copy_4: f32[s0 + 1, 8] = copy(%exp_1[i0 - 1, (i1 // 2)] ? (i0 - 1; fill=-inf))
%extern_5: f32[s0] = extern(%sum_2[i0] over (s0) strides (1)) {dtype=f32, outs=(((<s0>,), f32, (<1>,)),), role="opaque", \
serial=None, target="aten.sort.default", template=("call", ("tuple", ($0, -1, False)), ("dict", ()))}
    refused "no lowering"
constant 2 "w"
bind s0 = ("size", 0, 0)
output "out" %copy_4[i0, i1] over (s0 + 1, 8) as (8, 1) private on "cpu"
output "m" %extern_5[i0] over (s0) as (1) writes 1 on "cpu"
return ("tensor", 0)
return ("scalar", <2*s0>)
effect %extern_5
"""


def test_example_round_trips() -> None:
    g = parse_graph(EXAMPLE)
    assert print_graph(g) == EXAMPLE
    assert g.outputs[1].writes_to == 1 and g.symbols == {"s0": (2, None)} and g.hints == {"s0": 16}
    copy = g.outputs[0].read.source
    assert copy.reads[0].fill == -float("inf") and copy.reads[0].index[1] is ix.floordiv(ix.axis(1), 2)
    assert next(iter(g.origins.values())) == (Origin("exp", "net.0", "model.py:12 y = x.exp()"),)


def test_built_graph_round_trips() -> None:
    b = Builder()
    n = ix.sym("i7")  # a symbol with the name of an axis
    x = b.node("input", (n, ix.const(3)), dtype=DType.bf16, name='we"ird\n\u2028名')
    up = b.node("cast", x.shape, [Read(x, identity(x.shape))], dtype=DType.f32, implicit=False)
    c = b.node("const", (), dtype=DType.f32, value=-0.0)
    y = b.node("add", x.shape, [Read(up, identity(x.shape)), Read(c, ())])
    m = b.node("argmax", (ix.ONE, n, ix.const(3)), [Read(y, (ix.axis(1), ix.axis(2)))], reduce=2)
    out = Output("o", Read(m, (ix.ZERO,), domain=()), ())
    lay = Layout(contiguous_strides(x.shape), ix.const(5))
    g = Graph((Input(x, 0, lay, "cuda:0"),), (out,), symbols={"i7": (0, 9)}, bindings={"i7": ("size", 0, 0)})
    g.origins[y] = (Origin("add"), Origin("a", "b", "c"))
    text = print_graph(g)
    again = parse_graph(text)
    assert print_graph(again) == text
    assert [repr(k) for k in again.nodes()] == [repr(k) for k in g.nodes()]
    assert again.inputs[0].layout == lay and again.inputs[0].node.attr("name") == x.attr("name")
    assert str(again.nodes()[2].attr("value")) == "-0.0"
    assert print_graph(g, origins=False).count("from") == 0


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("graph 1", "graph 2", "format 1"),
        ("graph 1\n", "", "graph 1"),
        ("%exp_1: f32", "%exp_1: f64", "type f32"),
        ("exp(%input_0", "exp(%input_9", "not defined"),
        ("= exp(", "= frobnicate(", "frobnicate"),
        ("[i0, i1])\n    layout", "[i0, i1]) junk\n    layout", "junk"),
        ('"cpu"\narity', '"cpu\narity', "cannot read"),
        ("%exp_1", "%exp_x", "cannot read|x_x|expected"),
        ("sum(%exp_1[i0, i1])", "sum(%exp_1[i0, i1], %exp_1[i0, i1])", "1 reads"),
        ("arity 2", "arity __import__", "expected int"),
    ],
)
def test_errors_name_the_line(old: str, new: str, says: str) -> None:
    assert old in EXAMPLE
    with pytest.raises(UserError, match=says):
        parse_graph(EXAMPLE.replace(old, new, 1))


def test_expressions() -> None:
    i, j, s = ix.axis(0), ix.axis(1), ix.sym("s0")
    facts = ix.Facts(axes=(s, ix.const(100)))
    for e in (
        ix.ZERO,
        ix.const(-3),
        i * 64 + j - 1,
        -i * s,
        ix.floordiv(i * 5 + 1, s + 1),
        ix.mod(ix.floordiv(j, 7) * 3 - 4, 5, facts) * s,
        ix.floordiv(j, s * 4) * ix.mod(j, s * 4),
        ix.value(2) + ix.sym("v2"),
        ix.floordiv(ix.mod(i, 12), 5),
    ):
        assert parse_expr(print_expr(e)) is e, print_expr(e)
    assert print_expr(i * 64 + j - 1) == "64*i0 + i1 - 1"
    assert parse_expr("-(i0 - 3)*2 // 4 % 3") is ix.mod(ix.floordiv((i - 3) * -2, 4), 3)


def test_values() -> None:
    values = [None, True, 7, -7, 1.5, -1e-30, 1e22, float("inf"), -float("inf"), -0.0, "a\"b'\\\n\0é", DType.bf16]
    values += [DType.b1, (), (1,), ("list", (Arg(3), (ix.sym("s0") * 2, ix.ONE, 1)))]
    for v in values:
        text = print_value(v)
        again = parse_value(text)
        assert repr(again) == repr(v) and "\n" not in text
    assert str(parse_value(print_value(float("nan")))) == "nan"
    with pytest.raises(TypeError):
        print_value(object())
    with pytest.raises(UserError):
        parse_value("os")


def test_equal_nodes_stay_two() -> None:
    """A value that is stored twice is two nodes, and they stay so."""
    text = EXAMPLE.replace("%copy_4:", "%exp_3: f32[s0, 64] = exp(%input_0[i0, i1])\n%copy_4:").replace(
        "copy(%exp_1", "copy(%exp_3"
    )
    g = parse_graph(text)
    assert print_graph(g) == text
    assert sum(n.op == "exp" for n in g.nodes()) == 2
