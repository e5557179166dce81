"""What the function of every part has around its body: symbols, arguments, the amount of work, and a thread's share of the grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from plait.emit.cpp_ops import memory_type
from plait.emit.cpp_scope import Scope
from plait.emit.writer import Writer
from plait.errors import LowerFailed
from plait.ir import index as ix
from plait.tile.program import Sweep


@contextmanager
def part_frame(out: Writer, name: str, number: int, scope: Scope, scratch_lanes: int) -> Iterator[None]:
    """The two functions of a part: how much work it is, and the part itself, whose body is written inside the `with`."""
    program = scope.program
    if any(d.role not in ("grid", "row") for d in program.dims):
        raise LowerFailed("dims are grid or row")
    out.lines(*(f"// {h}" for text in (*program.header, str(program.schedule)) for h in text.splitlines()))
    with out.block(f"static int64_t {name}_work{number}(const int64_t* syms) {{", "}"):
        _symbols(out, scope)
        weight = max(1, sum(not isinstance(s, Sweep) for s in program.walk()))
        out.line(f"return INT64_C({weight}) * ({scope.expr(ix.product(d.extent for d in program.dims))});")
    opening = f"static void {name}_part{number}(void* const* bufs, const int64_t* syms, plait::Worker worker, plait::Status& status) {{"
    with out.block(opening, "}"):
        _symbols(out, scope)
        _arguments(out, scope, scratch_lanes)
        yield
        out.line(f"status.report({number}, fault);")
    out.line()


def _symbols(out: Writer, scope: Scope) -> None:
    for i, s in enumerate(scope.program.symbols):
        out.line(f"[[maybe_unused]] const int64_t {scope.symbols[s]} = syms[{i}];")
    for i, name in enumerate(scope.draws.values(), len(scope.program.symbols)):
        out.line(f"[[maybe_unused]] const uint32_t {name} = static_cast<uint32_t>(syms[{i}]);")


def _arguments(out: Writer, scope: Scope, scratch_lanes: int) -> None:
    position = 0
    for b, name in zip(scope.program.buffers, scope.buffers, strict=True):
        ctype = memory_type(b.dtype)
        if b.role == "scratch":
            lanes = f"({scope.expr(b.elems)}) * {scratch_lanes}" if scratch_lanes > 1 else scope.expr(b.elems)
            out.line(f"plait::Scratch<{ctype}> {name}_memory({lanes});")
            out.line(f"{ctype}* const {name} = {name}_memory.data();")
            continue
        const = "const " if b.role == "in" else ""
        out.line(f"{const}{ctype}* const {name} = static_cast<{const}{ctype}*>(bufs[{position}]);")
        position += 1
    for d, name in zip(scope.program.dims, scope.dims, strict=True):
        out.line(f"[[maybe_unused]] const int64_t {name}_n = {scope.expr(d.extent)};")
    out.line("int fault = 0;")


@contextmanager
def items(out: Writer, number: int, counters: Sequence[tuple[str, str]]) -> Iterator[None]:
    """The loop over this worker's share of the grid; `counters` (variable, how many) advance like an odometer."""
    out.line(f"const int64_t items = {' * '.join(n for _, n in counters) or '1'};")
    out.line(f"const auto [begin, end] = worker.share(items, {number});")
    out.line("if (begin == end) return;")
    if counters:
        out.line("int64_t rest = begin;")
    for k, (at, n) in enumerate(reversed(counters)):
        if k == len(counters) - 1:
            out.line(f"int64_t {at} = rest;")
        else:
            out.lines(f"int64_t {at} = rest % {n};", f"rest /= {n};")
    with out.block("for (int64_t item = begin; item < end; ++item) {", "}"):
        yield
        _advance(out, counters)


def _advance(out: Writer, counters: Sequence[tuple[str, str]]) -> None:
    if not counters:
        return
    text = f"++{counters[0][0]};"
    for at, n in counters[1:]:
        text = f"if (++{at} == {n}) {{ {at} = 0; {text} }}"
    out.line(text)
