"""Reproducers in tests: made of golden cases, and run in this process."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from golden.case import Case
from golden.test_golden_values import tensors

from plait.compiler import all_levels
from plait.diagnose.reproduce import Subject
from plait.options import Options
from plait.plan.device import SPECS
from plait.plan.layout import Layouts
from plait.runtime.link import link


def subject(case: Case, device: str = "cpu") -> Subject:
    """A golden case as a compiled graph with one call of it."""
    compiled = all_levels(case.graph, SPECS[device], Options())
    cuda = compiled.spec.kind == "cuda"
    script = link(compiled.graph, compiled.plan.reading, compiled.launches, Layouts(compiled.graph), overwrite=cuda)
    return Subject(case.path.stem, compiled, script, tuple(tensors(case)))


def run(path: Path, *flags: str) -> int:
    """The file's exit code, as `python FILE FLAGS` has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(path), *flags])
        patch.setattr("plait.diagnose.reproducer._ROUNDS", 1)
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(path), run_name="__main__")
    assert isinstance(ended.value.code, int)
    return ended.value.code
