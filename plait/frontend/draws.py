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
    aten = torch.ops.aten
    seeds: dict[torch.device, fx.Node] = {}
    drawn: set[fx.Node] = set()
    for draw, node in enumerate([n for n in graph.nodes if n in forward and _is_dropout(n)]):
        edit = _Edit(graph, node, drawn)
        u = edit.call(torch.ops.plait.uniform.default, (_seed_of(graph, node, seeds), draw, edit.size()))
        x, p = node.args[0], node.args[1] if len(node.args) > 1 else 0.5
        if node.target is aten.bernoulli.p:
            hit = edit.call(aten.lt.Scalar, (u, p))
            like = node.meta["val"]
            new = edit.call(aten._to_copy.default, (hit,), {"dtype": like.dtype})
            node.replace_all_uses_with(new)
        else:
            mask = edit.call(aten.ge.Scalar, (u, p))
            kept = edit.call(aten.mul.Tensor, (x, mask), mark=False)
            assert isinstance(p, float | int)
            out = edit.call(aten.mul.Tensor, (kept, 1.0 / (1.0 - p)), mark=False)
            for user in list(node.users):
                user.replace_all_uses_with((out, mask)[user.args[1]])
                graph.erase_node(user)
        graph.erase_node(node)
    _mark_what_follows(graph, forward, drawn)


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
        p, val = node.args[1] if len(node.args) > 1 else 0.5, node.meta.get("val")
        return isinstance(p, float) and node.kwargs.get("generator") is None and isinstance(val, torch.Tensor)
    if node.target is not aten.native_dropout.default:
        return False
    p, train = node.args[1:3]
    only = all(u.op == "call_function" and u.target is operator.getitem for u in node.users)
    return isinstance(p, float) and 0 < p < 1 and train is not False and only


class _Edit:
    """Nodes put in before another, with its place in the user's code."""

    def __init__(self, graph: fx.Graph, node: fx.Node, drawn: set[fx.Node]) -> None:
        self.graph, self.node, self.drawn = graph, node, drawn
        first: Any = node.args[0]
        self.x: fx.Node = first

    def size(self) -> list[Any]:
        """The extents of the dropout's tensor, as numbers and, where they vary, as nodes."""
        shape = self.x.meta["val"].shape
        size = torch.ops.aten.sym_size.int
        return [n if isinstance(n, int) else self.call(size, (self.x, d), mark=False) for d, n in enumerate(shape)]

    def call(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, mark: bool = True
    ) -> fx.Node:
        """A call before the node; `mark` one that is to be computed again where it is needed."""
        with self.graph.inserting_before(self.node):
            out = self.graph.call_function(target, args, kwargs or {})
        out.meta = {k: v for k, v in self.node.meta.items() if k not in ("val", "tensor_meta", "unbacked_bindings")}
        with self.x.meta["val"].fake_mode:
            given, named = fx.map_arg((out.args, out.kwargs), lambda n: n.meta["val"])
            out.meta["val"] = target(*given, **named)
        if mark:
            self.drawn.add(out)
            form_again(out)
        return out


def _seed_of(graph: fx.Graph, node: fx.Node, seeds: dict[torch.device, fx.Node]) -> fx.Node:
    first: Any = node.args[0]
    device = first.meta["val"].device
    if device not in seeds:
        after = [n for n in graph.nodes if n.op == "placeholder"][-1]
        with graph.inserting_after(after):
            seed = graph.call_function(torch.ops.plait.seed.default, (device,))
        with first.meta["val"].fake_mode:
            seed.meta["val"] = torch.empty([], dtype=torch.int64, device=device)
        seeds[device] = seed
    return seeds[device]
