"""Random graphs, planned and lowered for CPU and GPU in several ways, run by the tile evaluator: all agree to the last bit.

The graphs of graph_make are exact in every order of evaluation, so a difference is a wrong index, mask, phase or store.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from graph_make import SYMBOL_VALUES, graph_texts
from graph_values import arguments
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tile_run import TileRun, run_compiled

from plait import compiler
from plait.compiler import Compiled, plan_and_lower, simplify
from plait.ir.graph import Graph
from plait.ir.parse import parse_graph
from plait.ir.text import print_graph
from plait.options import Options
from plait.oracle.eval_graph import evaluation
from plait.plan import layout
from plait.plan.device import DeviceSpec, spec_for
from plait.plan.inline import Reading
from plait.rewrite.passes import pad_rows
from plait.tile.text import print_program


@dataclass(frozen=True)
class Way:
    """One way to compile."""

    device: str
    plan: str
    apart: bool = False  # rows of every value that may be padded lie apart

    def compile(self, graph: Graph) -> Compiled:
        options = Options(numerics="eager", plan=self.plan, check=2)
        spec = spec_for(self.device)
        graph = simplify(graph, spec, options)
        with ExitStack() as stack:
            if self.apart:  # wherever it can be done, however short rows are
                for where, name, value in (
                    (pad_rows._Padding, "_near_products", lambda self: set(self.nodes)),
                    (layout, "WASTE", 1e9),
                    (layout, "ALIGNED", 64),
                    (pad_rows, "ALIGNED", 64),
                    (compiler, "pad_rows", partial(_apart, pad_rows.pad_rows)),
                ):
                    stack.enter_context(patch.object(where, name, value))
            return plan_and_lower(graph, spec, options)


def _apart(pad: Callable[..., Graph], graph: Graph, spec: DeviceSpec, numerics: str, reading: Reading) -> Graph:
    return pad(graph, replace(spec, row_bytes=64), "fused", reading)


WAYS = [
    *(Way(device, plan) for device in ("cpu", "cuda") for plan in ("greedy", "none")),
    Way("cuda", "greedy", apart=True),
    Way("cuda", "none", apart=True),
]


@pytest.mark.parametrize("way", WAYS, ids=lambda w: f"{w.device}-{w.plan}{'-apart' * w.apart}")
@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(graph_texts(), st.sampled_from(SYMBOL_VALUES), st.integers(0, 3))
def test_every_way_gives_the_graphs_value(way: Way, text: str, size: int, seed: int) -> None:
    graph = parse_graph(text)
    inputs = arguments(graph, size, seed)
    want = evaluation(graph, inputs).returned()
    compiled = way.compile(graph)
    run = run_compiled(compiled, inputs)
    assert not run.failed()
    for k, (x, y) in enumerate(zip(run.evaluation.returned(), want, strict=True)):
        assert torch.equal(x, y), explain(graph, compiled, run, f"output {k}: got {x.tolist()}, wanted {y.tolist()}")
        assert x.stride() == y.stride()


def explain(graph: Graph, compiled: Compiled, run: TileRun, what: str) -> str:
    """Everything needed to see the bug, as text."""
    programs = "\n".join(print_program(low.program, header=False) for low, _ in run.reports)
    return f"{what}\n{print_graph(graph, origins=False)}\n{programs}"


def test_predicted_bytes_equal_counted_bytes_of_a_row_softmax() -> None:
    """C3: what the plan says a kernel moves is what the evaluator counts."""
    text = """\
graph 1
device "cpu"
arity 1
%input_0: f32[6, 40] = input() {dtype=f32, name="x"}
    argument 0 strides (40, 1) offset 0 on "cpu"
%max_1: f32[6 | 40] = max(%input_0[i0, i1])
%sub_2: f32[6, 40] = sub(%input_0[i0, i1], %max_1[i0])
%exp_3: f32[6, 40] = exp(%sub_2[i0, i1])
%sum_4: f32[6 | 40] = sum(%exp_3[i0, i1])
%div_5: f32[6, 40] = div(%exp_3[i0, i1], %sum_4[i0])
output "y" %div_5[i0, i1] over (6, 40) as (40, 1) on "cpu"
return ("tensor", 0)
"""
    graph = parse_graph(text)
    options = Options(check=1)
    compiled = plan_and_lower(graph, spec_for("cpu"), options)
    (launch,) = compiled.launches
    run = run_compiled(compiled, [torch.randn(6, 40)])
    moved = sum(r.bytes_moved for _, r in run.reports)
    cost = launch.groups[0].cost
    assert cost is not None and moved == 6 * 40 * 4 * 2 == cost.bytes_read + cost.bytes_written
