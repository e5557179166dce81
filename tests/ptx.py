"""The assembly blocks that emitted kernels hold, on arrays: what Triton's interpreter and the Gluon emulator run in their place.

A block takes `pack` elements of a thread at once. Here a thread has as many as the pack wants; where they are too few, what
the compiler leaves undefined is NaN.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

import numpy as np

_OPS: dict[str, Callable[..., np.ndarray]] = {
    "mul.f32": lambda a, b: a * b,
    "rcp.approx.ftz.f32": lambda a: _flushed(np.float32(1) / _flushed(a)),
    "setp.lt.f32": lambda a, b: a < b,
    "setp.lt.and.f32": lambda a, b, c: (a < b) & c,
}


def _flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def run(text: str, constraints: str, values: np.ndarray, pack: int) -> np.ndarray:
    """What a block of one input and one output gives for float32 `values`."""
    assert constraints == ",".join(["=&f"] * pack + ["f"] * pack) and text[0] == "{" and text[-1] == "}"
    flat = values.astype(np.float32).ravel()
    padded = np.concatenate([flat, np.full(-len(flat) % pack, np.nan, np.float32)]).reshape(-1, pack)
    registers = {f"${pack + i}": padded[:, i] for i in range(pack)}
    goes_on = np.full(len(padded), True)  # threads that have not jumped
    with np.errstate(all="ignore"):
        for line in filter(None, (x.strip() for x in text[1:-1].replace("done:", ";done:;").split(";"))):
            goes_on = _step(line, registers, goes_on)
    return np.stack([registers[f"${i}"] for i in range(pack)], 1).ravel()[: len(flat)].reshape(values.shape)


def _step(line: str, registers: dict[str, np.ndarray], goes_on: np.ndarray) -> np.ndarray:
    """Run a line in the threads that go on; those that do so after it."""
    if line.startswith(".reg"):
        return goes_on
    if line == "done:":
        return np.full(len(goes_on), True)
    if (jump := re.fullmatch(r"@(\w+) bra done", line)) is not None:
        return goes_on & ~registers[jump[1]]
    op, _, rest = line.partition(" ")
    to, *names = (x.strip() for x in rest.split(","))
    args = [_literal(n, len(goes_on)) if n.startswith("0f") else registers[n] for n in names]
    got = _OPS[op](*args)
    registers[to] = np.where(goes_on, got, registers[to]) if to in registers else got
    return goes_on


def _literal(text: str, n: int) -> np.ndarray:
    (x,) = struct.unpack("!f", bytes.fromhex(text[2:]))
    return np.full(n, x, np.float32)
