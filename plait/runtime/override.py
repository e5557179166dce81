"""Stages of a compilation that files replace: texts of PLAIT_DUMP, edited by hand and put into the folder of PLAIT_OVERRIDE.

The files have the names that the dump gave them. Graph, plan and tile programs are read by the parsers of their texts and
judged by the checkers of their levels; sources go to the compiler as they are. A program or kernel that a file leaves out,
or has unchanged, stays as it was computed. Every replacement is warned about; what cannot be used is one error, with file
and line. Files are code: only those are read that nobody but the user can write.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from plait.errors import CheckFailed, OverrideFailed, TextError
from plait.ir.check import check_graph
from plait.ir.graph import Graph
from plait.ir.parse import parse_graph
from plait.options import STAGES, Options
from plait.plan.plan import Plan
from plait.runtime import report
from plait.runtime.folders import Unsafe, open_in, read_all, why_not_private
from plait.tile.check import check_program
from plait.tile.lower import Lowered
from plait.tile.parse import parse_programs
from plait.tile.program import TileProgram
from plait.tile.text import print_program

T = TypeVar("T")
_MOST_BYTES = 64 << 20
_KERNEL = re.compile(r"(?m)^(?://|#) kernel (\w+)$")


def of(options: Options) -> Override | None:
    """The files for the graph that is being compiled; None where no folder is named."""
    if not options.override:
        return None
    record = report.current()
    found = record.details.setdefault("override", Override(os.path.abspath(options.override), record.name))
    assert isinstance(found, Override)
    return found


def file_name(graph: str, stage: str, suffix: str = "txt") -> str:
    """What a stage's file is called: graph0.2.plan.txt."""
    return f"{graph}.{STAGES.index(stage) + 1}.{stage}.{suffix if stage == 'source' else 'txt'}"


def kernel_mark(name: str, suffix: str) -> str:
    """The line above a kernel in a file of sources."""
    return f"{'#' if suffix == 'py' else '//'} kernel {name}"


