"""Split a cascade that too few blocks would stream: partial accumulators for each part of its axis, then their merge.

    m, l, acc over n   ->   m_s, l_s, acc_s over n' for each part s (n = chunk*s + n'), each part relative to its own m_s;
                            m = max_s m_s, l = sum_s l_s*c(m_s, m), acc = sum_s acc_s*c(m_s, m), and what follows from them

Decode attention and the loss of a few rows over a long vocabulary fill the machine this way. Lifts, corrections c and
results are the formulas that plan/cascade has checked; all of it becomes ordinary nodes, a contraction of a part stays a
contraction with operands of its type. Extents are static. Where parts do not divide the axis, the last one is padded:
reads end at the axis' end, and what is beyond adds the monoid's identity.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from plait.ir import index as ix
from plait.ir.fuel import take_at
from plait.ir.graph import Builder, Graph, Node, Read, Shape, compose
from plait.ir.recombine import recombine
from plait.plan.cascade import Cascade, Step
from plait.plan.device import DeviceSpec
from plait.plan.formula import Formula, const, old, substitute
from plait.rewrite.engine import rebuilt, transform
from plait.rewrite.passes.cascade_parts import Cut, find_cuts, sides_of
from plait.rewrite.passes.formula_nodes import FormulaNodes, inverse
from plait.rewrite.passes.split_reductions import identity_of


def split_cascades(graph: Graph, spec: DeviceSpec, numerics: str) -> Graph:
    """Split where the machine would stand idle and the parts' traffic costs less than that."""
    found = find_cuts(graph, spec, "relaxed" if numerics == "fused" else "eager")
    cuts = [c for c in found if _granted(graph, [s.node for s in c.cascade.steps])]
    if not cuts:
        return graph
    steps = {step.node: (k, i) for k, cut in enumerate(cuts) for i, step in enumerate(cut.cascade.steps)}
    new: dict[Node, Node] = {}
    splits: list[_Split] = []

    def visit(builder: Builder, n: Node, reads: tuple[Read, ...]) -> Node:
        if not splits:
            splits.extend(_Split(cut, builder, new) for cut in cuts)
        if n in steps:
            k, i = steps[n]
            new[n] = splits[k].result(i)
        else:
            new[n] = rebuilt(builder, n, reads)
            for split in splits:
                if n in split.cut.padded:
                    split.pad(n)
        return new[n]

    out = transform(graph, visit)
    alive = set(out.nodes())
    partials = {r.source for s in splits for r in s.partial.values() if r.source in alive}
    return replace(out, partials=out.partials | partials)


def _granted(graph: Graph, nodes: list[Node]) -> bool:
    return take_at("rewrite", "split_cascades", graph, nodes)


