"""The parser of ir/text.py's format. Data is never executed: every value is read by the little grammar below.

Nodes are rebuilt by a Builder, so the types written are checked against the types inferred (N1), and keep their serials.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from plait.errors import TextError, UserError
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.graph import Arg, Builder, Graph, Input, Layout, Node, Origin, Output, Read, Region, Shape
from plait.ir.index import Expr
from plait.ir.ops import TypeMismatch

T = TypeVar("T")
_TOKEN = re.compile(
    r"""\s*(?:
    (?P<string>"(?:[^"\\]|\\.)*")
  | (?P<float>\d+\.\d*(?:e[+-]?\d+)?|\d+e[+-]?\d+)
  | (?P<int>\d+)
  | (?P<node>%[A-Za-z_]\w*_\d+)
  | (?P<name>@?[A-Za-z_]\w*)
  | (?P<mark>//|[-+*%()\[\]{}<>,;:=?|$])
)""",
    re.VERBOSE,
)
_WORDS: dict[str, Any] = {"None": None, "True": True, "False": False, "inf": float("inf"), "nan": float("nan")}
DTYPES = {d.value: d for d in DType}


def parse_expr(text: str) -> Expr:
    """An index expression."""
    return _parse_all(text, lambda line: line.expr())


def parse_value(text: str) -> Any:
    """An attribute's value; node names are not known here."""
    return _parse_all(text, lambda line: line.value())


def parse_graph(text: str) -> Graph:
    """Inverse of print_graph. Raises UserError naming the line that it cannot read."""
    reader = _Reader()
    for number, raw in enumerate(text.splitlines(), 1):
        if not raw.strip() or raw.lstrip().startswith("#"):
            continue
        try:
            reader.line(raw)
        except (UserError, TypeMismatch, ValueError, KeyError) as e:
            raise TextError("graph", number, str(e), raw.strip()) from e
    if reader.header is None:
        raise UserError("graph text: the first line must be 'graph 1'")
    return reader.graph()


def _parse_all(text: str, rule: Callable[[Line], T]) -> T:
    line = Line(text, {})
    found = rule(line)
    line.end()
    return found


def leaf_of(name: str) -> Expr:
    """What a name means in a graph's expressions."""
    if re.fullmatch(r"i\d+", name):
        return ix.axis(int(name[1:]))
    if re.fullmatch(r"v\d+", name):
        return ix.value(int(name[1:]))
    return ix.sym(name.removeprefix("@"))


def read_attrs(line: Line) -> tuple[tuple[str, Any], ...]:
    """{name=value, ...}, if that is next."""
    out: dict[str, Any] = {}
    if line.accept("{"):
        while line.peek() != "}":
            key = line.take("name")
            line.expect("=")
            out[key] = line.value()
            if not line.accept(","):
                break
        line.expect("}")
    return tuple(out.items())


