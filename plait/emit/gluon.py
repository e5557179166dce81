"""TileProgram to Gluon source, Triton's lower dialect: kernels for Hopper whose layouts, copies and barriers are spelled out.

It takes programs that stream tiles through two products (emit/gluon_shape says which), and products with what happens to
their results (emit/gluon_product); it raises LowerFailed for all others. Plain Triton takes every program.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from plait.emit.gluon_body import GluonEmitter
from plait.emit.gluon_descriptor import Descriptor
from plait.emit.gluon_product import ProductEmitter, product_of
from plait.emit.gluon_shape import rescheduled, stream_of
from plait.emit.triton import MAX_PROGRAMS, TritonSource
from plait.emit.triton_helpers import closure
from plait.errors import LowerFailed
from plait.ir.fault import passed
from plait.tile.program import TileProgram

__all__ = ["CAPABILITY", "Descriptor", "GluonSource", "emit_gluon"]

CAPABILITY = 9  # of the cards whose instructions this is written for

_KNOWN = frozenset(
    [
        "abs",
        "cast",
        "ceil",
        "cos",
        "div_rn",
        "erf",
        "exp",
        "exp2",
        "fma",
        "floor",
        "full",
        "inline_asm_elementwise",
        "log",
        "log2",
        "load",
        "maximum",
        "minimum",
        "num_programs",
        "program_id",
        "reduce",
        "rsqrt",
        "sin",
        "sqrt",
        "sqrt_rn",
        "static_range",
        "store",
        "sum",
        "where",
        "zeros_like",
        "int1",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "float8e4nv",
        "float8e5",
        "constexpr",
    ]
)
_PLAIN = re.compile(r"\btl\.(\w+)")
_HEAD = """import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait
"""


@dataclass(frozen=True)
class GluonSource(TritonSource):
    """See TritonSource. The kernel takes `descriptors` first, then the pointers and numbers of `args`. `by_rows`: its loop is
    bounded by numbers that it loads."""

    descriptors: tuple[Descriptor, ...] = ()
    by_rows: bool = False


def emit_gluon(program: TileProgram, name: str) -> GluonSource:
    """The kernel of a program of one of the two kinds. Raises LowerFailed for any other."""
    emitter = _emitter(passed("code", program))
    program = emitter.program
    body, pointers = emitter.module(name)
    blocks = emitter.programs
    if blocks.const is not None and not 0 < blocks.const <= MAX_PROGRAMS:
        raise LowerFailed(f"{name}: {blocks.const} blocks")
    comments = [f"# {' '.join(line.splitlines())}".rstrip() for line in (*program.header, str(program.schedule))]
    head = "\n".join(comments) + "\n" + _HEAD
    text = "\n\n".join([*closure(body), body])
    if "libdevice." in text:
        head += "from triton.experimental.gluon.language.extra import libdevice\n"
    args = tuple(a for a in emitter.args if a.kind != "buffer" or a.name in pointers)
    return GluonSource(
        name=name,
        text=head + "\n\n" + in_gluon(text),
        args=args,
        programs=blocks,
        num_warps=4,
        num_stages=1,
        has_fault=False,
        numbers=program.symbols,
        options=(("enable_fp_fusion", emitter.accuracy.may_contract),),
        descriptors=tuple(p.descriptor for p in emitter.places.values()),
        by_rows=isinstance(emitter, GluonEmitter) and bool(emitter.ends),
    )


def _emitter(program: TileProgram) -> GluonEmitter | ProductEmitter:
    try:
        return ProductEmitter(program, product_of(program))
    except LowerFailed as failed:
        other = failed.message
    try:
        stream = stream_of(program)
    except LowerFailed as failed:
        raise LowerFailed(f"no products alone: {other}; no stream: {failed.message}") from None
    return GluonEmitter(rescheduled(program, stream), stream)


def in_gluon(text: str) -> str:
    """Triton's text in its dialect: the same functions under another name."""

    def renamed(m: re.Match[str]) -> str:
        if m.group(1) == "PropagateNan":
            return m.group(0)
        if m.group(1) not in _KNOWN:
            raise LowerFailed(f"there is no gl.{m.group(1)}")
        return f"gl.{m.group(1)}"

    return _PLAIN.sub(renamed, text).replace("@triton.jit", "@gluon.jit")
