"""Text that the Gluon kernels share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from plait.emit.gluon_descriptor import Place

_REGISTERS = (240, 24)  # a thread of the second group (the first has what is left, as many), and of the copying warp


def specialized(parts: Sequence[str]) -> str:
    """The line that sends groups of four warps and, last, the copying warp to their functions."""
    more = len(parts) - 2  # groups beside the first
    warps, registers = [4] * more + [1], [_REGISTERS[0]] * more + [_REGISTERS[1]]
    return f"gl.warp_specialize([{', '.join(parts)}], {warps}, {registers})"


def sides_of(place: Place) -> str:
    """The two sides of a tile in memory."""
    return ", ".join(map(str, place.descriptor.block[-2:]))


def function(name: str, parameters: Iterable[str], lines: Iterable[str]) -> str:
    """The text of a function."""
    return f"@triton.jit\ndef {name}({', '.join(parameters)}):\n" + "\n".join(lines) + "\n"


def accumulator(columns: int) -> str:
    """The layout of 64 rows of a product's result that four warps add up."""
    return f"gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, {columns}, 16])"


def indented(lines: Sequence[str], depth: int = 1) -> list[str]:
    """Lines, some levels further in."""
    return ["    " * depth + line for line in lines]
