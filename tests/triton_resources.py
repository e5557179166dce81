"""Compile an emitted Triton module for sm_90 without a GPU, and read what the binary takes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from plait.emit.triton import TritonSource
from plait.runtime.binary import cross_compile, disassemble, usage_of


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
    kernel = cross_compile(source, 90)
    usage = usage_of(kernel)
    return Resources(usage.registers, usage.spills, usage.shared, kernel.asm["ptx"], kernel.asm["cubin"])


def sass(r: Resources) -> list[str]:
    """The machine instructions, one a line."""
    return [m.group(1).strip() for m in re.finditer(r"/\*[0-9a-f]{4}\*/\s+(.*?);", disassemble(r.cubin))]
