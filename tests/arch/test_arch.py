"""The tree keeps the house rules (each rule is shown able to fail in test_checks_can_fail)."""

from __future__ import annotations

import subprocess
import sys

import pytest
from arch import checks
from arch.tree import ROOT, modules, tracked


def _assert_none(breaches: list[str]) -> None:
    assert not breaches, "\n".join(["", *breaches])


PER_MODULE = (
    checks.check_layers,
    checks.check_outsiders,
    checks.check_environment,
    checks.check_unsafe,
)


@pytest.mark.parametrize("rule", PER_MODULE, ids=lambda rule: rule.__name__)
def test_every_module_keeps(rule) -> None:
    _assert_none([b for name, (source, is_package) in modules().items() for b in rule(name, source, is_package)])


def test_no_import_cycles() -> None:
    assert not checks.find_cycles(checks.import_graph(modules()))


def test_sizes_of_package_and_tests() -> None:
    python = {name: text for name, text in tracked().items() if name.endswith(".py")}
    assert len(python) > 20
    _assert_none([b for name, text in python.items() for b in checks.check_sizes(name, text)])


def test_modules_say_what_they_are_for() -> None:
    _assert_none([b for name, (source, _) in modules().items() for b in checks.check_docstring(name, source)])


def test_broad_excepts_say_why() -> None:
    _assert_none([b for name, (source, _) in modules().items() for b in checks.check_broad_except(name, source)])


def test_text_speaks_only_of_the_project() -> None:
    _assert_none([b for name, text in tracked().items() if name != "LICENSE" for b in checks.check_text(name, text)])


def _run_python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_import_of_plait_does_not_import_torch() -> None:
    _run_python("import plait, sys; assert 'torch' not in sys.modules, 'torch was imported'")


def test_help_does_not_import_torch() -> None:
    _run_python("import plait.tools.cli, sys; assert 'torch' not in sys.modules, 'torch was imported'")


def test_core_runs_without_torch_and_triton() -> None:
    core = [m for m in modules() if checks.layer_of(m) in (0, 1, 2) or m.startswith("plait.emit")]
    assert len(core) > 10
    blocked = "import sys; sys.modules['torch'] = sys.modules['triton'] = sys.modules['sympy'] = None\n"
    _run_python(blocked + "".join(f"import {m}\n" for m in core))


def test_every_pin_is_exact() -> None:
    rows = [r for r in tracked()["constraints.txt"].splitlines() if r and not r.startswith("#")]
    assert len(rows) > 30
    assert not [r for r in rows if "==" not in r or "@" in r or "+" in r]
