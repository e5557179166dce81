"""Sums over the results of a product that need not wait for what is known of a row only after its end.

    sum_j t[j] * (s[j] - m - log l)   ->   sum_j t[j] * s[j]  -  (m + log l) * sum_j t[j]

with s the products of a row and m, l their maximum and sum of exponentials: the sum would need a second pass, and thus
every product a second time. The forms are those that plan/cascade finds and checks ("rank"). What they lose to
cancellation where all of s are large is of the size of the products' own rounding. A sum over several axes becomes a sum
of sums over the last one first, so that its rows are found.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from plait.ir import index as ix
from plait.ir.fuel import take_at
from plait.ir.graph import Builder, Graph, Node, Read, Shape, compose, identity
from plait.plan.body import space_of
from plait.plan.cascade import Cascade, Step, plan_cascade
from plait.plan.cascade_chains import find_chains
from plait.plan.formula import Formula, parts_of
from plait.plan.regions import is_mixed
from plait.rewrite.engine import rebuilt, transform
from plait.rewrite.passes.formula_nodes import FormulaNodes

_MOST_BETWEEN = 40


def linear_sums(graph: Graph, numerics: str) -> Graph:
    """The graph with such sums written as accumulators and what follows from them."""
    streamed = _streamed(graph)
    if not streamed or numerics != "fused":
        return graph
    graph = _nested(graph, streamed)
    found = _steps(graph, _streamed(graph))
    steps = {n: s for n, s in found.items() if take_at("rewrite", "linear_sums", graph, [n])}
    new: dict[Node, Node] = {}

    def visit(builder: Builder, n: Node, reads: tuple[Read, ...]) -> Node:
        made = _Row(builder, *steps[n], new).result() if n in steps else rebuilt(builder, n, reads)
        new[n] = made
        return made

    return transform(graph, visit) if steps else graph


def _streamed(graph: Graph) -> set[Node]:
    """Sums of values that lie point by point above a product's results."""
    above: set[Node] = set()
    out: set[Node] = set()
    for n in graph.nodes():
        if any(r.source in above for r in n.reads):
            if n.op == "sum" and n.dtype.is_float:
                out.add(n)
            elif n.kind == "map" and n.op != "gather":
                above.add(n)
        if n.kind == "contract":
            above.add(n)
    return out


def _nested(graph: Graph, streamed: set[Node]) -> Graph:
    """Sums over several axes as sums over the last one, summed."""

    def visit(builder: Builder, n: Node, reads: tuple[Read, ...]) -> Node | None:
        if n not in streamed or n.reduce < 2:
            return None
        inner = builder.node("sum", n.axes, reads, reduce=1)
        return builder.node("sum", n.axes[:-1], [Read(inner, identity(inner.shape))], reduce=n.reduce - 1)

    return transform(graph, visit)


def _steps(graph: Graph, streamed: set[Node]) -> dict[Node, tuple[Cascade, Step]]:
    """Sums to rewrite, each with its cascade."""
    out: dict[Node, tuple[Cascade, Step]] = {}
    near = {n for n in graph.nodes() if space_of(n) is not None and _is_near(n)}
    for chain in find_chains(graph, numerics="relaxed", among=near.__contains__) if streamed & near else ():
        found = plan_cascade(graph, chain, numerics="relaxed")
        if not isinstance(found, Cascade) or len(found.space.stream) != 1 or found.space.stream[0].const is None:
            continue
        for step in found.steps:
            whole = step.node.shape == found.space.parallel and step.body.place == identity(step.node.shape)
            if is_mixed(graph, [s.node for s in found.steps]):
                continue
            if step.node in streamed and step.rank and _is_split(found, step) and whole:
                out[step.node] = (found, step)
    return out


def _is_near(n: Node) -> bool:
    """Few point-by-point values lie between a reduction and what it is made of. Sums over a residual stream, which reach back
    through all layers, are none of these, and would take long to write out."""
    seen: set[Node] = set()
    todo = [n]
    while todo and len(seen) <= _MOST_BETWEEN:
        new = [r.source for r in todo.pop().reads if r.source.kind == "map" and r.source not in seen]
        seen.update(new)
        todo += new
    return not todo or len(seen) <= _MOST_BETWEEN


def _is_split(cascade: Cascade, step: Step) -> bool:
    """Whether a sum takes more than one accumulator, or one and the count."""
    found = parts_of(step.lower)
    slots = {f.value[0] for f in found if f.op == "slot"}
    plain = all(cascade.slots[k].monoid == "sum" for k in slots)
    return plain and len(slots) + any(f.op == "count" for f in found) > 1


@dataclass
class _Row:
    """One sum over the axes of its cascade, the last of which streams."""

    builder: Builder
    cascade: Cascade
    step: Step
    new: dict[Node, Node]
    sums: dict[int, Read] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.axes: Shape = self.cascade.space.axes
        self.facts = ix.Facts(axes=self.axes, symbols=self.builder.facts.symbols)
        self.nodes = FormulaNodes(self.builder, self.axes, self.step.node.dtype, self._leaf)

    def result(self) -> Node:
        n = self.step.node
        r = self.nodes.typed(self.step.lower, n.dtype)
        if r.source.shape == n.shape and r.index == identity(n.shape) and not r.guard:
            return r.source
        return self.builder.node("copy", n.shape, [r])

    def _leaf(self, f: Formula) -> Read:
        if f.op == "slot":
            return self._sum(f.value[0])
        if f.op == "state":
            earlier = self.cascade.steps[f.value]
            return Read(self.new[earlier.node], compose(earlier.body.place, identity(self.axes), self.facts))
        if f.op == "count":
            return self.nodes.number(self.cascade.space.count)
        if f.value.source is None:
            return self.nodes.number(f.value.index[0])
        return Read(self.new[f.value.source], f.value.index)

    def _sum(self, k: int) -> Read:
        found = self.sums.get(k)
        if found is None:
            (lift,) = self.cascade.slots[k].lift
            read = self.nodes.typed(lift, self.step.node.dtype)
            found = self.sums[k] = self.nodes.reduced("sum", [read], len(self.axes) - 1)
        return found
