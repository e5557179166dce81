"""ATen calls in a Graph: how an FX call is frozen into an extern node, and how the frozen form becomes a call again.

A template is a tree of plain values, so that it can be printed, compared and cached, and never holds a live object:

    Arg(k)                 operand k of the node
    ("item", Arg(k))       the number that operand k, a 0-dim tensor, holds
    Expr                   a SymInt
    None bool int float str
    ("list", (…)) ("tuple", (…)) ("dict", ((key, …), …))
    ("dtype", "float32") ("device", "cuda:0") ("layout", "strided") ("memory_format", "channels_last")
    ("complex", re, im) ("slice", start, stop, step) ("op", "aten.add.Tensor") ("attr", "true_graph_0")

The template of a node is ("call", ("tuple", args), ("dict", kwargs)). `outs` has one entry a result:
(shape, DType, strides) for a tensor (DType.other where plait has no such type), ("int",), ("float",), ("none",), ….
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from plait import frontend
from plait.errors import ImportFailed
from plait.frontend.context import LOWERINGS, Context, Tensor, to_dtype, whole
from plait.frontend.decompose import early_decompositions
from plait.frontend.layout import overlaps
from plait.frontend.sizes import Sizes
from plait.ir.bindings import Number, sym_values
from plait.ir.dtype import DType
from plait.ir.graph import Arg, Node, Read, Shape, contiguous_strides
from plait.ir.index import Expr

_CONTRACT_NAMES = """mm addmm bmm baddbmm convolution convolution_backward _convolution conv1d conv2d conv3d
conv_transpose2d cudnn_convolution mkldnn_convolution _scaled_mm _scaled_grouped_mm _grouped_mm _int_mm linear
linear_backward matmul matmul_backward einsum dot vdot mv addmv addr addbmm _addmm_activation _weight_int8pack_mm
_weight_int4pack_mm mkldnn_linear scaled_dot_product_attention"""
_SCATTER_NAMES = """index_put _unsafe_index_put scatter scatter_add scatter_reduce index_add index_copy index_fill
masked_scatter index_reduce embedding_dense_backward as_strided_scatter put _unsafe_masked_index_put_accumulate"""
_CONTRACT, _SCATTER = frozenset(_CONTRACT_NAMES.split()), frozenset(_SCATTER_NAMES.split())
ATTENTION_PREFIXES = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention")
_PURE_NAMESPACES = ("aten", "prims", "plait")


@dataclass(frozen=True, slots=True)
class Item:
    """In an instantiated call whose operands are still Args: the number that the operand will hold."""

    arg: Arg


@dataclass(frozen=True, slots=True)
class Attr:
    """An argument that is a module attribute (a subgraph), by name."""

    name: str


# ------------------------------------------------------------------------------------------------- what is lowered
@cache
def load_tables() -> None:
    """Import the modules that fill LOWERINGS: every aten_*.py beside this one."""
    for module in sorted(pkgutil.iter_modules(frontend.__path__), key=lambda m: m.name):
        if module.name.startswith("aten_"):
            importlib.import_module(f"plait.frontend.{module.name}")


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The decomposition table for AOTAutograd: core ATen's, without what plait lowers itself or calls as a whole. An
    operator kept whole also keeps the strides that eager gives its result."""
    return dict(_decompositions())


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    # a fifth of a second: its thousand names are looked up once
    from torch._decomp import core_aten_decompositions

    load_tables()
    table: dict[Any, Callable[..., Any]] = dict(core_aten_decompositions())
    table[torch.ops.aten.roll.default] = _roll
    early = early_decompositions()
    return {
        op: fn
        for op, fn in (table | early).items()
        if fn is _roll or op in early or (str(op) not in LOWERINGS and role_of(op) == "opaque")
    }


