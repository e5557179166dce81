"""Random graphs for property tests, free of torch.

Values are small integers in whatever type, and stay small by clamping, so every operator here is exact: all correct ways to
compute a graph, in any order of summation, agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.graph import Builder, Graph, Input, Layout, Node, Origin, Output, Read, Shape, compose, identity
from plait.ir.index import Expr, Facts
from plait.ir.text import print_graph

TYPES = (DType.f32, DType.f32, DType.i64, DType.i32, DType.f64)
EXTENTS = (1, 2, 3, 4, 5, 8, 16)
LIMIT = 64
SYMBOL = ix.sym("s0")
SYMBOL_VALUES = (1, 2, 3, 6)


@dataclass(frozen=True)
class View:
    """A lazy view, as the importer has them."""

    source: Node
    shape: Shape
    index: Shape
    guard: Shape = ()
    fill: int = 0

    @property
    def dtype(self) -> DType:
        return self.source.dtype


class _Views:
    """Makes nodes and views; every choice is drawn by hypothesis."""

    def __init__(self, draw: st.DrawFn, symbolic: bool) -> None:
        self.draw = draw
        self.b = Builder()
        self.symbols: dict[str, tuple[int, int | None]] = {"s0": (1, None)} if symbolic else {}
        self.symbolic = symbolic
        self.inputs: list[Input] = []
        self.pool: list[View] = []

    def pick(self, *options: object) -> object:
        return self.draw(st.sampled_from(options))

    def facts(self, shape: Shape) -> Facts:
        return Facts(axes=shape, symbols=self.symbols)

    # ---------------------------------------------------------------- leaves
    def extent(self) -> Expr:
        choices = [ix.const(n) for n in EXTENTS] + ([SYMBOL] * 3 if self.symbolic else [])
        return self.draw(st.sampled_from(choices))

    def input(self) -> View:
        shape = tuple(self.extent() for _ in range(self.draw(st.integers(0, 3))))
        dtype = self.draw(st.sampled_from(TYPES))
        k = len(self.inputs)
        n = self.b.node("input", shape, dtype=dtype, name=f"x{k}")
        order = self.draw(st.permutations(range(len(shape))))
        strides: list[Expr] = [ix.ONE] * len(shape)
        step = ix.ONE
        for d in reversed(order):
            strides[d] = step
            step = step * shape[d]
        self.inputs.append(Input(n, k, Layout(tuple(strides), ix.const(self.draw(st.integers(0, 1)) * 3))))
        return self.whole(n)

    def whole(self, n: Node) -> View:
        return View(n, n.shape, identity(n.shape))

    def const(self, value: int, dtype: DType) -> View:
        typed = bool(value) if dtype is DType.b1 else float(value) if dtype.is_float else value
        return self.whole(self.b.node("const", (), dtype=dtype, value=typed))

    # ---------------------------------------------------------------- nodes
    def read(self, x: View) -> Read:
        fill = (
            (float(x.fill) if x.dtype.is_float else bool(x.fill) if x.dtype is DType.b1 else x.fill) if x.guard else 0
        )
        return Read(x.source, x.index, x.guard, fill)

    def map(self, op: str, *args: View, **attrs: object) -> View:
        shape = broadcast([a.shape for a in args])
        reads = [self.read(self.expand(a, shape)) for a in args]
        return self.whole(self.b.node(op, shape, reads, **attrs))

    def cast(self, x: View, dtype: DType) -> View:
        return x if x.dtype is dtype else self.map("cast", x, dtype=dtype, implicit=False)

    def clamp(self, x: View) -> View:
        low = self.map("maximum", x, self.const(-LIMIT, x.dtype))
        return self.map("minimum", low, self.const(LIMIT, x.dtype))

    def numeric(self, x: View) -> View:
        return self.cast(x, DType.i64) if x.dtype is DType.b1 else x

    # ---------------------------------------------------------------- views
    def view(self, x: View, shape: Sequence[Expr], through: Sequence[Expr], guard: Shape = (), fill: int = 0) -> View:
        shape = tuple(shape)
        facts = self.facts(shape)
        unit = {ix.axis_atom(d): ix.ZERO for d, n in enumerate(shape) if n is ix.ONE}
        through = tuple(e.substitute(unit, facts) for e in through)
        guard = tuple(g.substitute(unit, facts) for g in guard)
        guard = tuple(g for g in guard if not facts.is_nonneg(g))
        if guard and x.guard and fill != x.fill:
            x = self.map("copy", x)
        inner = tuple(g for g in compose(x.guard, through, facts) if not facts.is_nonneg(g))
        guards = tuple(dict.fromkeys((*inner, *guard)))
        return View(x.source, shape, compose(x.index, through, facts), guards, fill if guard else x.fill)

    def expand(self, x: View, shape: Shape) -> View:
        lead = len(shape) - len(x.shape)
        through = [ix.ZERO if n is ix.ONE else ix.axis(lead + d) for d, n in enumerate(x.shape)]
        return self.view(x, shape, through)

    def permute(self, x: View, order: Sequence[int]) -> View:
        """Result dimension k is old dimension order[k]."""
        return self.view(x, [x.shape[d] for d in order], [ix.axis(list(order).index(d)) for d in range(len(order))])

    def random_view(self, x: View) -> View:
        rank = len(x.shape)
        kind = self.pick("permute", "flip", "slice", "pad", "merge", "split", "expand", "select")
        d = self.draw(st.integers(0, rank - 1)) if rank else 0
        axes = [ix.axis(k) for k in range(rank)]
        if kind == "expand" or rank == 0:
            return self.view(x, (self.extent(), *x.shape), [ix.axis(k + 1) for k in range(rank)])
        n = x.shape[d]
        if kind == "permute":
            return self.permute(x, self.draw(st.permutations(range(rank))))
        if kind == "flip":
            return self.view(x, x.shape, [*axes[:d], n - 1 - axes[d], *axes[d + 1 :]])
        if kind == "pad":
            a, b = self.draw(st.integers(0, 2)), self.draw(st.integers(0, 2))
            guard = (axes[d] - a, n - 1 + a - axes[d])
            shape = (*x.shape[:d], n + (a + b), *x.shape[d + 1 :])
            return self.view(x, shape, [*axes[:d], axes[d] - a, *axes[d + 1 :]], guard, self.draw(st.integers(-2, 2)))
        if kind == "merge" and rank >= 2:
            d = min(d, rank - 2)
            merged = (*x.shape[:d], x.shape[d] * x.shape[d + 1], *x.shape[d + 2 :])
            facts = self.facts(merged)
            two = ix.unflatten(ix.axis(d), x.shape[d : d + 2], facts)
            return self.view(x, merged, [*axes[:d], *two, *(ix.axis(k) for k in range(d + 1, rank - 1))])
        return self._slice_select_split(x, d, kind)

    def _slice_select_split(self, x: View, d: int, kind: object) -> View:
        rank, n = len(x.shape), x.shape[d].const
        axes = [ix.axis(k) for k in range(rank)]
        if n is None or n == 1:
            return x
        if kind == "select":
            at = ix.const(self.draw(st.integers(0, n - 1)))
            rest = [ix.axis(k if k < d else k - 1) for k in range(rank) if k != d]
            return self.view(x, (*x.shape[:d], *x.shape[d + 1 :]), [*rest[:d], at, *rest[d:]])
        factors = [f for f in (2, 3, 4) if n % f == 0 and n != f]
        if kind == "split" and factors:
            f = self.draw(st.sampled_from(factors))
            later = [ix.axis(k + 1) for k in range(d + 1, rank)]
            shape = (*x.shape[:d], ix.const(n // f), ix.const(f), *x.shape[d + 1 :])
            return self.view(x, shape, [*axes[:d], axes[d] * f + ix.axis(d + 1), *later])
        start, step = self.draw(st.integers(0, n - 1)), self.draw(st.integers(1, 2))
        size = ix.const(-(-(n - start) // step))
        shape = (*x.shape[:d], size, *x.shape[d + 1 :])
        return self.view(x, shape, [*axes[:d], axes[d] * step + start, *axes[d + 1 :]])

    # ---------------------------------------------------------------- operations


class Maker(_Views):
    """Draws whole operations and graphs."""

    def operation(self) -> View:
        x = self.draw(st.sampled_from(self.pool))
        kind = self.pick(
            "unary",
            "binary",
            "binary",
            "view",
            "view",
            "reduce",
            "reduce",
            "scan",
            "cat",
            "gather",
            "where",
            "dear",
            "test",
        )
        if kind == "view":
            return self.random_view(x)
        if kind == "cat":
            return self.cat(x)
        if kind == "where":
            x = self.numeric(x)
            ok = self.map(self.pick("lt", "eq", "ge"), x, self.const(self.draw(st.integers(-2, 2)), x.dtype))
            return self.map("where", ok, x, self.map("neg", x)) if self.draw(st.booleans()) else ok
        x = self.numeric(x)
        if kind == "unary":
            if x.dtype.is_float and self.draw(st.booleans()):
                return self.cast(self.cast(x, DType.bf16), x.dtype)
            return self.map(self.pick("neg", "abs"), x)
        if kind == "binary":
            return self.binary(x)
        if kind == "gather":
            return self.gather(x)
        if kind == "dear":
            # work enough to be kept rather than done again
            return self.cast(self.map("remainder", self.cast(x, DType.i64), self.const(7, DType.i64)), x.dtype)
        if kind == "test" and x.shape:
            ok = self.map("gt", x, self.const(0, x.dtype))
            op = str(self.pick("any", "all"))
            return self.whole(
                self.b.node(op, ok.shape, [self.read(ok)], reduce=self.draw(st.integers(1, len(x.shape))))
            )
        return self.reduction(x, str(kind))

    def binary(self, x: View) -> View:
        fit = [y for y in self.pool if broadcastable(x.shape, y.shape)]
        y = self.cast(self.numeric(self.draw(st.sampled_from(fit))), x.dtype)
        op = self.pick("add", "sub", "mul", "maximum", "minimum")
        return self.clamp(self.map(str(op), x, y))

    def reduction(self, x: View, kind: str) -> View:
        rank = len(x.shape)
        if rank == 0 or kind == "test":
            return x
        if kind == "scan":
            d = self.draw(st.integers(0, rank - 1))
            order = [*(k for k in range(rank) if k != d), d]
            moved = self.permute(x, order)
            op = str(self.pick("cumsum", "cummax", "cummin"))
            out = self.whole(self.b.node(op, moved.shape, [self.read(moved)]))
            return self.clamp(self.permute(out, [order.index(k) for k in range(rank)]))
        gone = sorted(self.draw(st.sets(st.integers(0, rank - 1), min_size=1)))
        moved = self.permute(x, [*(k for k in range(rank) if k not in gone), *gone])
        op = str(self.pick("sum", "sum", "max", "min", "argmax", "argmin"))
        out = self.whole(self.b.node(op, moved.shape, [self.read(moved)], reduce=len(gone)))
        if self.draw(st.booleans()):
            # keepdim, so that it broadcasts against what it came from
            shape = tuple(ix.ONE if k in gone else n for k, n in enumerate(x.shape))
            out = self.view(out, shape, [ix.axis(k) for k in range(rank) if k not in gone])
        return self.clamp(out)

    def cat(self, x: View) -> View:
        if not x.shape:
            return x
        d = self.draw(st.integers(0, len(x.shape) - 1))
        others = [y for y in self.pool if len(y.shape) == len(x.shape) and y.dtype is x.dtype]
        others = [y for y in others if all(k == d or m is n for k, (m, n) in enumerate(zip(x.shape, y.shape)))]
        y = self.draw(st.sampled_from(others or [x]))
        total = x.shape[d] + y.shape[d]
        shape = (*x.shape[:d], total, *x.shape[d + 1 :])
        axes = [ix.axis(k) for k in range(len(shape))]
        first = self.view(x, shape, axes, (x.shape[d] - 1 - axes[d],))
        second = self.view(y, shape, [*axes[:d], axes[d] - x.shape[d], *axes[d + 1 :]], (axes[d] - x.shape[d],))
        return self.whole(self.b.node("pieces", shape, [self.read(first), self.read(second)]))

    def gather(self, x: View) -> View:
        """x's rows at positions made of data, kept in range."""
        if not x.shape or x.shape[0].const == 0:
            return x
        k = self.cast(self.numeric(self.draw(st.sampled_from(self.pool))), DType.i64)
        size = self.whole(self.b.node("index", (), expr=x.shape[0]))
        k = self.map("remainder", self.map("abs", k), size)
        shape = (*k.shape, *x.shape[1:])
        lead = len(k.shape)
        positions = self.view(k, shape, [ix.axis(d) for d in range(lead)])
        facts = Facts(shape, self.symbols, {1: x.shape[0]})
        unit = {ix.axis_atom(d): ix.ZERO for d, n in enumerate(shape) if n is ix.ONE}
        through = (ix.value(1), *(ix.axis(lead + d).substitute(unit) for d in range(len(x.shape) - 1)))
        guard = tuple(g for g in compose(x.guard, through, facts) if not facts.is_nonneg(g))
        data = Read(x.source, compose(x.index, through, facts), guard, self.read(x).fill if guard else 0)
        return self.whole(self.b.node("gather", shape, [data, self.read(positions)]))

    # ---------------------------------------------------------------- the graph
    def graph(self, operations: int) -> Graph:
        self.pool += [self.input() for _ in range(self.draw(st.integers(1, 3)))]
        if self.symbolic:
            n = self.b.node("input", (SYMBOL,), dtype=DType.f32, name="sized")
            self.inputs.append(Input(n, len(self.inputs), Layout((ix.ONE,))))
            self.pool.append(self.whole(n))
        for _ in range(operations):
            made = self.operation()
            if points(made.shape) <= 4096:
                self.pool.append(made)
        outs = [self.output(k, v) for k, v in enumerate(reversed(self.pool[-3:]))]
        bindings: dict[str, tuple[object, ...]] = {}
        if self.symbolic:
            bindings["s0"] = ("size", len(self.inputs) - 1, 0)
        g = Graph(
            tuple(self.inputs),
            tuple(outs),
            symbols=self.symbols,
            bindings=bindings,
            hints={"s0": 3} if self.symbolic else {},
            arity=len(self.inputs),
            returns=tuple(("tensor", k) for k in range(len(outs))),
        )
        g.origins = {n: (Origin(f"op{n.serial}", "net", f"m.py:{n.serial}"),) for n in g.nodes() if n.op != "input"}
        return g

    def output(self, k: int, x: View) -> Output:
        # outputs are views of what is stored: a guarded one is a value of its own
        if x.guard:
            x = self.map("copy", x)
        r = self.read(x)
        order = self.draw(st.permutations(range(len(x.shape))))
        strides: list[Expr] = [ix.ONE] * len(x.shape)
        step = ix.ONE
        for d in reversed(order):
            strides[d] = step
            step = step * x.shape[d]
        return Output(f"o{k}", Read(r.source, r.index, domain=x.shape), tuple(strides))


