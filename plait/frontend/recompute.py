"""Products that a training step forms again: between the passes stay row statistics, not the square matrix.

A product whose result is much larger than its operands, and which only feeds another product (scores of attention between
queries and keys on one side and values on the other), is cheaper to form twice than to keep. In a joint graph

- softmax on the way between the two is written out, so that its row maximum and row sum are values of their own;
- the values as large as the product are marked for recomputation, the row statistics for keeping;
- the row term of softmax's gradient, sum_k P[q,k] * (sum_d G[q,d] V[k,d]), becomes sum_d G[q,d] * (sum_k P[q,k] V[k,d]),
  whose inner sum is the forward's result: the sums are exchanged, and no pass over k is left.

Nothing here knows attention: the rule of sums holds for any product that stands in a sum with its own left factor.
"""

from __future__ import annotations

import collections
import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from plait.frontend.fx_nodes import call_before
from plait.frontend.marks import EQUALITY, form_again, keep
from plait.plan.contract_cost import DWARFS, WIDEST

_PRODUCTS = ("aten.mm.default", "aten.bmm.default", "aten.addmm.default", "aten.baddbmm.default")
_VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten.expand.default")
_CASTS = ("aten._to_copy.default", "prims.convert_element_type.default")
_REDUCTIONS = ("aten.amax.default", "aten.sum.dim_IntList", "aten.sum.default", "aten.logsumexp.default")
_SAFE = "aten._safe_softmax.default"
_SOFTMAXES = ("aten._softmax.default", _SAFE)
_PICKS = ("aten.gather.default", "aten.index.Tensor")
_OTHERS = (*_VIEWS, *_CASTS, "aten.clone.default", "aten.alias.default", "aten.slice.Tensor", "aten.unsqueeze.default")


def recompute_products(graph: fx.Graph, forward: set[fx.Node], deep: bool = False) -> None:
    """Rewrite and mark a joint graph, of which `forward` are the forward's nodes. `deep`: memory is worth more than time: products that
    are larger than their factors at all, and of a depth that no kernel holds, which blocks form again (block_values.py)."""
    for product in [n for n in graph.nodes if n in forward and _is_product(n)]:
        region = _between(product, forward, deep)
        if region is None:
            continue
        inside: set[fx.Node] = set()  # row statistics that are kept as part of another
        for n in [n for n in region if str(n.target) in _SOFTMAXES]:
            region.remove(n)
            written = _write_out(n)
            region = _by_logsumexp(written, [*region, *written.values], forward)
            inside |= written.reductions
        for n in region:
            form_again(n)
        for n in {s for r in region for s in r.users if _numel(s) < _numel(r) and _is_reduction(s)} - inside:
            keep(n)
    _positions(graph, forward)
    graph.eliminate_dead_code()


