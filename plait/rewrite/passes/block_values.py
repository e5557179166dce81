"""Have large values made one block at a time, where memory is worth more than time.

    %p = mm(%x, %w^T);  %g = f(%p, %rows);  %dw = mm(%g^T, %x);  %dx = mm(%g, %w)
    %loop = plait.loop(%x, %w, %rows) x 25: a block of 1280 words of p and g;  its block of dw written, its part of dx added

Requires static sizes. What can be blocked is said by rewrite/passes/blocking.py; here the Graph of one block is written. Sums are
added up in the compute type: in place by the library's call where that is the operands' type, else by a product of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.graph import (
    PRODUCTS,
    Arg,
    Builder,
    Graph,
    Input,
    Layout,
    Node,
    Origin,
    Output,
    Read,
    Shape,
    contiguous_strides,
    identity,
)
from plait.ir.loop import BLOCK, loop_node
from plait.plan.layout import Layouts
from plait.rewrite.engine import rebuilt, transform
from plait.rewrite.passes.blocking import Blocking, CannotBlock, blocking, call_axes, moved, numel
from plait.rewrite.passes.open_contractions import can_open, open_product

_ADDING = {"aten.mm.default": "aten.addmm.default", "aten.bmm.default": "aten.baddbmm.default"}
_LEAST = 512  # points of an axis: products over fewer have a fraction of their speed
_AT_ONCE = 3  # values as large as a block of the seed that a block holds: the product, what follows from it, a copy turned round


@dataclass(frozen=True)
class Blocked:
    """A value that is made in blocks, for reports: `nbytes` of it whole; `why`, where it is not, is why."""

    value: Node
    nbytes: int
    axis: int = 0
    count: int = 0
    why: str = ""


def block_values(graph: Graph, limit: int) -> tuple[Graph, list[Blocked]]:
    """The graph with products whose results exceed `limit` bytes, and what follows from them, in blocks; what was done."""
    said: list[Blocked] = []
    refused: set[str] = set()
    while True:
        found = next((n for n in graph.nodes() if _is_large(n, limit) and repr(n) not in refused), None)
        if found is None:
            return graph, said
        nbytes = numel(found) * found.dtype.nbytes
        try:
            best, count, axis = _best(graph, found, limit)
        except CannotBlock as why:
            refused.add(repr(found))
            said.append(Blocked(found, nbytes, why=str(why)))
            continue
        graph = _rewritten(graph, best, count)
        refused.clear()  # nodes have other numbers now
        said = [s for s in said if not s.why] + [Blocked(found, nbytes, axis, count)]


def _is_large(n: Node, limit: int) -> bool:
    return n.kind == "extern" and n.attr("target") in PRODUCTS and can_open(n) and numel(n) * n.dtype.nbytes > limit


def _best(graph: Graph, seed: Node, limit: int) -> tuple[Blocking, int, int]:
    """The axis whose blocks exceed the limit by least, then add up the least, how many they are, and the axis' number. Raises CannotBlock."""
    if graph.symbols:
        raise CannotBlock("sizes vary from call to call")
    found: list[tuple[int, int, int, int, Blocking]] = []
    nbytes = numel(seed) * seed.dtype.nbytes
    why = CannotBlock("its axes have one point")
    for axis, extent in enumerate(seed.shape):
        if extent is ix.ONE:
            continue
        try:
            b = blocking(graph, seed, axis)
            count = _count(b, nbytes, limit)
        except CannotBlock as no:
            why = no
            continue
        over = max(0, _AT_ONCE * nbytes // count - limit)
        found.append((over, count * sum(numel(n) for n in b.summed), count, axis, b))
    if not found:
        raise why
    _, _, count, axis, b = min(found, key=lambda f: f[:4])
    return b, count, axis


def _count(b: Blocking, nbytes: int, limit: int) -> int:
    """Blocks of equal size, the fewest that fit the limit, or the most that are not too thin."""
    counts = [c for c in range(2, b.extent + 1) if b.extent % c == 0 and b.extent // c >= _LEAST]
    if not counts:
        raise CannotBlock(f"its {b.extent} points have no divisor that gives blocks of {_LEAST} or more")
    return next((c for c in counts if _AT_ONCE * nbytes <= limit * c), counts[-1])


def _rewritten(graph: Graph, b: Blocking, count: int) -> Graph:
    """The graph with a loop in place of a blocking's members and results."""
    body = _Body(graph, b, count)
    made = body.written()
    new: dict[Node, Node] = {}
    parts: dict[Node, Node] = {}

    def visit(builder: Builder, n: Node, reads: tuple[Read, ...]) -> Node | None:
        if n in b.results:
            if not parts:
                nodes = loop_node(
                    builder, [replace(r, source=new[r.source]) for r in body.operands], body.into, count, made
                )
                parts.update(zip(b.results, nodes, strict=True))
            out = parts[n]
            if out.dtype is not n.dtype:
                out = builder.node("cast", n.shape, [Read(out, identity(n.shape))], dtype=n.dtype, implicit=True)
            new[n] = out
        else:
            new[n] = rebuilt(builder, n, reads)
        return new[n]

    # what the loop reads comes before it, what reads its results after
    return transform(graph, visit, first=lambda n: n not in b.dependents)


class _Body:
    """Writes the Graph of one block."""

    def __init__(self, graph: Graph, b: Blocking, count: int) -> None:
        self.old, self.b, self.count = graph, b, count
        self.size = b.extent // count
        self.start = ix.sym(BLOCK) * self.size
        self.builder = Builder(ix.Facts(symbols={BLOCK: (0, count - 1)}))
        self.layouts = Layouts(graph)
        self.operands: list[Read] = []
        self.into: list[tuple[Shape, DType]] = []
        self.inputs: dict[Node, Node] = {}
        self.made: dict[tuple[Node, int | None], Node] = {}
        self.origins: dict[Node, tuple[Origin, ...]] = {}
        self.given: list[Input] = []

    def written(self) -> Graph:
        """The body, with `operands` and `into` known."""
        for n in sorted(self.b.members, key=lambda n: n.serial):
            self.block(n, self.b.axes[n])
        finals = [self.result(n) for n in self.b.results]
        first = len(self.operands)
        outputs = []
        for k, (value, place) in enumerate(finals):
            read = Read(value, identity(value.shape), domain=value.shape)
            at = None
            if place is not None:
                at = tuple(self.start if d == place else ix.ZERO for d in range(len(value.shape)))
            outputs.append(Output(f"result_{k}", read, contiguous_strides(value.shape), first + k, self.old.device, at))
        inputs = [replace(i, position=i.position if i.position >= 0 else first - 1 - i.position) for i in self.given]
        last = first + len(outputs)
        return Graph(
            tuple(sorted(inputs, key=lambda i: i.position)),
            tuple(outputs),
            symbols={BLOCK: (0, self.count - 1)},
            hints={BLOCK: 0},
            bindings={BLOCK: ("scalar", last)},
            origins=self.origins,
            device=self.old.device,
            arity=last + 1,
        )

    # ---------------------------------------------------------------- values
    def block(self, n: Node, j: int | None) -> Node:
        """A block of a value along its axis j (None: the whole of one that has no such axis)."""
        found = self.made.get((n, j))
        if found is None:
            axes = tuple(ix.const(self.size) if d == j else e for d, e in enumerate(n.axes))
            attrs = {k: self.moved(v, j) if k in ("expr", "linear") else v for k, v in n.attrs}
            if n.kind == "extern":
                dtype = n.attr("outs")[0][1]
                attrs["outs"] = ((axes, dtype, contiguous_strides(axes)),)
                reads = [self.operand_of(n, k, j) for k in range(len(n.reads))]
            else:
                reads = [self.read(r, j, n.axes) for r in n.reads]
            found = self.builder.node(n.op, axes, reads, reduce=n.reduce, **attrs)
            self.made[n, j] = self.noted(found, n)
        return found

    def noted(self, made: Node, n: Node) -> Node:
        for m in [m for m in self.builder.made if m not in self.origins]:
            self.origins[m] = self.old.origins.get(n, ())
        return made

    def moved(self, e: ix.Expr, j: int | None) -> ix.Expr:
        return e if j is None else moved(e, j, self.start, self.builder.facts)

    def read(self, r: Read, j: int | None, axes: Shape) -> Read:
        """A read of a block's, whose axis j is the blocked one."""
        guard = tuple(self.moved(g, j) for g in r.guard)
        place = self.place(r, j, axes)
        if place is not None or self.is_free(r.source):
            return Read(self.block(r.source, place), r.index, guard, r.fill)
        return Read(self.whole(r.source), tuple(self.moved(e, j) for e in r.index), guard, r.fill)

    def place(self, r: Read, j: int | None, axes: Shape) -> int | None:
        """The dimension of a source along which a block reads its own block of it, made in the body too."""
        if r.source in self.b.members:
            return self.b.axes[r.source]
        if j is None or not (self.is_free(r.source) or self.is_formula(r.source)):
            return None
        at = [d for d, e in enumerate(r.index) if j in e.axes()]
        whole = len(at) == 1 and r.index[at[0]].as_axis() == j and r.source.shape[at[0]] is axes[j]
        return at[0] if whole else None

    def is_free(self, s: Node) -> bool:
        return s.op == "const"

    def is_formula(self, s: Node) -> bool:
        """A value, as large as those in blocks, that is computed point by point: it is so in the body as well."""
        large = numel(s) >= numel(self.b.seed)
        return s.op == "index" or (large and s.kind in ("map", "random"))

    def whole(self, s: Node) -> Node:
        """A value from outside."""
        found = self.inputs.get(s)
        if found is None:
            strides = self.layouts.strides(s)
            found = self.input(s.shape, s.dtype, strides, len(self.operands))
            self.operands.append(Read(s, identity(s.shape), domain=s.shape, strides=strides))
            self.inputs[s] = found
        return found

    def input(self, shape: Shape, dtype: DType, strides: Shape, position: int) -> Node:
        name = f"operand_{position}" if position >= 0 else f"into_{-1 - position}"
        node = self.builder.node("input", shape, dtype=dtype, name=name)
        self.given.append(Input(node, position, Layout(strides), self.old.device))
        return node

    def operand_of(self, n: Node, k: int, j: int | None) -> Read:
        """Operand k of a call along whose axis j (of its result; None: the summed one) the blocks are."""
        r = n.reads[k]
        assert r.domain is not None and r.strides is not None
        along = call_axes(n, k)
        wanted = len(n.shape) if j is None else j
        e = along.index(wanted) if wanted in along and r.domain[along.index(wanted)] is not ix.ONE else None
        domain = tuple(ix.const(self.size) if d == e else x for d, x in enumerate(r.domain))
        found = self.read(r, e, r.domain)
        strides = r.strides
        if found.source not in self.inputs.values():  # of the block's own layout
            own = contiguous_strides(found.source.shape)
            at = {x.as_axis(): own[d] for d, x in enumerate(found.index)}
            strides = tuple(at.get(d, ix.ZERO) for d in range(len(domain)))
        return replace(found, domain=domain, strides=strides)

    # ---------------------------------------------------------------- results
    def result(self, n: Node) -> tuple[Node, int | None]:
        """The value that a block gives a result, and along which axis it is a block of it (None: it holds what was there)."""
        place = self.b.axes[n]
        if place is not None:
            self.into.append((n.shape, n.dtype))
            self.input(n.shape, n.dtype, contiguous_strides(n.shape), -1 - (len(self.into) - 1))
            return self.block(n, place), place
        wide = n.dtype.compute
        self.into.append((n.shape, wide))
        before = self.input(n.shape, wide, contiguous_strides(n.shape), -1 - (len(self.into) - 1))
        if n.kind == "extern" and wide is n.dtype:
            return self.noted(self._added_by_call(n, before), n), None
        part = self.noted(self._part(n), n)
        add = self.builder.node("add", n.shape, [Read(before, identity(n.shape)), Read(part, identity(n.shape))])
        return self.noted(add, n), None

    def _added_by_call(self, n: Node, before: Node) -> Node:
        reads = [self.operand_of(n, k, None) for k in range(len(n.reads))]
        first = Read(before, identity(n.shape), domain=n.shape, strides=contiguous_strides(n.shape))
        return added_call(self.builder, _ADDING[n.attr("target")], first, reads)

    def _part(self, n: Node) -> Node:
        if n.kind == "extern":
            return open_product(self.builder, n, tuple(self.operand_of(n, k, None) for k in range(len(n.reads))))
        (place,) = {d for r in n.reads for d in self._summed_at(r)}
        return self.block(n, place)

    def _summed_at(self, r: Read) -> list[int]:
        if r.source not in self.b.members:
            return []
        at = self.b.axes[r.source]
        assert at is not None
        j = r.index[at].as_axis()
        assert j is not None
        return [j]


def added_call(builder: Builder, target: str, before: Read, factors: Sequence[Read]) -> Node:
    """before + the product of two factors, as the library's call."""
    shape, dtype = before.source.shape, before.source.dtype
    template = ("call", ("tuple", (Arg(0), Arg(1), Arg(2))), ("dict", ()))
    outs = ((shape, dtype, contiguous_strides(shape)),)
    return builder.node(
        "extern",
        shape,
        [before, *factors],
        dtype=dtype,
        target=target,
        role="contract",
        template=template,
        outs=outs,
        serial=None,
    )
