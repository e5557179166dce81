"""Dropout of a training step as a function of a seed: the backward draws the mask again instead of reading it.

In a joint graph

    out, mask = native_dropout(x, p, True)   ->   u = plait::uniform(seed, draw, size); mask = u >= p; out = x * mask / (1 - p)
    bernoulli(x, p)                          ->   plait::uniform(seed, draw, size) < p, in x's type

with one `plait::seed` for the graph. What is computed from draws alone is marked for recomputation, so that only the seed
is kept between the passes. The user's own marks (torch.utils.checkpoint) are left as they are.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from plait.frontend.fx_nodes import call_before, last_placeholder
from plait.frontend.marks import form_again
from plait.ir.dtype import DType
from plait.oracle.semantics import random_values

OFFSET = 1
"""The offset of these draws: their numbers are their own, apart from those that one graph gives (at offset 0)."""

_library = torch.library.Library("plait", "DEF")  # type: ignore[no-untyped-call]
_library.define("seed(Device device) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))  # type: ignore[no-untyped-call]
_library.define("uniform(Tensor seed, int draw, SymInt[] size) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]


def _seed(device: torch.device) -> torch.Tensor:
    top = torch.iinfo(torch.int64)
    return torch.randint(top.min, top.max, [], dtype=torch.int64, device=device)


def _uniform(seed: torch.Tensor, draw: int, size: list[int]) -> torch.Tensor:
    out = torch.empty(size, dtype=torch.float32, device=seed.device)
    linear = torch.arange(out.numel())
    values = random_values("rand", linear, int(seed), OFFSET, draw, DType.f32)
    return out.copy_(values.view(size))


torch.library.impl("plait::seed", "CompositeExplicitAutograd", _seed)
torch.library.impl("plait::uniform", "CompositeExplicitAutograd", _uniform)
torch.library.register_fake("plait::seed", lambda device: torch.empty([], dtype=torch.int64, device=device))
torch.library.register_fake(
    "plait::uniform", lambda seed, draw, size: torch.empty(size, dtype=torch.float32, device=seed.device)
)


def draw_by_seed(graph: fx.Graph, forward: set[fx.Node]) -> None:
    """Rewrite the dropouts among `forward` (a joint graph's forward nodes)."""
    seeds: dict[torch.device, fx.Node] = {}
    drawn: set[fx.Node] = set()
    for draw, node in enumerate([n for n in graph.nodes if n in forward and _is_dropout(n)]):
        x: Any = node.args[0]
        u = call_before(node, torch.ops.plait.uniform.default, _seed_of(x, seeds), draw, _size(node, x), marked=True)
        new = _bernoulli(node, u) if node.target is torch.ops.aten.bernoulli.p else _dropped(node, x, u)
        for n in (u, *new):
            drawn.add(n)
            form_again(n)
        graph.erase_node(node)
    _mark_what_follows(graph, forward, drawn)


def _bernoulli(node: fx.Node, u: fx.Node) -> tuple[fx.Node, ...]:
    """Replace it; what is computed from the draw alone."""
    hit = call_before(node, torch.ops.aten.lt.Scalar, u, _probability(node), marked=True)
    new = call_before(node, torch.ops.aten._to_copy.default, hit, dtype=node.meta["val"].dtype, marked=True)
    node.replace_all_uses_with(new)
    return hit, new


def _dropped(node: fx.Node, x: fx.Node, u: fx.Node) -> tuple[fx.Node, ...]:
    """Replace it; what is computed from the draw alone."""
    aten, p = torch.ops.aten, _probability(node)
    mask = call_before(node, aten.ge.Scalar, u, p, marked=True)
    kept = call_before(node, aten.mul.Tensor, x, mask, marked=True)
    out = call_before(node, aten.mul.Tensor, kept, 1.0 / (1.0 - p), marked=True)
    for item in list(node.users):
        item.replace_all_uses_with(mask if item.args[1] else out)
        node.graph.erase_node(item)
    return (mask,)


def _mark_what_follows(graph: fx.Graph, forward: set[fx.Node], drawn: set[fx.Node]) -> None:
    """Values point by point of draws alone are drawn again too: kept instead, they would be as large as the mask."""
    for n in graph.nodes:
        tags = getattr(n.target, "tags", ())
        if n.all_input_nodes and drawn.issuperset(n.all_input_nodes) and torch.Tag.pointwise in tags and n in forward:
            drawn.add(n)
            form_again(n)


def _is_dropout(node: fx.Node) -> bool:
    aten = torch.ops.aten
    if node.op != "call_function" or not isinstance(node.args[0] if node.args else None, fx.Node):
        return False
    if node.target is aten.bernoulli.p:
        given = isinstance(_probability(node), float) and isinstance(node.meta.get("val"), torch.Tensor)
        return given and node.kwargs.get("generator") is None
    if node.target is not aten.native_dropout.default:
        return False
    p, train = node.args[1:3]
    only = all(u.op == "call_function" and u.target is operator.getitem for u in node.users)
    return isinstance(p, float) and 0 < p < 1 and train is not False and only


def _probability(node: fx.Node) -> Any:
    return node.args[1] if len(node.args) > 1 else 0.5


def _size(node: fx.Node, x: fx.Node) -> list[Any]:
    """The extents of the dropout's tensor, as numbers and, where they vary, as nodes."""
    size = torch.ops.aten.sym_size.int
    extents = enumerate(x.meta["val"].shape)
    return [n if isinstance(n, int) else call_before(node, size, x, d, marked=True) for d, n in extents]


def _seed_of(x: fx.Node, seeds: dict[torch.device, fx.Node]) -> fx.Node:
    val = x.meta["val"]
    if val.device not in seeds:
        with x.graph.inserting_after(last_placeholder(x.graph)):
            seed = x.graph.call_function(torch.ops.plait.seed.default, (val.device,))
        with val.fake_mode:
            seed.meta["val"] = torch.ops.plait.seed(val.device)
        seeds[val.device] = seed
    return seeds[val.device]
