"""Runs a planned and lowered graph with the evaluators alone: every kernel by run_tile, every ATen call by the graph
evaluator. What comes out is judged against the whole graph's evaluation, so plan and lowering are tested without a
compiler, and each kernel's addresses, double stores and unwritten elements are watched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.ir.graph import Graph, Node
from plait.oracle.eval_graph import Evaluation, Value
from plait.oracle.eval_tile import TileReport, flat_view, run_tile
from plait.plan.layout import Layouts, room
from plait.tile.lower import Lowered

_UNWRITTEN = 77  # what memory holds before it is written, and between rows


@dataclass
class TileRun:
    """`evaluation` answers for outputs and returns; `reports` has one entry a kernel part."""

    evaluation: Evaluation
    reports: list[tuple[Lowered, TileReport]]

    def failed(self) -> list[str]:
        """Messages of checks that failed."""
        return [low.program.messages[code - 1] for low, r in self.reports for code in r.failed]


def run_compiled(compiled: Any, inputs: Sequence[Any], constants: Mapping[str, Any] | None = None) -> TileRun:
    """Execute `compiled` (compiler.Compiled) on CPU tensors."""
    graph: Graph = compiled.graph
    run = TileRunner(graph, inputs, constants)
    with torch.no_grad():
        for launch in compiled.launches:
            if launch.parts:
                for part in launch.parts:
                    run.kernel(part)
            else:
                run.need(launch.groups[0].nodes[0])
        for n in graph.nodes():
            if n.kind in ("source", "project"):
                run.need(n)
    return TileRun(run.ev, run.reports)


class TileRunner:
    """Values of a graph's nodes, as far as they were needed or stored by a kernel."""

    def __init__(self, graph: Graph, inputs: Sequence[Any], constants: Mapping[str, Any] | None = None) -> None:
        self.ev = Evaluation(graph, inputs, "eager", constants or {})
        self.layouts = Layouts(graph)
        self.positions = {i.node: i.position for i in graph.inputs}
        self.reports: list[tuple[Lowered, TileReport]] = []

    def need(self, n: Node) -> Tensor:
        """A node's value; what no kernel computes, the graph evaluator does."""
        if n not in self.ev.values:
            assert n.kind in ("source", "project", "extern"), f"{n} is wanted in memory and no kernel stores it"
            for r in n.reads:
                self.need(r.source)
            self.ev.values[n] = self.ev.compute(n)
        return self.ev.values[n].rounded

    def kernel(self, lowered: Lowered) -> TileReport:
        """Run one kernel with the evaluator; what it stores are the values of its nodes from now on."""
        given = self.buffers(lowered)
        symbols = dict(zip(lowered.program.symbols, self.sizes_of(lowered), strict=True))
        report = run_tile(lowered.program, given, symbols, complete=True)
        self.keep(lowered, given)
        self.reports.append((lowered, report))
        return report

    def buffers(self, lowered: Lowered) -> list[Tensor]:
        """A kernel's arguments: memory of what it reads, and new memory for what it stores."""
        given: list[Tensor] = []
        for n, b in zip(lowered.tensors, lowered.program.buffers, strict=False):
            if b.role == "out":
                given.append(torch.full((max(self.ev.size(b.elems), 0),), _UNWRITTEN, dtype=_torch(n)))
            else:
                given.append(self.memory(n))
        return given

    def sizes_of(self, lowered: Lowered) -> list[int]:
        """A kernel's symbol arguments."""
        symbols = {str(a.args[0]): v for a, v in self.ev.symbols.items() if isinstance(v, int)}
        return [symbols[s] for s in lowered.program.symbols]

    def keep(self, lowered: Lowered, given: Sequence[Tensor]) -> None:
        """Take what a kernel stored as the values of its nodes."""
        for n, b, flat in zip(lowered.tensors, lowered.program.buffers, given, strict=False):
            if b.role == "out":
                value = flat.as_strided(self.ev.sizes(n.shape), self.ev.sizes(self.layouts.strides(n)))
                if n in self.ev.graph.padded:
                    between = flat.clone()
                    between.as_strided(value.shape, value.stride()).fill_(_UNWRITTEN)
                    assert bool((between == _UNWRITTEN).all()), f"{n} was written between its rows"
                self.ev.values[n] = Value(value, value)

    def memory(self, n: Node) -> Tensor:
        """The flat memory of a value, with the strides the kernel counts on."""
        value = self.need(n)
        argument = self.ev.arguments[self.positions[n]] if n in self.positions else None
        strides = self.ev.sizes(self.layouts.strides(n))
        if isinstance(argument, Tensor):
            wrong = [d for d, k in enumerate(argument.shape) if k > 1 and argument.stride(d) != strides[d]]
            assert not wrong, f"{n} has strides {argument.stride()}, the plan counts on {strides}"
            return flat_view(argument)
        flat = torch.full((room(value.shape, strides),), _UNWRITTEN, dtype=value.dtype)
        flat.as_strided(value.shape, strides).copy_(value)
        return flat


def _torch(n: Node) -> torch.dtype:
    from plait.oracle.semantics import TORCH

    return TORCH[n.dtype]
