"""The same program gives the same texts and the same cache keys to the byte: in another process, under another hash seed, in another
folder, with another cache, after other programs, and whatever order sets of nodes have."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.campaigns import programs
from tests.campaigns.determinism import difference, levels_of, other_order

ROOT = Path(__file__).resolve().parents[2]
FAST = ["mlp_training", "scatter", "shared_inputs"]
SEEDS = ("0", "1", "random")


def in_a_process(folder: Path, seed: str, names: Sequence[str]) -> dict[str, str]:
    """The texts, made by a process with its own folder, cache, home and copy of the programs."""
    folder.mkdir()
    copy = shutil.copy(programs.__file__, folder / "programs.py")
    env = dict(os.environ)
    env |= {
        "PYTHONHASHSEED": seed,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HOME": str(folder),
        "TMPDIR": str(folder),
    }
    env |= {"XDG_CACHE_HOME": str(folder / "cache"), "PADDING": "x" * (len(str(folder)) * 97 % 4096)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.campaigns.determinism", str(copy), *names],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout)
    return found


def agree_in_processes(tmp_path: Path, names: Sequence[str], seeds: Sequence[str] = SEEDS) -> None:
    """A process a seed; the last one compiles the programs the other way round."""
    first: dict[str, str] = {}
    for seed in seeds:
        order = list(reversed(names)) if seed == seeds[-1] else list(names)
        found = in_a_process(tmp_path / f"seed {seed}", seed, order)
        first = first or found
        assert not difference(first, found)
    assert all(any(k.startswith(f"{n} ") and k.endswith("h200 source") for k in first) for n in names)
    assert any('"kind": "c++"' in text for k, text in first.items() if k.endswith("cpu keys"))


def test_processes_agree_to_the_byte(tmp_path: Path) -> None:
    agree_in_processes(tmp_path, FAST, SEEDS[1:])


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_processes_agree_to_the_byte_on_every_program(tmp_path: Path) -> None:
    agree_in_processes(tmp_path, list(programs.PROGRAMS))


@pytest.mark.parametrize("name", ["shared_inputs", "norms"])
def test_no_order_of_sets_shows(name: str) -> None:
    want = levels_of(programs.PROGRAMS[name]())
    for seed in range(3):
        with other_order(seed):
            assert not difference(want, levels_of(programs.PROGRAMS[name]()))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", list(programs.PROGRAMS))
def test_no_order_of_sets_shows_in_any_program(name: str) -> None:
    want = levels_of(programs.PROGRAMS[name]())
    for seed in range(8):
        with other_order(seed):
            assert not difference(want, levels_of(programs.PROGRAMS[name]()))


def test_a_difference_is_told() -> None:
    assert "-b" in difference({"x": "a\nb"}, {"x": "a\nc"}) and "another order" in difference({"x": ""}, {"y": ""})
