"""Compile an emitted Gluon module for sm_90 without a GPU, and read what the binary takes."""

from __future__ import annotations

import re
from dataclasses import dataclass

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton_module import load_module

from plait.emit.gluon import GluonSource
from plait.ir.dtype import DType
from plait.runtime.binary import POINTERS, disassemble, resource_usage

_ELEMENT = {DType.bf16: ("bf16", gl.bfloat16), DType.f16: ("fp16", gl.float16)}


@dataclass(frozen=True)
class Binary:
    """Registers a thread at launch, bytes of local memory (spills), shared memory, and how often some instructions stand."""

    registers: int
    stack: int
    shared: int
    counts: dict[str, int]
    sass: str = ""

    def __repr__(self) -> str:
        return f"REG {self.registers} STACK {self.stack} SH {self.shared} {self.counts}"


_AT = r"\[U?R\d+(?:\+U?R\d+)?\+(0x[0-9a-f]+)\]"


def stores_over_barriers(sass: str) -> set[str]:
    """Places in shared memory that are waited at as barriers and stored to as something else. No compiler's barrier keeps
    the first warp that goes on from storing before the last has seen that it may."""
    waited, stored = (set(re.findall(rf"\b{op}\S* (?:\w+, )?{_AT}", sass)) for op in (r"SYNCS\.PHASECHK", "STS"))
    assert waited and stored
    return waited & stored


def halves_that_share_a_predicate(sass: str) -> list[str]:
    """Extremes of two sixteen-bit halves that write both comparisons into one predicate: what reads it sees either."""
    return re.findall(r"V\w*MNMX\w*\.[SU]16x2 \w+, (?=(U?P\d), \1,).*?;", sass)


def signature_of(source: GluonSource) -> dict[str, str]:
    """Types of the kernel's parameters, as Triton names them."""
    out: dict[str, str] = {}
    for d in source.descriptors:
        name, element = _ELEMENT[d.dtype]
        layout = gl.NVMMASharedLayout.get_default_for(list(d.block), element)
        out[d.name] = f"tensordesc<{name}{list(d.block)},{layout!r}>"
    for a in source.args:
        out[a.name] = "i32" if a.kind in ("symbol", "draw") else POINTERS[a.dtype]
    return out


def compile_gluon(source: GluonSource) -> Binary:
    """Compile; raises what Triton raises."""
    fn = getattr(load_module(source), source.name)
    signature = signature_of(source)
    attrs = {
        (i,): [["tt.divisibility", 16]] for i, t in enumerate(signature.values()) if not t.startswith("tensordesc")
    }
    options = {"num_warps": source.num_warps, **dict(source.options)}
    kernel = triton.compile(
        GluonASTSource(fn=fn, signature=signature, constexprs={}, attrs=attrs),
        target=GPUTarget("cuda", 90, 32),
        options=options,
    )
    found, sass = resource_usage(kernel.asm["cubin"]), disassemble(kernel.asm["cubin"])
    words = ("HGMMA", "STL", "LDL", "BAR.SYNC", "USETMAXREG", "UTMALDG", "WARPGROUP.DEPBAR", "MUFU", "F2F", "I2F")
    counts = {w: len(re.findall(rf"\b{re.escape(w)}", sass)) for w in words}
    return Binary(found["REG"], found["STACK"] + found["LOCAL"], kernel.metadata.shared, counts, sass)
