"""The files of `plait explain --reproduce`: one of a graph or a kernel, or a folder of all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from plait.errors import UserError
from plait.tools.files import can_write

if TYPE_CHECKING:
    from plait.report.report import Report


@dataclass(frozen=True)
class Wanted:
    """What is to be written. `path`: a file, if it ends in .py, else a folder. `kernel` by its number in the report."""

    path: str
    kernel: int | None = None
    graph: int | None = None
    values: bool = False

    def check(self) -> None:
        """Raises UserError for a path that cannot be written, before the work."""
        if self.is_file:
            can_write(self.path)
        elif Path(self.path).exists() and not Path(self.path).is_dir():
            raise UserError(
                f"{self.path} is neither a folder nor the name of a Python file", hint="a file's name ends in .py"
            )

    @property
    def is_file(self) -> bool:
        """One file is wanted."""
        return self.path.endswith(".py") and not Path(self.path).is_dir()

    def write(self, report: Report) -> list[str]:
        """Write them; a line for each, and for each kernel that cannot be written down."""
        if self.is_file:
            return [f"wrote {self._one(report, self.graph or 0, self.kernel, Path(self.path))}"]
        folder = Path(self.path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make {folder}: {error.strerror}", hint="name a folder of your own") from error
        lines: list[str] = []
        for g, facts in enumerate(report.graphs):
            if self.graph is not None and g != self.graph:
                continue
            steps = [None, *(k.number for k in facts.kernels if k.kind == "kernel")]
            for step in steps if self.kernel is None else [self.kernel]:
                name = f"graph{g}.py" if step is None else f"graph{g}_kernel{step}.py"
                try:
                    lines.append(f"wrote {self._one(report, g, step, folder / name)}")
                except UserError as error:
                    if self.kernel is not None:
                        raise
                    lines.append(f"not {name}: {error.message}")
        return lines

    def _one(self, report: Report, graph: int, step: int | None, path: Path) -> Path:
        if step is None:
            return report.reproduce(path, graph=graph, values=self.values)
        return report.kernel(step, graph).reproduce(path, values=self.values)
