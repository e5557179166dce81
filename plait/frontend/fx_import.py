"""FX graph → Graph: functionalised ATen with fake tensors in, nodes with index maps out.

Every FX node becomes a value (context.py): operators through LOWERINGS, or as their ATen call where no lowering applies,
which is recorded with its reason. A trailing `copy_` into an argument becomes an output that writes to it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree

from plait.errors import ImportFailed, InternalError
from plait.frontend import symbolic
from plait.frontend.context import LOWERINGS, Context, Tensor, to_dtype, whole
from plait.frontend.externs import Attr, extern_maker, load_tables, operand_read
from plait.frontend.layout import elementwise_strides, is_dense, overlaps
from plait.frontend.origins import origin_of
from plait.frontend.saved import left_apart, private_results, was_computed
from plait.frontend.sizes import Sizes
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.fault import passed
from plait.ir.graph import Builder, Graph, Input, Layout, Node, Origin, Output, Shape, contiguous_strides, topological
from plait.ir.index import Expr

# binary operators whose fake kernels order dimensions otherwise than eager's iterator does
_MISREPORTED = frozenset(
    f"aten.{name}"
    for name in (
        "copysign.Tensor",
        "floor_divide.default",
        "heaviside.default",
        "logaddexp.default",
        "logaddexp2.default",
        "logical_and.default",
        "logical_or.default",
        "logical_xor.default",
        "special_xlog1py.default",
        "xlogy.Tensor",
    )
)


def import_fx(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any] = (),
    *,
    numerics: str = "fused",
    rng: str = "plait",
    device: str | None = None,
) -> Graph:
    """The Graph of an FX graph. `example_inputs` stand in for placeholders without `meta["val"]`. ImportFailed where the
    graph says something that plait cannot."""
    load_tables()
    importer = _Importer(gm, example_inputs, numerics, rng, device)
    return passed("import", importer.run())


@dataclass
class _Result:
    """What the FX graph returns and writes, as it is collected."""

    outputs: list[Output]
    returns: list[tuple[Any, ...]]
    places: dict[torch.fx.Node, int]
    memory: dict[int, int]  # fake storages of returned tensors, numbered


# operators whose results' sizes depend on data, but which torch (2.11) does not mark as such: it traces made-up sizes
_SIZED_BY_DATA = frozenset(["aten._unique.default"])


class _Importer:
    """One run of import_fx."""

    def __init__(
        self, gm: torch.fx.GraphModule, examples: Sequence[Any], numerics: str, rng: str, device: str | None
    ) -> None:
        self.gm = gm
        self.placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        self.examples = dict(zip(self.placeholders, examples, strict=False))
        for n, example in self.examples.items():
            n.meta.setdefault("val", example)
        self.position = {n: k for k, n in enumerate(self.placeholders)}
        self.device = device or _device_of(gm)
        self.sizes = Sizes(_shape_env(gm))
        self.ctx = Context(Builder(self.sizes.facts), self.sizes.facts, numerics, self.device, rng)
        self.ctx.make_extern = extern_maker(self.sizes)
        self.env: dict[torch.fx.Node, Any] = {}
        self.inputs: list[Input] = []
        self.constants: dict[int, str] = {}
        self.origins: dict[Node, tuple[Origin, ...]] = {}
        self.layouts: dict[Node, Shape] = {}
        self.padded: dict[Node, Shape] = {}
        self.private: frozenset[torch.fx.Node] = frozenset()
        self.result = _Result([], [], {}, {})

    def run(self) -> Graph:
        self.sizes.bind_all(list(_sources(self.placeholders)))
        for fx in self.gm.graph.nodes:
            before = self.ctx.builder.count
            self.ctx.node_meta = fx
            try:
                self.env[fx] = self._convert(fx)
            except (ImportFailed, InternalError) as e:
                raise type(e)(f"importing {fx.format_node()}: {e.message}", origin=origin_of(fx).line) from e
            origin = origin_of(fx)
            for node in self.ctx.builder.since(before):
                self.origins[node] = (origin,)
        graph = Graph(
            inputs=tuple(self.inputs),
            outputs=tuple(self.result.outputs),
            origins=self.origins,
            layouts=self.layouts,
            padded=self.padded,
            device=self.device,
            arity=len(self.placeholders),
            constants=self.constants,
            returns=tuple(self.result.returns),
            effects=tuple(self.ctx.effects),
            refusals=self.ctx.refusals,
        )
        self.sizes.finish(symbolic.symbols_of(graph))
        # data-dependent sizes come from these calls, whether or not their tensors are read
        sources = [how[1] for how in self.sizes.bindings.values() if how[0] == "extern"]
        graph.effects = tuple(sorted({*graph.effects, *sources}, key=lambda n: n.serial))
        graph.symbols, graph.hints, graph.bindings = self.sizes.ranges, self.sizes.hints, self.sizes.bindings
        return graph

    # ---------------------------------------------------------------- FX nodes
    def _convert(self, fx: torch.fx.Node) -> Any:
        if fx.op == "placeholder":
            return self._placeholder(fx)
        if fx.op == "get_attr":
            return self._attribute(fx)
        if fx.op == "output":
            return self._output(fx)
        if fx.op == "call_function":
            return self._call(fx)
        raise ImportFailed(f"{fx.op} nodes are not functionalised ATen")

    def _placeholder(self, fx: torch.fx.Node) -> Any:
        val, position = fx.meta.get("val"), self.position[fx]
        if isinstance(val, torch.Tensor):
            found = self._input(fx.name, val, position)
            self.inputs[-1] = replace(self.inputs[-1], private=was_computed(fx))
            lies = left_apart(val, self.examples.get(fx))
            if lies is not None:
                # the program is owed eager's strides; the memory has these
                i, strides = self.inputs[-1], tuple(map(ix.const, lies))
                self.inputs[-1] = replace(i, layout=Layout(strides))
                self.padded[i.node] = strides
            return found
        if isinstance(val, (torch.SymInt, torch.SymBool)):
            return self.sizes.expr(val)
        if isinstance(val, torch.SymFloat):
            node = self.ctx.builder.node("input", (), dtype=DType.f64, name=fx.name)
            self.inputs.append(Input(node, position, None, self.device))
            return replace(whole(node), is_number=True)
        return val

    def _input(self, name: str, val: torch.Tensor, position: int) -> Tensor:
        shape, strides = self.sizes.shape(val.shape), _strides(self.sizes, val)
        node = self.ctx.builder.node("input", shape, dtype=to_dtype(val.dtype) or DType.other, name=name)
        self.inputs.append(Input(node, position, Layout(strides), str(val.device)))
        return replace(whole(node), strides=strides)

    def _attribute(self, fx: torch.fx.Node) -> Any:
        name = str(fx.target)
        held = operator.attrgetter(name)(self.gm)
        if not isinstance(held, torch.Tensor):
            return Attr(name)
        fx.meta.setdefault("val", held)
        dtype = to_dtype(held.dtype)
        if name.startswith("_tensor_constant") and held.ndim == 0 and dtype is not None and type(held) is torch.Tensor:
            # a number written in the user's code; nothing can change it later
            with unset_fake_temporarily():
                return self.ctx.const(held.item(), dtype)
        position = len(self.placeholders) + len(self.constants)
        self.constants[position] = name
        return self._input(fx.name, held, position)

    def _call(self, fx: torch.fx.Node) -> Any:
        args, kwargs = self._argument(fx.args), self._argument(fx.kwargs)
        if fx.target is operator.getitem:
            return args[0][args[1]]
        val = fx.meta.get("val")
        if isinstance(fx.target, torch._ops.OpOverload):
            if fx.target is torch.ops.aten.copy_.default:
                return self._write(fx, *args)
            if fx.target._schema.is_mutable:
                raise ImportFailed(f"{fx.target} changes its argument: the graph is not functionalised")
            if isinstance(val, (int, torch.SymInt, torch.SymBool)) and self.sizes.is_known(val):
                return self.sizes.expr(val)
            return self._operator(fx, args, kwargs)
        if isinstance(fx.target, torch._ops.HigherOrderOperator):
            return self.ctx.extern(fx.target, args, kwargs, val, reason="higher-order operator")
        assert callable(fx.target)
        return symbolic.python_function(self.ctx, self.sizes, fx.target, args, val)

    def _operator(self, fx: torch.fx.Node, args: Any, kwargs: Any) -> Any:
        """An ATen operator through its lowering, or as a call."""
        val, reason = fx.meta.get("val"), ""
        if str(fx.target) in _SIZED_BY_DATA and all(isinstance(n, int) for t in _tensors(val) for n in t.shape):
            raise ImportFailed(f"{fx.target}: the size of its result depends on data, and was traced as a fixed one")
        if fx.target is torch.ops.aten.as_strided.default:
            args, reason = self._of_whole_storage(fx, *args, **kwargs)
            kwargs = {}
        reason = reason or self._why_not_lower(fx)
        if not reason:
            args, kwargs = self._bring(fx, args, kwargs, self.device)
            self.ctx.reason = ""
            self.ctx.expected = tuple((self.sizes.shape(t.shape), to_dtype(t.dtype)) for t in _tensors(val))
            before = self.ctx.builder.count
            found = LOWERINGS[str(fx.target)](self.ctx, *args, **kwargs)
            if found is not NotImplemented:
                return self._checked(fx, found, val, before)
            reason = self.ctx.reason or "not this form of the operator"
        elif any(t.device.type == "cpu" for t in _tensors(val)):
            args, kwargs = self._bring(fx, args, kwargs, "cpu")
        return self.ctx.extern(fx.target, args, kwargs, val, reason=reason)

    def _why_not_lower(self, fx: torch.fx.Node) -> str:
        """The reason for the call, or "" for the lowering."""
        if str(fx.target) not in LOWERINGS:
            return "no lowering"
        outs = list(_tensors(fx.meta.get("val")))
        for t in (*_metas(fx.all_input_nodes), *outs):
            if to_dtype(t.dtype) is None:
                return f"type {str(t.dtype).removeprefix('torch.')}"
            if t.layout is not torch.strided or t.is_quantized:
                return f"layout {t.layout}"
            if str(t.device) != self.device and not (t.device.type == "cpu" and t.ndim == 0):
                return f"device {t.device}"
            if self.sizes.unbacked and any(e.symbols() & self.sizes.unbacked for e in self.sizes.shape(t.shape)):
                return "size known only at run time"
        if outs and all(str(t.device) != self.device for t in outs):
            operands = [self.env[n] for n in fx.all_input_nodes]
            if not all(_is_placeless(v) for v in operands if isinstance(v, Tensor)):
                return f"device {outs[0].device}"
        return ""

    def _of_whole_storage(
        self, fx: torch.fx.Node, x: Tensor, size: Any, stride: Any, offset: Any = None
    ) -> tuple[tuple[Any, ...], str]:
        """as_strided of a view as as_strided of the tensor whose memory the view shares. An argument's memory may be more
        than the tensor: there only the call, which is given the argument itself, knows."""
        node = fx.all_input_nodes[0]
        if offset is None and node.op != "placeholder":
            offset = self.sizes.expr(node.meta["val"].storage_offset())
        memory = _storage(node.meta["val"])
        while node.op == "call_function" and node.all_input_nodes:
            parent = node.all_input_nodes[0]
            if _storage(parent.meta.get("val")) != memory:
                break
            node = parent
        root, val = self.env[node], node.meta["val"]
        dense = is_dense(root.shape, root.strides or contiguous_strides(root.shape))
        if node.op != "placeholder" and not (dense and self.sizes.expr(val.storage_offset()) is ix.ZERO):
            raise ImportFailed("as_strided of memory that is not one dense tensor")
        return (root, size, stride, offset), "memory of an argument" if node.op == "placeholder" else ""

    def _bring(self, fx: torch.fx.Node, args: Any, kwargs: Any, device: str) -> tuple[Any, Any]:
        """Arguments with 0-dim tensors of another device copied to `device`; constants are made on the graph's device."""
        moved: dict[int, Tensor] = {}
        for source in fx.all_input_nodes if self.device != "cpu" else ():
            val, value = source.meta.get("val"), self.env[source]
            if not isinstance(val, torch.Tensor) or not isinstance(value, Tensor) or val.ndim:
                continue
            # an operator that is called on the CPU takes what lies elsewhere as it is, but for constants
            placeless = _is_placeless(value)
            here = self.device if placeless else str(val.device)
            if here != device and (placeless or device != "cpu") and to_dtype(val.dtype) is not None:
                moved[id(value)] = self._copied(value, val, device)
        if not moved:
            return args, kwargs
        swapped: tuple[Any, Any] = pytree.tree_map_only(Tensor, lambda t: moved.get(id(t), t), (args, kwargs))
        return swapped

    def _copied(self, x: Tensor, val: torch.Tensor, device: str) -> Tensor:
        out = self.ctx.extern(
            torch.ops.aten._to_copy.default, (x,), {"device": torch.device(device)}, val, reason=f"copy to {device}"
        )
        assert isinstance(out, Tensor)
        return out

    def _checked(self, fx: torch.fx.Node, found: Any, val: Any, before: int) -> Any:
        """Compare a lowering's result with what the fake tensors say, and note eager's strides."""
        if isinstance(val, (list, tuple)):
            if not isinstance(found, (list, tuple)) or len(found) != len(val):
                raise InternalError(f"the lowering of {fx.target} gives {found!r} for {len(val)} results")
            # a gradient that was not asked for is None in eager, while torch's meta functions may show a tensor for it
            return tuple(
                None if f is None else self._checked(fx, f, v, before) for f, v in zip(found, val, strict=True)
            )
        if not isinstance(val, torch.Tensor):
            return replace(found, is_number=True) if isinstance(found, Tensor) else found
        shape = self.sizes.shape(val.shape)
        if not isinstance(found, Tensor) or len(found.shape) != len(shape) or found.dtype is not to_dtype(val.dtype):
            raise InternalError(f"the lowering of {fx.target} gives {found!r} where eager gives {val}")
        for have, want in zip(found.shape, shape, strict=True):
            if have is not want and have.const is not None and want.const is not None:
                raise InternalError(f"the lowering of {fx.target} gives shape {found.shape}, not {shape}")
        # an extent the program wrote as a number stays one, where the fake tensor only has a quotient equal to it
        shape = tuple(h if h.const is not None else w for h, w in zip(found.shape, shape, strict=True))
        strides = contiguous_strides(shape) if self.sizes.is_contiguous(val) else self._eager_strides(fx, val)
        if found.source.serial >= before and found.source.kind != "extern":
            self._note_layout(found, strides)
        return replace(found, shape=shape, strides=strides)

    def _eager_strides(self, fx: torch.fx.Node, val: torch.Tensor) -> Shape:
        """The fake tensor's strides, but for operators whose fake result has another layout than the real one."""
        if str(fx.target) in _MISREPORTED:
            operands = [self.env[n] for n in fx.all_input_nodes]
            pairs = [(t.shape, t.strides or contiguous_strides(t.shape)) for t in operands if isinstance(t, Tensor)]
            found = elementwise_strides(pairs, self.sizes.shape(val.shape))
            if found is not None:
                return found
        return _strides(self.sizes, val)

    def _note_layout(self, x: Tensor, strides: Shape) -> None:
        """Eager's strides of a new node's value, when the result shows that value with its dimensions in some order."""
        if x.guard or not is_dense(x.shape, strides):
            return
        node, seen = x.source, {x.index[d].as_axis(): d for d in range(len(x.index))}
        wanted: dict[int, Expr] = {}
        for k, extent in enumerate(x.shape):
            if extent is ix.ONE:
                continue
            if k not in seen:
                return
            wanted[seen[k]] = strides[k]
        if all(n is ix.ONE or d in wanted for d, n in enumerate(node.shape)):
            plain = contiguous_strides(node.shape)
            self.layouts[node] = tuple(wanted.get(d, plain[d]) for d in range(len(node.shape)))

    # ---------------------------------------------------------------- results
    def _write(self, fx: torch.fx.Node, target: Tensor, value: Tensor, non_blocking: bool = False) -> Tensor:
        """copy_ into an argument: an output that writes to it."""
        place = fx.args[0]
        if not isinstance(place, torch.fx.Node) or place not in self.position:
            raise ImportFailed("copy_ into something that is not an argument: the graph is not functionalised")
        x = self.ctx.expand(self.ctx.cast(value, target.dtype), target.shape)
        strides = target.strides or contiguous_strides(target.shape)
        read = operand_read(replace(x, strides=strides))
        device = str(place.meta["val"].device)
        self.result.outputs = [o for o in self.result.outputs if o.writes_to != self.position[place]]
        self.result.outputs.append(Output(place.name, read, strides, self.position[place], device))
        return x

    def _output(self, fx: torch.fx.Node) -> None:
        self.private = private_results(fx)
        for leaf in pytree.tree_leaves(fx.args[0], is_leaf=lambda x: x is None):
            self.result.returns.append(self._returned(leaf))

    def _returned(self, leaf: Any) -> tuple[Any, ...]:
        if not isinstance(leaf, torch.fx.Node):
            return ("none",) if leaf is None else ("value", leaf)
        value = self.env[leaf]
        given = leaf in self.position and isinstance(value, Tensor) and value.source not in self.padded
        if given and not isinstance(leaf.meta.get("val"), torch.SymFloat):
            return ("input", self.position[leaf])
        if isinstance(value, Expr):
            return ("scalar", value)
        if value is None:
            return ("none",)
        if not isinstance(value, Tensor):
            return ("value", value)
        if leaf not in self.result.places:
            val = leaf.meta.get("val")
            if isinstance(val, torch.Tensor) and str(val.device) != self.device and _is_placeless(value):
                value = self._copied(value, val, str(val.device))
            strides = value.strides if value.strides is not None else contiguous_strides(value.shape)
            device = str(val.device) if isinstance(val, torch.Tensor) else self.device
            if overlaps(value.shape, strides):
                strides = contiguous_strides(value.shape)  # a result owns its elements
            self.result.places[leaf] = len(self.result.outputs)
            read = operand_read(replace(value, strides=strides))
            memory, private = self._memory_of(leaf), leaf in self.private
            self.result.outputs.append(Output(leaf.name, read, strides, None, device, None, memory, private))
        kind = "tensor" if isinstance(leaf.meta.get("val"), torch.Tensor) else "item"
        return (kind, self.result.places[leaf])

    def _memory_of(self, leaf: torch.fx.Node) -> int | None:
        """The number of a returned tensor's storage, read off the fake tensors."""
        key = _storage(leaf.meta.get("val"))
        if key is None:
            return None
        for n, position in self.position.items():
            if _storage(n.meta.get("val")) == key:
                return -1 - position
        return self.result.memory.setdefault(key, len(self.result.memory))

    def _argument(self, a: Any) -> Any:
        """FX argument → values: nodes are looked up, SymInts become Exprs, containers are kept."""
        if isinstance(a, torch.fx.Node):
            return self.env[a]
        if isinstance(a, (list, tuple)):
            return (
                type(a)([self._argument(x) for x in a]) if type(a) in (list, tuple) else [self._argument(x) for x in a]
            )
        if isinstance(a, dict):
            return {k: self._argument(x) for k, x in a.items()}
        if isinstance(a, slice):
            return slice(self._argument(a.start), self._argument(a.stop), self._argument(a.step))
        return self.sizes.expr(a) if isinstance(a, torch.SymInt) else a


