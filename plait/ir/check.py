"""The checker of Graph. Free of torch, so it runs between any two stages.

N1  a node's type is what its operator infers              N2  attributes are those the operator takes, sorted
A3  reads, axes and expressions fit together: counts, axes that exist, integer values, symbols that are bound
T1  reads are in bounds wherever their guard holds         T2  a guard that always holds is absent (level 2)
G1  closed, acyclic, in the order of serials               G2  every computed node has an origin (level 2)
G3  at most one output writes to an input                  G4  the text parses back to itself (level 2)
G5  what lies padded is seen by kernels, products and private outputs alone, and no two of its elements share a place

T1 is proven by bounds where it can be. From level 3 what could not be proven is tried at every point of the hinted
sizes, or at a sample where there are too many; `check_graph` returns the reads that no proof covers.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence

from plait.errors import CheckFailed
from plait.ir import index as ix
from plait.ir.graph import PRODUCTS, WRITES_ROWS_APART, Arg, Graph, Node, Output, Read, Shape
from plait.ir.index import Atom, Expr, Facts
from plait.ir.ops import OPS, TypeMismatch
from plait.ir.parse import parse_graph
from plait.ir.text import print_graph, print_node, printed_nodes

_MOST_POINTS = 1 << 16


def check_graph(graph: Graph, level: int = 1) -> tuple[str, ...]:
    """Raise CheckFailed for the first broken invariant. Returns what T1 could not prove, one sentence a read."""
    if level <= 0:
        return ()
    return _Checker(graph, level).run()


class _Checker:
    def __init__(self, graph: Graph, level: int) -> None:
        self.g, self.level = graph, level
        self.unproven: list[str] = []
        self.bound = set(graph.symbols) | set(graph.bindings)

    def fail(self, invariant: str, sentence: str, node: Node | None = None) -> CheckFailed:
        origin = self.g.origins.get(node, ()) if node is not None else ()
        line = f" (from {origin[0].line or origin[0].fx})" if origin else ""
        return CheckFailed(
            "graph", invariant, f"{node!r}: {sentence}{line}" if node else sentence, window(self.g, node)
        )

    def run(self) -> tuple[str, ...]:
        inputs = {i.node for i in self.g.inputs}
        seen: set[Node] = set()
        for n in self.g.nodes():
            for r in n.reads:
                if r.source not in seen:
                    raise self.fail("G1", f"reads {r.source!r}, which does not come before it", n)
            if n.op == "input" and n not in inputs:
                raise self.fail("G1", "is no input of the graph", n)
            seen.add(n)
            self.node(n)
            if self.level >= 2 and not self.g.origins.get(n) and not _needs_no_origin(n):
                raise self.fail("G2", "has no origin", n)
        self.ends()
        for n, strides in self.g.layouts.items():
            if len(strides) != len(n.shape):
                raise self.fail("A3", f"has a layout of {len(strides)} strides for {len(n.shape)} dimensions", n)
        for n, strides in self.g.padded.items():
            self.padded(n, strides)
        if self.level >= 2:
            text = print_graph(self.g)
            if print_graph(parse_graph(text)) != text:
                raise self.fail("G4", "the printed graph parses to another graph")
        return tuple(self.unproven)

    # ---------------------------------------------------------------- nodes
    def node(self, n: Node) -> None:
        defn = OPS[n.op]
        if defn.arity is not None and len(n.reads) != defn.arity:
            raise self.fail("N2", f"takes {defn.arity} reads, has {len(n.reads)}", n)
        keys = [k for k, _ in n.attrs]
        if sorted(set(keys) - set(defn.optional)) != sorted(defn.attrs):
            raise self.fail("N2", f"takes the attributes {sorted(defn.attrs)}, has {keys}", n)
        try:
            dtype = defn.infer([r.source.dtype for r in n.reads], dict(n.attrs))
        except TypeMismatch as wrong:
            raise self.fail("N1", str(wrong), n) from wrong
        if dtype is not n.dtype:
            raise self.fail("N1", f"has type {n.dtype}, but its operands give {dtype}", n)
        if not (0 <= n.reduce <= len(n.axes)) or (n.reduce and not n.reduces):
            raise self.fail("A3", f"reduces {n.reduce} of {len(n.axes)} axes", n)
        if n.kind == "scan" and not n.axes:
            raise self.fail("A3", "scans along no axis", n)
        self.sizes(n.axes, n)
        for name in ("expr", "linear"):
            e = dict(n.attrs).get(name)
            if isinstance(e, Expr):
                self.expr(e, n.axes, (), n)
        if n.kind == "extern":
            self.extern(n)
        elif n.op == "project":
            self.project(n)
        else:
            for k, r in enumerate(n.reads):
                if r.domain is not None or r.strides is not None:
                    raise self.fail("A3", f"read {k} has a domain, but only externs' reads have", n)
                self.read(r, n.axes, n.reads, n)

    def extern(self, n: Node) -> None:
        for k, r in enumerate(n.reads):
            if r.domain is None or r.strides is None or len(r.strides) != len(r.domain):
                raise self.fail("A3", f"operand {k} lacks its domain or its strides", n)
            self.sizes(r.strides, n)
            self.read(r, r.domain, (), n)
        for a in _args(n.attr("template")):
            if not 0 <= a.k < len(n.reads):
                raise self.fail("A3", f"the template names operand {a.k} of {len(n.reads)}", n)

    def project(self, n: Node) -> None:
        source, item = n.reads[0].source, n.attr("item")
        if source.kind != "extern":
            raise self.fail("A3", f"takes a result of {source!r}, which is no extern", n)
        outs = source.attr("outs")
        if not 0 <= item < len(outs) or len(outs[item]) != 3:
            raise self.fail("A3", f"result {item} of {source!r} is no tensor", n)
        if outs[item][0] != n.axes or outs[item][1] is not n.dtype:
            raise self.fail("N1", f"is {n.dtype}{list(n.axes)}, the result is {outs[item][1]}{list(outs[item][0])}", n)

    def ends(self) -> None:
        """Outputs: G3, and what a read must be."""
        written: set[int] = set()
        total = self.g.arity + len(self.g.constants)
        for o in self.g.outputs:
            if o.writes_to is not None:
                if o.writes_to in written:
                    raise self.fail("G3", f"two outputs write to argument {o.writes_to}", o.read.source)
                if not 0 <= o.writes_to < total:
                    raise self.fail("G3", f"output {o.name} writes to argument {o.writes_to} of {total}", o.read.source)
                written.add(o.writes_to)
            self.output(o)

    def padded(self, n: Node, strides: Shape) -> None:
        if len(strides) != len(n.shape):
            raise self.fail("A3", f"is padded to {len(strides)} strides for {len(n.shape)} dimensions", n)
        self.sizes(strides, n)
        dims = [(self.g.hint(s), self.g.hint(extent)) for s, extent in zip(strides, n.shape, strict=True)]
        reach = 1
        for step, extent in sorted(d for d in dims if d[1] > 1):
            if step < reach:
                raise self.fail("G5", f"is padded to {strides}, where elements share a place", n)
            reach = step * extent
        if n.kind == "source":
            return  # the materialised copies of what others see read it
        if n.kind == "extern" and n.attr("target") not in WRITES_ROWS_APART:
            raise self.fail("G5", f"is padded, but {n.attr('target')} lays its result out itself", n)
        for o in self.g.outputs:
            if o.read.source is n and not o.private:
                raise self.fail("G5", f"is padded, but output {o.name} shows it", n)
        for u in self.g.users()[n]:
            if u.kind == "extern" and u.attr("target") not in PRODUCTS and not _owed(u, n, strides):
                raise self.fail("G5", f"is padded, but {u!r} is given it", n)

    def output(self, o: Output) -> None:
        domain = o.read.domain
        if domain is None or len(o.strides) != len(domain):
            raise self.fail("A3", f"output {o.name} lacks its domain or its strides", o.read.source)
        self.sizes((*domain, *o.strides), o.read.source)
        self.read(o.read, domain, (), o.read.source)

    # ---------------------------------------------------------------- reads
    def sizes(self, shape: Shape, n: Node) -> None:
        for e in shape:
            if e.axes() or e.values():
                raise self.fail("A3", f"the size {e!r} is no size", n)
            self.symbols(e, n)

    def symbols(self, e: Expr, n: Node) -> None:
        if not e.symbols() <= self.bound:
            raise self.fail("A3", f"{e!r} speaks of symbols without a binding: {sorted(e.symbols() - self.bound)}", n)

    def expr(self, e: Expr, axes: Shape, reads: Sequence[Read], n: Node) -> None:
        self.symbols(e, n)
        if any(not 0 <= a < len(axes) for a in e.axes()):
            raise self.fail("A3", f"{e!r} speaks of axes beyond {len(axes)}", n)
        for k in e.values():
            if not 0 <= k < len(reads) or not reads[k].source.dtype.is_int:
                raise self.fail("A3", f"{e!r} uses the value of read {k}, which is no integer read", n)
            if any(k in x.values() for x in (*reads[k].index, *reads[k].guard)):
                raise self.fail("A3", f"read {k} is addressed by itself", n)

    def read(self, r: Read, axes: Shape, reads: Sequence[Read], n: Node) -> None:
        shape = r.source.shape
        if len(r.index) != len(shape):
            raise self.fail("A3", f"addresses {r.source!r} of {len(shape)} dimensions with {len(r.index)} indices", n)
        facts = self.g.facts(axes)
        for e in (*r.index, *r.guard):
            self.expr(e, axes, reads, n)
        for g in r.guard if self.level >= 2 else ():
            if not g.values() and facts.is_nonneg(g):
                raise self.fail("T2", f"the guard {g!r} of its read of {r.source!r} always holds", n)
        for d, (e, extent) in enumerate(zip(r.index, shape, strict=True)):
            # an address made from data is checked where it is used: eager raises there too
            if not e.values() and not self.in_bounds(e, extent, r.guard, facts):
                self.bounds_unproven(r, d, extent, axes, n)

    def in_bounds(self, e: Expr, extent: Expr, guard: Shape, facts: Facts) -> bool:
        """Proof of 0 <= e < extent where the guard holds (or where there are no points at all)."""
        if any(x is ix.ZERO for x in facts.axes) or facts.in_range(e, extent):
            return True
        return nonneg_under(e, guard, facts) and nonneg_under(extent - 1 - e, guard, facts)

    def bounds_unproven(self, r: Read, d: int, extent: Expr, axes: Shape, n: Node) -> None:
        e = r.index[d]
        covered = "unproven"
        if self.level >= 3:
            used = sorted(frozenset[int]().union(e.axes(), *(g.axes() for g in r.guard)))
            points, covered = self.points([self.g.hint(axes[a]) for a in used])
            leaves = {a for x in (e, extent, *r.guard) for a in x.leaves() if a.kind == "sym"}
            symbols = {a: self.g.hints.get(str(a.args[0]), 64) for a in leaves}
            guard = [g for g in r.guard if not g.values()]
            size = extent.evaluate(symbols)
            for point in points:
                env: dict[Atom, int] = {**symbols, **{ix.axis_atom(a): v for a, v in zip(used, point, strict=True)}}
                if all(g.evaluate(env) >= 0 for g in guard) and not 0 <= e.evaluate(env) < size:
                    where = ", ".join(f"i{a}={v}" for a, v in zip(used, point, strict=True))
                    sentence = f"reads {r.source!r} at {e!r} = {e.evaluate(env)} in dimension {d} of size {size}"
                    raise self.fail("T1", f"{sentence}, at {where}", n)
        self.unproven.append(f"{n!r}: T1 of {r.source!r}, dimension {d}: {covered}")

    @staticmethod
    def points(extents: Sequence[int]) -> tuple[Iterable[tuple[int, ...]], str]:
        """Every point, or a sample that has all corners."""
        total = 1
        for x in extents:
            total *= x
        if total <= _MOST_POINTS:
            return itertools.product(*(range(x) for x in extents)), "tried at every point of the hinted sizes"
        rng = random.Random(0)
        corners = itertools.islice(itertools.product(*({0, x - 1} for x in extents)), _MOST_POINTS // 4)
        drawn = [tuple(rng.randrange(x) for x in extents) for _ in range(_MOST_POINTS // 2)]
        return [*corners, *drawn], f"tried at {_MOST_POINTS // 2} points of {total}"


def nonneg_under(e: Expr, guard: Shape, facts: Facts, depth: int = 2) -> bool:
    """Proof of e >= 0 where every guard is >= 0."""
    if facts.is_nonneg(e):
        return True
    if any(facts.is_nonneg(e - g) for g in guard):
        return True
    if depth == 0:
        return False
    for a in sorted(e.atoms(), key=lambda a: a.key):
        if a.kind == "div":
            # exact for integers: x // d >= k is x >= k*d, and x // d <= k is x < (k + 1)*d
            x, divisor = a.args
            assert isinstance(x, Expr) and isinstance(divisor, Expr)
            quotient = Expr.make({(a,): 1})
            if _only(e, a, 1) and nonneg_under(x + (e - quotient) * divisor, guard, facts, depth - 1):
                return True
            if _only(e, a, -1) and nonneg_under((e + quotient + 1) * divisor - 1 - x, guard, facts, depth - 1):
                return True
    return any(nonneg_under(e - g, guard, facts, 0) for g in guard)


def _only(e: Expr, a: Atom, sign: int) -> bool:
    """Whether `a` occurs in e in one term alone, with this coefficient."""
    return [(m, c) for m, c in e.terms if a in m] == [((a,), sign)]


def _owed(call: Node, n: Node, strides: Shape) -> bool:
    """Whether a call that reads a node asks for the places that these strides give its elements."""
    for r in call.reads:
        if r.source is n:
            if r.strides is None or r.domain is None or r.guard:
                return False
            sizes = zip(r.strides, r.domain, strict=True)
            want = sum((ix.axis(d) * s for d, (s, extent) in enumerate(sizes) if extent is not ix.ONE), ix.ZERO)
            if sum((e * s for e, s in zip(r.index, strides, strict=True)), ix.ZERO) is not want:
                return False
    return True


def _needs_no_origin(n: Node) -> bool:
    """Inputs, constants, and copies of inputs: no operator of the user's made them."""
    return n.op in ("input", "const", "index") or (n.op == "copy" and _needs_no_origin(n.reads[0].source))


def _args(template: object) -> Iterator[Arg]:
    if isinstance(template, Arg):
        yield template
    elif isinstance(template, tuple):
        for x in template:
            yield from _args(x)


def window(graph: Graph, at: Node | None, around: int = 8) -> str:
    """The printed node with its neighbours and a caret under it."""
    nodes = printed_nodes(graph)
    if at not in nodes:
        return ""
    place = nodes.index(at)
    out: list[str] = []
    for k in range(max(0, place - around), min(len(nodes), place + around + 1)):
        text = print_node(nodes[k])
        out.append("    " + text)
        if k == place:
            out.append("    " + "^" * min(len(text), 110))
    return "\n".join(out)
