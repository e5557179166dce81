"""Texts of plans and tile programs are read back: whatever is printed is read again as the same value."""

from __future__ import annotations

import pathlib

import pytest

from plait.compiler import Compiled, plan_and_lower, simplify
from plait.errors import TextError
from plait.ir.parse import parse_graph
from plait.ir.text import print_graph
from plait.options import Options
from plait.plan.cost import size_at_hints
from plait.plan.device import SPECS
from plait.plan.given import parse_plan
from plait.plan.inline import Reading
from plait.tile.parse import parse_programs
from plait.tile.text import print_program
from tests.attention_variants import Sizes
from tests.unit.test_attention_variants import planned

CASES = sorted((pathlib.Path(__file__).parents[1] / "golden" / "cases").glob("*.txt"))


def check_programs(compiled: Compiled) -> None:
    programs = [p.program for launch in compiled.launches for p in launch.parts]
    text = "\n".join(map(print_program, programs))
    assert parse_programs(text) == programs


@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_a_dump_says_all_that_the_next_stage_needs(path: pathlib.Path, device: str) -> None:
    spec, options = SPECS[device], Options()
    graph = parse_graph(path.read_text().partition("\n---")[0])
    compiled = plan_and_lower(simplify(graph, spec, options), spec, options)
    again = parse_graph(print_graph(compiled.graph))
    assert print_graph(again) == print_graph(compiled.graph)
    assert str(plan_and_lower(again, spec, options).plan) == str(compiled.plan)
    reading = Reading(again, lambda extents: size_at_hints(again, extents), spec)
    given = parse_plan(str(compiled.plan), again, spec, reading, lambda al, stored: None)
    kernels = [line for line in str(compiled.plan).splitlines() if not line.startswith("apart")]
    assert [line for line in str(given).splitlines() if not line.startswith("apart")] == kernels
    check_programs(compiled)


@pytest.mark.parametrize("name", ["causal", "dropped", "sink", "grouped_query", "documents"])
@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_programs_of_products_and_running_sums(name: str, device: str) -> None:
    check_programs(planned(name, Sizes(m=256, n=256, d=64), device))


PROGRAM = """\
# the user's line
program "k0_exp"
schedule form=flat tile=p0:4 warps=1 stages=1 vector=p0
symbols s0
dim p0: 4*s0 grid
buffer b0 "b0": f32 in, 4*s0 elements
buffer b1 "b1": f32 out, 4*s0 elements
v0: f32<p0> = load b0[p0] ? (4*s0 - p0 - 2; fill=1.0)
v1: f32<p0> = exp(v0)
store b1[p0] = v1 over <p0>
"""


def test_a_program_is_read() -> None:
    (program,) = parse_programs(PROGRAM)
    assert print_program(program) == PROGRAM and program.header == ("the user's line",)


@pytest.mark.parametrize(
    ("old", "new", "line", "why"),
    [
        ("exp(v0)", "exp(x0)", 9, "expected v and a number, found 'x0'"),
        ("load b0[p0]", "load b0[p0", 8, "expected ']'"),
        ("over <p0>", "over <q0>", 10, "there is no dim 'q0'"),
        ("v1: f32", "    v1: f32", 9, "it is indented, and no sweep is open"),
        ("v1: f32", "v1: f99", 9, "there is no type 'f99'"),
        ("warps=1", "warps=one", 3, "invalid literal"),
        ('program "k0_exp"', 'programme "k0_exp"', 2, "a program begins with"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_line(old: str, new: str, line: int, why: str) -> None:
    with pytest.raises(TextError) as raised:
        parse_programs(PROGRAM.replace(old, new))
    assert raised.value.line == line and why in raised.value.why