def _is_placeless(x: Tensor) -> bool:
    """Whether a value is computed from constants alone, so that it can be had on any device."""
    return all(n.kind == "map" for n in topological([x.source]))


def _strides(sizes: Sizes, val: torch.Tensor) -> Shape:
    if val.layout is not torch.strided:
        return contiguous_strides(sizes.shape(val.shape))
    return sizes.shape(val.stride())


def _storage(val: Any) -> int | None:
    if not isinstance(val, torch.Tensor) or val.layout is not torch.strided:
        return None
    return int(val.untyped_storage()._cdata)


def _tensors(val: Any) -> Iterator[torch.Tensor]:
    for leaf in val if isinstance(val, (list, tuple)) else (val,):
        if isinstance(leaf, (list, tuple)):
            yield from _tensors(leaf)
        elif isinstance(leaf, torch.Tensor):
            yield leaf


def _metas(nodes: Sequence[torch.fx.Node]) -> Iterator[torch.Tensor]:
    for n in nodes:
        yield from _tensors(n.meta.get("val"))


def _device_of(gm: torch.fx.GraphModule) -> str:
    """The first accelerator among the graph's tensors, else the CPU."""
    found = "cpu"
    for t in _metas(list(gm.graph.nodes)):
        if t.device.type not in ("cpu", "meta"):
            return str(t.device)
    return found


def _shape_env(gm: torch.fx.GraphModule) -> Any:
    for n in gm.graph.nodes:
        val = n.meta.get("val")
        for leaf in val if isinstance(val, (list, tuple)) else (val,):
            if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                return leaf.node.shape_env
            mode = getattr(leaf, "fake_mode", None)
            if mode is not None and mode.shape_env is not None:
                return mode.shape_env
    return None


def _sources(placeholders: Sequence[torch.fx.Node]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Every number that an argument tells, with where to find it."""
    for position, n in enumerate(placeholders):
        val = n.meta.get("val")
        if isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            yield val, ("scalar", position)
        elif isinstance(val, torch.Tensor):
            for d, size in enumerate(val.shape):
                yield size, ("size", position, d)
            if val.layout is torch.strided:
                for d, step in enumerate(val.stride()):
                    yield step, ("stride", position, d)
