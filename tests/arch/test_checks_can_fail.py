"""Every architecture rule is fed a bad sample, which it must report, and a good one, which it must pass."""

from __future__ import annotations

import pytest
from arch import checks

SAMPLES = [
    (checks.check_layers, "plait.ir.x", "from plait.plan import cost", "from plait.errors import PlaitError"),
    (checks.check_layers, "plait.plan.x", "def f():\n    import plait.tile.program", "import plait.ir.graph"),
    (checks.check_layers, "plait.plan.x", "from ..tile import program", "from ..ir import graph"),
    (
        checks.check_layers,
        "plait.rewrite.engine",
        "from plait.rewrite import passes",
        "from plait.rewrite import pattern",
    ),
    (checks.check_layers, "plait.runtime.x", "from plait import api", "from plait import errors"),
    (checks.check_layers, "plait.unheard_of", "", None),
    (checks.check_outsiders, "plait.ir.x", "import torch.nn", "import torchless"),
    (checks.check_outsiders, "plait.emit.x", "def f():\n    from torch import nn", "TEXT = 'import torch'"),
    (checks.check_outsiders, "plait.tools.x", "import triton.language as tl", "import torch"),
    (checks.check_environment, "plait.tools.x", "import os\nos.environ['A']", "import os\nos.getcwd()"),
    (checks.check_environment, "plait.tools.x", "from os import getenv", "from os import sep"),
    (checks.check_unsafe, "plait.runtime.x", "import pickle", "import json"),
    (checks.check_unsafe, "plait.runtime.x", "from marshal import loads", "from json import loads"),
    (checks.check_unsafe, "plait.runtime.x", "import torch\ntorch.load('x')", "import torch\ntorch.save"),
    (checks.check_unsafe, "plait.runtime.x", "eval('1')", "model.eval()"),
    (checks.check_unsafe, "plait.runtime.x", "exec('1')", "run('1')"),
    (checks.check_broad_except, "x", "try:\n  f()\nexcept:\n  pass", "try:\n  f()\nexcept OSError:\n  pass"),
    (
        checks.check_broad_except,
        "x",
        "try:\n  f()\nexcept Exception:\n  pass",
        "try:\n  f()\nexcept Exception:  # why\n  g()",
    ),
    (checks.check_docstring, "x", "a = 1", "'''Says it.'''\na = 1"),
    (checks.check_sizes, "x.py", "a = 1\n" * 501, "a = 1\n" * 500),
    (checks.check_sizes, "x.py", "def f():\n" + "    a = 1\n" * 60, "def f():\n" + "    a = 1\n" * 59),
    (
        checks.check_sizes,
        "x.py",
        "class A:\n" + "".join(f"    def m{i}(self): ...\n" for i in range(21)),
        "class A:\n" + "".join(f"    def m{i}(self): ...\n" for i in range(20)),
    ),
    (checks.check_text, "x.md", "# TO" + "DO later", "to do later"),
    (checks.check_text, "x.md", "see /wo" + "rk/main/plait", "a framework/main"),
    (checks.check_text, "x.md", "https://py" + "pi.org/simple", "the registry"),
    (checks.check_text, "x.md", "fixes pytorch" + "#12345", "colour #123456"),
    (checks.check_text, "x.md", "written in this ses" + "sion", "a session of pytest"),
]


@pytest.mark.parametrize("rule, name, bad, good", SAMPLES, ids=lambda v: getattr(v, "__name__", None))
def test_rule_can_fail(rule, name: str, bad: str, good: str | None) -> None:
    assert rule(name, bad)
    if good is not None:
        assert not rule(name, good)


def test_cycles_are_found_and_straight_lines_are_not() -> None:
    bad = {"p": ("", True), "p.a": ("from p import b", False), "p.b": ("def f():\n    import p.a", False)}
    good = {"p": ("", True), "p.a": ("from p import b", False), "p.b": ("", False)}
    assert checks.find_cycles(checks.import_graph(bad)) == [["p.a", "p.b"]]
    assert not checks.find_cycles(checks.import_graph(good))


def test_every_rule_has_a_sample() -> None:
    rules = {f for name, f in vars(checks).items() if name.startswith("check_")}
    assert rules == {sample[0] for sample in SAMPLES}