def _positions(graph: fx.Graph, forward: set[fx.Node]) -> None:
    """What is computed from nothing (a mask of positions) is never worth keeping."""
    known: set[fx.Node] = set()
    for n in graph.nodes:
        tags = getattr(n.target, "tags", ())
        if not isinstance(n.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in tags:
            continue
        if not known.issuperset(n.all_input_nodes):
            continue
        if isinstance(n.meta.get("val"), torch.Tensor) and not n.target._schema.is_mutable and _is_static(n):
            known.add(n)
            if n in forward:
                form_again(n)


def _is_product(n: fx.Node) -> bool:
    return n.op == "call_function" and str(n.target) in _PRODUCTS


def _numel(n: fx.Node) -> int:
    """Elements of a value; 0 where that varies (asking would fix it)."""
    val = n.meta.get("val")
    return math.prod(val.shape) if isinstance(val, torch.Tensor) and _is_static(n) else 0


def _is_reduction(n: fx.Node) -> bool:
    return str(n.target) in _REDUCTIONS


def _between(product: fx.Node, forward: set[fx.Node], deep: bool) -> list[fx.Node] | None:
    """The product and the values as large that follow from it, down to other products; None where keeping it is better, or
    where something on the way needs it in memory."""
    size = _numel(product)
    if not size or size < (1 if deep else DWARFS) * sum(_numel(a) for a in product.all_input_nodes):
        return None
    region: dict[fx.Node, None] = {product: None}
    # gradients of its operands are products that sum its result, if their rows are short enough for a block to hold
    stack, ends = [product], deep or _depth(product) <= WIDEST
    while stack:
        n = stack.pop()
        for user in n.users:
            if user.op == "output" or str(user.target) in EQUALITY:
                return None  # a value formed again may differ in its last bit
            if user not in forward or user in region:
                continue
            if _is_product(user):
                ends = True
            elif _numel(user) == size and _is_simple(user):
                region[user] = None
                stack.append(user)
            elif not _is_reduction(user) and not (str(user.target) in _PICKS and _numel(user) < size):
                return None
    return list(region) if ends else None


def _depth(product: fx.Node) -> int:
    """Points that a product sums."""
    left = product.args[-2]
    assert isinstance(left, fx.Node)
    return int(left.meta["val"].shape[-1])


def _is_static(n: fx.Node) -> bool:
    return all(isinstance(s, int) for s in n.meta["val"].shape)


def _is_simple(n: fx.Node) -> bool:
    tags = getattr(n.target, "tags", ())
    return torch.Tag.pointwise in tags or str(n.target) in (*_OTHERS, *_SOFTMAXES)


# ---------------------------------------------------------------------------------------------------- softmax, written out
def _to(at: fx.Node, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    """x in a type, before a node; a conversion of ours, not the user's."""
    convert = torch.ops.prims.convert_element_type.default
    return x if x.meta["val"].dtype is dtype else call_before(at, convert, x, dtype)


@dataclass(frozen=True)
class _Softmax:
    """exp(x - top) / total, written out, all new values as large as it, and the reductions that top and total are made of."""

    x: fx.Node
    top: fx.Node
    total: fx.Node
    quotient: fx.Node
    values: list[fx.Node]
    reductions: set[fx.Node]


def _write_out(softmax: fx.Node) -> _Softmax:
    """Replace a softmax and its gradient. The safe one takes 0 for the maximum of a row of -inf, and 1 for its sum: all its
    points are 0 then, and so are its gradients."""
    aten, make = torch.ops.aten, functools.partial(call_before, softmax)
    x, dim = softmax.args[:2]
    assert isinstance(x, fx.Node)
    dtype = softmax.meta["val"].dtype
    v = _to(softmax, x, torch.float64 if dtype is torch.float64 else torch.float32)
    top = greatest = make(aten.amax.default, v, [dim], True)
    if str(softmax.target) == _SAFE:
        top = make(aten.masked_fill.Scalar, top, make(aten.eq.Scalar, top, -math.inf), 0.0)
    shifted = make(aten.sub.Tensor, v, top)
    e = make(aten.exp.default, shifted)
    total = added = make(aten.sum.dim_IntList, e, [dim], True)
    if str(softmax.target) == _SAFE:
        total = make(aten.masked_fill.Scalar, total, make(aten.eq.Scalar, total, 0.0), 1.0)
    p = make(aten.div.Tensor, e, total)
    out = _to(softmax, p, dtype)
    softmax.replace_all_uses_with(out)
    softmax.graph.erase_node(softmax)
    for user in list(out.users):
        if str(user.target) == "aten._softmax_backward_data.default" and user.args[1] is out:
            _write_out_gradient(user, p)
    values = list(dict.fromkeys(n for n in (v, shifted, e, p, out) if n is not x))
    return _Softmax(v, top, total, p, values, {greatest, added})


def _by_logsumexp(softmax: _Softmax, large: list[fx.Node], forward: set[fx.Node]) -> list[fx.Node]:
    """Have what is not of the forward, to which the values `large` belong, form a softmax again as exp(x - (top + log total)),
    and what follows from it: one row statistic is saved instead of two, and no point is divided. The large values that others
    than the forward need then."""
    aten, quotient = torch.ops.aten, softmax.quotient
    make = functools.partial(call_before, quotient)
    row = make(aten.add.Tensor, softmax.top, make(aten.log.default, softmax.total))
    keep(row)
    shifted = make(aten.sub.Tensor, softmax.x, row)
    made = {quotient: make(aten.exp.default, shifted)}
    follow = [quotient]

    def again(n: fx.Node) -> fx.Node:
        if n not in made:
            inputs = {a: again(a) for a in n.all_input_nodes if a in follow}
            with n.graph.inserting_before(n):
                made[n] = n.graph.node_copy(n, lambda a: inputs.get(a, a))
        return made[n]

    for n in follow:
        follow += [u for u in n.users if u in large and u not in follow]
    for n in follow:
        for user in [u for u in n.users if u not in forward and u not in large and u not in made.values()]:
            user.replace_input_with(n, again(n))
    (own,) = softmax.quotient.all_input_nodes[:1]
    gone = {*follow, own, *own.all_input_nodes}
    return [*(n for n in large if n not in gone), shifted, *made.values()]


def _write_out_gradient(backward: fx.Node, p: fx.Node) -> None:
    """P * (G - sum P * G), the sum exchanged where it can be."""
    aten, make = torch.ops.aten, functools.partial(call_before, backward)
    g, _, dim, dtype = backward.args
    assert isinstance(g, fx.Node) and isinstance(dtype, torch.dtype) and isinstance(dim, int)
    given = _to(backward, g, p.meta["val"].dtype)
    row = _exchanged(backward, g, p, dim) or make(aten.sum.dim_IntList, make(aten.mul.Tensor, given, p), [dim], True)
    out = make(aten.mul.Tensor, p, make(aten.sub.Tensor, given, row))
    backward.replace_all_uses_with(_to(backward, out, dtype))
    backward.graph.erase_node(backward)


# ---------------------------------------------------------------------------------------------------- the exchange of sums
def _exchanged(at: fx.Node, g: fx.Node, p: fx.Node, dim: int) -> fx.Node | None:
    """sum over k of p * g where g is c * f * (G @ V^T) point by point and p * f * c' is the left factor of a product with V:
    sum over d of G * (that product), times c / c'; or None."""
    if dim not in (-1, len(p.meta["val"].shape) - 1):
        return None
    (scale, factors), (own, mine) = _factors(g), _factors(p)
    for inner in [f for f in factors if str(f.target) in _PRODUCTS[:2]]:
        wanted = factors - collections.Counter([inner]) + mine
        grad, turned = inner.args[:2]
        assert isinstance(grad, fx.Node) and isinstance(turned, fx.Node)
        values = _turned(turned)
        for outer in values.users if values is not None else ():
            if outer.target is not inner.target or outer.args[1] is not values:
                continue
            left = outer.args[0]
            assert isinstance(left, fx.Node)
            number, found = _factors(left)
            if found == wanted:
                return _row_sum(at, grad, outer, scale * own / number, p)
    return None


def _row_sum(at: fx.Node, grad: fx.Node, outer: fx.Node, c: float, p: fx.Node) -> fx.Node:
    aten, val = torch.ops.aten, p.meta["val"]
    product = call_before(at, aten.mul.Tensor, _to(at, grad, val.dtype), _to(at, outer, val.dtype))
    row = call_before(at, aten.sum.dim_IntList, product, [-1], True)
    row = row if c == 1 else call_before(at, aten.mul.Tensor, row, c)
    return call_before(at, aten.view.default, row, [*val.shape[:-1], 1])


def _turned(n: fx.Node) -> fx.Node | None:
    """x where n is x with its last two dimensions exchanged."""
    last = len(n.meta["val"].shape) - 1
    target, source = str(n.target), n.args[0] if n.args else None
    if not isinstance(source, fx.Node):
        return None
    if target == "aten.transpose.int" and {int(a) % (last + 1) for a in n.args[1:3]} == {last - 1, last}:  # type: ignore[arg-type]
        return source
    order = [*range(last - 1), last, last - 1]
    return source if target == "aten.t.default" or (target == "aten.permute.default" and n.args[1] == order) else None


def _factors(n: fx.Node) -> tuple[float, collections.Counter[fx.Node]]:
    """A value as a number times values that are no products of others point by point, seen through casts and views that
    keep the last dimension."""
    scale, out = 1.0, collections.Counter[fx.Node]()
    stack = [n]
    while stack:
        x = stack.pop()
        number, more = _split(x)
        if more:
            scale *= number
            stack += more
        else:
            out[x] += 1
    return scale, out


def _split(x: fx.Node) -> tuple[float, list[fx.Node]]:
    target = str(x.target)
    args: Any = x.args
    nodes = [a for a in args if isinstance(a, fx.Node)]
    if target in _CASTS or (target in (*_VIEWS, "aten.clone.default") and _same_rows(x, nodes[0])):
        return 1.0, nodes[:1]
    if target == "aten.mul.Tensor":
        return (1.0, nodes) if len(nodes) == 2 else (float(args[1]), nodes)
    if target == "aten.mul.Scalar":
        return float(args[1]), nodes
    if target == "aten.div.Tensor" and len(nodes) == 1:
        return 1.0 / float(args[1]), nodes
    if target == "aten.native_dropout_backward.default":
        return float(args[2]), nodes
    return 1.0, []


def _same_rows(x: fx.Node, source: fx.Node) -> bool:
    a, b = x.meta["val"].shape, source.meta["val"].shape
    return math.prod(a) == math.prod(b) and bool(a) and bool(b) and a[-1] == b[-1]
