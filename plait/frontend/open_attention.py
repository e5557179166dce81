"""Which calls of `scaled_dot_product_attention` are opened, in Dynamo's graph: before autograd, so that an open call's gradients
are those of plain code, which the joint graph's rewrites know how to form.

A call stays the library's kernel, or becomes `plain_attention`, whichever `plan/attention_cost.py` predicts to be faster with
what is around it. What was decided is noted on the node, whence every operator that comes of it has it, gradients included.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from plait.frontend.attention import TARGETS, Given, plain_attention
from plait.frontend.device import spec_of
from plait.frontend.externs import ATTENTION_PREFIXES, load_tables
from plait.frontend.fx_nodes import is_view
from plait.frontend.neighbours import Neighbours, nbytes_of, size_of, watched
from plait.frontend.origins import ATTENTION, entries, origin_of
from plait.ir.names import module_under, names_of
from plait.options import Options
from plait.plan.attention_cost import Attention, choose
from plait.plan.contract_cost import DWARFS, TILE
from plait.plan.device import DeviceSpec
from plait.plan.openings import Opening

_NAME = "scaled_dot_product_attention"
_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_numbers = itertools.count()


def open_attention(gm: fx.GraphModule, options: Options, spec: DeviceSpec | None = None) -> None:
    """Open the calls of a graph of Dynamo's that are worth it, those of graphs inside it too. `spec`: the device to plan for, if it
    is not the tensors'."""
    load_tables()
    for graph in _graphs(gm):
        calls = [n for n in graph.graph.nodes if n.op == "call_function" and n.target in TARGETS]
        around = Neighbours()
        for n in calls:
            given = Given.of(n.args, n.kwargs)
            why = _why_kept(n, given, options)
            if why is None:
                _decide(n, given, around, options, spec)
            else:
                _note(n, Opening(n.name, 0.0, "closed", why=why))
        if calls:
            graph.graph.lint()
            graph.recompile()


