"""Random graphs: they keep the checker's invariants, and their text parses back to them (G4)."""

from __future__ import annotations

import re

import pytest
from graph_make import graph_texts, graphs
from hypothesis import given, settings

from plait.errors import CheckFailed, UserError
from plait.ir.check import check_graph
from plait.ir.graph import Graph
from plait.ir.parse import parse_graph
from plait.ir.text import print_graph


def assert_equal(a: Graph, b: Graph) -> None:
    """Structural equality, not by way of the text."""
    pairs = list(zip(a.nodes(), b.nodes(), strict=True))
    twin = dict(pairs)
    for x, y in pairs:
        assert (x.op, x.axes, x.reduce, x.dtype, x.serial) == (y.op, y.axes, y.reduce, y.dtype, y.serial)
        assert repr(x.attrs) == repr(y.attrs)
        for r, s in zip(x.reads, y.reads, strict=True):
            assert twin[r.source] is s.source and repr(r.fill) == repr(s.fill)
            assert (r.index, r.guard, r.domain, r.strides) == (s.index, s.guard, s.domain, s.strides)
    for o, p in zip(a.outputs, b.outputs, strict=True):
        assert twin[o.read.source] is p.read.source and o.read.index == p.read.index
        assert (o.name, o.strides, o.writes_to, o.read.domain) == (p.name, p.strides, p.writes_to, p.read.domain)
    assert [i.layout for i in a.inputs] == [i.layout for i in b.inputs]
    assert (a.symbols, a.hints, a.bindings, a.returns) == (b.symbols, b.hints, b.bindings, b.returns)


@given(graphs())
def test_text_round_trip(g: Graph) -> None:
    text = print_graph(g)
    again = parse_graph(text)
    assert print_graph(again) == text
    assert_equal(g, again)


@given(graph_texts())
def test_random_graphs_are_in_bounds(text: str) -> None:
    check_graph(parse_graph(text), level=3)


@settings(max_examples=60)
@given(graph_texts())
def test_a_shifted_read_is_found_or_the_text_says_where(text: str) -> None:
    """Moving a read past the end of a dimension of known size is out of bounds somewhere."""
    m = re.search(r"copy\((%input_\d+)\[i0(.*?)\]\)", text)
    if m is None:
        return
    broken = text.replace(m.group(0), m.group(0).replace("[i0", "[i0 + 1000"), 1)
    with pytest.raises((CheckFailed, UserError)):
        check_graph(parse_graph(broken), level=3)
