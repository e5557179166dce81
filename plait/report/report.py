"""Report: the facts of a program with their faces (table, JSON, page) and the assertions that a test suite makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plait.errors import UserError
from plait.report import checks
from plait.report.compare import Comparison, compare_reports
from plait.report.facts import Facts, Kernel, Member
from plait.report.html import to_html
from plait.report.json_form import to_json
from plait.report.text import WIDTH, render

# (graph, step, its members, name) -> the value
Tap = Callable[[int, int, Sequence[Member], str], Any]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a report, which can be looked into."""

    facts: Kernel
    graph: int
    _tap: Tap | None = field(default=None, repr=False, compare=False)

    def tap(self, name: str) -> Any:
        """The value of an intermediate of this kernel, in eager's type: `name` is a variable of the program, an operator
        ("softmax", "aten.exp"), a place ("model.py:12", "12"), or a node of the captured graph. A tuple where several values
        are called so. The program is run again for it, on copies of its arguments. Raises UserError with the near names."""
        if self._tap is None:
            raise UserError(
                "this report cannot run its program again", hint="tap the report that plait.explain returned"
            )
        return self._tap(self.graph, self.facts.number, self.facts.members, name)


@dataclass(frozen=True, slots=True)
class Report(Facts):
    """What plait.explain returns. `str` is the page; `graphs` hold every fact.

    Assertions name operators ("softmax", "aten.mm"; "matmul" is any product of matrices), module paths ("blocks.0.attn") or
    places ("model.py:12"); they raise AssertionError with the reason."""

    _tap: Tap | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return render(self)

    def kernel(self, number: int, graph: int = 0) -> Step:
        """A step by its number in a graph (the first graph, if not told), as the page counts them."""
        if not 0 <= graph < len(self.graphs):
            raise UserError(f"there is no graph {graph}", hint=f"there are {len(self.graphs)}")
        found = next((k for k in self.graphs[graph].kernels if k.number == number), None)
        if found is None:
            raise UserError(f"graph {graph} has no step {number}", hint=f"it has {len(self.graphs[graph].kernels)}")
        return Step(found, graph, self._tap)

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
