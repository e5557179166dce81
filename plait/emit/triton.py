"""TileProgram to Triton source: one module with one kernel, to be compiled by Triton 3.6 or run by its interpreter.

The grid is one-dimensional: the tiles of the grid dims, row-major, the last dim fastest. Arguments are the buffers'
pointers in order, then the run-time sizes, then (when the program checks indices) a pointer to one int32 into which
failing lanes put the greatest failing code. Nothing is read at an index that fails its Check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.emit.triton_body import Emitter, TritonArg, decorator
from plait.emit.triton_helpers import closure
from plait.emit.triton_index import size_name
from plait.errors import LowerFailed
from plait.ir import index as ix
from plait.ir.fault import passed
from plait.ir.index import Expr
from plait.tile.program import TileProgram

__all__ = ["TritonArg", "TritonSource", "emit_triton"]

MAX_PROGRAMS = 2**31 - 1


@dataclass(frozen=True)
class TritonSource:
    """A module text whose function `name` is the kernel; launched as kernel[(programs,)](*args, num_warps=…, num_stages=…)
    with `options` too. `programs` counts blocks, over the symbols; an empty grid (0) is not launched. `has_fault`: the last
    argument is one int32, zero before the launch, and the 1-based greatest failing code of `messages` after it."""

    name: str
    text: str
    args: tuple[TritonArg, ...]
    programs: Expr
    num_warps: int
    num_stages: int
    has_fault: bool
    messages: tuple[str, ...] = ()
    options: tuple[tuple[str, bool], ...] = ()
    numbers: tuple[str, ...] = ()
    """Parameters that are numbers, in the order of the parts and of each part's `numbers`."""
    aligned: frozenset[str] = frozenset()
    """Buffer parameters that must begin at a multiple of 16 bytes."""


def emit_triton(parts: TileProgram | Sequence[TileProgram], name: str, *, f8_saturates: bool = True) -> TritonSource:
    """The kernel of a program, or of several independent ones side by side (parts: each takes a range of the blocks).
    Raises LowerFailed for what this backend does not do (scratch buffers among it). `f8_saturates`: f8e4m3 values out of
    range become 448, as eager of torch 2.13 has it; before, they became NaN."""
    programs = tuple(passed("code", p) for p in ((parts,) if isinstance(parts, TileProgram) else parts))
    emitters: list[Emitter] = []
    for p in programs:
        emitters.append(Emitter(p, len(emitters), sum(len(e.program.messages) for e in emitters), len(programs) == 1))
    if len(programs) == 1:
        body, args = emitters[0].function(name, "tl.program_id(0)"), emitters[0].args
        (e,) = emitters
        blocks = e.walk.programs if e.walk else e.grid.programs
    else:
        body, args, blocks = _side_by_side(emitters, name)
    if blocks.const is not None and blocks.const > MAX_PROGRAMS:
        raise LowerFailed(f"{name}: {blocks.const} blocks")
    if not f8_saturates:
        body = body.replace("_to_f8e4m3(", "_to_f8e4m3_nan(")
    helpers = closure(body)
    return TritonSource(
        name=name,
        text="\n\n".join([_head(programs, "".join(helpers) + body), *helpers, body]),
        args=args,
        programs=blocks,
        num_warps=max(p.schedule.warps for p in programs),
        num_stages=max(p.schedule.stages for p in programs),
        has_fault=args[-1:] != () and args[-1].kind == "fault",
        messages=tuple(m for p in programs for m in p.messages),
        numbers=tuple(name for e in emitters for name in (*e.program.symbols, *e.draws.values())),
        aligned=frozenset(name for e in emitters for name in (e.walk.aligned if e.walk else ())),
        options=(("enable_fp_fusion", all(e.accuracy.may_contract for e in emitters)),),
    )


def _head(programs: Sequence[TileProgram], text: str) -> str:
    out: list[str] = []
    for p in programs:
        out += [*(f"# {' '.join(line.splitlines())}".rstrip() for line in p.header), f"# {p.schedule}"]
    out += ["import triton", "import triton.language as tl"]
    if "libdevice." in text:
        out.append("from triton.language.extra import libdevice")
    return "\n".join(out) + "\n"


def _side_by_side(emitters: list[Emitter], name: str) -> tuple[str, tuple[TritonArg, ...], Expr]:
    """A device function for every part, and a kernel that finds a block's part by ranges."""
    functions = [e.function(f"part{e.number}", "pid", ("pid",)) for e in emitters]
    args: dict[str, TritonArg] = {}
    for e in emitters:
        args |= {a.name: a for a in e.args}
    ordered = sorted(args.values(), key=lambda a: ("buffer", "symbol", "draw", "fault").index(a.kind))
    lines = ["pid = tl.program_id(0)"]
    symbols = dict.fromkeys(s for e in emitters for s in e.program.symbols)
    lines += [f"{size_name(s)} = tl.cast({s}, tl.int64)" for s in symbols]
    end = ix.ZERO
    for e in emitters:
        start, end = end, end + e.grid.programs
        test = f"{'el' if e.number else ''}if pid < {e.ix.text(end, ())}:"
        call = ", ".join(a.name for a in e.args)
        lines += [test, f"    part{e.number}(pid - ({e.ix.text(start, ())}), {call})"]
    kernel = f"{decorator(ordered)}\ndef {name}({', '.join(a.name for a in ordered)}):\n"
    kernel += "".join(f"    {line}\n" for line in lines)
    return "\n\n".join([*functions, kernel]), tuple(ordered), end
