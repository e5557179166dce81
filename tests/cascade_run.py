"""Runs the cascades of a torch function in double precision: by tiles, by random trees of merges, and pass by pass."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from frontend_eval import imported

from plait.ir.graph import Graph
from plait.ir.index import Atom
from plait.oracle.eval_graph import evaluate_nodes
from plait.plan.body import Refusal
from plait.plan.cascade import Cascade, plan_cascade
from plait.plan.cascade_chains import find_chains
from plait.plan.formula import Leaf
from plait.plan.stream import Point, Stream


def planned(fn: Callable[..., Any], *args: torch.Tensor) -> tuple[Graph, list[Cascade | Refusal]]:
    """The graph of a function of tensors and what becomes of each of its chains."""
    graph, _ = imported(torch.func.functionalize(fn, remove="mutations"), list(args))
    return graph, [plan_cascade(graph, chain) for chain in find_chains(graph)]


def only(fn: Callable[..., Any], *args: torch.Tensor) -> tuple[Graph, Cascade]:
    """The one cascade of a function."""
    graph, found = planned(fn, *args)
    assert len(found) == 1, found
    assert isinstance(found[0], Cascade), str(found[0])
    return graph, found[0]


def refused(fn: Callable[..., Any], *args: torch.Tensor) -> Refusal:
    """The one refusal of a function."""
    _, found = planned(fn, *args)
    assert len(found) == 1 and isinstance(found[0], Refusal), found
    return found[0]


def rows(graph: Graph, cascade: Cascade, args: Sequence[torch.Tensor], limit: int = 4) -> list[tuple[Stream, Point]]:
    """The cascade at up to `limit` of its parallel points."""
    values = evaluate_nodes(graph, list(args))

    def value(leaf: Leaf, point: Point) -> Any:
        env = {Atom.make("axis", i): p for i, p in enumerate(point)}
        at = tuple(e.evaluate(env) for e in leaf.index)
        return at[0] if leaf.source is None else values[leaf.source][at].item()

    elements = list(itertools.product(*(range(n.const or 0) for n in cascade.space.stream)))
    points = list(itertools.product(*(range(n.const or 0) for n in cascade.space.parallel)))
    random.Random(3).shuffle(points)
    return [(Stream(cascade, value, p, elements), p) for p in points[:limit]]


def close(a: Any, b: Any, tolerance: float = 1e-11) -> bool:
    """Equal, both NaN, or near."""
    return a == b or (a != a and b != b) or math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)


def in_a_tree(stream: Stream, rng: random.Random) -> list[Any]:
    """All results from random parts, each streamed by itself, merged in a random order."""
    cuts = sorted(rng.sample(range(1, len(stream.elements)), min(4, len(stream.elements) - 1)))
    parts = []
    for a, b in zip([0, *cuts], [*cuts, len(stream.elements)], strict=True):
        parts.append(stream.absorb(stream.start(), stream.elements[a:b]))
    parts.append(stream.start())  # a block that had nothing to do
    while len(parts) > 1:
        b, a = parts.pop(rng.randrange(len(parts))), parts.pop(rng.randrange(len(parts)))
        parts.append(stream.merge(a, b))
    return stream.results(parts[0])


def agree(graph: Graph, cascade: Cascade, args: Sequence[torch.Tensor], *, tolerance: float = 1e-11) -> None:
    """One pass, by whatever tiles and trees, gives what pass after pass gives, and what the graph's nodes hold."""
    rng = random.Random(5)
    values = evaluate_nodes(graph, list(args))
    for stream, point in rows(graph, cascade, args):
        want = stream.repeated()
        n = len(stream.elements)
        got = [("tiles of " + str(t), stream.online(t)) for t in sorted({1, 3, 4, n})]
        got += [("a tree", in_a_tree(stream, rng)) for _ in range(3)]
        for how, result in got:
            assert all(close(a, b, tolerance) for a, b in zip(result, want, strict=True)), (how, point, result, want)
        alone = Stream(cascade, stream._value, point, stream.elements[:1])
        if all(s.kind != "select" for s in cascade.steps):
            assert all(close(a, b, tolerance) for a, b in zip(alone.online(1), alone.repeated(), strict=True)), point
        # the widest reduction's rows are the cascade's
        at = next(i for i, s in enumerate(cascade.steps) if s.node.shape == cascade.space.parallel)
        eager = values[cascade.steps[at].node][point].item()
        assert close(want[at], eager, 1e-9), (point, want, eager)
