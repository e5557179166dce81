"""The body of a reduction as a formula: what is combined for one point of its axis, from tensors and earlier reductions.

A reduction is a reduce node, a contraction (the sum over k of a[m, k] * b[k, n]; a node or still an ATen call), or a gather
along the axis (the sum of what lies at one place). The walk goes back through maps, at composed indices, down to what it
cannot open: tensors, other reductions, externs. Bodies of several reductions over one axis are written in one space, that
of the widest, so that equal leaves are one leaf.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.graph import Arg, Graph, Node, Read, Shape, compose
from plait.ir.index import Expr, Facts
from plait.plan.formula import SEMANTICS, Formula, Leaf, apply, const, slot, state

_MAX_PARTS = 400  # of one body; more is a program, not a formula
_CONTRACTIONS: dict[str, tuple[int, int, int | None]] = {  # which arguments are (a, b, addend)
    "aten.mm.default": (0, 1, None),
    "aten.bmm.default": (0, 1, None),
    "aten.mv.default": (0, 1, None),
    "aten.dot.default": (0, 1, None),
    "aten.addmm.default": (1, 2, 0),
    "aten.baddbmm.default": (1, 2, 0),
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why there is no single pass, in words, with the nodes that are to blame. `law`: separable, range, rank, opaque,
    extent or numeric."""

    law: str
    text: str
    nodes: tuple[Node, ...] = ()
    reduction: Node | None = None  # the one that has to start a second pass

    def __str__(self) -> str:
        return self.text


class Refused(Exception):
    """Carries a Refusal out of a walk; never leaves the planner."""

    def __init__(self, law: str, text: str, *nodes: Node) -> None:
        super().__init__(text)
        self.refusal = Refusal(law, text, nodes)


@dataclass(frozen=True, slots=True)
class Space:
    """Axes that bodies are written in: those of the result, then the reduced ones."""

    parallel: Shape
    stream: Shape

    @property
    def axes(self) -> Shape:
        """All of them."""
        return (*self.parallel, *self.stream)

    @property
    def count(self) -> Expr:
        """How many points are reduced."""
        return ix.product(self.stream)


@dataclass(frozen=True)
class Body:
    """`node` combines `expr` over the stream axes of `space` by `monoid`; its value is `finish` of that (slot 0), if given.
    A body of monoid "select" takes the one point where `chosen` holds. `states`: place (in `space`) of every earlier
    reduction that it reads. `moved`: casts the user wrote that narrow an operand of a contraction; whoever
    multiplies in that type rounds before the late factors instead of after them, with the same relative error. `place`: the
    node's result axes in `space`."""

    node: Node
    monoid: str
    expr: Formula
    space: Space
    finish: Formula | None = None
    chosen: Formula | None = None
    states: Mapping[Node, Shape] = field(default_factory=dict)
    made: Mapping[Formula, Node] = field(default_factory=dict)
    moved: tuple[Node, ...] = ()
    place: Shape = ()


def space_of(node: Node) -> Space | None:
    """The axes a reduction runs over by itself; None for a node that is no reduction."""
    if node.kind in ("reduce", "contract"):
        return Space(node.shape, node.axes[len(node.shape) :])
    if node.kind == "extern" and node.attr("target") in _CONTRACTIONS:
        a = node.reads[_operands(node)[0]].domain
        return None if not a else Space(node.shape, (a[-1],))
    if node.op == "gather":
        along = _gathered_dimension(node)
        return None if along is None else Space(node.axes, (node.reads[0].source.shape[along],))
    return None


def dependents(graph: Graph, reductions: Mapping[Node, int]) -> frozenset[Node]:
    """Nodes whose values follow from one of the reductions."""
    out: set[Node] = set()
    for n in graph.nodes():
        if any(r.source in reductions or r.source in out for r in n.reads):
            out.add(n)
    return frozenset(out)


