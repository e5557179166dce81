"""A short way to write TilePrograms by hand, with their tensors, for tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from plait.ir.dtype import DType
from plait.ir.index import Expr, const
from plait.tile.flat import Flat
from plait.tile.pieces import cut_pieces
from plait.tile.program import Buffer, Check, Dim, Let, Load, Reduce, Scan, Stmt, Store, Sweep, TileProgram
from plait.tile.schedule import parse_schedule

F32, F64, I64, I32, B1 = DType.f32, DType.f64, DType.i64, DType.i32, DType.b1
TORCH = {
    torch.float32: DType.f32,
    torch.float64: DType.f64,
    torch.float16: DType.f16,
    torch.bfloat16: DType.bf16,
    torch.int64: DType.i64,
    torch.int32: DType.i32,
    torch.int16: DType.i16,
    torch.int8: DType.i8,
    torch.uint8: DType.u8,
    torch.bool: DType.b1,
    torch.float8_e4m3fn: DType.f8e4m3,
    torch.float8_e5m2: DType.f8e5m2,
}


class Make:
    """Builds one TileProgram: locals number themselves."""

    def __init__(self, dims: str, extents: list[Any], schedule: str, symbols: tuple[str, ...] = ()) -> None:
        self.names = dims.split()
        self.dims = tuple(
            Dim(n, e if isinstance(e, Expr) else const(e), "row" if n[0] in "rj" else "grid")
            for n, e in zip(self.names, extents)
        )
        self.schedule = parse_schedule(schedule)
        self.symbols = symbols
        self.buffers: list[Buffer] = []
        self.tensors: list[torch.Tensor] = []
        self.body: list[Stmt] = []
        self.stack: list[list[Stmt]] = []
        self.spans: dict[int, tuple[int, ...]] = {}
        self.types: dict[int, DType] = {}
        self.messages: list[str] = []

    def buffer(self, t: torch.Tensor, role: str = "in", elems: Expr | None = None) -> int:
        n = len(self.buffers)
        self.buffers.append(Buffer(f"b{n}", TORCH[t.dtype], role, elems or const(max(t.numel(), 1))))
        self.tensors.append(t)
        return n

    def _new(self, span: Any, dtype: DType) -> int:
        n = len(self.types)
        self.spans[n], self.types[n] = tuple(sorted(span)), dtype
        return n

    def load(self, t: torch.Tensor, address: Expr, guard: tuple[Expr, ...] = (), fill: Any = 0, **kw: Any) -> int:
        b = self.buffer(t, **kw)
        span = set(address.axes()) | {i for g in guard for i in g.axes()}
        for k in address.values():
            span |= set(self.spans[k])
        d = self.buffers[b].dtype.compute
        n = self._new(span, d)
        self.body.append(Load(n, b, address, d, self.spans[n], guard, fill))
        return n

    def let(self, op: str, *args: int, dtype: DType | None = None, **attrs: Any) -> int:
        span: set[int] = set()
        for k in args:
            span |= set(self.spans[k])
        for e in (e for a in attrs.values() for e in (a if isinstance(a, tuple) else (a,))):
            if isinstance(e, Expr):
                span |= set(e.axes()).union(*(self.spans[k] for k in e.values()))
        n = self._new(span, dtype or self.types[args[-1]])
        if op == "cast":
            attrs["dtype"] = self.types[n]
        self.body.append(Let(n, op, args, self.types[n], self.spans[n], tuple(sorted(attrs.items()))))
        return n

    def const(self, v: Any, dtype: DType = F32) -> int:
        return self.let("const", dtype=dtype, value=v)

    def reduce(
        self, monoid: str, arg: int, dims: tuple[int, ...], linear: Expr | None = None, dtype: Any = None
    ) -> int:
        d = I64 if linear is not None else dtype or self.types[arg]
        n = self._new(set(self.spans[arg]) - set(dims), d)
        self.body.append(Reduce(n, monoid, arg, dims, d, self.spans[n], linear))
        return n

    def scan(self, scan: str, arg: int, dim: int) -> int:
        n = self._new({*self.spans[arg], dim}, self.types[arg])
        self.body.append(Scan(n, scan, arg, dim, self.types[n], self.spans[n]))
        return n

    def store(self, t: torch.Tensor, address: Expr, v: int, guard: tuple[Expr, ...] = (), **kw: Any) -> int:
        b = self.buffer(t, "out", **kw)
        self.body.append(Store(b, address, v, tuple(sorted({*address.axes(), *self.spans[v]})), guard))
        return b

    def check(self, index: Expr, extent: Expr, message: str) -> None:
        self.messages.append(message)
        span = {i for k in index.values() for i in self.spans[k]} | set(index.axes())
        self.body.append(Check(index, extent, len(self.messages), tuple(sorted(span))))

    def sweep(self, dim: int) -> Make:
        self.sweeping = dim
        return self

    def __enter__(self) -> Make:
        self.stack.append(self.body)
        self.body = [self.sweeping]  # type: ignore[list-item]
        return self

    def __exit__(self, *exc: Any) -> None:
        dim, *body = self.body
        self.body = self.stack.pop()
        self.body.append(Sweep(dim, tuple(body)))  # type: ignore[arg-type]

    def cut(self) -> Make:
        """With dims cut at their guards (tile/pieces)."""
        flat = cut_pieces(Flat(self.dims, tuple(self.buffers), (), tuple(self.body), tuple(self.messages)))
        self.dims, self.body = flat.dims, list(flat.stmts)
        return self

    def program(self, name: str = "k") -> TileProgram:
        return TileProgram(
            name,
            self.dims,
            tuple(self.buffers),
            self.symbols,
            tuple(self.body),
            self.schedule,
            tuple(self.messages),
        )


@dataclass
class Case:
    """`expected` holds torch's values of the output buffers, in order; `fault` the failing code to see; `more` are
    parts beside the first."""

    make: Make
    expected: list[torch.Tensor]
    sizes: dict[str, int] = field(default_factory=dict)
    fault: int = 0
    rtol: float = 2e-6
    atol: float = 1e-6
    more: list[Make] = field(default_factory=list)


CASES: dict[str, Callable[[], Case]] = {}


def case(f: Callable[[], Case]) -> Callable[[], Case]:
    """Register a case."""
    CASES[f.__name__] = f
    return f


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)
