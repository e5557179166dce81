"""Builds hand-written tile programs into one shared object and runs them on torch tensors."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from plait.emit.cpp import CppKernel, compile_flags, emit_cpp
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.index import Expr
from plait.tile.program import Buffer, Check, Dim, Dot, Let, Load, Reduce, Scan, Stmt, Store, Sweep, TileProgram
from plait.tile.schedule import Schedule

TORCH = {
    DType.b1: torch.bool,
    DType.u8: torch.uint8,
    DType.i8: torch.int8,
    DType.i16: torch.int16,
    DType.i32: torch.int32,
    DType.i64: torch.int64,
    DType.f16: torch.float16,
    DType.bf16: torch.bfloat16,
    DType.f32: torch.float32,
    DType.f64: torch.float64,
    DType.f8e4m3: torch.float8_e4m3fn,
    DType.f8e5m2: torch.float8_e5m2,
}


class Prog:
    """Builds a TileProgram statement by statement; statements made inside `with p.sweep(d)` go into that sweep."""

    def __init__(
        self, name: str, dims: Sequence[tuple[str, Any]], vector: str = "", symbols: Sequence[str] = ()
    ) -> None:
        self.name, self.vector, self.symbols = name, vector, tuple(symbols)
        self.dims = tuple(Dim(n, ix.to_expr(e), "row" if n[0] in "rj" else "grid") for n, e in dims)
        self.buffers: list[Buffer] = []
        self.stack: list[list[Stmt]] = [[]]
        self.spans: list[frozenset[int]] = []
        self.types: list[DType] = []
        self.tile: tuple[tuple[str, int], ...] = ()
        self.messages: list[str] = []

    def buf(self, name: str, dtype: DType, elems: Any, role: str = "in") -> int:
        self.buffers.append(Buffer(name, dtype, role, ix.to_expr(elems)))
        return len(self.buffers) - 1

    def _new(self, dtype: DType, span: frozenset[int]) -> int:
        self.spans.append(span)
        self.types.append(dtype)
        return len(self.types) - 1

    def _span(self, *exprs: Expr) -> frozenset[int]:
        out: frozenset[int] = frozenset()
        for e in exprs:
            out |= e.axes()
            for k in e.values():
                out |= self.spans[k]
        return out

    def let(self, op: str, *args: int, result: DType | None = None, **attrs: Any) -> int:
        dtype = result or self.types[args[-1]]
        flat = [e for v in attrs.values() for e in (v if isinstance(v, tuple) else (v,)) if isinstance(e, Expr)]
        span = self._span(*flat).union(*(self.spans[a] for a in args))
        out = self._new(dtype, span)
        self.stack[-1].append(Let(out, op, args, dtype, tuple(sorted(span)), tuple(sorted(attrs.items()))))
        return out

    def const(self, value: Any, dtype: DType = DType.f32) -> int:
        return self.let("const", result=dtype, value=value)

    def load(self, buffer: int, address: Any, guard: tuple[Expr, ...] = (), fill: Any = 0) -> int:
        address = ix.to_expr(address)
        dtype = self.buffers[buffer].dtype.compute
        span = self._span(address, *guard)
        if self.buffers[buffer].role == "scratch":  # private to a block: the values differ along the grid too
            span |= {i for i, d in enumerate(self.dims) if d.role == "grid"}
        out = self._new(dtype, span)
        self.stack[-1].append(Load(out, buffer, address, dtype, tuple(sorted(span)), guard, fill))
        return out

    def store(self, buffer: int, address: Any, value: int, guard: tuple[Expr, ...] = ()) -> None:
        address = ix.to_expr(address)
        span = self._span(address, *guard) | self.spans[value]
        self.stack[-1].append(Store(buffer, address, value, tuple(sorted(span)), guard))

    def check(self, index: Expr, extent: Any, code: int, guard: tuple[Expr, ...] = ()) -> None:
        span = self._span(index, *guard)
        self.stack[-1].append(Check(index, ix.to_expr(extent), code, tuple(sorted(span)), guard))

    def reduce(
        self, monoid: str, arg: int, dims: Sequence[int], linear: Expr | None = None, scale: int | None = None
    ) -> int:
        dtype = DType.i64 if monoid.startswith("arg") else self.types[arg]
        span = self.spans[arg] - set(dims)
        out = self._new(dtype, span)
        self.stack[-1].append(Reduce(out, monoid, arg, tuple(dims), dtype, tuple(sorted(span)), linear, scale))
        return out

    def dot(self, arg: int, other: int, dims: Sequence[int], operand: DType, scale: int | None = None) -> int:
        span = (self.spans[arg] | self.spans[other]) - set(dims)
        out = self._new(operand.compute, span)
        at = tuple(sorted(span))
        self.stack[-1].append(
            Dot(out, "dot", arg, tuple(dims), operand.compute, at, None, scale, other=other, operand=operand)
        )
        return out

    def scan(self, kind: str, arg: int, dim: int) -> int:
        span = self.spans[arg] | {dim}
        out = self._new(self.types[arg], span)
        self.stack[-1].append(Scan(out, kind, arg, dim, self.types[arg], tuple(sorted(span))))
        return out

    def sweep(self, dim: int) -> _SweepContext:
        return _SweepContext(self, dim)

    def done(self) -> TileProgram:
        assert len(self.stack) == 1
        form = "swept" if any(isinstance(s, Sweep) for s in self.stack[0]) else "flat"
        schedule = Schedule(form=form, tile=self.tile, vector=self.vector)
        return TileProgram(
            self.name,
            self.dims,
            tuple(self.buffers),
            self.symbols,
            tuple(self.stack[0]),
            schedule,
            tuple(self.messages),
            (self.name,),
        )


class _SweepContext:
    def __init__(self, prog: Prog, dim: int) -> None:
        self.prog, self.dim = prog, dim

    def __enter__(self) -> None:
        self.prog.stack.append([])

    def __exit__(self, kind: object, *unused: object) -> None:
        body = self.prog.stack.pop()
        if kind is None:
            self.prog.stack[-1].append(Sweep(self.dim, tuple(body)))


class Library:
    """A compiled translation unit."""

    def __init__(self, kernels: Sequence[CppKernel], folder: Path, extra: Sequence[str] = ()) -> None:
        self.source = emit_cpp(kernels)
        path = folder / "kernels.cpp"
        path.write_text(self.source)
        so = folder / "kernels.so"
        built = subprocess.run(
            ["g++", *compile_flags(), *extra, str(path), "-o", str(so)], capture_output=True, text=True, check=False
        )
        assert built.returncode == 0, built.stderr[:4000]
        self.messages = built.stderr
        self.so = ctypes.CDLL(str(so))

    def run(self, name: str, tensors: Sequence[torch.Tensor], symbols: Sequence[int] = (), threads: int = 2) -> int:
        """Call a kernel on tensors' memory; returns its status."""
        bufs = (ctypes.c_void_p * max(1, len(tensors)))(*(t.data_ptr() for t in tensors))
        syms = (ctypes.c_int64 * max(1, len(symbols)))(*symbols)
        fn = getattr(self.so, name)
        fn.restype = ctypes.c_int
        return int(fn(bufs, syms, ctypes.c_int(threads)))


def compile_programs(programs: Sequence[TileProgram], folder: Path, extra: Sequence[str] = ()) -> Library:
    """One kernel a program."""
    return Library([CppKernel(p.name, (p,)) for p in programs], folder, extra)