def body_of(
    graph: Graph,
    node: Node,
    states: Mapping[Node, int],
    *,
    space: Space | None = None,
    place: Shape | None = None,
    numerics: str = "fused",
    following: frozenset[Node] | None = None,
) -> Body | Refusal:
    """The body of `node`, whose earlier reductions are `states` (with their numbers). With `space`, it is written over that
    space: `place` gives each of the node's result axes there. `numerics` "eager" keeps every rounding, "fused" those the
    user wrote, "relaxed" not even those that only narrow an operand of a contraction (see Body.moved). `following`: what
    depends on a state, None to find out."""
    own = space_of(node)
    if own is None:
        return Refusal("opaque", f"{node!r} is no reduction that can be opened", (node,))
    target = space or own
    if own.count is not target.count:
        return Refusal("extent", f"{node!r} runs over {own.count} points, the others over {target.count}", (node,))
    facts = graph.facts(target.axes)
    first = len(target.parallel)
    stream = tuple(ix.ZERO if n is ix.ONE else ix.axis(first + d) for d, n in enumerate(target.stream))
    if own.stream != target.stream:
        stream = ix.unflatten(ix.flatten(stream, target.stream), own.stream, facts)
    if place is None:
        place = tuple(ix.ZERO if n is ix.ONE else ix.axis(d) for d, n in enumerate(target.parallel))
    walk = _Walk(states, target, facts, numerics, dependents(graph, states) if following is None else following)
    try:
        return walk.body(node, place, stream)
    except Refused as no:
        return no.refusal


def bodies_of(graph: Graph, reductions: Sequence[Node], numerics: str) -> list[Body] | Refusal:
    """Bodies of all reductions in the space of the widest: each says where it reads the earlier ones, which places those."""
    spaces = [space_of(n) for n in reductions]
    for n, own in zip(reductions, spaces):
        if own is None:
            return Refusal("opaque", f"{n!r} is no reduction that can be opened", (n,), n)
    anchor = max(range(len(reductions)), key=lambda i: (len(spaces[i].parallel), i))  # type: ignore[union-attr]
    space = spaces[anchor]
    assert space is not None
    here = tuple(ix.ZERO if n is ix.ONE else ix.axis(d) for d, n in enumerate(space.parallel))
    places: dict[Node, Shape] = {reductions[anchor]: here}
    out: dict[int, Body] = {}
    while len(out) < len(reductions):
        waiting = [i for i in reversed(range(len(reductions))) if i not in out]
        i = next((i for i in waiting if reductions[i] in places), waiting[0])
        states = {n: k for k, n in enumerate(reductions[:i])}
        place = places.get(reductions[i]) or _sibling_place(graph, reductions[i], states, places, here, space, numerics)
        if place is None:
            return Refusal("extent", f"{reductions[i]!r} has other rows than the rest", (reductions[i],), reductions[i])
        body = body_of(graph, reductions[i], states, space=space, place=place, numerics=numerics)
        if isinstance(body, Refusal):
            return replace(body, reduction=reductions[i])
        for other, at in body.states.items():
            if places.setdefault(other, at) != at:
                return Refusal("extent", f"{other!r} is read at two different places", (other,), reductions[i])
        out[i] = body
    return [out[i] for i in range(len(reductions))]


def _sibling_place(
    graph: Graph,
    node: Node,
    states: Mapping[Node, int],
    places: Mapping[Node, Shape],
    here: Shape,
    space: Space,
    numerics: str,
) -> Shape | None:
    """Where a reduction belongs that no other reads: by an earlier one that it and the others read."""
    body = body_of(graph, node, states, numerics=numerics)
    if isinstance(body, Refusal):
        return None
    shared = {n: at for n, at in body.states.items() if n in places}
    own = tuple(ix.ZERO if n is ix.ONE else ix.axis(d) for d, n in enumerate(body.space.parallel))
    for n, at in shared.items():
        if at == own:
            return places[n]
    same_rows = body.space.parallel == space.parallel and all(places[n] == at for n, at in shared.items())
    return here if shared and same_rows else None


