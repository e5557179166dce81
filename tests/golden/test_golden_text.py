"""Each golden case: the text of every stage is what the file says (without torch). See golden/case.py for the format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import without_torch
from golden.case import FOLDER, cases, planned, read_case, stage_text

from plait.ir.check import check_graph
from plait.ir.text import print_graph
from plait.plan.reasons import Why

UPDATE = "pytest tests/golden --update-golden"
# what must have a case, whatever else has one
NEEDED = [
    "pointwise_chain",
    "softmax",
    "rms_norm",
    "layer_norm_residual",
    "block_quant",
    "rope",
    "column_sum",
    "two_reductions",
    "split_reduction",
    "transpose_copy",
    "gather_check",
    "cumsum",
    "inline_cast",
    "cycle",
    "opaque_between",
    "argument_limit",
    "dynamic_rows",
]


@pytest.fixture(autouse=True)
def no_torch() -> Iterator[None]:
    """Everything here is free of torch."""
    with without_torch.no_torch():
        yield


@pytest.mark.parametrize("name", NEEDED)
def test_case_exists(name: str) -> None:
    path = FOLDER / f"{name}.txt"
    assert path.exists(), f"write the graph and its `---` lines to {path}, then run {UPDATE}"


@pytest.mark.parametrize("path", cases(), ids=lambda p: p.stem)
def test_text(path: Path, pytestconfig: pytest.Config) -> None:
    case = read_case(path)
    assert case.marked("title"), "a case says what it is about in a line `# title: …`"
    assert case.sections, f"a case has at least one `--- stage` line; add it, then run {UPDATE}"
    assert print_graph(case.graph) == case.text, "the input is not as print_graph prints it"
    check_graph(case.graph, level=3 if case.graph.origins else 1)
    found = {stage: stage_text(case.text, stage) for stage in case.sections}
    if pytestconfig.getoption("--update-golden", default=False):
        case.sections = found
        path.write_text(case.print())
    for stage, text in found.items():
        assert case.sections[stage], f"{stage} has no expected text: run {UPDATE}"
        assert text == case.sections[stage], f"{stage} differs; if it should, run {UPDATE} and read the difference"
    for stage in case.marked("unchanged"):
        assert stage_text(case.text, stage) == case.text, f"{stage} changed the graph"
    for line in case.marked("reject"):
        device, why, a, b = line.split()
        reason = planned(case.text, device).refusal(a, b)
        assert reason is not None, f"{device}: {a} and {b} share a kernel, or nothing says why not"
        assert reason.why is Why[why], f"{device}: {a} and {b} are apart because {reason}"
