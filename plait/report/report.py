"""Report: the facts of a program with their faces (table, JSON, page) and the assertions that a test suite makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from plait.errors import UserError
from plait.report import checks
from plait.report.compare import Comparison, compare_reports
from plait.report.facts import Facts, Kernel, Member
from plait.report.html import to_html
from plait.report.json_form import to_json
from plait.report.text import WIDTH, render


class Inside(Protocol):
    """The program of a report, which can be run again (diagnose/tap.py)."""

    def tap(self, graph: int, step: int, members: Sequence[Member], name: str) -> Any:
        """The value called `name` in a step of a graph."""
        ...

    def reproduce(self, graph: int, step: int | None, path: str | Path, values: bool) -> Path:
        """Write the file that runs a step of a graph, or all of it, on its own."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a report, which can be looked into."""

    facts: Kernel
    graph: int
    _inside: Inside | None = field(default=None, repr=False, compare=False)

    def tap(self, name: str) -> Any:
        """The value of an intermediate of this kernel, in eager's type: `name` is a variable of the program, an operator
        ("softmax", "aten.exp"), a place ("model.py:12", "12"), or a node of the captured graph. A tuple where several values
        are called so. The program is run again for it, on copies of its arguments. Raises UserError with the near names."""
        return _there(self._inside).tap(self.graph, self.facts.number, self.facts.members, name)

    def reproduce(self, path: str | Path, *, values: bool = False) -> Path:
        """Write one Python file that runs this kernel on its own, judges it against float64 and times it: `python FILE`, exit code 1
        while it is wrong. Its arguments are drawn so that they are like those of the first call; with `values` they are those, up
        to 1 MiB. The program is run again for it. Returns the path. Raises UserError for a step that is an ATen call, and for
        a path where there is another file."""
        return _there(self._inside).reproduce(self.graph, self.facts.number, path, values)


@dataclass(frozen=True, slots=True)
class Report(Facts):
    """What plait.explain returns. `str` is the page; `graphs` hold every fact.

    Assertions name operators ("softmax", "aten.mm"; "matmul" is any product of matrices), module paths ("blocks.0.attn") or
    places ("model.py:12"); they raise AssertionError with the reason."""

    _inside: Inside | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return render(self)

    def kernel(self, number: int, graph: int = 0) -> Step:
        """A step by its number in a graph (the first graph, if not told), as the page counts them."""
        if not 0 <= graph < len(self.graphs):
            raise UserError(f"there is no graph {graph}", hint=f"there are {len(self.graphs)}")
        found = next((k for k in self.graphs[graph].kernels if k.number == number), None)
        if found is None:
            raise UserError(f"graph {graph} has no step {number}", hint=f"it has {len(self.graphs[graph].kernels)}")
        return Step(found, graph, self._inside)

    def reproduce(self, path: str | Path, *, graph: int = 0, values: bool = False) -> Path:
        """Step.reproduce for all of a graph: its kernels and ATen calls, judged against eager where ATen's operators can be
        written down, and else against what the graph means."""
        if not 0 <= graph < len(self.graphs):
            raise UserError(f"there is no graph {graph}", hint=f"there are {len(self.graphs)}")
        return _there(self._inside).reproduce(graph, None, path, values)

    def text(self, *, top: int = 5, detail: bool | None = None, width: int = WIDTH, color: bool = False) -> str:
        """The page: `top` refusals and steps of each graph (0: all), `detail`: every operator of every kernel."""
        return render(self, top=top, detail=detail, width=width, color=color)

    def to_json(self, path: str | Path | None = None) -> str:
        """The facts as JSON (schema_1.json, beside this module, describes it); also written to `path`."""
        text = to_json(self)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def to_html(self, path: str | Path | None = None) -> str:
        """The facts as one page that needs no network: graphs, roofline, kernels with their sources, refusals; also written to
        `path`."""
        text = to_html(self)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def compare(self, other: Facts) -> Comparison:
        """What is different in another report of the program: `str` is the page, `worse` what got worse, in words."""
        return compare_reports(self, other)

    def assert_fused(self, *names: str) -> None:
        """Operators of these names share a kernel, and nowhere do neighbours of these names stay apart."""
        checks.assert_fused(self, names)

    def assert_not_fused(self, *names: str) -> None:
        """No kernel holds operators of all these names."""
        checks.assert_not_fused(self, names)

    def assert_kernels(self, *, at_most: int) -> None:
        """Kernels and ATen calls, of all graphs together."""
        checks.assert_kernels(self, at_most)

    def assert_no_fallback(self) -> None:
        """Nothing that plait was asked to compile runs in eager (operators that are ATen calls by plan are none)."""
        checks.assert_no_fallback(self)

    def assert_traffic(self, *, at_most: float | str) -> None:
        """Bytes to and from device memory, of all graphs together: a number, or text such as "64 MB"."""
        checks.assert_traffic(self, at_most)


def _there(inside: Inside | None) -> Inside:
    if inside is None:
        raise UserError("this report cannot run its program again", hint="ask the report that plait.explain returned")
    return inside
