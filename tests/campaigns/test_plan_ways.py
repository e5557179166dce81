"""One program under many lawful plans: results agree with float64 by the verdict rule, and what is made of points alone has the same
bits under every plan. Random graphs, whose operators are exact, agree to the last bit in the tile evaluator, for CPU and GPU."""

from __future__ import annotations

from unittest import mock

import planted
import pytest
import torch
from graph_make import SYMBOL_VALUES, graph_texts
from graph_values import arguments
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from middle import check_plan, middle
from tile_run import TileRunner

from plait.diagnose.program import Outcome
from plait.ir.parse import parse_graph
from plait.oracle.eval_graph import evaluation
from plait.plan import search
from plait.tile.text import print_program
from tests.campaigns.plan_ways import Compared, Differential, Way, by_dice, same_bits, ways
from tests.campaigns.programs import PROGRAMS

# results that no sum takes part in
POINTS: dict[str, tuple[int, ...] | None] = {"pointwise": None, "shared_inputs": (0, 1, 2, 6)}


def differential(name: str, count: int, seed: int = 0) -> list[Compared]:
    """Run a program in `count` ways and more; every one is right, and several plans are really different."""
    one = Differential(PROGRAMS[name]())
    fuel, names = one.first()
    found = [one.run(way) for way in ways(seed, fuel, names, count)]
    lawful = [c for c in found if not c.refused]
    assert not [f"{c.way.name}: {w}\n{c.plans}" for c in lawful for w in c.wrong]
    assert len(lawful) > len(found) // 2
    assert len({c.plans for c in lawful}) >= 3, "the ways give one plan"
    if name in POINTS:
        first = lawful[0].outcome
        for c in lawful:
            assert first is not None and c.outcome is not None
            assert not same_bits(first, c.outcome, POINTS[name]), f"{c.way.name}\n{c.plans}"
    return found


@pytest.mark.parametrize("name", ["pointwise", "shared_inputs", "norms"])
def test_every_plan_gives_the_programs_results(name: str) -> None:
    differential(name, 3)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_every_plan_of_every_program_gives_its_results(name: str, seed: int) -> None:
    differential(name, 20, seed + 1)


def on_random_graphs(device: str, text: str, size: int, dice: list[int]) -> None:
    """Several drawn plans of one graph, run by the tile evaluator."""
    graph = parse_graph(text)
    inputs = arguments(graph, size, 0)
    want = evaluation(graph, inputs).returned()
    for seed in dice:
        with by_dice(seed):
            m = middle(graph, device, numerics="eager")
        check_plan(m)
        run = TileRunner(m.graph, inputs)
        truth = evaluation(m.graph, inputs)
        for x, y in zip(truth.returned(), want, strict=True):
            assert torch.equal(x, y)
        with torch.no_grad():
            for g in m.plan.kernels():
                low = m.lower(g)
                assert not run.kernel(low).failed, print_program(low.program)
                for n in g.stored:
                    x, y = run.ev.values[n].rounded, truth.values[n].rounded
                    assert torch.equal(x, y), (
                        f"{n} is {x.tolist()}, not {y.tolist()}\n{m.plan}\n{print_program(low.program)}"
                    )


DICE = st.lists(st.integers(0, 1 << 20), min_size=3, max_size=3)
QUICK = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much, HealthCheck.large_base_example]


@pytest.mark.parametrize("device", ["cpu", "h200"])
@settings(max_examples=25, suppress_health_check=QUICK)
@given(graph_texts(10), st.sampled_from(SYMBOL_VALUES), DICE)
def test_drawn_plans_of_random_graphs_agree(device: str, text: str, size: int, dice: list[int]) -> None:
    on_random_graphs(device, text, size, dice)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("device", ["cpu", "h200"])
@settings(max_examples=400, suppress_health_check=QUICK)
@given(graph_texts(14), st.sampled_from(SYMBOL_VALUES), DICE)
def test_drawn_plans_of_many_random_graphs_agree(device: str, text: str, size: int, dice: list[int]) -> None:
    on_random_graphs(device, text, size, dice)


def test_a_plan_against_the_laws_is_seen() -> None:
    """The campaign can fail: some of the plans that are drawn without laws break one."""
    with mock.patch.object(search, "why_not", lambda laws, al: None), pytest.raises(AssertionError, match="P4"):
        on_random_graphs("cpu", TWO_SUMS, 3, list(range(10)))


def test_a_kernel_that_is_wrong_under_some_plans_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where exp and tanh share a kernel, tanh is wrong."""
    planted.wrong_code(monkeypatch)
    one = Differential(PROGRAMS["pointwise"]())
    fused, apart = one.run(Way()), one.run(Way({"plan": "none"}))
    assert fused.wrong and not apart.wrong
    assert fused.outcome is not None and apart.outcome is not None
    assert "result 1" in same_bits(fused.outcome, apart.outcome)


def test_bits_are_compared() -> None:
    zero, nan = torch.zeros(2), torch.full((2,), float("nan"))
    assert same_bits(Outcome([zero, nan]), Outcome([zero.clone(), nan.clone()])) == []
    assert same_bits(Outcome([zero, nan]), Outcome([-zero, nan])) == ["result 0"]
    assert same_bits(Outcome([zero, nan]), Outcome([-zero, nan]), (1,)) == []


# sums over either axis, of the same values, with a use: no kernel of one pass has both
TWO_SUMS = """\
graph 1
device "cpu"
arity 1
%input_0: f32[6, 5] = input() {dtype=f32, name="x"}
    argument 0 strides (5, 1) offset 0 on "cpu"
%sum_1: f32[5 | 6] = sum(%input_0[i1, i0])
%sum_2: f32[6 | 5] = sum(%input_0[i0, i1])
%mul_3: f32[6, 5] = mul(%sum_1[i1], %sum_2[i0])
output "y" %mul_3[i0, i1] over (6, 5) as (5, 1) on "cpu"
return ("tensor", 0)
"""
