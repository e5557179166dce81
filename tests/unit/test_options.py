"""Options: what is accepted, what is refused and with which words, and who wins over whom."""

from __future__ import annotations

import subprocess
import sys

import pytest

from plait.errors import BadOption
from plait.options import ENVIRONMENT, Options, cache_home, cxx_command


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


def test_defaults_are_the_dataclass_defaults() -> None:
    assert Options.make() == Options()


def test_explicit_wins_over_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_NUMERICS", "eager")
    monkeypatch.setenv("PLAIT_STRICT", "1")
    assert Options.make().numerics == "eager"
    assert Options.make().strict
    assert Options.make(None, {"numerics": "fused", "strict": False}) == Options()


def test_every_variable_sets_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"mode": "max", "numerics": "eager", "rng": "eager", "backend": "cpp", "plan": "none", "dump": "plan@d"}
    values |= {
        "cache_dir": "somewhere",
        "override": "somewhere",
        "groups": "1,3-5",
        "check": "3",
        "strict": "1",
        "explain": "on",
    }
    assert len(ENVIRONMENT) <= 12
    for variable, (name, meaning) in ENVIRONMENT.items():
        monkeypatch.setenv(variable, values[name])
        assert getattr(Options.make(), name) != getattr(Options(), name), variable
        assert meaning
        monkeypatch.delenv(variable)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"numeric": "fused"}, ["'numeric'", "did you mean 'numerics'?", "cache_dir"]),
        ({"numerics": "fussed"}, ["'fussed'", "did you mean 'fused'?", "eager"]),
        ({"check": 9}, ["9", "from 0 to 4"]),
        ({"check": True}, ["True"]),
        ({"check": "two"}, ["'two'"]),
        ({"strict": "maybe"}, ["'maybe'", "0 or 1"]),
        ({"dump": "plans"}, ["'plans'", "did you mean 'plan'?"]),
        ({"groups": "1,x"}, ["'x'"]),
        ({"cache_dir": 3}, ["3", "folder"]),
    ],
)
def test_refusals_say_what_to_write(given: dict[str, object], words: list[str]) -> None:
    with pytest.raises(BadOption) as info:
        Options.make(None, given)
    for w in words:
        assert w in str(info.value)


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(BadOption, match="max"):
        Options.make("maxx")
    assert Options.make("max-autotune").mode == "O3"


def test_values_are_read() -> None:
    made = Options.make(
        "fast-compile", {"dump": "graph,source@out", "groups": "3,1-2", "cache_dir": False, "cache-mb": 5}
    )
    assert made.mode == "O1"
    assert (made.dump, made.dump_dir) == (("graph", "source"), "out")
    assert made.groups == (1, 2, 3)
    assert (made.cache_dir, made.cache_mb) == ("0", 5)
    assert Options.make(None, {"dump": "1"}).dump == ("graph", "plan", "tile", "source")


def test_codegen_key_tells_settings_that_matter_apart() -> None:
    keys = {
        Options.make(None, o).codegen_key() for o in ({}, {"numerics": "eager"}, {"plan": "none"}, {"rng": "eager"})
    }
    assert len(keys) == 4
    assert Options.make(None, {"check": 2}).codegen_key() == Options().codegen_key()


def test_platform_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", "/somewhere")
    assert cache_home() == "/somewhere/.cache"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_home() == "/x"
    monkeypatch.setenv("CXX", "ccache clang++")
    assert cxx_command() == ("ccache", "clang++")
    monkeypatch.delenv("CXX")
    assert cxx_command() == ("g++",)


def test_package_api_and_options_load_without_torch() -> None:
    code = (
        "import plait, sys; plait.compile; plait.Options; plait.errors.BadOption; plait.backend.reset; plait.__version__\n"
        "assert 'torch' not in sys.modules\n"
        "try: plait.compile(len, numeric='x')\n"
        "except plait.errors.BadOption: pass\n"
        "else: raise SystemExit('accepted')\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
