"""Kernels built for processors other than this one: loading them resolves every symbol, without running an instruction."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from cpp_run import Prog, compile_programs

from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.tile.program import TileProgram

DRAWS = (("rand", DType.f32), ("rand", DType.f64), ("randn", DType.f32), ("randbits", DType.i64))


def draw(op: str, dtype: DType) -> TileProgram:
    p = Prog(f"{op}_{dtype.value}", [("p0", 5000)], vector="p0")
    seed, offset, o = p.buf("seed", DType.i64, 1), p.buf("offset", DType.i64, 1), p.buf("o", dtype, 5000, "out")
    at = ix.axis(0)
    p.store(o, at, p.let(op, p.load(seed, 0), p.load(offset, 0), result=dtype, dtype=dtype, draw=3, linear=at))
    return p.done()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names x86 instruction sets")
@pytest.mark.parametrize("arch", ["x86-64", "haswell", "skylake-avx512"])
def test_random_kernels_find_their_vector_versions(arch: str, tmp_path: Path) -> None:
    library = compile_programs([draw(*d) for d in DRAWS], tmp_path, [f"-march={arch}"])
    assert all(hasattr(library.so, f"{op}_{dtype.value}") for op, dtype in DRAWS)
