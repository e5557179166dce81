"""PLAIT_OVERRIDE: a dumped stage, edited by hand, replaces what is computed; what cannot be used is one error with file and line."""

from __future__ import annotations

import os
import pathlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from plait.errors import OverrideFailed
from plait.options import Options
from plait.runtime import report
from plait.runtime.cache import cache_for

X = torch.randn(32, 64)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    os.chmod(tmp_path, 0o700)
    yield tmp_path


def program(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1) * 2 + torch.linalg.inv(x[:, :32])[:, :1]


def run(folder: pathlib.Path | None = None, fn: Any = program, **options: Any) -> torch.Tensor:
    """What the compiled program gives; graphs are numbered from 0 in a process, here by their own run."""
    torch._dynamo.reset()
    if folder is not None:
        options["override"] = str(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(fn, backend="plait", options={"strict": True, **options})
        out = compiled(X)
    assert isinstance(out, torch.Tensor)
    return out


@pytest.fixture
def numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every graph is graph0, as the first of a process is."""
    monkeypatch.setattr(report, "_numbers", iter([0] * 1000))


def dumped(folder: pathlib.Path, stage: str, fn: Any = program) -> pathlib.Path:
    run(fn=fn, dump=f"{stage}@{folder}")
    (path,) = folder.iterdir()
    return path


def edit(path: pathlib.Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, text
    path.write_text(text.replace(old, new, 1))


pytestmark = pytest.mark.usefixtures("numbered")


@pytest.mark.parametrize("stage", ["graph", "plan", "tile", "source"])
def test_what_is_not_edited_changes_nothing(folder: pathlib.Path, stage: str) -> None:
    dumped(folder, stage)
    torch.testing.assert_close(run(folder), program(X))


def test_an_edited_graph(folder: pathlib.Path) -> None:
    path = dumped(folder, "graph")
    text = path.read_text()
    path.write_text(re.sub(r"value=2\.0", "value=3.0", text))
    assert "value=2.0" in text
    want = torch.softmax(X, -1) * 3 + torch.linalg.inv(X[:, :32])[:, :1]
    torch.testing.assert_close(run(folder), want)


def test_an_edited_plan(folder: pathlib.Path) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1).square().sum(-1)

    path = dumped(folder, "plan", fn)
    (line,) = [x for x in path.read_text().splitlines() if x.startswith("kernel")]
    members = line.partition(": ")[2].partition(" ->")[0].split()
    path.write_text(f"kernel 0: {' '.join(members[:-1])} -> ?\nkernel 1: {members[-1]} -> {members[-1]}\n")
    torch.testing.assert_close(run(folder, fn), fn(X))
    last = report.last()
    assert last is not None and len(list(last.details["compiled"].plan.kernels())) == 2
    assert last.details["override"].replaced == ["plan"]
    assert "the plan was read from a file" in str(last.details["compiled"].plan)


def test_an_edited_tile_program(folder: pathlib.Path) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.exp() + 1

    path = dumped(folder, "tile", fn)
    edit(path, "= exp(", "= sin(")
    torch.testing.assert_close(run(folder, fn), X.sin() + 1)


def test_edited_source_is_named_and_not_cached(folder: pathlib.Path, tmp_path_factory: Any) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * 5

    path = dumped(folder, "source", fn)
    text = path.read_text()
    assert "// kernel k0_mul" in text
    path.write_text(re.sub(r"\b5(\.0*)?f?\b(?=[^*]*;)", "7.0f", text))
    cache = tmp_path_factory.mktemp("cache")
    os.chmod(cache, 0o700)
    torch._dynamo.reset()
    report.reset()
    options = {"override": str(folder), "cache_dir": str(cache), "strict": True}
    with pytest.warns(UserWarning, match=r"PLAIT_OVERRIDE: graph0: source of k0_mul of .*graph0\.4\.source\.cpp"):
        out = torch.compile(fn, backend="plait", options=options)(X)
    torch.testing.assert_close(out, X * 7)
    assert cache_for(Options.make(None, {"cache_dir": str(cache)})).summary()["entries"] == 0
    torch.testing.assert_close(run(None, fn, cache_dir=str(cache)), X * 5)
    assert cache_for(Options.make(None, {"cache_dir": str(cache)})).summary()["entries"] > 0


def refused(folder: pathlib.Path, why: str, fn: Any = program) -> str:
    with pytest.raises(Exception, match=why) as raised:
        run(folder, fn)
    error = getattr(raised.value, "inner_exception", raised.value)
    assert isinstance(error, OverrideFailed), error
    return str(error)


@pytest.mark.parametrize(
    ("stage", "old", "new", "why"),
    [
        ("graph", "= exp(", "= exp(%nothing_9, ", r"graph0\.1\.graph\.txt:\d+: %nothing_9 is not defined above"),
        ("graph", 'device "cpu"', 'device "cuda"', r"graph\.txt: its call are not those of the program"),
        ("plan", ": %max_", ": %nothing_9 %max_", r"plan\.txt:\d: the graph has no node %nothing_9"),
        ("plan", "kernel ", "kernels ", r"plan\.txt:\d: expected 'kernel <number>"),
        ("tile", "max v", "max q", r"tile\.txt:\d+: expected v and a number"),
        ("tile", "buffer b0", "buffer b1", r"tile\.txt:\d+: the next buffer is b0"),
        ("source", "{", "{ nonsense;", r"graph0\.4\.source\.cpp:\d+:\d+: error: .*nonsense"),
        ("source", "// kernel k", "// kernel other_k", r"source\.cpp:1: there is no kernel other_k"),
    ],
)
def test_a_broken_file_is_one_error_with_file_and_line(
    folder: pathlib.Path, stage: str, old: str, new: str, why: str
) -> None:
    edit(dumped(folder, stage), old, new)
    refused(folder, why)


def test_members_that_cannot_share_a_kernel_are_refused(folder: pathlib.Path) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.exp(), x[:7, :5].sum(0)

    path = dumped(folder, "plan", lambda x: fn(x)[0])
    assert path.exists()
    path.unlink()
    torch._dynamo.reset()
    torch.compile(fn, backend="plait", options={"dump": f"plan@{folder}"})(X)
    kernels = [x for x in path.read_text().splitlines() if x.startswith("kernel")]
    members = [m for k in kernels for m in k.partition(": ")[2].partition(" ->")[0].split()]
    path.write_text(f"# one for all\nkernel 0: {' '.join(members)} -> ?\n")
    refused(folder, r"plan\.txt:2: these cannot be one kernel: axes do not align", fn)


def test_files_that_others_can_write_are_refused(folder: pathlib.Path) -> None:
    path = dumped(folder, "plan")
    os.chmod(path, 0o666)
    refused(folder, "can be written by others")
    os.chmod(path, 0o600)
    os.chmod(folder, 0o777)
    refused(folder, "can be written by others")
    os.chmod(folder, 0o700)
    target = path.with_suffix(".real")
    path.rename(target)
    path.symlink_to(target)
    refused(folder, "is a symbolic link")


def test_a_folder_that_is_not_there(tmp_path: pathlib.Path) -> None:
    refused(tmp_path / "none", "there is no such folder")


def test_the_variable_is_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_OVERRIDE", "some/folder")
    monkeypatch.setenv("PLAIT_CACHE", "/somewhere@17")
    made = Options.make()
    assert made.override == "some/folder" and (made.cache_dir, made.cache_mb) == ("/somewhere", 17)
    monkeypatch.setenv("PLAIT_CACHE", "@64")
    assert (Options.make().cache_dir, Options.make().cache_mb) == (None, 64)
    monkeypatch.setenv("PLAIT_CACHE", "0")
    assert Options.make().cache_dir == "0"
