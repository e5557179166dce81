"""Storage conversions and casts of the C++ emitter, bit for bit as torch's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cpp_run import TORCH, Library, Prog, compile_programs

from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.tile.program import TileProgram

A = ix.axis
STORAGE = (DType.f16, DType.bf16, DType.f8e4m3, DType.f8e5m2)
COMPUTE = (DType.b1, DType.u8, DType.i8, DType.i16, DType.i32, DType.i64, DType.f32, DType.f64)


def cast_program(source: DType, target: DType) -> TileProgram:
    n = ix.sym("n")
    p = Prog(f"cast_{source.value}_{target.value}", [("p0", n)], vector="p0", symbols=["n"])
    x, o = p.buf("x", source, n), p.buf("o", target, n, "out")
    v = p.load(x, A(0))
    if source.compute is not target.compute:
        v = p.let("cast", v, result=target.compute, dtype=target.compute)
    p.store(o, A(0), v)
    return p.done()


def round_program(target: DType) -> TileProgram:
    n = ix.sym("n")
    p = Prog(f"round_{target.value}", [("p0", n)], vector="p0", symbols=["n"])
    x, o = p.buf("x", DType.f32, n), p.buf("o", DType.f32, n, "out")
    p.store(o, A(0), p.let("round", p.load(x, A(0)), result=DType.f32, dtype=target))
    return p.done()


def bitcast_program(source: DType, target: DType) -> TileProgram:
    p = Prog(f"bits_{source.value}_{target.value}", [("p0", 64)], vector="p0")
    x, o = p.buf("x", source, 64), p.buf("o", target, 64, "out")
    p.store(o, A(0), p.let("bitcast", p.load(x, A(0)), result=target.compute, dtype=target))
    return p.done()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    casts = [cast_program(a, b) for a in COMPUTE for b in COMPUTE if a is not b]
    casts += [cast_program(a, DType.f32) for a in STORAGE] + [cast_program(DType.f32, a) for a in STORAGE]
    casts += [round_program(a) for a in STORAGE]
    casts += [
        bitcast_program(a, b) for a, b in ((DType.f32, DType.i32), (DType.i64, DType.f64), (DType.i16, DType.bf16))
    ]
    return compile_programs(casts, tmp_path_factory.mktemp("types"), ["-O2", "-ftree-vectorize"])


def halves() -> torch.Tensor:
    """f32 values around every boundary that rounding to 16 or 8 bits has: neighbours of halfway points, and random bits."""
    torch.manual_seed(0)
    high = torch.arange(0, 1 << 16, dtype=torch.int64) << 16
    bits = torch.cat([high + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0x1000, 0x0FFF, 0x1001, 0xFFFF)])
    bits = torch.cat([bits, torch.randint(0, 1 << 32, (200_000,), dtype=torch.int64)])
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Equal bits, or NaN in both."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    equal = a.view(kind) == b.view(kind)
    return equal | (a.isnan() & b.isnan()) if a.dtype.is_floating_point else equal


@pytest.mark.parametrize("dtype", STORAGE)
def test_storage_types_convert_up_and_down(library: Library, dtype: DType) -> None:
    width = 8 * dtype.nbytes
    codes = torch.arange(1 << width).to(torch.uint8 if width == 8 else torch.int32)
    x = (codes if width == 8 else codes.to(torch.int16)).view(TORCH[dtype])
    up = torch.empty(len(x))
    assert library.run(f"cast_{dtype.value}_f32", [x, up], [len(x)]) == 0
    assert same(up, x.float()).all()
    f = halves()
    down = torch.empty(len(f), dtype=TORCH[dtype])
    assert library.run(f"cast_f32_{dtype.value}", [f, down], [len(f)]) == 0
    want = f.to(TORCH[dtype])
    bad = (~same(down.float(), want.float())).nonzero()[:5, 0]
    assert len(bad) == 0, (f[bad], down[bad], want[bad])
    back = torch.empty(len(f))
    assert library.run(f"round_{dtype.value}", [f, back], [len(f)]) == 0
    assert same(back, want.float()).all()


def test_large_values_become_nan_in_f8e4m3_as_they_did_before_torch_2_13(tmp_path: Path) -> None:
    library = compile_programs([cast_program(DType.f32, DType.f8e4m3)], tmp_path, ["-DPLAIT_F8E4M3_NAN"])
    f = halves()
    down = torch.empty(len(f), dtype=torch.float8_e4m3fn)
    assert library.run("cast_f32_f8e4m3", [f, down], [len(f)]) == 0
    large = ~(f.abs() <= 464)
    assert down[large].float().isnan().all()
    assert same(down[~large], f[~large].to(torch.float8_e4m3fn)).all()


def sample(dtype: DType) -> torch.Tensor:
    """Values of a compute type with the extremes among them."""
    torch.manual_seed(1)
    t = TORCH[dtype]
    if dtype is DType.b1:
        return torch.arange(100) % 3 == 0
    if dtype.is_int:
        info = torch.iinfo(t)
        ends = torch.tensor([info.min, info.max, 0, 1, info.max - 1], dtype=torch.int64)
        around = [
            s * ((1 << k) + (1 << max(k - h, 0)) + d)
            for k in range(24, 63)
            for h in (0, 1, 24, 25)
            for d in (-1, 0, 1, 3)
            for s in (1, -1)
        ]
        around = torch.tensor([v for v in around if abs(v) < 1 << 63], dtype=torch.int64)
        return torch.cat([ends, around, torch.randint(info.min, info.max, (500,), dtype=torch.int64)]).to(t)
    special = [
        0.0,
        -0.0,
        0.5,
        -0.5,
        1.0,
        -1.0,
        255.0,
        256.0,
        300.7,
        -1.5,
        -300.2,
        65535.0,
        70000.0,
        1e-40,
        2.1e9,
        -2.1e9,
    ]
    return torch.cat([torch.tensor(special, dtype=t), torch.randn(500, dtype=t) * 100])


def test_casts_between_compute_types(library: Library) -> None:
    for a in COMPUTE:
        x = sample(a)
        for b in COMPUTE:
            if a is b:
                continue
            o = torch.empty(len(x), dtype=TORCH[b])
            assert library.run(f"cast_{a.value}_{b.value}", [x, o], [len(x)]) == 0
            want = x.to(TORCH[b])
            bad = (~same(o, want)).nonzero()[:5, 0]
            assert len(bad) == 0, (a, b, x[bad], o[bad], want[bad])


def test_casts_of_nan_and_infinity_to_integers_are_those_of_the_processor(library: Library) -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 3e9, -3e9])
    for b in (DType.i32, DType.i64, DType.b1):
        o = torch.empty(len(x), dtype=TORCH[b])
        assert library.run(f"cast_f32_{b.value}", [x, o], [len(x)]) == 0
        assert (o == x.to(TORCH[b])).all(), (b, o, x.to(TORCH[b]))


def test_bitcast(library: Library) -> None:
    f = torch.randn(64)
    o = torch.empty(64, dtype=torch.int32)
    assert library.run("bits_f32_i32", [f, o]) == 0 and (o == f.view(torch.int32)).all()
    w = torch.randn(64, dtype=torch.float64).view(torch.int64)
    d = torch.empty(64, dtype=torch.float64)
    assert library.run("bits_i64_f64", [w, d]) == 0 and (d == w.view(torch.float64)).all()
    s = torch.randn(64).to(torch.bfloat16).view(torch.int16)
    b = torch.empty(64, dtype=torch.bfloat16)
    assert library.run("bits_i16_bf16", [s, b]) == 0 and (b == s.view(torch.bfloat16)).all()
