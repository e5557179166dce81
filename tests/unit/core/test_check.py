"""Every invariant of the Graph checker, broken on purpose."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.errors import CheckFailed
from plait.ir import index as ix
from plait.ir.check import check_graph, nonneg_under
from plait.ir.dtype import DType
from plait.ir.graph import Graph, Node, Origin
from plait.ir.parse import parse_graph

TEXT = """\
graph 1
device "cpu"
arity 2
symbol s0 [2, inf] hint 16
%input_0: f32[s0, 64] = input() {dtype=f32, name="x"}
    argument 0 strides (64, 1) offset 0 on "cpu"
%input_1: i64[5] = input() {dtype=i64, name="k"}
    argument 1 strides (1) offset 0 on "cpu"
%exp_2: f32[s0, 64] = exp(%input_0[i0, i1])
    from "exp" in "net.0" at "model.py:12 y = x.exp()"
%sum_3: f32[s0 | 64] = sum(%exp_2[i0, i1])
    from "sum" in "" at ""
%copy_4: f32[s0 + 1, 32] = copy(%exp_2[i0 - 1, 2*i1] ? (i0 - 1; fill=0.0))
    from "pad" in "" at ""
%gather_5: f32[5] = gather(%sum_3[v1], %input_1[i0])
    from "index" in "" at ""
%extern_6: f32[s0] = extern(%sum_3[i0] over (s0) strides (1)) {dtype=f32, outs=(((<s0>,), f32, (<1>,)), ((<s0>,), i64, \
(<1>,))), role="opaque", serial=None, target="aten.sort.default", template=("call", ("tuple", ($0, -1, False)), ("dict", ()))}
    from "sort" in "" at ""
%project_7: i64[s0] = project(%extern_6[]) {dtype=i64, item=1}
    from "getitem" in "" at ""
