"""Binaries of Triton kernels: compiled for a GPU that is not here, and what they take, read off the binary itself.

Compiling for another architecture needs no card: Triton brings the assembler. Pointers and sizes count as multiples of 16,
as the launcher finds them for most tensors.
"""

from __future__ import annotations

import functools
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plait.emit.triton import TritonSource
from plait.ir.dtype import DType
from plait.options import triton_is_interpreted
from plait.runtime.build import import_text, same_kernels, side_by_side

POINTERS = {
    DType.b1: "*i1",
    DType.u8: "*u8",
    DType.i8: "*i8",
    DType.i16: "*i16",
    DType.i32: "*i32",
    DType.i64: "*i64",
    DType.f16: "*fp16",
    DType.bf16: "*bf16",
    DType.f32: "*fp32",
    DType.f64: "*fp64",
    DType.f8e4m3: "*fp8e4nv",
    DType.f8e5m2: "*fp8e5",
}
_TOOL_SECONDS = 60.0


@dataclass(frozen=True)
class Usage:
    """Of one compiled kernel: registers a thread, bytes of local memory a thread (spills and arrays), bytes of shared memory
    a block, and its warps."""

    registers: int
    spills: int
    shared: int
    warps: int


def cross_compile(source: TritonSource, arch: int) -> Any:
    """Triton's compiled kernel for compute capability `arch` / 10. Raises what Triton raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {a.name: "i32" if a.kind in ("symbol", "draw") else POINTERS[a.dtype] for a in source.args}
    attrs = {(i,): [["tt.divisibility", 16]] for i, _ in enumerate(source.args)}
    options = {"num_warps": source.num_warps, "num_stages": source.num_stages, **dict(source.options)}
    return triton.compile(
        ASTSource(fn=import_text(source), signature=signature, constexprs={}, attrs=attrs),
        target=GPUTarget("cuda", arch, 32),
        options=options,
    )


def usages_for(sources: Sequence[TritonSource], arch: int) -> list[Usage | str]:
    """Each kernel compiled for a card that need not be here, equal ones once: what it takes, or why it does not compile."""
    if triton_is_interpreted():
        return ["TRITON_INTERPRET is set: nothing is compiled" for _ in sources]
    same_as = same_kernels(sources)
    distinct = sorted(set(same_as))
    done = dict(zip(distinct, side_by_side(lambda p: _usage_for(sources[p], arch), distinct), strict=True))
    return [done[p] for p in same_as]


def _usage_for(source: TritonSource, arch: int) -> Usage | str:
    try:
        return usage_of(cross_compile(source, arch))
    except Exception as error:  # Triton raises all kinds; the report says so for this kernel
        words = str(error).strip()
        return f"{type(error).__name__}: {words.splitlines()[-1][:300] if words else ''}"


def usage_of(compiled: Any) -> Usage:
    """What a compiled kernel takes: as the driver says of a loaded one, else read off the binary."""
    metadata = compiled.metadata
    if getattr(compiled, "n_regs", None) is not None:
        return Usage(int(compiled.n_regs), int(compiled.n_spills or 0) * 4, int(metadata.shared), metadata.num_warps)
    found = resource_usage(compiled.asm["cubin"])
    return Usage(found["REG"], found["STACK"] + found["LOCAL"], int(metadata.shared), metadata.num_warps)


def resource_usage(cubin: bytes) -> dict[str, int]:
    """The words of the binary's resource section: REG, STACK, LOCAL, SHARED."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        command = [_tool("cuobjdump"), "-res-usage", f.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TOOL_SECONDS)
    return {k: int(v) for k, v in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", done.stdout)}


def disassemble(cubin: bytes) -> str:
    """The machine code as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        command = [_tool("nvdisasm"), "-c", f.name]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TOOL_SECONDS).stdout


@functools.cache
def _tool(name: str) -> str:
    """A program that Triton brings along."""
    import triton

    return str(pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)