def _roll(x: torch.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    """Eager's roll on the CPU is a cat of two slices, and has a cat's layout; its fake kernel says contiguous."""
    if x.is_contiguous() or x.device.type != "cpu" or len(dims) != 1 or x.numel() == 0:
        return NotImplemented
    n = x.shape[dims[0]]
    start = (n - shifts[0]) % n
    return torch.cat([x.narrow(dims[0], start, n - start), x.narrow(dims[0], 0, start)], dims[0])


# ------------------------------------------------------------------------------------------------ names of operators
def target_name(target: Any) -> str:
    """The name an extern node keeps: "aten.mm.default", or "higher_order.cond"."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target._name}"
    raise ImportFailed(f"a call of {target!r}, which is no operator")


def resolve(name: str) -> Any:
    """The operator of that name; ImportFailed when this torch has none."""
    parts = name.split(".")
    found: Any = torch.ops
    for part in parts:
        found = getattr(found, part, None)
        if found is None:
            raise ImportFailed(f"this torch has no operator {name}")
    return found


def role_of(target: Any) -> str:
    """contract, scatter or opaque."""
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
        base = target._schema.name.split("::")[1]
        if base in _CONTRACT or base.startswith(ATTENTION_PREFIXES):
            return "contract"
        if base in _SCATTER:
            return "scatter"
    return "opaque"


def is_effectful(target: Any) -> bool:
    """Whether the call must happen even when nobody reads it."""
    if not isinstance(target, torch._ops.OpOverload):
        return True
    if target.namespace not in _PURE_NAMESPACES:
        return True
    base = target._schema.name.split("::")[1]
    return target._schema.is_mutable or base.startswith(("_assert", "sym_constrain", "_print", "_functional_assert"))


def needs_serial(target: Any) -> bool:
    """Whether two equal calls are two calls: effects and random draws."""
    return is_effectful(target) or torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def copying_view(target: Any) -> tuple[Any, bool]:
    """A view operator's copying form and True, so that no extern's result shares memory with its operand; any other
    operator as it is and False."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return target, False
    base, overload = target._schema.name.split("::")[1], target._overloadname
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in target._schema.returns)
    if not (is_view or base == "_unsafe_view"):
        return target, False
    packet = getattr(torch.ops.aten, f"{base.removeprefix('_unsafe_')}_copy", None)
    found = getattr(packet, overload, None)
    return (target, False) if found is None else (found, True)


# ------------------------------------------------------------------------------------------------------------ freezing
class _Freezer:
    """Collects the operands of one call while its arguments are frozen."""

    def __init__(self) -> None:
        self.reads: list[Read] = []

    def freeze(self, v: Any) -> Any:
        if isinstance(v, Tensor):
            self.reads.append(operand_read(v))
            place = Arg(len(self.reads) - 1)
            return ("item", place) if v.is_number else place
        if v is None or isinstance(v, (Expr, bool, int, float, str)):
            return v
        if isinstance(v, (list, tuple)):
            return ("list" if isinstance(v, list) else "tuple", tuple(self.freeze(x) for x in v))
        if isinstance(v, Mapping):
            return ("dict", tuple((str(k), self.freeze(x)) for k, x in v.items()))
        if isinstance(v, slice):
            return ("slice", self.freeze(v.start), self.freeze(v.stop), self.freeze(v.step))
        return _freeze_leaf(v)


