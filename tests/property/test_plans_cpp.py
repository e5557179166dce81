"""Random graphs as C++: all kernels of some forty graphs in one shared object, run in the order of their plans.

graph_make's operators are exact, so what a kernel stores equals the graph's own value to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from cpp_run import Library, compile_programs
from graph_make import SYMBOL_VALUES, graph_texts
from graph_values import arguments
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from middle import Middle, middle
from tile_run import TileRunner

from plait.ir.graph import Node
from plait.ir.parse import parse_graph
from plait.oracle.eval_graph import evaluation
from plait.tile.lower import Lowered
from plait.tile.text import print_program

GRAPHS = 40


@dataclass
class Sample:
    """A graph with the size to run it at, and for each of its groups the kernels to try (none for an ATen call)."""

    m: Middle
    size: int
    kernels: list[list[Lowered]]


def make_sample(number: int, text: str, size: int) -> Sample:
    m = middle(parse_graph(text), "cpu", numerics="eager")
    kernels: list[list[Lowered]] = []
    for g in m.plan.groups:
        # as chosen, and every third graph in its other forms; C++ kernels reduce in sweeps
        forms = list(m.forms(g)) if g.kind == "kernel" else []
        fit = [
            low for form, low in forms if form.startswith("swept") or all(d.role == "grid" for d in low.program.dims)
        ]
        tried = [forms[0][1], *(fit if number % 3 == 0 else [])] if forms else []
        kernels.append([_named(low, f"g{number}_k{g.number}_{k}") for k, low in enumerate(tried)])
    return Sample(m, size, kernels)


def _named(low: Lowered, name: str) -> Lowered:
    return replace(low, program=replace(low.program, name=name))


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    drawn: dict[str, int] = {}

    @settings(max_examples=3 * GRAPHS, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(graph_texts(10), st.sampled_from(SYMBOL_VALUES))
    def draw(text: str, size: int) -> None:
        drawn[str(text)] = size

    draw()
    largest = sorted(drawn, key=lambda t: -len(t))[:GRAPHS]
    return [make_sample(k, text, drawn[text]) for k, text in enumerate(largest)]


@pytest.fixture(scope="module")
def library(samples: list[Sample], tmp_path_factory: pytest.TempPathFactory) -> Library:
    programs = [low.program for s in samples for tried in s.kernels for low in tried]
    assert len(programs) > GRAPHS
    return compile_programs(programs, Path(tmp_path_factory.mktemp("plans")))


@pytest.mark.parametrize("number", range(GRAPHS))
def test_every_kernel_stores_the_graphs_values(number: int, samples: list[Sample], library: Library) -> None:
    s = samples[number]
    inputs = arguments(s.m.graph, s.size, number)
    truth = evaluation(s.m.graph, inputs)
    run = TileRunner(s.m.graph, inputs)
    with torch.no_grad():
        for g, tried in zip(s.m.plan.groups, s.kernels, strict=True):
            for low in tried:
                buffers = run.buffers(low)
                assert library.run(low.program.name, buffers, run.sizes_of(low)) == 0
                run.keep(low, buffers)
                for n in g.stored:
                    same(n, run.ev.values[n].rounded, truth.values[n].rounded, low)


def same(n: Node, got: torch.Tensor, want: torch.Tensor, low: Lowered) -> None:
    """The same bits, or the kernel's text."""
    assert torch.equal(got, want), f"{n} is {got.tolist()}, not {want.tolist()}\n{print_program(low.program)}"