@dataclass
class Override:
    """Files of one graph. `replaced`: what was taken from them."""

    folder: str
    graph_name: str
    replaced: list[str] = field(default_factory=list)
    _texts: dict[str, str | None] = field(default_factory=dict)
    _programs: dict[str, tuple[TileProgram, int]] | None = None

    # ---------------------------------------------------------------- files
    def path(self, stage: str, suffix: str = "txt") -> str:
        return os.path.join(self.folder, file_name(self.graph_name, stage, suffix))

    def text(self, stage: str, suffix: str = "txt") -> str | None:
        """The text of a stage's file, None where there is none. Raises OverrideFailed for one that others can write."""
        path = self.path(stage, suffix)
        if path not in self._texts:
            self._texts[path] = self._read(path)
        return self._texts[path]

    def _read(self, path: str) -> str | None:
        if not os.path.lexists(path):
            if not os.path.isdir(self.folder):
                raise OverrideFailed(
                    f"{self.folder}: there is no such folder", hint="PLAIT_OVERRIDE names the folder of a dump"
                )
            return None
        folder = os.path.realpath(self.folder)
        reason = why_not_private(folder)
        if reason is not None:
            raise OverrideFailed(f"{path}: not used: {reason}", hint="chmod go-w, and a folder of your own")
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fd = open_in(at, os.path.basename(path), os.O_RDONLY)
            try:
                return read_all(fd, _MOST_BYTES).decode()
            finally:
                os.close(fd)
        except (Unsafe, OSError, UnicodeDecodeError, ValueError) as error:
            raise OverrideFailed(f"{path}: not used: {error}", hint="chmod go-w FILE") from error
        finally:
            os.close(at)

    def _parsed(self, path: str, parse: Callable[[], T]) -> T:
        try:
            return parse()
        except TextError as error:
            text = error.why
            raise OverrideFailed(f"{path}:{error.line}: {text}", origin=error.origin) from error
        except CheckFailed as error:
            raise OverrideFailed(f"{path}: {error}") from error

    def _say(self, what: str, path: str) -> None:
        self.replaced.append(what)
        report.warn_once(f"PLAIT_OVERRIDE: {self.graph_name}: {what} of {path}")

    # ---------------------------------------------------------------- stages
    def graph(self, computed: Graph) -> Graph | None:
        """The file's graph. `computed`: as it was imported; what callers rely on must be the same."""
        text, path = self.text("graph"), self.path("graph")
        if text is None:
            return None
        found = self._parsed(path, lambda: parse_graph(text))
        self._parsed(path, lambda: check_graph(found, level=1))
        for what, mine, theirs in zip(("inputs", "outputs", "call"), _face(found), _face(computed), strict=True):
            if mine != theirs:
                raise OverrideFailed(f"{path}: its {what} are not those of the program: {mine}, not {theirs}")
        self._say("graph", path)
        return found

    def plan(self, parse: Callable[[str], Plan]) -> Plan | None:
        """The file's plan."""
        text, path = self.text("plan"), self.path("plan")
        if text is None:
            return None
        found = self._parsed(path, lambda: parse(text))
        self._say("plan", path)
        return found

    def program(self, lowered: Lowered) -> Lowered:
        """A group as the file has it, if it does."""
        text, path = self.text("tile"), self.path("tile")
        if text is None:
            return lowered
        if self._programs is None:
            lines = [k for k, line in enumerate(text.splitlines(), 1) if line.startswith("program ")]
            found = self._parsed(path, lambda: parse_programs(text))
            self._programs = {p.name: (p, line) for p, line in zip(found, lines, strict=True)}
        program, line = self._programs.get(lowered.program.name, (lowered.program, 0))
        if print_program(program, header=False) == print_program(lowered.program, header=False):
            return lowered
        mine, theirs = (
            [(b.dtype, b.role) for b in p.buffers if b.role != "scratch"] for p in (program, lowered.program)
        )
        if mine != theirs:
            raise OverrideFailed(f"{path}:{line}: {program.name} has other buffers than the plan's kernel")
        self._parsed(f"{path}:{line}", lambda: check_program(program))
        self._say(f"tile program {program.name}", path)
        return Lowered(program, lowered.tensors)

    def sources(self, computed: Mapping[str, str], suffix: str) -> dict[str, str]:
        """Kernels whose text is another in the file; its lines are known to the compiler."""
        text, path = self.text("source", suffix), self.path("source", suffix)
        if text is None:
            return {}
        out: dict[str, str] = {}
        marks = list(_KERNEL.finditer(text))
        for m, end in zip(marks, [*(m.start() for m in marks[1:]), len(text)], strict=True):
            name, own = m[1], text[m.end() + 1 : end]
            line = text.count("\n", 0, m.end()) + 2
            if name not in computed:
                raise OverrideFailed(
                    f"{path}:{line - 1}: there is no kernel {name}", hint=f"kernels: {', '.join(computed)}"
                )
            if own.strip() != computed[name].strip():
                out[name] = f'#line {line} "{path}"\n{own}' if suffix == "cpp" else _python(own, path, line)
                self._say(f"source of {name}", path)
        if not marks:
            raise OverrideFailed(f"{path}:1: expected '{kernel_mark('NAME', suffix)}' above each kernel")
        return out


def _python(text: str, path: str, line: int) -> str:
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise OverrideFailed(f"{path}:{line - 1 + (error.lineno or 1)}: {error.msg}") from error
    return text


def _face(graph: Graph) -> tuple[object, ...]:
    """What callers rely on."""
    return (
        [(i.position, i.node.dtype.value, str(i.node.shape)) for i in graph.inputs],
        [(o.writes_to, o.read.source.dtype.value) for o in graph.outputs],
        (graph.device, graph.arity, graph.constants, [r[0] for r in graph.returns]),
    )
