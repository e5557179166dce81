"""Each golden case computes what its graph means: every kernel in every form, for both devices, under the tile evaluator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from golden.case import Case, cases, planned, read_case
from graph_values import laid_out
from middle import Middle, check_plan, middle
from tile_run import TileRunner

from plait.compiler import plan_and_lower, simplify
from plait.ir.graph import Graph
from plait.options import Options
from plait.oracle.compare import check
from plait.oracle.eval_graph import evaluate
from plait.plan.device import SPECS
from plait.tile.text import print_program

# values do not depend on the order of evaluation where there is none of these
REORDERED = {"sum", "prod", "cumsum", "cumprod", "logcumsumexp", "extern"}
FORMS = ("chosen", "uncut", "flat", "swept")
SIZE = 5  # of every symbol


def tensors(case: Case) -> list[torch.Tensor]:
    """Random arguments."""
    rng = torch.Generator().manual_seed(1)
    ranges, inputs = case.ranges(), case.graph.inputs

    def values(k: int, count: int) -> torch.Tensor:
        node = inputs[k].node
        if node.dtype.is_float:
            return torch.randn(count, generator=rng)
        low, high = ranges.get(node.attr("name"), (0, 3))
        return torch.randint(low, high + 1, (count,), generator=rng)

    return laid_out(case.graph, SIZE, values)


def run(m: Middle, inputs: list[torch.Tensor], form: str) -> list[torch.Tensor]:
    """What the call returns when every kernel has this form, where it has it."""
    runner = TileRunner(m.graph, inputs)
    with torch.no_grad():
        for g in m.plan.groups:
            if g.kind == "extern":
                runner.need(g.nodes[0])
                continue
            found = {name.split()[0]: low for name, low in m.forms(g)}
            assert not runner.kernel(found.get(form, found["flat"])).failed
        for n in m.graph.nodes():
            if n.kind in ("source", "project"):
                runner.need(n)
    return [runner.ev.output(o) for o in m.graph.outputs]


@pytest.mark.parametrize("device", ["cpu", "h200"])
@pytest.mark.parametrize("path", cases(), ids=lambda p: p.stem)
def test_values(path: Path, device: str) -> None:
    case = read_case(path)
    inputs, graph = tensors(case), case.graph
    want = evaluate(graph, inputs)
    exact = evaluate(graph, inputs, dtype_mode="float64")
    bitwise = not REORDERED & {n.op for n in graph.nodes()}
    # numerics differ only where something is rounded
    for numerics in ("eager", "fused") if any(n.dtype.is_storage_only for n in graph.nodes()) else ("eager",):
        m = middle(graph, device, numerics=numerics)
        check_plan(m)
        for form in FORMS:
            got = run(m, inputs, form)
            check(got, want, exact, strides=True, name=f"{numerics} {form} ")
            if bitwise and numerics == "eager":
                assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True)), f"{form}: not the same bits"


@pytest.mark.parametrize("path", cases(), ids=lambda p: p.stem)
def test_the_compiler_plans_the_same(path: Path) -> None:
    """tests/middle.py stands for compiler.py, without torch."""
    case = read_case(path)
    for device in ("cpu", "h200"):
        spec, options = SPECS[device], Options()
        graph: Graph = simplify(case.graph, spec, options)
        compiled = plan_and_lower(graph, spec, options)
        m = planned(case.text, device)
        assert str(compiled.plan) == str(m.plan)
        # launches may hold their parts in another order, where these do not depend on each other
        parts = [_body(p.program) for launch in compiled.launches for p in launch.parts]
        assert sorted(parts) == sorted(_body(m.lower(g).program) for g in m.plan.kernels())


def _body(program: object) -> str:
    return print_program(program, header=False).partition("\n")[2]  # type: ignore[arg-type]
