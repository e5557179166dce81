"""Emits one C++ translation unit for the kernels of a graph.

A kernel is `extern "C" int NAME(void* const* bufs, const int64_t* syms, int threads)`: `bufs` are the data pointers of all
buffers but scratch, of all parts in order; `syms` the numbers of all parts in order. It returns 0, or 1000*part + code of
a failed Check (999: an integer division by zero). Parts run side by side in one parallel region.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from plait.emit.cpp_body import Body
from plait.emit.cpp_frame import items, part_frame
from plait.emit.cpp_leaf import State
from plait.emit.cpp_scope import Scope, guard_by_checks
from plait.emit.cpp_tiles import emit_tiled_part, is_tiled
from plait.emit.writer import Writer, identifier
from plait.ir.fault import passed
from plait.tile.program import TileProgram

HEADERS = (
    "plait.h",
    "plait_types.h",
    "plait_math.h",
    "plait_elementary.h",
    "plait_special.h",
    "plait_reduce.h",
    "plait_random.h",
    "plait_dot.h",
)
"""Our headers, beside this file; every kernel includes the first, which includes all but the last two."""

_STRIP = 1024  # points of a strip when the schedule gives none
_WIDEST_STRIP = 4096
_ROW_STRIP = 128  # of a row dim with sweeps inside


@dataclass(frozen=True)
class CppKernel:
    """A kernel of one or more independent parts."""

    name: str
    parts: tuple[TileProgram, ...]


def include_dir() -> Path:
    """Where the headers are."""
    return Path(__file__).parent


def header_text() -> str:
    """All headers' text: what, besides the source itself, a compiled kernel depends on."""
    return "".join((include_dir() / h).read_text() for h in HEADERS)


def compile_flags(level: str = "-O3") -> list[str]:
    """Flags for g++ (9 or later) or clang, at a level of its optimiser. Never -ffast-math: NaN, infinities, signed zeros and subnormals are kept."""
    tune = ["-march=native"] if platform.machine() in ("x86_64", "AMD64", "aarch64") else []
    return [
        "-std=c++17",
        level,
        *tune,
        "-fopenmp",
        "-fPIC",
        "-shared",
        "-fwrapv",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
        # loops that clear a few lanes must not become calls of memset
        "-fno-tree-loop-distribute-patterns",
        "-fno-semantic-interposition",
        "-fvisibility=hidden",
        f"-I{include_dir()}",
    ]


def emit_cpp(kernels: Sequence[CppKernel]) -> str:
    """The source text of one translation unit."""
    kernels = [replace(k, parts=tuple(passed("code", p) for p in k.parts)) for k in kernels]
    out = Writer()
    out.line('#include "plait.h"')
    if any(p.draws for k in kernels for p in k.parts):
        out.line('#include "plait_random.h"')
    if any(is_tiled(p) for k in kernels for p in k.parts):
        out.line('#include "plait_dot.h"')
    out.line()
    for k in kernels:
        for number, part in enumerate(k.parts):
            emit = emit_tiled_part if is_tiled(part) else _emit_part
            emit(out, identifier(k.name), number, guard_by_checks(part))
        _emit_entry(out, k)
    return out.text()


def _emit_entry(out: Writer, kernel: CppKernel) -> None:
    name = identifier(kernel.name)
    opening = f'extern "C" __attribute__((visibility("default"))) int {name}(void* const* bufs, const int64_t* syms, int threads) {{'
    with out.block(opening, "}"):
        out.line("plait::Status status;")
        buf = sym = 0
        places: list[tuple[int, int]] = []
        work: list[str] = []
        for number, part in enumerate(kernel.parts):
            places.append((buf, sym))
            work.append(f"{name}_work{number}(syms + {sym})")
            buf += sum(b.role != "scratch" for b in part.buffers)
            sym += len(part.numbers)
        out.line(f"const int64_t work = {' + '.join(work) or '0'};")
        with out.block("plait::team(work, threads, [&](plait::Worker worker) {", "});"):
            for number, (b, s) in enumerate(places):
                out.line(f"{name}_part{number}(bufs + {b}, syms + {s}, worker, status);")
        out.line("return status.code;")
    out.line()


def _emit_part(out: Writer, name: str, number: int, program: TileProgram) -> None:
    vector = next((i for i, d in enumerate(program.dims) if d.name == program.schedule.vector), None)
    scope = Scope(program, vector)
    by_grid = vector is not None and program.dims[vector].role == "grid"
    width = _ROW_STRIP
    if by_grid and vector is not None:
        size = program.schedule.size(program.dims[vector].name)
        width = min(size if size > 1 else _STRIP, _WIDEST_STRIP)
    state = State(scope, out, width, by_grid)
    with part_frame(out, name, number, scope, width if by_grid else 1):
        _grid(out, scope, state, number, by_grid)


def _grid(out: Writer, scope: Scope, state: State, number: int, by_grid: bool) -> None:
    """The loop over this worker's share of the grid, counters advanced like an odometer."""
    grid = [i for i, d in enumerate(scope.program.dims) if d.role == "grid"]
    counters: list[tuple[str, str]] = []
    for i in grid:
        if i == scope.vector:
            out.line(f"const int64_t {scope.dims[i]}_tiles = plait::ceildiv({scope.dims[i]}_n, {state.width});")
            counters.append((f"{scope.dims[i]}_tile", f"{scope.dims[i]}_tiles"))
        else:
            counters.append((f"{scope.dims[i]}_at", f"{scope.dims[i]}_n"))
    with items(out, number, counters):
        for i, (at, _) in zip(grid, counters, strict=True):
            name = scope.dims[i]
            if i == scope.vector:
                out.line(f"const int64_t {name}_lo = {at} * {state.width};")
                out.line(f"const int64_t {name}_hi = plait::lesser({name}_n, {name}_lo + {state.width});")
            else:
                out.line(f"[[maybe_unused]] const int64_t {name} = {at};")
        Body(state, by_grid).emit()
