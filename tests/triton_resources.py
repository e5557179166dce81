"""Compile an emitted Triton module for sm_90 without a GPU, and read what the binary takes.

Pointers and sizes are taken as multiples of 16, as the launcher finds them for most tensors.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import tempfile
from dataclasses import dataclass

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton_module import load_module

from plait.emit.triton import TritonSource
from plait.ir.dtype import DType

_POINTERS = {
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


@dataclass(frozen=True)
class Resources:
    """Of one compiled kernel: registers a thread, bytes of local memory (spills and arrays), static shared memory."""

    registers: int
    stack: int
    shared: int
    ptx: str
    cubin: bytes = b""

    @property
    def widest_load(self) -> int:
        """Words of the widest global load."""
        return max((int(n or 1) for n in re.findall(r"ld\.global(?:\.\w+)*?(?:\.v(\d))?\.b32", self.ptx)), default=0)


def compile_sm90(source: TritonSource) -> Resources:
    """Compile; raises what Triton raises."""
    fn = getattr(load_module(source), source.name)
    signature = {a.name: "i32" if a.kind in ("symbol", "draw") else _POINTERS[a.dtype] for a in source.args}
    attrs = {(i,): [["tt.divisibility", 16]] for i, _ in enumerate(source.args)}
    options = {"num_warps": source.num_warps, "num_stages": source.num_stages, **dict(source.options)}
    kernel = triton.compile(
        ASTSource(fn=fn, signature=signature, constexprs={}, attrs=attrs),
        target=GPUTarget("cuda", 90, 32),
        options=options,
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(kernel.asm["cubin"])
        f.flush()
        tool = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        text = subprocess.run([str(tool), "-res-usage", f.name], capture_output=True, text=True, check=True).stdout
    found = {k: int(v) for k, v in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", text)}
    return Resources(
        found["REG"], found["STACK"] + found["LOCAL"], kernel.metadata.shared, kernel.asm["ptx"], kernel.asm["cubin"]
    )


def sass(r: Resources) -> list[str]:
    """The machine instructions, one a line."""
    tool = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(r.cubin)
        f.flush()
        text = subprocess.run([str(tool), "-c", f.name], capture_output=True, text=True, check=True).stdout
    return [m.group(1).strip() for m in re.finditer(r"/\*[0-9a-f]{4}\*/\s+(.*?);", text)]
