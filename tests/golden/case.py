"""Golden cases: a graph's text, and what each stage makes of it.

    # title: what the case is about
    # values: x1 0 9                      integers of input x1 are drawn from 0 to 9 (default: 0 to 3)
    # reject: cpu MISALIGNED %max_1 %sum_2     the plan for "cpu" keeps the two apart, for this reason
    # unchanged: split{device=cpu}        this stage must leave the graph as it is
    graph 1
    …
    --- plan{device=cpu}
    expected text
    --- tile{device=h200}
    expected text

Stages: split{device=}, materialise, plan{device=}, and tile{device=, form=chosen | flat | swept}: every kernel of the plan.
To add a section write its `---` line and run `pytest tests/golden --update-golden`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from middle import Middle, middle

from plait.ir.graph import Graph
from plait.ir.parse import parse_graph
from plait.ir.text import print_graph
from plait.plan.device import SPECS
from plait.rewrite.passes.materialise import materialise
from plait.rewrite.passes.split_reductions import split_reductions
from plait.tile.text import print_program

FOLDER = Path(__file__).parent / "cases"


@dataclass
class Case:
    """One file."""

    path: Path
    marks: list[tuple[str, str]]  # ("title" | "values" | "reject" | "unchanged", text), in order
    text: str
    sections: dict[str, str]  # stage -> expected text

    def marked(self, kind: str) -> list[str]:
        """Texts of the header lines of one kind."""
        return [t for k, t in self.marks if k == kind]

    @property
    def graph(self) -> Graph:
        """The case's graph, parsed anew."""
        return parse_graph(self.text)

    def ranges(self) -> dict[str, tuple[int, int]]:
        """Least and greatest value of integer inputs, by name."""
        rows = [t.split() for t in self.marked("values")]
        return {name: (int(low), int(high)) for name, low, high in rows}

    def print(self) -> str:
        """The file's text."""
        head = "".join(f"# {k}: {t}\n" for k, t in self.marks)
        return head + self.text + "".join(f"--- {stage}\n{text}" for stage, text in self.sections.items())


def read_case(path: Path) -> Case:
    """Parse a case file."""
    first, *parts = re.split(r"^--- (.*)\n", path.read_text(), flags=re.MULTILINE)
    rows = first.splitlines(keepends=True)
    marks = [r[2:].strip().partition(": ") for r in rows if r.startswith("# ")]
    text = "".join(r for r in rows if not r.startswith("# "))
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    return Case(path, [(k, t) for k, _, t in marks], text, sections)


def cases() -> list[Path]:
    """Every case file, by name."""
    return sorted(FOLDER.glob("*.txt"))


def stage_text(graph_text: str, stage: str) -> str:
    """What a stage makes of a graph."""
    m = re.fullmatch(r"(\w+)(?:\{(.*)\})?", stage)
    assert m is not None, f"not a stage: {stage!r}"
    name, options = m.group(1), dict(o.split("=") for o in (m.group(2) or "").split(",") if o)
    device = options.get("device", "cpu")
    if name == "split":
        return print_graph(split_reductions(parse_graph(graph_text), SPECS[device]))
    if name == "materialise":
        return print_graph(materialise(parse_graph(graph_text)))
    m_ = planned(graph_text, device)
    if name == "plan":
        return str(m_.plan)
    assert name == "tile", f"no stage {name!r}"
    return "".join(_program(m_, g.number, options.get("form", "chosen")) for g in m_.plan.kernels())


@cache
def planned(graph_text: str, device: str) -> Middle:
    """The plan of a graph."""
    return middle(parse_graph(graph_text), device)


def _program(m: Middle, number: int, form: str) -> str:
    found = [low for name, low in m.forms(m.plan.groups[number]) if name.split()[0] == form]
    return print_program(found[-1].program)
