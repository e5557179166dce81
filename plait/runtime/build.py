"""Sources to kernels: g++ for C++, Triton's own compiler for CUDA. The only module that imports triton.

Kernels of one graph are built together: equal ones once, C++ in a few translation units side by side, Triton kernels on
threads. Every unit is built in a private folder that goes away whatever happens, and kept in the disk cache by content:
source, headers, flags, compiler, processor.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import hashlib
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from plait.emit import cpp
from plait.emit.gluon import Descriptor, GluonSource
from plait.emit.triton import TritonSource
from plait.emit.writer import identifier
from plait.errors import BuildFailed
from plait.ir.budget import Budget, current
from plait.ir.dtype import DType
from plait.ir.index import Expr
from plait.levels import CHEAPEST_CXX, DEFAULT, LEVELS
from plait.options import cxx_command
from plait.runtime import folders, report
from plait.runtime.cache import Cache, load_library_bytes
from plait.runtime.folders import Unsafe
from plait.runtime.follow import doing, expects
from plait.runtime.gluon_kernel import Base, GluonKernel
from plait.runtime.kernel import CppKernel, Kernel
from plait.runtime.locks import Lock
from plait.runtime.triton_kernel import TritonKernel, scratch_memory

_TIMEOUT_SECONDS = 600.0
_MOST_UNITS = 8
BEST = LEVELS[DEFAULT].cxx
LEFT_OUT = "the option budget was used up before it was built"
_STAND_IN = "plait_kernel_name"  # what a kernel is called while equal ones are looked for

Built = Kernel | BuildFailed
_import_lock = Lock()
T = TypeVar("T")
R = TypeVar("R")


def workers() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def side_by_side(fn: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Apply to all, on as many threads as there are processors."""
    if len(items) < 2 or workers() < 2:
        return [fn(i) for i in items]
    with ThreadPoolExecutor(min(len(items), workers()), thread_name_prefix="plait-build") as pool:
        return list(pool.map(fn, items))


# ------------------------------------------------------------------------------------------------------------------ C++
@dataclass(frozen=True)
class _Unit:
    """One translation unit: its text and the kernels in it, by their place in the caller's list."""

    text: str
    names: tuple[str, ...]
    places: tuple[int, ...]

    @property
    def label(self) -> str:
        """The first kernel, and how many more."""
        return self.names[0] + (f" and {len(self.names) - 1} more" if len(self.names) > 1 else "")


class CppSources:
    """The text of every kernel; equal ones, which are built once, are those whose text without comments is equal."""

    def __init__(self, kernels: Sequence[cpp.CppKernel]) -> None:
        self.names = tuple(identifier(k.name) for k in kernels)
        self.texts = tuple(cpp.emit_cpp([replace(k, name=_STAND_IN)]) for k in kernels)
        first: dict[str, int] = {}
        # comments quote the user's lines and the group's number; they do not make kernels differ
        self.same_as = tuple(first.setdefault(self.plain(p), p) for p in range(len(self.texts)))

    def plain(self, place: int) -> str:
        """One kernel's text without its name and its comments."""
        return _without_comments(self.texts[place], "//")

    def with_texts(self, texts: Mapping[str, str]) -> CppSources:
        """The same kernels, some of them with another text."""
        out = copy.copy(self)
        out.texts = tuple(texts.get(n, t) for n, t in zip(self.names, self.texts, strict=True))
        first: dict[str, int] = {}
        out.same_as = tuple(first.setdefault(out.plain(p), p) for p in range(len(out.texts)))
        return out

    def distinct(self) -> list[int]:
        """Places of the kernels to build."""
        return [p for p, q in enumerate(self.same_as) if p == q]

    def text(self, place: int) -> str:
        """One kernel's text under its own name."""
        return self.texts[place].replace(_STAND_IN, self.names[place])

    def unit(self, places: Sequence[int]) -> _Unit:
        """One translation unit; reading the headers again does nothing."""
        return _Unit("\n".join(map(self.text, places)), tuple(self.names[p] for p in places), tuple(places))