class _Walk:
    """One body being read off."""

    def __init__(
        self, states: Mapping[Node, int], space: Space, facts: Facts, numerics: str, following: frozenset[Node]
    ) -> None:
        self.states, self.space, self.facts, self.following = states, space, facts, following
        self.fused, self.relaxed = numerics != "eager", numerics == "relaxed"
        self.moved: list[Node] = []
        first = len(space.parallel)
        self.stream_axes = frozenset(range(first, first + len(space.stream)))
        self.memo: dict[tuple[Node, Shape], Formula] = {}
        self.made: dict[Formula, Node] = {}
        self.places: dict[Node, Shape] = {}

    def body(self, node: Node, place: Shape, stream: Shape) -> Body:
        """The body of a reduction whose own axes are `place` and `stream`."""
        finish: Formula | None = None
        chosen: Formula | None = None
        monoid = node.op
        if node.kind == "reduce":
            expr = self.read(node.reads[0], (*place, *stream))
        elif node.kind == "contract":
            monoid = "sum"
            expr = apply("mul", *(self._operand(r, (*place, *stream)) for r in node.reads))
        elif node.op == "gather":
            monoid = "select"
            expr, chosen = self._selected(node, place, stream[0])
        else:
            monoid = "sum"
            expr, finish = self._contraction(node, place, stream[0])
        return Body(node, monoid, expr, self.space, finish, chosen, self.places, self.made, tuple(self.moved), place)

    # ---------------------------------------------------------------- reductions that are no reduce nodes
    def _contraction(self, node: Node, place: Shape, k: Expr) -> tuple[Formula, Formula | None]:
        a, b, addend = _operands(node)
        left, right = node.reads[a], node.reads[b]
        assert left.domain is not None and right.domain is not None
        batch = place[: len(left.domain) - 2] if len(left.domain) == 3 else ()
        rows = place[len(batch) : len(batch) + 1] if len(left.domain) - len(batch) == 2 else ()
        columns = place[len(batch) + len(rows) :]
        expr = apply("mul", self._operand(left, (*batch, *rows, k)), self._operand(right, (*batch, k, *columns)))
        if addend is None:
            return expr, None
        extra = node.reads[addend]
        assert extra.domain is not None
        missing = len(place) - len(extra.domain)
        at = tuple(ix.ZERO if n is ix.ONE else p for n, p in zip(extra.domain, place[missing:]))
        scale = dict(node.attr("template")[2][1])
        alpha, beta = scale.get("alpha", 1), scale.get("beta", 1)
        if not isinstance(alpha, (int, float)) or not isinstance(beta, (int, float)):
            raise Refused("opaque", f"{node!r} is scaled by a run-time number", node)
        out = apply("mul", const(float(alpha)), slot(0))
        return expr, out if beta == 0 else apply("add", out, apply("mul", const(float(beta)), self.read(extra, at)))

    def _operand(self, r: Read, axes: Shape) -> Formula:
        """An operand of a contraction, without a last rounding to its type where that may move."""
        node, index = r.source, compose(r.index, axes, self.facts)
        while node.op == "copy" and not r.guard and not node.reads[0].guard:
            node, index = node.reads[0].source, compose(node.reads[0].index, index, self.facts)
        if self.relaxed and node.op == "cast" and node not in self.states and not r.guard and not node.reads[0].guard:
            source = node.reads[0].source.dtype
            if source.is_float and node.dtype in (DType.f16, DType.bf16) and not node.attr("implicit"):
                self.moved.append(node)
                return self.read(node.reads[0], index)
        return self.read(r, axes)

    def _selected(self, node: Node, place: Shape, k: Expr) -> tuple[Formula, Formula]:
        along = _gathered_dimension(node)
        assert along is not None
        data = node.reads[0]
        (which,) = data.index[along].values()
        at = compose(data.index, place, self.facts)
        expr = self._guarded(data, place, self.at(data.source, (*at[:along], k, *at[along + 1 :])))
        return expr, apply("eq", self._number(k), self.read(node.reads[which], place))

    # ---------------------------------------------------------------- maps
    def read(self, r: Read, axes: Shape) -> Formula:
        """A read's value where the reader's axes are `axes`."""
        return self._guarded(r, axes, self.at(r.source, compose(r.index, axes, self.facts)))

    def _guarded(self, r: Read, axes: Shape, value: Formula) -> Formula:
        for g in compose(r.guard, axes, self.facts):
            value = apply("where", apply("ge", self._number(g), const(0)), value, const(r.fill))
        return value

    def _number(self, e: Expr) -> Formula:
        return const(e.const) if e.const is not None else self._leaf(Leaf(None, (e,)))

    def _leaf(self, leaf: Leaf) -> Formula:
        streams = any(e.axes() & self.stream_axes for e in leaf.index)
        return Formula("stream" if streams else "row", (), leaf)

    def at(self, node: Node, index: Shape) -> Formula:
        """The value of a node at one place."""
        key = (node, index)
        found = self.memo.get(key)
        if found is None:
            if len(self.memo) > _MAX_PARTS:
                raise Refused("opaque", f"the expression has more than {_MAX_PARTS} operations", node)
            found = self.memo[key] = self._open(node, index)
            self.made.setdefault(found, node)
        return found

    def _open(self, node: Node, index: Shape) -> Formula:
        if node in self.states:
            return self._state(node, index)
        if node.op == "const":
            return const(node.attr("value"))
        if node.op == "index":
            return self._number(compose((node.attr("expr"),), index, self.facts)[0])
        if node.op == "copy":
            return self.read(node.reads[0], index)
        if node.op == "cast":
            return self._cast(node, self.read(node.reads[0], index))
        if node.op == "fma":  # in exact arithmetic a sum and a product, which can be taken apart
            a, b, c = (self.read(r, index) for r in node.reads)
            return apply("add", apply("mul", a, b), c)
        if node.kind == "map" and node.op in SEMANTICS:
            return apply(node.op, *(self.read(r, index) for r in node.reads))
        if node in self.following:
            through = node.attr("target") if node.kind == "extern" else node.op
            raise Refused("opaque", f"an earlier reduction passes through {through} on its way here", node)
        return self._leaf(Leaf(node, index))

    def _state(self, node: Node, index: Shape) -> Formula:
        if any(e.axes() & self.stream_axes for e in index):
            raise Refused("extent", f"{node!r} differs along the axis that is reduced here", node)
        if self.places.setdefault(node, index) != index:
            raise Refused("extent", f"{node!r} is read at two different places", node)
        return state(self.states[node])

    def _cast(self, node: Node, value: Formula) -> Formula:
        source, target = node.reads[0].source.dtype, node.dtype
        if source is target:
            return value
        if source.is_float and target.is_float and (_holds(target, source) or (self.fused and node.attr("implicit"))):
            return value
        if value.op == "const" and not target.is_storage_only and target.is_float:
            return const(float(value.value))
        return apply("cast", value, value=target)


def _holds(wide: DType, narrow: DType) -> bool:
    """Every value of the narrow float type is one of the wide type."""
    return wide is DType.f64 or (wide is DType.f32 and narrow is not DType.f64)


def _operands(node: Node) -> tuple[int, int, int | None]:
    """Read numbers of a contraction's a, b and addend."""
    args: tuple[Any, ...] = node.attr("template")[1][1]
    a, b, addend = _CONTRACTIONS[node.attr("target")]
    found = [args[a], args[b], *([] if addend is None else [args[addend]])]
    assert all(isinstance(x, Arg) for x in found)
    return found[0].k, found[1].k, None if addend is None else found[2].k


def _gathered_dimension(node: Node) -> int | None:
    """The dimension of a gather's data that its one gathered index addresses, bare; None for other gathers."""
    index = node.reads[0].index
    found = [d for d, e in enumerate(index) if e.values()]
    if len(found) != 1 or len(index[found[0]].values()) != 1:
        return None
    (which,) = index[found[0]].values()
    return found[0] if index[found[0]] is ix.value(which) and not node.reads[0].guard else None
