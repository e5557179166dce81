"""The parser of tile/text.py's format: print(parse(s)) is s for every s that was printed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from plait.errors import TextError, UserError
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.index import Expr
from plait.ir.parse import DTYPES, Line, leaf_of, read_attrs
from plait.tile.program import Buffer, Check, Dim, Dot, Let, Load, Reduce, Scan, Span, Stmt, Store, Sweep, TileProgram
from plait.tile.schedule import parse_schedule

_INDENT = 4


def parse_programs(text: str) -> list[TileProgram]:
    """Inverse of print_program, of several programs one after another. Raises TextError."""
    out: list[_Reader] = []
    comments: list[str] = []
    for number, raw in enumerate(text.splitlines(), 1):
        if not raw.strip():
            continue
        if raw.startswith("#"):
            comments.append(raw.removeprefix("#").strip())
            continue
        try:
            if raw.startswith("program "):
                out.append(_Reader(header=tuple(comments)))
                comments = []
            if not out:
                raise UserError("a program begins with 'program \"name\"'")
            out[-1].line(raw)
        except (UserError, ValueError, KeyError, IndexError) as error:
            raise TextError("tile", number, str(error), raw.strip()) from error
    return [reader.program() for reader in out]


class _TileLine(Line):
    """A line in which the names of dims mean their places."""

    def __init__(self, text: str, dims: dict[str, int]) -> None:
        super().__init__(text, {}, lambda name: ix.axis(dims[name]) if name in dims else leaf_of(name))
        self.dims = dims

    def dim(self) -> int:
        name = self.take("name")
        if name not in self.dims:
            raise UserError(f"there is no dim {name!r}")
        return self.dims[name]

    def span(self) -> Span:
        self.expect("<")
        out: list[int] = []
        while not self.accept(">"):
            out.append(self.dim())
            self.accept(",")
        return tuple(out)

    def some_dims(self) -> Span:
        out = [self.dim()]
        while self.accept(","):
            out.append(self.dim())
        return tuple(out)

    def numbered(self, letter: str) -> int:
        """v3, b0."""
        name = self.take("name")
        if name[:1] != letter or not name[1:].isdigit():
            raise UserError(f"expected {letter} and a number, found {name!r}")
        return int(name[1:])

    def dtype(self) -> DType:
        name = self.take("name")
        if name not in DTYPES:
            raise UserError(f"there is no type {name!r}")
        return DTYPES[name]

    def guard(self) -> tuple[tuple[Expr, ...], Any]:
        """? (a, b; fill=0.0): guard expressions and the fill."""
        if not self.accept("?"):
            return (), 0
        self.expect("(")
        out = self.exprs(";", ")")
        fill: Any = 0
        if self.accept(";"):
            self.expect("fill")
            self.expect("=")
            fill = self.value()
        self.expect(")")
        return out, fill

    def place(self) -> tuple[int, Expr]:
        """b0[address]."""
        buffer = self.numbered("b")
        self.expect("[")
        address = self.expr()
        self.expect("]")
        return buffer, address


@dataclass
class _Reader:
    """One program, line by line. `open` are the bodies of the sweeps around the next statement."""

    header: tuple[str, ...] = ()
    name: str = ""
    schedule: str = ""
    symbols: tuple[str, ...] = ()
    dims: list[Dim] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    body: list[Any] = field(default_factory=list)
    open: list[tuple[int, list[Any]]] = field(default_factory=list)

    def program(self) -> TileProgram:
        return TileProgram(
            self.name,
            tuple(self.dims),
            tuple(self.buffers),
            self.symbols,
            tuple(_closed(self.body)),
            parse_schedule(self.schedule),
            tuple(self.messages),
            self.header,
        )

    def line(self, raw: str) -> None:
        word, _, rest = raw.partition(" ")
        if word == "schedule":
            parse_schedule(rest)
            self.schedule = rest
            return
        line = _TileLine(raw, {d.name: k for k, d in enumerate(self.dims)})
        if word in ("program", "symbols", "dim", "buffer", "message"):
            line.take("name")
            getattr(self, f"_{word}")(line)
        else:
            self._statement(raw, line)
        line.end()

    def _program(self, line: _TileLine) -> None:
        self.name = line.string()

    def _symbols(self, line: _TileLine) -> None:
        names: list[str] = []
        while line.kind() == "name":
            names.append(line.symbol())
            line.accept(",")
        self.symbols = tuple(names)

    def _dim(self, line: _TileLine) -> None:
        name = line.take("name")
        line.expect(":")
        extent = line.expr()
        self.dims.append(Dim(name, extent, line.take("name")))

    def _buffer(self, line: _TileLine) -> None:
        if line.numbered("b") != len(self.buffers):
            raise UserError(f"the next buffer is b{len(self.buffers)}")
        name = line.string()
        line.expect(":")
        dtype, role = line.dtype(), line.take("name")
        line.expect(",")
        self.buffers.append(Buffer(name, dtype, role, line.expr()))
        line.expect("elements")

    def _message(self, line: _TileLine) -> None:
        if line.integer() != len(self.messages) + 1:
            raise UserError(f"the next message is {len(self.messages) + 1}")
        self.messages.append(line.string())

    # ---------------------------------------------------------------- statements
    def _statement(self, raw: str, line: _TileLine) -> None:
        depth = (len(raw) - len(raw.lstrip())) // _INDENT
        if depth > len(self.open):
            raise UserError("it is indented, and no sweep is open")
        del self.open[depth:]
        into = self.open[-1][1] if self.open else self.body
        if line.accept("sweep"):
            inner: list[Any] = []
            into.append((line.dim(), inner))
            self.open.append((depth, inner))
        else:
            into.append(_statement(line))


def _closed(body: list[Any]) -> Iterator[Stmt]:
    for s in body:
        yield Sweep(s[0], tuple(_closed(s[1]))) if isinstance(s, tuple) else s


def _statement(line: _TileLine) -> Stmt:
    if line.accept("store"):
        buffer, address = line.place()
        line.expect("=")
        value = line.numbered("v")
        line.expect("over")
        span = line.span()
        return Store(buffer, address, value, span, line.guard()[0])
    if line.accept("check"):
        return _check(line)
    out = line.numbered("v")
    line.expect(":")
    dtype, span = line.dtype(), line.span()
    line.expect("=")
    op = line.take("name")
    if op == "load":
        buffer, address = line.place()
        guard, fill = line.guard()
        return Load(out, buffer, address, dtype, span, guard, fill)
    if line.accept("("):
        args: list[int] = []
        while not line.accept(")"):
            args.append(line.numbered("v"))
            line.accept(",")
        return Let(out, op, tuple(args), dtype, span, read_attrs(line))
    arg = line.numbered("v")
    if line.accept("along"):
        return Scan(out, op, arg, line.dim(), dtype, span)
    other, operand = -1, dtype
    if op == "dot":
        line.expect(",")
        other = line.numbered("v")
        line.expect("as")
        operand = line.dtype()
    line.expect("over")
    dims = line.some_dims()
    linear = line.expr() if line.accept("linear") else None
    scale = line.numbered("v") if line.accept("scale") else None
    if op == "dot":
        return Dot(out, op, arg, dims, dtype, span, linear, scale, other, operand)
    return Reduce(out, op, arg, dims, dtype, span, linear, scale)


def _check(line: _TileLine) -> Check:
    if line.integer() != 0:
        raise UserError("a check reads 0 <= index < extent")
    line.expect("<")
    line.expect("=")
    index = line.expr()
    line.expect("<")
    extent = line.expr()
    line.expect("else")
    code = line.integer()
    line.expect("over")
    span = line.span()
    return Check(index, extent, code, span, line.guard()[0])
