"""Report: the facts of a program with their faces (table, JSON, page) and the assertions that a test suite makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from plait.report import checks
from plait.report.facts import Facts
from plait.report.html import to_html
from plait.report.json_form import to_json
from plait.report.text import WIDTH, render


@dataclass(frozen=True, slots=True)
class Report(Facts):
    """What plait.explain returns. `str` is the page; `graphs` hold every fact.

    Assertions name operators ("softmax", "aten.mm"; "matmul" is any product of matrices), module paths ("blocks.0.attn") or
    places ("model.py:12"); they raise AssertionError with the reason."""

    def __str__(self) -> str:
        return render(self)

    def text(self, *, top: int = 5, detail: bool | None = None, width: int = WIDTH, color: bool = False) -> str:
        """The page: `top` refusals and steps of each graph (0: all), `detail`: every operator of every kernel."""
        return render(self, top=top, detail=detail, width=width, color=color)

    def to_json(self, path: str | Path | None = None) -> str:
        """The facts as JSON (schema_1.json, beside this module, describes it); also written to `path`."""
        text = to_json(self)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def to_html(self, path: str | Path) -> None:
        """The facts as one page that needs no network: graphs, roofline, kernels with their sources, refusals."""
        Path(path).write_text(to_html(self), encoding="utf-8")

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