def _graphs(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    yield from (m for m in gm.modules() if isinstance(m, fx.GraphModule))


# ------------------------------------------------------------------------------------------------------------ the laws
def _why_kept(n: fx.Node, given: Given, options: Options) -> str | None:
    """Why a call can only be the library's, or None."""
    if options.numerics == "eager":
        return "eager's bits are wanted"
    if options.plan == "none":
        return "nothing is to be fused"
    if not options.opens_products:
        return f"mode {options.mode} leaves products to the library"
    if not isinstance(given.dropout_p, (int, float)) or not 0 <= given.dropout_p < 1:
        return "its dropout is no number below 1"
    if given.dropout_p > 0 and options.rng == "eager":
        return "eager's random numbers are wanted"
    if any(isinstance(x, fx.Node) for x in (given.is_causal, given.scale, given.enable_gqa)):
        return "a number among its arguments varies"
    if given.is_causal and given.attn_mask is not None:
        return "it has two masks"
    return _why_not_plain(n, given)


def _why_not_plain(n: fx.Node, given: Given) -> str | None:
    operands = [given.query, given.key, given.value, *([] if given.attn_mask is None else [given.attn_mask])]
    if not all(isinstance(x, fx.Node) for x in operands) or watched(n) is None:
        return "its tensors are no plain ones"
    q, k, v, *mask = (x.meta["example_value"] for x in operands)
    out = n.meta["example_value"]
    if out.dtype not in _TYPES or not all(x.is_floating_point() for x in (q, k, v)):
        return f"it works in {out.dtype}"
    if any(size_of(s) == 0 for x in (q, k, v, *mask, out) for s in x.shape):
        return "a size is 0"
    if not q.ndim == k.ndim == v.ndim >= 3 or any(m.ndim > q.ndim for m in mask):
        return "its tensors have different dimensions"
    if given.enable_gqa and k.shape[-3] != v.shape[-3]:
        return "keys and values have different heads"
    return None if _order(out) is not None else "its result is not dense"


def _order(out: torch.Tensor) -> tuple[int, ...] | None:
    """Dimensions of a dense tensor, outermost first in memory; None of another."""
    sizes, strides = [size_of(s) for s in out.shape], [size_of(s) for s in out.stride()]
    order = sorted(range(out.ndim), key=lambda d: (-strides[d] if sizes[d] > 1 else 0, d))
    # dimensions of one point lie anywhere: where they are, if that is in order
    plain = [d for d in order if sizes[d] > 1]
    expected = 1
    for d in reversed(plain):
        if strides[d] != expected:
            return None
        expected *= sizes[d]
    if plain == sorted(plain):
        return tuple(range(out.ndim))
    moving = iter(plain)
    return tuple(d if sizes[d] == 1 else next(moving) for d in range(out.ndim))


# ---------------------------------------------------------------------------------------------------------- the choice
def _decide(n: fx.Node, given: Given, around: Neighbours, options: Options, spec: DeviceSpec | None) -> None:
    device = spec_of(str(n.meta["example_value"].device)) if spec is None else spec
    facts = _facts(n, given, around, device)
    found = choose(n.name, facts, device)
    wanted = _wanted(n, options)
    if wanted:
        found = replace(found, state="open" if wanted[0] else "closed", why=wanted[1])
    _note(n, found)
    if found.state == "open":
        _open(n, given)


def _wanted(n: fx.Node, options: Options) -> tuple[bool, str] | None:
    """Whether the user wants it open, and in what words; None: says nothing."""
    label = next((label for _, (kind, label, _) in entries(n) if kind == "fuse"), None)
    if label is not None:
        return True, f"region {label!r} wants one kernel"
    origin = origin_of(n)

    def meant(names: Sequence[str]) -> bool:
        own = {x.removeprefix("forward/").removeprefix("backward/") for x in names}
        calls = set(names_of(_NAME, f"aten.{_NAME}", line=origin.line))
        return bool(own & calls) or any(module_under(origin.module, x) is not None for x in own)

    if any(meant(names) for names in options.force):
        return True, "option force"
    if any(len(names) == 1 and meant(names) for names in options.forbid):
        return False, "option forbid"
    return None


def _varies(n: fx.Node, given: Given) -> bool:
    values = [x.meta["example_value"] for x in (n, given.query, given.key, given.value)]
    return any(not isinstance(s, int) for x in values for s in x.shape)


def _facts(n: fx.Node, given: Given, around: Neighbours, spec: DeviceSpec) -> Attention:
    q, k, v, out = (x.meta["example_value"] for x in (given.query, given.key, given.value, n))
    sizes = [size_of(s) for s in out.shape]
    wants = [x.meta["example_value"].requires_grad for x in (given.query, given.key, given.value)]
    training, keys = torch.is_grad_enabled() and any(wants), size_of(k.shape[-2])
    a = Attention(
        rows=math.prod(sizes[:-1]),
        queries=sizes[-2],
        keys=keys,
        depth=size_of(q.shape[-1]),
        width=sizes[-1],
        nbytes=out.element_size(),
        io_bytes=sum(map(nbytes_of, (q, k, v, out))),
        causal=bool(given.is_causal),
        training=training,
        # recompute.py forms it again where it is much larger than what it is made of, and no size varies
        whole=training
        and (
            _varies(n, given)
            or math.prod(sizes[:-1]) * keys < DWARFS * sum(math.prod(map(size_of, x.shape)) for x in (q, k))
        ),
        fused=spec.kind != out.device.type or _has_kernel(n),
    )
    return _with_neighbours(a, n, given, around)


def _has_kernel(n: fx.Node) -> bool:
    """Whether the library has a kernel for the call, and does not take it apart itself."""
    ops = watched(n, gradients=True) or []
    return any(op._schema.name.split("::")[1].startswith(ATTENTION_PREFIXES) for op in ops)


def _with_neighbours(a: Attention, n: fx.Node, given: Given, around: Neighbours) -> Attention:
    saved, joined, mask_bytes = 0.0, 0, 0.0
    # each tile of queries would form keys and values again
    alone = [given.query, *([given.key, given.value] if a.queries <= TILE else [])]
    for x in alone:
        found = around.formed(x, n)
        if found is not None and found.readers == 1:
            saved += 2 * nbytes_of(x.meta["example_value"])
    if given.attn_mask is not None:
        mask = given.attn_mask.meta["example_value"]
        found = around.formed(given.attn_mask, n)
        mask_bytes = nbytes_of(mask) / mask.element_size() * a.nbytes
        if mask.dtype is torch.bool:  # the library makes numbers of it
            saved += 2 * mask_bytes
        if found is not None:
            saved += max((1 + 1 / found.readers) * nbytes_of(mask) - found.source_bytes, 0.0)
    if not a.training and around.taken_in(n):
        saved, joined = saved + 2 * nbytes_of(n.meta["example_value"]), 1
    return replace(a, saved_bytes=saved, joined=joined, mask_bytes=mask_bytes)


# --------------------------------------------------------------------------------------------------------- the rewriting
def _note(n: fx.Node, found: Opening) -> None:
    entry = (next(_numbers), found.gain_ns, found.state, found.call_ns, found.open_ns, found.why)
    n.meta["custom"] = {**(n.meta.get("custom") or {}), ATTENTION: entry}


def _open(n: fx.Node, given: Given) -> None:
    out = n.meta["example_value"]
    q, k = (x.meta["example_value"] for x in (given.query, given.key))
    n.target = plain_attention
    n.args = (given.query, given.key, given.value, given.attn_mask)
    n.kwargs = {
        "dropout_p": float(given.dropout_p),
        "is_causal": bool(given.is_causal),
        "scale": given.scale,
        "grouped": bool(given.enable_gqa) and q.shape[-3] != k.shape[-3],
        "dtype": out.dtype,
        "order": _order(out),
    }


# ------------------------------------------------------------------------------------------------------------- reading
def noted(gm: Any) -> tuple[Opening, ...]:
    """What was decided of the calls that a graph of ATen operators came of: by the last operator of each that computes."""
    found: dict[Any, Opening] = {}
    for n in gm.graph.nodes:
        entry = (n.meta.get("custom") or {}).get(ATTENTION)
        if entry is not None and n.op == "call_function" and n.target is not operator.getitem and not is_view(n):
            number, gain, state, call, opened, why = entry
            found[number] = Opening(n.name, gain, state, call, opened, why)
    return tuple(found.values())