class Line:
    """Tokens of one line, consumed from the left by recursive descent."""

    def __init__(self, text: str, nodes: dict[str, Node], leaf: Callable[[str], Expr] | None = None) -> None:
        self.nodes = nodes
        self.leaf = leaf or leaf_of  # what a name in an expression means
        self.tokens: list[tuple[str, str]] = []
        at, end = 0, len(text.rstrip())
        while at < end:
            m = _TOKEN.match(text, at, end)
            if m is None:
                raise UserError(f"cannot read {text[at:].strip()[:30]!r}")
            kind = m.lastgroup or ""
            self.tokens.append((kind, m.group(kind)))
            at = m.end()
        self.at = 0

    # -------------------------------------------------------------------------------- tokens
    def peek(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def kind(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def take(self, *kinds: str) -> str:
        if self.kind() not in kinds:
            raise UserError(f"expected {' or '.join(kinds)}, found {self.peek() or 'the end of the line'!r}")
        self.at += 1
        return self.tokens[self.at - 1][1]

    def accept(self, text: str) -> bool:
        """Consume this mark or word if it is next."""
        if self.peek() == text and self.kind() in ("mark", "name"):
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.accept(text):
            raise UserError(f"expected {text!r}, found {self.peek() or 'the end of the line'!r}")

    def end(self) -> None:
        if self.at < len(self.tokens):
            raise UserError(f"unexpected {self.peek()!r}")

    # -------------------------------------------------------------------------------- leaves
    def string(self) -> str:
        text = json.loads(self.take("string"))
        assert isinstance(text, str)
        return text

    def integer(self) -> int:
        sign = -1 if self.accept("-") else 1
        return sign * int(self.take("int"))

    def node(self) -> Node:
        name = self.take("node")
        if name not in self.nodes:
            raise UserError(f"{name} is not defined above")
        return self.nodes[name]

    def symbol(self) -> str:
        return self.take("name").removeprefix("@")

    # -------------------------------------------------------------------------------- expressions
    def expr(self) -> Expr:
        total = self.term()
        while self.peek() in ("+", "-"):
            total = total + self.term() if self.accept("+") else total - self._negated()
        return total

    def _negated(self) -> Expr:
        self.expect("-")
        return self.term()

    def term(self) -> Expr:
        out = self.factor()
        while self.peek() in ("*", "//", "%"):
            if self.accept("*"):
                out = out * self.factor()
            elif self.accept("//"):
                out = ix.floordiv(out, self.factor())
            else:
                self.expect("%")
                out = ix.mod(out, self.factor())
        return out

    def factor(self) -> Expr:
        if self.accept("-"):
            return -self.factor()
        if self.accept("("):
            inner = self.expr()
            self.expect(")")
            return inner
        if self.kind() == "int":
            return ix.const(int(self.take("int")))
        return self.leaf(self.take("name"))

    def exprs(self, *closing: str) -> Shape:
        """Expressions up to (not including) a closing mark."""
        out: list[Expr] = []
        while self.peek() not in closing:
            out.append(self.expr())
            if not self.accept(","):
                break
        return tuple(out)

    def shape(self) -> Shape:
        self.expect("(")
        out = self.exprs(")")
        self.expect(")")
        return out

    # -------------------------------------------------------------------------------- values
    def value(self) -> Any:
        if self.kind() == "string":
            return self.string()
        if self.kind() == "node":
            return self.node()
        if self.accept("$"):
            return Arg(int(self.take("int")))
        if self.accept("<"):
            e = self.expr()
            self.expect(">")
            return e
        if self.accept("("):
            return self._tuple()
        sign = -1 if self.accept("-") else 1
        if self.kind() == "int":
            return sign * int(self.take("int"))
        if self.kind() == "float":
            return sign * float(self.take("float"))
        word = self.take("name")
        if word in _WORDS:
            return -_WORDS[word] if sign < 0 else _WORDS[word]
        if word in DTYPES and sign > 0:
            return DTYPES[word]
        raise UserError(f"{word!r} is no value")

    def _tuple(self) -> tuple[Any, ...]:
        out: list[Any] = []
        while not self.accept(")"):
            out.append(self.value())
            if not self.accept(","):
                self.expect(")")
                break
        return tuple(out)

    # -------------------------------------------------------------------------------- reads
    def read(self) -> Read:
        source = self.node()
        self.expect("[")
        index = self.exprs("]")
        self.expect("]")
        guard: Shape = ()
        fill: bool | int | float = 0
        if self.accept("?"):
            self.expect("(")
            guard = self.exprs(";")
            self.expect(";")
            self.expect("fill")
            self.expect("=")
            fill = self.value()
            self.expect(")")
        domain = self.shape() if self.accept("over") else None
        strides = self.shape() if self.accept("strides") else None
        return Read(source, index, guard, fill, domain, strides)


class _Reader:
    """The state of reading a graph, line by line."""

    def __init__(self) -> None:
        self.header: int | None = None
        self.builder = Builder()
        self.nodes: dict[str, Node] = {}
        self.last: Node | None = None
        self.inputs: list[Input] = []
        self.outputs: list[Output] = []
        self.effects: list[Node] = []
        self.returns: list[tuple[Any, ...]] = []
        self.g = Graph((), ())

    def graph(self) -> Graph:
        self.g.inputs = tuple(sorted(self.inputs, key=lambda i: i.position))
        self.g.outputs, self.g.returns, self.g.effects = tuple(self.outputs), tuple(self.returns), tuple(self.effects)
        return self.g

    def line(self, raw: str) -> None:
        line = Line(raw, self.nodes)
        if line.kind() == "node":
            self._node(line)
        else:
            word = line.take("name")
            handler = getattr(self, f"_on_{word}", None)
            if handler is None:
                raise UserError(f"no line starts with {word!r}")
            if self.header is None and word != "graph":
                raise UserError("the first line must be 'graph 1'")
            handler(line)
        line.end()

    def _node(self, line: Line) -> None:
        name = line.take("node")
        if name in self.nodes:
            raise UserError(f"{name} is defined twice")
        line.expect(":")
        dtype = DTYPES[line.take("name")]
        line.expect("[")
        axes = line.exprs("|", "]")
        reduced = line.exprs("]") if line.accept("|") else ()
        line.expect("]")
        line.expect("=")
        op = line.take("name")
        line.expect("(")
        reads: list[Read] = []
        while line.peek() != ")":
            reads.append(line.read())
            if not line.accept(","):
                break
        line.expect(")")
        attrs = dict(read_attrs(line))
        serial = name.rpartition("_")[2]
        if not serial.isdigit() or name != f"%{op}_{serial}":
            raise UserError(f"{name} must be %{op}_<number>")
        self.builder.continue_at(int(serial))
        node = self.builder.node(op, (*axes, *reduced), reads, reduce=len(reduced), **attrs)
        if node.serial != int(serial):
            # written twice to be stored twice: late passes give equal values memory of their own
            node = replace(node, serial=int(serial))
            self.builder.continue_at(node.serial + 1)
        if node.dtype is not dtype:
            raise UserError(f"{name} is written as {dtype.value} but has type {node.dtype.value}")
        self.nodes[name] = self.last = node

    def _above(self) -> Node:
        if self.last is None:
            raise UserError("no node above that this could belong to")
        return self.last

    # -------------------------------------------------------------------------------- lines that begin with a word
    def _on_graph(self, line: Line) -> None:
        self.header = line.integer()
        if self.header != 1:
            raise UserError(f"this reads format 1, not {self.header}")

    def _on_device(self, line: Line) -> None:
        self.g.device = line.string()

    def _on_arity(self, line: Line) -> None:
        self.g.arity = line.integer()

    def _on_symbol(self, line: Line) -> None:
        name = line.symbol()
        line.expect("[")
        low = line.integer()
        line.expect(",")
        self.g.symbols[name] = (low, None if line.accept("inf") else line.integer())
        line.expect("]")
        if line.accept("hint"):
            self.g.hints[name] = line.integer()

    def _on_hint(self, line: Line) -> None:
        name = line.symbol()
        self.g.hints[name] = line.integer()

    def _on_argument(self, line: Line) -> None:
        position = line.integer()
        layout = None
        if line.accept("strides"):
            strides = line.shape()
            line.expect("offset")
            layout = Layout(strides, line.expr())
        private = bool(line.accept("private"))
        line.expect("on")
        self.inputs.append(Input(self._above(), position, layout, line.string(), private))

    def _on_layout(self, line: Line) -> None:
        table = self.g.padded if line.accept("padded") else self.g.layouts
        table[self._above()] = line.shape()

    def _on_from(self, line: Line) -> None:
        fx = line.string()
        line.expect("in")
        module = line.string()
        line.expect("at")
        place = line.string()
        regions: list[Region] = []
        more = line.accept("within")
        while more:
            kind, number, label = line.take("name"), line.integer(), line.string()
            regions.append(Region(kind, number, label, line.integer() if line.accept("side") else 0))
            more = line.accept(",")
        origin = Origin(fx, module, place, tuple(regions))
        self.g.origins[self._above()] = (*self.g.origins.get(self._above(), ()), origin)

    def _on_partial(self, line: Line) -> None:
        self.g.partials |= {self._above()}

    def _on_refused(self, line: Line) -> None:
        self.g.refusals[self._above()] = line.string()

    def _on_constant(self, line: Line) -> None:
        position = line.integer()
        self.g.constants[position] = line.string()

    def _on_bind(self, line: Line) -> None:
        name = line.symbol()
        line.expect("=")
        self.g.bindings[name] = line.value()

    def _on_output(self, line: Line) -> None:
        name = line.string()
        read = line.read()
        line.expect("as")
        strides = line.shape()
        writes = line.integer() if line.accept("writes") else None
        at = line.shape() if line.accept("at") else None
        private = bool(line.accept("private"))
        line.expect("on")
        self.outputs.append(Output(name, read, strides, writes, line.string(), at, private=private))

    def _on_return(self, line: Line) -> None:
        self.returns.append(line.value())

    def _on_effect(self, line: Line) -> None:
        self.effects.append(line.node())