bind s0 = ("size", 0, 0)
output "a" %copy_4[i0, i1] over (s0 + 1, 32) as (32, 1) on "cpu"
output "b" %gather_5[i0] over (5) as (1) on "cpu"
output "c" %project_7[i0] over (s0) as (1) writes 0 on "cpu"
return ("tensor", 0)
"""


def test_a_good_graph_passes_at_every_level() -> None:
    for level in (0, 1, 2, 3):
        assert check_graph(parse_graph(TEXT), level) == ()


BROKEN = [
    # (invariant, level, old text, new text)
    ("T1", 3, "copy(%exp_2[i0 - 1, 2*i1] ? (i0 - 1; fill=0.0))", "copy(%exp_2[i0 - 1, 2*i1])"),
    ("T1", 3, "exp_2[i0 - 1, 2*i1]", "exp_2[i0 - 1, 2*i1 + 2]"),
    ("T1", 3, "exp_2[i0 - 1, 2*i1]", "exp_2[i0, 2*i1]"),
    ("T2", 2, "(i0 - 1; fill=0.0)", "(i0 - 1, i1; fill=0.0)"),
    ("A3", 1, "exp(%input_0[i0, i1])", "exp(%input_0[i0])"),
    ("A3", 1, "exp(%input_0[i0, i1])", "exp(%input_0[i0, i2])"),
    ("A3", 1, "exp(%input_0[i0, i1])", "exp(%input_0[s1, i1])"),
    ("A3", 1, "gather(%sum_3[v1]", "gather(%sum_3[v2]"),
    ("A3", 1, "gather(%sum_3[v1]", "gather(%sum_3[v0]"),
    ("A3", 1, "exp_2: f32[s0, 64]", "exp_2: f32[s1, 64]"),
    ("A3", 1, "[i0] over (s0) strides (1))", "[i0] over (s0))"),
    ("A3", 1, '("tuple", ($0, -1', '("tuple", ($1, -1'),
    ("A3", 1, "item=1", "item=2"),
    ("N1", 1, "project_7: i64[s0]", "project_7: i64[5]"),
    ("A3", 1, "over (s0 + 1, 32) as (32, 1)", "over (s0 + 1, 32) as (32)"),
    ("G3", 1, 'over (5) as (1) on "cpu"', 'over (5) as (1) writes 0 on "cpu"'),
    ("G3", 1, "writes 0", "writes 9"),
    ("A3", 1, '    from "exp"', '    layout padded (72)\n    from "exp"'),
    ("G5", 1, '    from "exp"', '    layout padded (60, 1)\n    from "exp"'),
    ("G5", 1, '    from "pad"', '    layout padded (36, 1)\n    from "pad"'),
    ("G5", 1, '    from "sum"', '    layout padded (4)\n    from "sum"'),
    ("G5", 1, '    from "sort"', '    layout padded (4)\n    from "sort"'),
    ("G2", 2, '    from "exp" in "net.0" at "model.py:12 y = x.exp()"\n', ""),
]


@pytest.mark.parametrize(("invariant", "level", "old", "new"), BROKEN)
def test_broken_graphs_are_found(invariant: str, level: int, old: str, new: str) -> None:
    assert old in TEXT
    graph = parse_graph(TEXT.replace(old, new, 1))
    with pytest.raises(CheckFailed) as found:
        check_graph(graph, level)
    assert found.value.invariant == invariant


def test_rows_of_a_value_that_only_kernels_read_may_lie_apart() -> None:
    apart = '    layout padded (72, 1)\n    from "exp"'
    graph = parse_graph(TEXT.replace('    from "exp"', apart))
    assert [[s.const for s in strides] for strides in graph.padded.values()] == [[72, 1]]
    check_graph(graph, 2)


def test_unproven_bounds_are_reported_and_tried_at_level_3() -> None:
    # i0*i0 % 7 < 7 is provable, i0*i0 < 26 on five points only by trying
    text = TEXT.replace("gather(%sum_3[v1], %input_1[i0])", "gather(%input_0[0, i0*i0], %input_1[i0])")
    (sentence,) = check_graph(parse_graph(text), 1)
    assert "unproven" in sentence and "gather_5" in sentence
    (sentence,) = check_graph(parse_graph(text), 3)
    assert "every point" in sentence
    with pytest.raises(CheckFailed, match="T1"):
        check_graph(parse_graph(text.replace("i0*i0", "i0*i0*i0 + 1")), 3)


def test_failures_show_the_node_in_its_surroundings() -> None:
    graph = parse_graph(TEXT.replace("exp(%input_0[i0, i1])", "exp(%input_0[i0])"))
    with pytest.raises(CheckFailed) as found:
        check_graph(graph)
    text = str(found.value)
    assert "A3" in text and "model.py:12" in text and "%sum_3" in text
    lines = found.value.window.splitlines()
    caret = next(k for k, line in enumerate(lines) if line.strip().startswith("^"))
    assert "%exp_2" in lines[caret - 1]


def test_nodes_made_by_hand_are_found() -> None:
    """N1 and N2 and order: what no Builder would make."""
    graph = parse_graph(TEXT)
    exp = next(n for n in graph.nodes() if n.op == "exp")

    def with_exp(bad: Node) -> Graph:
        out = replace(graph.outputs[0], read=replace(graph.outputs[0].read, source=bad, index=(ix.ZERO, ix.ZERO)))
        g = replace(graph, outputs=(out,))
        g.origins[bad] = (Origin("made"),)
        return g

    for bad, invariant in (
        (replace(exp, dtype=DType.f64), "N1"),
        (replace(exp, attrs=(("alpha", 1),)), "N2"),
        (replace(exp, reads=()), "N2"),
        (replace(exp, reduce=1), "A3"),
        (replace(exp, op="input", reads=(), attrs=(("dtype", DType.f32), ("name", "z"))), "G1"),
        (replace(exp, serial=-1), "G1"),
        (replace(exp, op="floor", reads=(replace(exp.reads[0], source=graph.inputs[1].node, index=(ix.ZERO,)),)), "N1"),
    ):
        with pytest.raises(CheckFailed) as found:
            check_graph(with_exp(bad))
        assert found.value.invariant == invariant, bad


def test_bounds_under_guards() -> None:
    i = ix.axis(0)
    facts = ix.Facts(axes=(ix.const(20),))
    assert nonneg_under(i - 3, (i - 3,), facts)
    assert nonneg_under(ix.floordiv(i - 3, 2), (i - 3,), facts)
    assert not nonneg_under(ix.floordiv(i - 3, 2), (i - 2,), facts)
    # (i - 3)//2 <= 4 where i <= 12
    assert nonneg_under(ix.const(4) - ix.floordiv(i - 3, 2), (i - 3, ix.const(12) - i), facts)
    assert not nonneg_under(ix.const(4) - ix.floordiv(i - 3, 2), (i - 3, ix.const(13) - i), facts)
