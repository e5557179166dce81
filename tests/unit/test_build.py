"""Building kernels: what is shared, cached and refused, and what a failure leaves behind."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from plait.emit.cpp import CppKernel
from plait.emit.triton import emit_triton
from plait.errors import BuildFailed
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.oracle.semantics import random_values
from plait.runtime import build, report
from plait.runtime.build import CppSources, build_cpp, compile_cpp, cpp_key
from plait.runtime.cache import Cache
from plait.tile.program import Buffer, Check, Dim, Let, Load, Store, TileProgram
from plait.tile.schedule import Schedule

N = ix.sym("n")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    report.reset()
    build.compiler_identity.cache_clear()
    yield
    report.reset()
    build.compiler_identity.cache_clear()


def program(name: str, op: str = "exp", header: str = "") -> TileProgram:
    """out[i] = op(x[i]), for n points."""
    x, out = (Buffer(b, DType.f32, role, N) for b, role in (("x", "in"), ("out", "out")))
    body = (
        Load(0, 0, ix.axis(0), DType.f32, (0,)),
        Let(1, op, (0,), DType.f32, (0,)),
        Store(1, ix.axis(0), 1, (0,)),
    )
    dim = Dim("p0", N, "grid")
    return TileProgram(name, (dim,), (x, out), ("n",), body, Schedule(tile=(("p0", 64),), vector="p0"), (), (header,))


def checked(name: str) -> TileProgram:
    """Checks i < 4 for n points."""
    out = Buffer("out", DType.i64, "out", N)
    body = (
        Check(ix.axis(0), ix.const(4), 1, (0,)),
        Let(0, "index", (), DType.i64, (0,), (("expr", ix.axis(0)),)),
        Store(0, ix.axis(0), 0, (0,)),
    )
    return TileProgram(
        name, (Dim("p0", N, "grid"),), (out,), ("n",), body, Schedule(vector="p0"), ("row out of range",)
    )


def run(kernel: object, *tensors: torch.Tensor, n: int, messages: tuple[tuple[str, ...], ...] = ()) -> None:
    assert not isinstance(kernel, BuildFailed), kernel
    kernel.bind(tuple(range(len(tensors))), (n,), messages)(list(tensors))


def test_kernels_are_built_run_and_found_in_the_cache(tmp_path: pathlib.Path) -> None:
    kernels = [CppKernel("first", (program("a", "exp"),)), CppKernel("second", (program("b", "neg"),))]
    store = Cache(str(tmp_path / "cache"))
    built = build_cpp(CppSources(kernels), store)
    x, out = torch.randn(1000), torch.empty(1000)
    run(built[0], x, out, n=1000)
    torch.testing.assert_close(out, x.exp())
    run(built[1], x, out, n=1000)
    torch.testing.assert_close(out, -x)
    assert (store.stats.stores, store.stats.hits) == (1, 0)
    again = Cache(str(tmp_path / "cache"))
    run(build_cpp(CppSources(kernels), again)[1], x, out, n=1000)
    assert (again.stats.stores, again.stats.hits) == (0, 1)


def test_equal_kernels_are_built_once(tmp_path: pathlib.Path) -> None:
    kernels = [CppKernel(f"k{i}", (program(f"p{i}", "exp", f"layer {i}"),)) for i in range(5)]
    built = build_cpp(CppSources(kernels), Cache(str(tmp_path / "cache")))
    assert len({id(b) for b in built}) == 1


def drawing(name: str, draw: int) -> TileProgram:
    """out[i] = the i-th number of a draw."""
    buffers = (
        Buffer("seed", DType.i64, "in", ix.ONE),
        Buffer("offset", DType.i64, "in", ix.ONE),
        Buffer("out", DType.f32, "out", ix.const(64)),
    )
    attrs = (("draw", draw), ("dtype", DType.f32), ("linear", ix.axis(0)))
    body = (
        Load(0, 0, ix.ZERO, DType.i64, ()),
        Load(1, 1, ix.ZERO, DType.i64, ()),
        Let(2, "rand", (0, 1), DType.f32, (0,), attrs),
        Store(2, ix.axis(0), 2, (0,)),
    )
    schedule = Schedule(tile=(("p0", 64),), vector="p0", warps=1)
    return TileProgram(name, (Dim("p0", ix.const(64), "grid"),), buffers, (), body, schedule)


def test_layers_that_draw_alike_are_one_kernel(tmp_path: pathlib.Path) -> None:
    programs = [drawing("first", 3), drawing("second", 11)]
    built = build_cpp(CppSources([CppKernel(p.name, (p,)) for p in programs]), Cache(tmp_path))
    assert built[0] is built[1] and not isinstance(built[0], BuildFailed)
    seed, offset = torch.tensor([5]), torch.tensor([7])
    for p in programs:
        out = torch.empty(64)
        built[0].bind((0, 1, 2), [e.const for e in p.numbers if e.const is not None], ())([seed, offset, out])
        assert torch.equal(out, random_values("rand", torch.arange(64), 5, 7, p.draws[0], DType.f32))
    triton = [re.sub("first|second", "k", emit_triton(p, "k").text) for p in programs]
    assert triton[0] == triton[1]


def test_failed_check_raises_index_error(tmp_path: pathlib.Path) -> None:
    kernel = build_cpp(CppSources([CppKernel("c", (checked("c"),))]), Cache(str(tmp_path / "cache")))[0]
    run(kernel, torch.empty(4, dtype=torch.int64), n=4, messages=(("row out of range",),))
    with pytest.raises(IndexError, match="row out of range"):
        run(kernel, torch.empty(5, dtype=torch.int64), n=5, messages=(("row out of range",),))


def test_one_bad_kernel_does_not_take_the_others_along(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emit = build.cpp.emit_cpp

    def spoiled(kernels: list[CppKernel]) -> str:
        return emit(kernels) + ("#error spoiled\n" if any(k.parts[0].name == "bad" for k in kernels) else "")

    monkeypatch.setattr(build.cpp, "emit_cpp", spoiled)
    kernels = [CppKernel("good", (program("good"),)), CppKernel("bad", (program("bad", "neg"),))]
    built = build_cpp(CppSources(kernels), Cache(str(tmp_path / "cache")))
    x, out = torch.randn(9), torch.empty(9)
    run(built[0], x, out, n=9)
    torch.testing.assert_close(out, x.exp())
    failed = built[1]
    assert isinstance(failed, BuildFailed)
    assert "spoiled" in str(failed)
    folder = pathlib.Path(failed.artifact)
    assert "#error spoiled" in (folder / "kernels.cpp").read_text()
    assert "spoiled" in (folder / "stderr.txt").read_text()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with pytest.warns(report.PlaitFallbackWarning, match="spoiled"):
        assert build.count_failures(built, ["good", "bad"]) == [1]
    assert (report.FALLBACKS[0].scope, report.FALLBACKS[0].op) == ("group", "bad")


def test_no_compiler_says_what_to_install(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    failed = build_cpp(CppSources([CppKernel("k", (program("k"),))]), Cache(None))[0]
    assert isinstance(failed, BuildFailed)
    assert "no-such-compiler" in failed.message
    assert "apt install g++" in failed.hint


def test_key_depends_on_all_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    base = cpp_key("int x;", ["-O3", "-I/somewhere"])
    assert cpp_key("int x;", ["-O3", "-I/elsewhere"]) == base, "where we are installed does not matter"
    others = {cpp_key("int y;", ["-O3"]), cpp_key("int x;", ["-O2"])}
    with monkeypatch.context() as m:
        m.setattr(build.cpp, "header_text", lambda: "changed")
        others.add(cpp_key("int x;", ["-O3"]))
    with monkeypatch.context() as m:
        m.setattr(build, "processor_identity", lambda: "another processor")
        others.add(cpp_key("int x;", ["-O3"]))
    with monkeypatch.context() as m:
        m.setattr(build, "compiler_identity", lambda: "another compiler")
        others.add(cpp_key("int x;", ["-O3"]))
    assert len(others | {base}) == 6


def test_processor_and_compiler_have_names() -> None:
    assert len(build.processor_identity()) > 10
    assert "g++" in build.compiler_identity()
    assert build.workers() >= 1


def test_interrupted_build_leaves_nothing(tmp_path: pathlib.Path) -> None:
    slow = tmp_path / "slow-compiler"
    slow.write_text("#!/bin/sh\nsleep 30\n")
    slow.chmod(0o755)
    # a shell that starts the tests in the background lets its children ignore interrupts
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{heed}; from plait.runtime.build import compile_cpp; compile_cpp('int x;', [])"
    place = tmp_path / "tmp"
    place.mkdir(mode=0o700)
    env = {**os.environ, "CXX": str(slow), "TMPDIR": str(place)}
    child = subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 50
    while not list(place.glob("plait-build-*/kernels.cpp")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    child.send_signal(signal.SIGINT)
    _, words = child.communicate(timeout=30)
    assert b"KeyboardInterrupt" in words
    assert not list(place.iterdir())


def test_unsafe_temporary_folder_is_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "open"
    place.mkdir()
    place.chmod(0o777)
    monkeypatch.setattr("tempfile.tempdir", str(place))
    with pytest.raises(BuildFailed, match="can be written by others") as info:
        compile_cpp("int x;", build.cpp.compile_flags())
    assert "TMPDIR" in info.value.hint
    assert not list(place.iterdir())