def build_cpp(sources: CppSources, cache: Cache, threads: int | None = None, cxx: str = BEST) -> list[Built]:
    """One entry a kernel: the built kernel, or why there is none. `threads`: what kernels run with (None: torch's); `cxx`: the
    compiler's own level."""
    places = sources.distinct()
    # few enough that the headers are not read too often, many enough to use several processors
    count = max(1, min(_MOST_UNITS, len(places) // 4))
    units = [sources.unit(places[k::count]) for k in range(count) if places[k::count]]
    done: dict[int, Built] = {}
    budget = current()
    expects(len(units))

    def build(unit: _Unit) -> list[Kernel] | BuildFailed:
        with doing("building", unit.label):
            return _build_unit(unit, cache, threads, cxx, budget)

    for unit, outcome in zip(units, side_by_side(build, units), strict=True):
        for nth, place in enumerate(unit.places):
            if not isinstance(outcome, BuildFailed):
                done[place] = outcome[nth]
            elif len(unit.places) == 1:
                done[place] = outcome
            else:
                # one bad kernel must not take its neighbours along
                alone = _build_unit(sources.unit([place]), cache, threads, cxx, budget)
                done[place] = alone if isinstance(alone, BuildFailed) else alone[0]
    return [done[q] for q in sources.same_as]


def _without_comments(text: str, mark: str) -> str:
    return re.sub(rf"(?m)^\s*{re.escape(mark)}.*\n", "", text)


def _build_unit(
    unit: _Unit, cache: Cache, threads: int | None, cxx: str, budget: Budget | None
) -> list[Kernel] | BuildFailed:
    try:
        flags, key = _flags_and_key(unit, cxx)
        library = cache.load_library(key)
        if library is None and cxx == BEST and budget is not None and budget.leaves_out("full C++ optimisation"):
            flags, key = _flags_and_key(unit, CHEAPEST_CXX)
            library = cache.load_library(key)
        if library is None:
            data = compile_cpp(unit.text, flags)
            cache.put(key, data)
            library = load_library_bytes(data)
        return [CppKernel(getattr(library, name), library, threads) for name in unit.names]
    except BuildFailed as failed:
        return failed
    except (OSError, AttributeError, Unsafe) as error:
        return BuildFailed(f"the compiled kernels cannot be loaded: {error}")


def _flags_and_key(unit: _Unit, cxx: str) -> tuple[list[str], str]:
    flags = [*cpp.compile_flags(cxx), *([] if f8_saturates() else ["-DPLAIT_F8E4M3_NAN"])]
    return flags, cpp_key(unit.text, flags)


@functools.cache
def f8_saturates() -> bool:
    """Whether torch's cast to f8e4m3 makes 448 of what is larger (since 2.13), or NaN."""
    return bool(torch.tensor(1e6).to(torch.float8_e4m3fn).float().isfinite())


def cpp_key(source: str, flags: Sequence[str]) -> str:
    """Everything a compiled unit depends on, as the cache's key text."""
    parts = {
        "kind": "c++",
        "source": hashlib.sha256(source.encode()).hexdigest(),
        "headers": hashlib.sha256(cpp.header_text().encode()).hexdigest(),
        "flags": [f for f in flags if not f.startswith("-I")],
        "compiler": compiler_identity(),
        "processor": processor_identity(),
    }
    return json.dumps(parts, sort_keys=True)


def compile_cpp(source: str, flags: Sequence[str]) -> bytes:
    """The shared library's bytes. Raises BuildFailed with the compiler's words and a folder to look at."""
    command = cxx_command()
    try:
        with folders.scratch_folder("plait-build-") as folder:
            path = os.path.join(folder, "kernels.cpp")
            with open(path, "x", encoding="utf-8") as out:
                out.write(source)
            done = subprocess.run(
                [*command, *flags, "-o", os.path.join(folder, "kernels.so"), path],
                capture_output=True,
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                timeout=_TIMEOUT_SECONDS,
            )
            if done.returncode == 0:
                with open(os.path.join(folder, "kernels.so"), "rb") as made:
                    return made.read()
            problem = done.stderr.strip() or f"exit status {done.returncode}"
    except FileNotFoundError:
        hint = "install one (apt install g++), or set CXX to a C++17 compiler"
        raise BuildFailed(f"there is no C++ compiler {command[0]!r}", hint=hint) from None
    except subprocess.TimeoutExpired:
        problem = f"no end after {_TIMEOUT_SECONDS:.0f} s"
    except (OSError, Unsafe) as error:
        raise BuildFailed(f"kernels cannot be compiled: {error}", hint="set TMPDIR to a folder of your own") from error
    first = next((line for line in problem.splitlines() if "error" in line), problem.splitlines()[0])
    raise BuildFailed(
        f"{command[0]} failed: {first[:300]}", artifact=_keep({"kernels.cpp": source, "stderr.txt": problem})
    )


def _keep(texts: dict[str, str]) -> str | None:
    """Files for a bug report, in a new private folder; None when that is not possible."""
    try:
        folder = tempfile.mkdtemp(prefix="plait-failed-build-")
        for name, text in texts.items():
            with open(os.path.join(folder, name), "x", encoding="utf-8") as out:
                out.write(text)
    except OSError:
        return None
    return folder


@functools.cache
def compiler_identity() -> str:
    """The compiler's path, version and target; "none" when there is no compiler."""
    command = cxx_command()
    try:
        done = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return "none"
    return f"{' '.join(command)}: {done.stdout.splitlines()[0] if done.stdout else done.returncode}"


@functools.cache
def processor_identity() -> str:
    """What -march=native means here: the machine and its instruction sets."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as text:
            lines = {line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in text if ":" in line}
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    named = [lines.get(k, "") for k in ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")]
    features = hashlib.sha256((lines.get("flags") or lines.get("Features") or "").encode()).hexdigest()[:16]
    return f"{platform.machine()} {' '.join(named).strip()} {features}"


# --------------------------------------------------------------------------------------------------------------- Triton
def build_triton(
    sources: Sequence[TritonSource],
    device: str,
    size_hint: Callable[[Expr], int] | None = None,
    optional: Collection[int] = (),
) -> list[Built]:
    """One entry a kernel. With `size_hint`, kernels are compiled now, for sizes like those; else at their first launch. Those at
    the `optional` places come last, and none is begun once the option budget is used up."""
    if importlib.util.find_spec("triton") is None:
        failed = BuildFailed("triton is not installed", hint="pip install triton")
        return [failed for _ in sources]
    same_as = same_kernels(sources)
    needed = {q for p, q in enumerate(same_as) if p not in optional}
    distinct = sorted((p for p in range(len(sources)) if same_as[p] == p), key=lambda p: p not in needed)
    budget = current()
    expects(len(distinct))

    def build(place: int) -> Built:
        if place not in needed and budget is not None and budget.leaves_out("timed alternative"):
            return BuildFailed(LEFT_OUT)
        with doing("building", sources[place].name):
            return _build_triton_one(sources[place], device, size_hint)

    built = side_by_side(build, distinct)
    done = dict(zip(distinct, built, strict=True))
    return [done[same_as[p]] for p in range(len(sources))]


def same_kernels(sources: Sequence[TritonSource]) -> list[int]:
    """For each source the place of the first that is equal but for its name and its comments."""
    texts: dict[tuple[Any, ...], int] = {}
    return [texts.setdefault(identity(s), place) for place, s in enumerate(sources)]


def identity(s: TritonSource) -> tuple[Any, ...]:
    """Everything that tells a kernel from others, but for its name and its comments; equal in every process."""
    plain = re.sub(rf"\b{re.escape(s.name)}\b", _STAND_IN, _without_comments(s.text, "#"))
    views = s.descriptors if isinstance(s, GluonSource) else ()
    return (plain, s.args, s.programs, s.num_warps, s.num_stages, s.options, s.numbers, views)


def triton_version() -> str:
    """The compiler's, for keys."""
    import triton

    return str(triton.__version__)


def _build_triton_one(source: TritonSource, device: str, size_hint: Callable[[Expr], int] | None) -> Built:
    import triton

    runtime = triton.knobs.runtime

    def watched() -> bool:
        hook = runtime.launch_enter_hook
        return bool(getattr(hook, "calls", hook))

    def providing(call: Callable[[], Any]) -> Any:
        def inside() -> Any:
            triton.set_allocator(lambda size, alignment, stream: scratch_memory(size, torch.device(device)))
            return call()

        # in a context of its own: the allocator of the user's own kernels stays
        return contextvars.copy_context().run(inside)

    try:
        function = import_text(source)
        kernel: TritonKernel | GluonKernel
        if isinstance(source, GluonSource):
            kernel = GluonKernel(source, function, device, watched, _Descriptors())
        else:
            kernel = TritonKernel(source, function, device, watched, providing)
        if size_hint is not None:
            kernel.compile(size_hint)
    except Exception as error:  # Triton raises all kinds; the group then runs in eager, with this reason
        words = str(error).strip()
        return BuildFailed(
            f"Triton failed: {type(error).__name__}: {words.splitlines()[-1][:300] if words else ''}",
            artifact=_keep({f"{source.name}.py": source.text, "error.txt": words}),
        )
    return kernel


class _Descriptors:
    """Makes Triton's tensor descriptors (gluon_kernel.Maker)."""

    def describe(self, d: Descriptor, base: Base, shape: Sequence[int]) -> Any:
        """A descriptor as Triton's entry takes it."""
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        element = gl.bfloat16 if d.dtype is DType.bf16 else gl.float16
        layout = gl.NVMMASharedLayout.get_default_for(list(d.block), element)
        return TensorDescriptor(base, list(shape), list(d.strides), list(d.block), layout)

    def expand(self, compiled: Any, made: Sequence[Any]) -> tuple[Callable[..., Any], list[list[Any]]]:
        """The launcher below the one that makes descriptors anew at every launch, and what it takes for each."""
        from triton.backends.nvidia import driver

        launch, meta = compiled.run.launch, getattr(compiled.metadata, "tensordesc_meta", None)
        names = getattr(getattr(launch, "__code__", None), "co_freevars", ())
        make = getattr(driver, "make_tensordesc_arg", None)
        if make is None or not meta or "launcher" not in names:
            return launch, [[d] for d in made]
        below = launch.__closure__[names.index("launcher")].cell_contents
        return below, [make(d, m) for d, m in zip(made, meta, strict=True)]


@functools.cache
def _source_folder() -> tempfile.TemporaryDirectory[str]:
    """Where Triton modules lie while this process lives: Triton reads a kernel's source from its file."""
    return tempfile.TemporaryDirectory(prefix="plait-triton-", ignore_cleanup_errors=True)


def import_text(source: TritonSource) -> Any:
    """The kernel function of a module we wrote."""
    name = f"plait_{source.name}_{hashlib.sha256(source.text.encode()).hexdigest()[:12]}"
    with _import_lock:
        if name not in sys.modules:
            path = os.path.join(_source_folder().name, f"{name}.py")
            with open(path, "w", encoding="utf-8") as out:
                out.write(source.text)
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            sys.modules[name] = module
    return getattr(sys.modules[name], source.name)


def count_failures(built: Sequence[Built], names: Sequence[str]) -> list[int]:
    """Report each kernel that has none; their places."""
    bad = [k for k, b in enumerate(built) if isinstance(b, BuildFailed)]
    for k in bad:
        failed = built[k]
        assert isinstance(failed, BuildFailed)
        reason = failed.message + (f" ({failed.hint})" if failed.hint else "")
        report.add_fallback(
            report.Fallback(
                reason, "group", names[k], failed.origin or "", report.current().name, failed.artifact or ""
            )
        )
    return bad