def points(shape: Shape) -> int:
    """Elements at the largest symbol value used."""
    atoms = {ix.Atom.make("sym", "s0"): max(SYMBOL_VALUES)}
    return ix.product(shape).evaluate(atoms)


def broadcastable(a: Shape, b: Shape) -> bool:
    return all(m is n or m is ix.ONE or n is ix.ONE for m, n in zip(reversed(a), reversed(b), strict=False))


def broadcast(shapes: Sequence[Shape]) -> Shape:
    out: list[Expr] = []
    for s in shapes:
        while len(out) < len(s):
            out.insert(0, ix.ONE)
        for k in range(1, len(s) + 1):
            if out[-k] is ix.ONE:
                out[-k] = s[-k]
    return tuple(out)


@st.composite
def graphs(draw: st.DrawFn, most_operations: int = 7) -> Graph:
    """A graph of a few operations over one to three inputs, in half of the cases with a symbolic size."""
    return Maker(draw, draw(st.booleans())).graph(draw(st.integers(1, most_operations)))


class GraphText(str):
    """Text that a failing test shows as it is, to be pasted in a test of its own."""

    def __repr__(self) -> str:
        return f'"""\n{self}"""'


def graph_texts(most_operations: int = 7) -> st.SearchStrategy[GraphText]:
    """Random graphs as text: what fails can be read and pasted."""
    return graphs(most_operations).map(lambda g: GraphText(print_graph(g)))