def _freeze_leaf(v: Any) -> Any:
    if isinstance(v, (torch.dtype, torch.layout, torch.memory_format)):
        return (type(v).__name__, str(v).removeprefix("torch."))
    if isinstance(v, torch.device):
        return ("device", str(v))
    if isinstance(v, complex):
        return ("complex", v.real, v.imag)
    if isinstance(v, Attr):
        return ("attr", v.name)
    if isinstance(v, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        return ("op", target_name(v))
    raise ImportFailed(f"an operator's argument is {v!r} ({type(v).__name__}), which plait cannot keep")


def operand_read(x: Tensor) -> Read:
    """The read of an extern's operand: the whole view, with the strides the call is owed."""
    strides = x.strides
    if strides is None or overlaps(x.shape, strides):
        strides = contiguous_strides(x.shape)
    return Read(x.source, x.index, x.guard, x.fill if x.guard else 0, domain=x.shape, strides=strides)


# --------------------------------------------------------------------------------------------------------- extern nodes
def extern_maker(sizes: Sizes) -> Callable[..., Any]:
    """The function Context.extern calls, for one graph's symbols."""

    def make(
        ctx: Context, target: Any, args: Sequence[Any], kwargs: dict[str, Any], meta: Any, role: str, reason: str
    ) -> Any:
        target, contiguous = copying_view(target)
        freezer = _Freezer()
        template = ("call", freezer.freeze(tuple(args)), freezer.freeze(kwargs))
        flat = meta if isinstance(meta, (list, tuple)) else (meta,)
        outs = tuple(_out(m, sizes, contiguous) for m in flat)
        first: tuple[Shape, DType] = next(((o[0], o[1]) for o in outs if is_tensor_out(o)), ((), DType.other))
        node = ctx.builder.node(
            "extern",
            first[0],
            freezer.reads,
            dtype=first[1],
            target=target_name(target),
            role=role if role != "opaque" else role_of(target),
            template=template,
            outs=outs,
            serial=ctx.serial() if needs_serial(target) else None,
        )
        if reason:
            ctx.refusals.setdefault(node, reason)
        if is_effectful(target):
            ctx.effects.append(node)
        if not isinstance(meta, (list, tuple)):
            return _result(ctx, node, 0, outs[0], meta, alone=True)
        results = [_result(ctx, node, k, o, m, alone=False) for k, (o, m) in enumerate(zip(outs, flat, strict=True))]
        return tuple(results) if isinstance(meta, tuple) else results

    def _result(ctx: Context, node: Node, k: int, out: tuple[Any, ...], meta: Any, alone: bool) -> Any:
        if is_tensor_out(out):
            sizes.bind_sizes(out[0], node, k)
            source = node if alone else ctx.builder.node("project", out[0], [Read(node, ())], dtype=out[1], item=k)
            return replace(whole(source), strides=out[2])
        if out == ("none",):
            return None
        if out[0] == "int":
            return sizes.from_extern(meta, node, k)
        raise ImportFailed(f"{node.attr('target')} returns {meta!r}, which is not a tensor")

    return make


def is_tensor_out(out: tuple[Any, ...]) -> bool:
    """Whether an entry of `outs` is a tensor's."""
    return len(out) == 3


def _out(meta: Any, sizes: Sizes, contiguous: bool) -> tuple[Any, ...]:
    if isinstance(meta, torch.Tensor):
        shape = sizes.shape(meta.shape)
        plain = contiguous or meta.layout is not torch.strided
        strides = contiguous_strides(shape) if plain else sizes.shape(meta.stride())
        return (shape, to_dtype(meta.dtype) or DType.other, strides)
    if meta is None:
        return ("none",)
    if isinstance(meta, (int, torch.SymInt)):
        return ("int",)
    if isinstance(meta, (float, torch.SymFloat)):
        return ("float",)
    return ("python", type(meta).__name__)


# -------------------------------------------------------------------------------------------------------------- calling
def instantiate(
    template: Any,
    operands: Sequence[Any],
    symbols: Mapping[str, Number] | Callable[[Expr], int] | None = None,
    attrs: Callable[[str], Any] | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of the frozen call. `symbols` are the values of the run's symbols (or a function from Expr to int);
    `attrs` finds subgraphs by name."""
    size = symbols if callable(symbols) else _sizer(symbols or {})

    def thaw(t: Any) -> Any:
        if isinstance(t, Arg):
            return operands[t.k]
        if isinstance(t, Expr):
            return t.const if t.const is not None else size(t)
        if not isinstance(t, tuple):
            return t
        kind = t[0]
        if kind == "item":
            found = thaw(t[1])
            return Item(found) if isinstance(found, Arg) else found.item()
        if kind == "list":
            return [thaw(x) for x in t[1]]
        if kind == "tuple":
            return tuple(thaw(x) for x in t[1])
        if kind == "dict":
            return {k: thaw(x) for k, x in t[1]}
        if kind == "attr":
            if attrs is None:
                raise ImportFailed(f"the call needs the subgraph {t[1]}, which this runtime does not keep")
            return attrs(t[1])
        return slice(*(thaw(x) for x in t[1:])) if kind == "slice" else _THAW[kind](*t[1:])

    return thaw(template[1]), thaw(template[2])


def call(node: Node, operands: Sequence[Any], symbols: Any = None, attrs: Callable[[str], Any] | None = None) -> Any:
    """Run an extern node on torch tensors: its operator's results as the operator gives them."""
    args, kwargs = instantiate(node.attr("template"), operands, symbols, attrs)
    return resolve(node.attr("target"))(*args, **kwargs)


def _sizer(symbols: Mapping[str, Number]) -> Callable[[Expr], int]:
    env = sym_values(symbols)
    return lambda e: e.evaluate(env)


def _torch_name(name: str) -> Any:
    return getattr(torch, name)


_THAW: dict[str, Callable[..., Any]] = {
    "dtype": _torch_name,
    "layout": _torch_name,
    "memory_format": _torch_name,
    "device": torch.device,
    "complex": complex,
    "op": resolve,
}