@dataclass
class _Split:
    """One cascade being rebuilt. Its parts live over (part, parallel axes, place in the part), its merge over each result's
    own axes and the parts."""

    cut: Cut
    builder: Builder
    new: dict[Node, Node]
    partial: dict[int, Read] = field(default_factory=dict)  # slot -> accumulator, over (part, parallel axes)
    extended: dict[Node, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        space = self.cut.cascade.space
        self.cascade: Cascade = self.cut.cascade
        self.rank = len(space.parallel)
        self.axes: Shape = (ix.const(self.cut.parts), *space.parallel, ix.const(self.cut.chunk))
        self.last = self.rank + 1
        self.at = self.cut.chunk * ix.axis(0) + ix.axis(self.last)
        self.env = {ix.axis_atom(a): ix.axis(a + 1) for a in range(self.rank)} | {ix.axis_atom(self.rank): self.at}
        self.facts = ix.Facts(axes=self.axes, symbols=self.builder.facts.symbols)
        self.guard: Shape = (self.cut.extent - 1 - self.at,) if self.cut.uneven else ()
        self.of_part = FormulaNodes(self.builder, self.axes, self.cut.real, self._leaf_of_part)

    # ---------------------------------------------------------------- parts
    def _leaf_of_part(self, f: Formula) -> Read:
        if f.op == "slot":
            return self.accumulator(f.value[0])
        if f.op == "state":
            return self.of_part.value(self.cascade.steps[f.value].lower)
        if f.op == "count":
            return self.of_part.value(const(float(self.cut.chunk)))
        index = tuple(recombine(e.substitute(self.env, self.facts), self.facts) for e in f.value.index)
        if f.value.source is None:
            return self.of_part.number(index[0])
        if f.value.source in self.extended:
            d = self.cut.padded[f.value.source]
            return Read(self.extended[f.value.source], (*index[:d], ix.axis(0), ix.axis(self.last), *index[d + 1 :]))
        return Read(self.new[f.value.source], index, self.guard if f.op == "stream" else ())

    def accumulator(self, k: int) -> Read:
        """The partial results of a slot, over (part, parallel axes)."""
        found = self.partial.get(k)
        if found is None:
            found = self.partial[k] = self._accumulated(k)
        return found

    def _accumulated(self, k: int) -> Read:
        slot = self.cascade.slots[k]
        step = self.cascade.steps[slot.step]
        (lift,) = slot.lift
        if step.node.kind == "contract" and (sides := sides_of(lift, step.body)) is not None:
            # zeros beyond the end come before the rounding to the operand's type, which belongs to the product
            reads = [
                self.of_part.cast(self._ended(self.of_part.value(f), 0), r.source.dtype)
                for f, r in zip(sides, step.node.reads, strict=True)
            ]
            return self.of_part.reduced("dot", reads, self.last)
        dtype = step.node.dtype.compute
        read = self._ended(self.of_part.typed(lift, dtype), identity_of(slot.monoid, dtype))
        return self.of_part.reduced(slot.monoid, [read], self.last)

    def _ended(self, r: Read, fill: Any) -> Read:
        """The identity beyond the axis' end."""
        return replace(r, guard=self.guard, fill=fill) if self.guard else r

    def pad(self, n: Node) -> None:
        """Make n over (part, place in the part) instead of the axis that streams, what is beyond its end included."""
        d = self.cut.padded[n]
        axes = (*n.axes[:d], self.axes[0], self.axes[-1], *n.axes[d + 1 :])
        at = self.cut.chunk * ix.axis(d) + ix.axis(d + 1)
        env = {ix.axis_atom(i): ix.axis(i if i < d else i + 1) for i in range(len(n.axes))} | {ix.axis_atom(d): at}
        facts = ix.Facts(axes=axes, symbols=self.builder.facts.symbols)
        reads = [self._padded_read(r, d, env, facts, at) for r in n.reads]
        attrs = dict(n.attrs)
        if "expr" in attrs:
            attrs["expr"] = attrs["expr"].substitute(env, facts)
        self.extended[n] = self.builder.node(n.op, axes, reads, reduce=n.reduce, **attrs)

    def _padded_read(self, r: Read, d: int, env: dict[Any, ix.Expr], facts: ix.Facts, at: ix.Expr) -> Read:
        index, guard = (tuple(e.substitute(env, facts) for e in exprs) for exprs in (r.index, r.guard))
        inner = self.cut.padded.get(r.source)
        if inner is not None and r.index[inner].as_axis() == d:
            index = (*index[:inner], ix.axis(d), ix.axis(d + 1), *index[inner + 1 :])
            return Read(self.extended[r.source], index, guard, r.fill)
        if any(d in e.axes() for e in r.index):
            guard = (*guard, self.cut.extent - 1 - at)
        return Read(self.new[r.source], index, guard, r.fill)

    # ---------------------------------------------------------------- merge
    def result(self, i: int) -> Node:
        """The value of reduction i, from the merged parts."""
        return _Merge(self, self.cascade.steps[i]).result()


class _Merge:
    """One reduction's value over its own axes; while parts are merged, the part is one more."""

    def __init__(self, split: _Split, step: Step) -> None:
        self.split, self.step = split, step
        own = step.node.shape
        self.part = len(own)
        axes = (*own, split.axes[0])
        space = split.cascade.space.parallel
        found = inverse(step.body.place, own, space)
        assert found is not None  # cascade_parts has asked
        self.through = tuple(found.get(a, ix.ZERO) for a in range(len(space)))
        self.facts = ix.Facts(axes=axes, symbols=split.builder.facts.symbols)
        real = split.cut.real
        self.scaled = FormulaNodes(split.builder, axes, real, lambda f: self._leaf(f, merging=True))
        self.final = FormulaNodes(split.builder, axes, real, lambda f: self._leaf(f, merging=False))
        self.merged: dict[int, Read] = {}

    def result(self) -> Node:
        """The node, over the reduction's own axes."""
        n = self.step.node
        r = self.final.typed(self.step.lower, n.dtype)
        bare = tuple(ix.ZERO if e is ix.ONE else ix.axis(d) for d, e in enumerate(n.shape))
        if r.source.shape == n.shape and r.index == bare and not r.guard:
            return r.source
        return self.split.builder.node("copy", n.shape, [r])

    def _slot(self, k: int) -> Read:
        found = self.merged.get(k)
        if found is None:
            slot = self.split.cascade.slots[k]
            r = self._of_parts(k)
            if slot.correction is not None:
                factor = self.scaled.value(slot.correction)
                r = self.scaled.product(r, factor)
            found = self.merged[k] = self.scaled.reduced(slot.monoid, [r], self.part)
        return found

    def _of_parts(self, k: int) -> Read:
        r = self.split.accumulator(k)
        env = {ix.axis_atom(0): ix.axis(self.part)} | {ix.axis_atom(a + 1): e for a, e in enumerate(self.through)}
        return replace(r, index=self._simple(e.substitute(env, self.facts) for e in r.index))

    def _simple(self, index: Iterable[ix.Expr]) -> Shape:
        return tuple(recombine(e, self.facts) for e in index)

    def _leaf(self, f: Formula, *, merging: bool) -> Read:
        if f.op == "slot":
            return self._of_parts(f.value[0]) if merging else self._slot(f.value[0])
        if f.op == "state":
            step = self.split.cascade.steps[f.value]
            return Read(self.split.new[step.node], self._simple(compose(step.body.place, self.through, self.facts)))
        if f.op == "old":
            lower = self.split.cascade.steps[f.value].lower
            return self.scaled.value(substitute(lower, lambda g: old(g.value) if g.op == "state" else None))
        if f.op == "count":
            size = self.split.cut.chunk if merging else self.split.cut.extent
            return self.final.value(const(float(size)))
        index = self._simple(compose(f.value.index, self.through, self.facts))
        if f.value.source is None:
            return self.final.number(index[0])
        return Read(self.split.new[f.value.source], index)
