"""The Graph evaluator: runs a Graph node by node with torch, and is thereby the definition of what a Graph means.

Modes say how floats are held:

    eager    every node in its own dtype; every cast rounds (numerics="eager")
    fused    what one fused kernel may do at best: an implicit cast to a narrower float keeps the unrounded value for
             its readers, views and casts included; operands of discontinuous operators, externs and outputs are rounded
    float64  floats in double, and only the casts to narrow types that the user wrote round: the reference of
             oracle/compare. Integers, and operators defined by the bits of a type (bitcast, nextafter), keep their
             type's meaning

Random numbers depend on the seed and on positions only. Addresses are checked as they are used: an index out of bounds where its guard holds is CheckFailed T1 when it speaks of
axes only, and IndexError, as in eager, when data decided it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from plait.errors import CheckFailed, TableIncomplete
from plait.frontend.externs import instantiate, resolve
from plait.ir import index as ix
from plait.ir.bindings import Number, bind_symbols, names_of
from plait.ir.dtype import DType
from plait.ir.graph import Graph, Node, Output, Read, Shape, contiguous_strides
from plait.ir.index import Atom, Expr
from plait.ir.loop import Loop, loop_of
from plait.oracle.semantics import (
    MAPS,
    TORCH,
    IndexValue,
    axis_values,
    bitcast,
    contract,
    eval_index,
    random_values,
    reduce_trailing,
    scan_along,
)

Argument = Tensor | bool | int | float
Attributes = Mapping[str, Any]  # the module attributes a graph names: constants, subgraphs
MODES = ("eager", "fused", "float64")


@dataclass(frozen=True)
class Value:
    """A node's value. `rounded` differs from `wide` only in mode "fused", for values an implicit cast left unrounded.
    `items` are an extern's results as its operator gave them."""

    wide: Tensor
    rounded: Tensor
    items: tuple[Any, ...] = ()


def evaluate(
    graph: Graph,
    inputs: Sequence[Argument],
    *,
    dtype_mode: str = "eager",
    constants: Attributes | None = None,
) -> list[Tensor]:
    """One tensor for each of `graph.outputs`, in order, with the strides wanted (those that write to an input included;
    the inputs themselves are left as they are)."""
    run = evaluation(graph, inputs, dtype_mode=dtype_mode, constants=constants)
    return [run.output(o) for o in graph.outputs]


def evaluate_nodes(
    graph: Graph,
    inputs: Sequence[Argument],
    *,
    dtype_mode: str = "eager",
    constants: Attributes | None = None,
) -> dict[Node, Tensor]:
    """The value of every node, over its shape: for looking inside."""
    run = evaluation(graph, inputs, dtype_mode=dtype_mode, constants=constants)
    return {n: v.rounded for n, v in run.values.items()}


def evaluation(
    graph: Graph,
    inputs: Sequence[Argument],
    *,
    dtype_mode: str = "eager",
    constants: Attributes | None = None,
) -> Evaluation:
    """Run the whole graph; ask the result for outputs and values."""
    if dtype_mode not in MODES:
        raise ValueError(f"dtype_mode is one of {MODES}, not {dtype_mode!r}")
    run = Evaluation(graph, inputs, dtype_mode, constants or {})
    with torch.no_grad():
        for node in graph.nodes():
            run.values[node] = run.compute(node)
    return run


class Evaluation:
    """One run of a Graph: concrete sizes, and the value of every node computed so far."""

    def __init__(self, graph: Graph, inputs: Sequence[Argument], mode: str, constants: Attributes) -> None:
        self.graph, self.mode, self.constants = graph, mode, constants
        arguments = dict(enumerate(inputs))
        arguments.update({position: constants[name] for position, name in graph.constants.items()})
        self.arguments: list[Argument] = [arguments[k] for k in range(len(arguments))]
        self.values: dict[Node, Value] = {}
        self.numbers: dict[str, Number] = {}
        self.symbols: dict[Atom, IndexValue] = {}
        self._input_of = {i.node: i for i in graph.inputs}
        self._bind()

    # ------------------------------------------------------------------------------------------ sizes and types
    def _bind(self) -> None:
        """Give every symbol its value that can have one by now."""
        ready: dict[str, tuple[Any, ...]] = {}
        for name, how in self.graph.bindings.items():
            waits = how[0] == "extern" and how[1] not in self.values
            if not waits and (how[0] != "derived" or names_of(how[1]) <= ready.keys()):
                ready[name] = how

        def of_extern(node: Node, item: int, dim: int | None) -> Number:
            found = self.values[node].items[item]
            number: Number = found.item() if isinstance(found, Tensor) and dim is None else found
            return number if dim is None else found.shape[dim]

        self.numbers = bind_symbols(ready, self.arguments, of_extern)
        self.symbols = {Atom.make("sym", k): v for k, v in self.numbers.items() if isinstance(v, int)}

    def size(self, e: Expr) -> int:
        """An axis-free expression at the sizes of this run."""
        found = eval_index(e, self.symbols)
        assert isinstance(found, int)
        return found

    def sizes(self, shape: Shape) -> list[int]:
        """Concrete extents."""
        return [self.size(n) for n in shape]

    def held(self, dtype: DType) -> torch.dtype:
        """The torch type values of `dtype` are held in (KeyError for DType.other, which is only passed on)."""
        return torch.float64 if self.mode == "float64" and dtype.is_float else TORCH[dtype]

    # ------------------------------------------------------------------------------------------ nodes
    def compute(self, node: Node) -> Value:
        """The value of a node whose sources have theirs."""
        if node.op == "input":
            return _plain(self._input(node))
        if node.kind == "extern":
            return self._extern(node)
        if node.op == "project":
            return _plain(self._as_held(self.values[node.reads[0].source].items[node.attr("item")].cpu(), node.dtype))
        extents = self.sizes(node.axes)
        wide = self._apply(node, extents, rounded=node.defn.discontinuous)
        if self.mode != "fused" or not self._may_be_unrounded(node):
            return _plain(wide)
        rounded = wide.to(TORCH[node.dtype]) if node.op == "cast" and node.attr("implicit") else None
        if rounded is None or node.dtype.compute is node.dtype:
            rounded = self._apply(node, extents, rounded=True).to(TORCH[node.dtype])
        return Value(wide, rounded)

    def _may_be_unrounded(self, node: Node) -> bool:
        """Whether the value carries bits that its dtype does not have, or that eager would have rounded away: implicit
        casts start it; moves and casts of such a value pass it on."""
        if node.op == "cast" and node.attr("implicit") and node.dtype.is_storage_only:
            return True
        passes = node.op in ("copy", "pieces", "where") or (node.op == "cast" and node.attr("implicit"))
        widens = node.op == "cast" and node.dtype.compute is node.dtype and node.dtype.is_float
        return (passes or widens) and any(
            self.values[r.source].wide is not self.values[r.source].rounded for r in node.reads
        )

    def _input(self, node: Node) -> Tensor:
        given = self.arguments[self._input_of[node].position]
        if not isinstance(given, Tensor):
            return torch.tensor(given, dtype=self.held(node.dtype))
        wanted = self.sizes(node.axes)
        known = node.dtype is DType.other or given.dtype is TORCH[node.dtype]
        if list(given.shape) != wanted or not known:
            raise ValueError(
                f"input {node.attr('name')}: got {given.dtype} {list(given.shape)}, the graph wants {node.dtype} {wanted}"
            )
        return self._as_held(given.detach().cpu(), node.dtype)

    def _as_held(self, x: Tensor, dtype: DType) -> Tensor:
        return x if dtype is DType.other else x.to(self.held(dtype))

    def _apply(self, node: Node, extents: list[int], *, rounded: bool) -> Tensor:
        if node.op == "pieces":
            return self._pieces(node, extents, rounded)
        reads = _Operands(self, node.reads, extents, rounded)
        if node.op == "gather":
            return reads[0].expand(extents)
        if node.kind == "contract":
            over = range(len(extents) - node.reduce, len(extents))
            held = self.held(node.dtype)
            a, b = (
                reads[k].to(held).reshape([1] * (len(extents) - reads[k].dim()) + list(reads[k].shape)) for k in (0, 1)
            )
            found = contract(a, b, over, extents)
            return found.expand([1 if d in over else n for d, n in enumerate(extents)]).reshape(extents[: over.start])
        x = [reads[k].expand(extents) for k in range(len(node.reads))]
        if node.kind == "reduce":
            return reduce_trailing(node.op, x[0], node.reduce)
        if node.kind == "scan":
            return scan_along(node.op, x[0], len(extents) - 1) if x[0].numel() else x[0]
        if node.kind == "random":
            linear = self._over_axes(node.attr("linear"), extents)
            seed, offset = int(x[0].flatten()[0]), int(x[1].flatten()[0])
            drawn = random_values(node.op, linear, seed, offset, node.attr("draw"), node.dtype)
            return self._as_held(drawn, node.dtype)
        if node.op == "const":
            return torch.full(extents, node.attr("value"), dtype=self.held(node.dtype))
        if node.op == "index":
            return self._over_axes(node.attr("expr"), extents)
        if node.op in ("cast", "bitcast"):
            return self._cast(node, x[0])
        if node.op == "nextafter":
            # defined by the bits of the type, so double does not stand in for it
            low = [v.to(TORCH[node.dtype]) for v in x]
            return self._as_held(torch.nextafter(*low), node.dtype)
        meaning = MAPS.get(node.op)
        if meaning is None:
            raise TableIncomplete(f"the evaluator has no meaning for operator {node.op!r}")
        if node.op == "where":
            return torch.where(x[0], *_alike(x[1], x[2]))
        return meaning(*x)

    def _cast(self, node: Node, x: Tensor) -> Tensor:
        source = node.reads[0].source.dtype
        if node.op == "bitcast":
            return bitcast(x, source, node.dtype, torch.float64 if self.mode == "float64" else None)
        if self.mode == "fused" and node.attr("implicit") and node.dtype.is_storage_only:
            return x.to(torch.float32)
        if self.mode == "float64" and node.dtype.is_storage_only and not node.attr("implicit"):
            return x.to(TORCH[node.dtype]).to(torch.float64)
        return x.to(self.held(node.dtype))

    def _over_axes(self, e: Expr, extents: list[int]) -> Tensor:
        env = dict(self.symbols)
        for i, v in enumerate(axis_values(extents)):
            env[ix.axis_atom(i)] = v
        return torch.as_tensor(eval_index(e, env), dtype=torch.int64).expand(extents)

    def _pieces(self, node: Node, extents: list[int], rounded: bool) -> Tensor:
        """The first read whose guard holds; where none does, the last read's fill."""
        reads = _Operands(self, node.reads, extents, rounded)
        out: Tensor | None = None
        for k in reversed(range(len(node.reads))):
            x = reads[k].expand(extents)
            mask = reads.mask(k)
            out = x if out is None or mask is None else torch.where(mask, *_alike(x, out))
        assert out is not None
        return out

    # ------------------------------------------------------------------------------------------ externs and outputs
    def _extern(self, node: Node) -> Value:
        operands = [self.operand(r) for r in node.reads]
        loop = loop_of(node)
        if loop is not None:
            made = self._loop(loop, node, operands)
            return Value(made[0], made[0], made)
        args, kwargs = instantiate(node.attr("template"), operands, self.size, self.constants.__getitem__)
        if self.mode == "float64":
            args, kwargs = pytree.tree_map(_double_type, (args, kwargs))
        results = resolve(node.attr("target"))(*args, **kwargs)
        items = tuple(results) if isinstance(results, (tuple, list)) else (results,)
        tensor = next((i for i in items if isinstance(i, Tensor)), torch.empty(0))
        first = self._as_held(tensor.detach().cpu(), node.dtype)
        # symbols that are this call's sizes or results wait for it
        self.values[node] = Value(first, first, items)
        if any(how[0] == "extern" and how[1] is node for how in self.graph.bindings.values()):
            self._bind()
        return self.values[node]

    def _loop(self, loop: Loop, node: Node, operands: list[Tensor]) -> tuple[Tensor, ...]:
        """A loop's results: its body evaluated once a block."""
        results = [torch.zeros(self.sizes(o[0]), dtype=self.held(o[1])) for o in node.attr("outs")]
        for block in range(loop.count):
            run = Evaluation(loop.body, (*operands, *results, block), self.mode, {})
            given = {i.node: run.arguments[i.position] for i in loop.body.inputs}
            run.values.update({n: _plain(x) for n, x in given.items() if isinstance(x, Tensor)})
            for n in loop.body.nodes():
                if n not in run.values:
                    run.values[n] = run.compute(n)
            run.returned()
        return tuple(results)

    def operand(self, read: Read) -> Tensor:
        """A read that has its own domain, as a tensor with the strides it is owed."""
        assert read.domain is not None
        extents = self.sizes(read.domain)
        found = _Operands(self, (read,), extents, True)[0].expand(extents)
        strides = self.sizes(read.strides) if read.strides is not None else None
        return _strided(found, strides)

    def output(self, o: Output) -> Tensor:
        """An output's value in its own storage type, with its strides."""
        domain = o.read.domain if o.read.domain is not None else o.read.source.shape
        extents = self.sizes(domain)
        found = _Operands(self, (o.read,), extents, True)[0].expand(extents)
        return _strided(found, self.sizes(o.strides))

    def returned(self) -> tuple[Any, ...]:
        """What the compiled call returns, after writing mutated inputs back into the arguments given."""
        outs = [self.output(o) for o in self.graph.outputs]
        if any(o.writes_to is not None for o in self.graph.outputs):
            # a value that is an argument's own memory is what it was before the writes
            outs = [x if o.writes_to is not None else x.clone() for o, x in zip(self.graph.outputs, outs, strict=True)]
        for o, x in zip(self.graph.outputs, outs, strict=True):
            if o.writes_to is not None:
                target = self.arguments[o.writes_to]
                assert isinstance(target, Tensor)
                target = target.detach()
                for d, (start, extent) in enumerate(zip(o.at or (), x.shape, strict=o.at is not None)):
                    target = target.narrow(d, self.size(start), extent)
                target.copy_(x)
        return tuple(self._returned(how, outs) for how in self.graph.returns)

    def _returned(self, how: tuple[Any, ...], outs: Sequence[Tensor]) -> Any:
        if how[0] in ("tensor", "item"):
            found = outs[how[1]]
            return found if how[0] == "tensor" else found.item()
        if how[0] == "input":
            return self.arguments[how[1]]
        if how[0] == "scalar":
            return self.size(how[1]) if isinstance(how[1], Expr) else self.numbers[how[1]]
        return None if how[0] == "none" else how[1]


def _double_type(x: Any) -> Any:
    return torch.float64 if isinstance(x, torch.dtype) and x.is_floating_point else x


def _plain(x: Tensor) -> Value:
    return Value(x, x)


def _alike(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mode "fused" may hold one operand unrounded in f32 and the other in its narrow type."""
    return (x, y) if x.dtype is y.dtype else (x.to(torch.float32), y.to(torch.float32))


def _strided(x: Tensor, strides: list[int] | None) -> Tensor:
    if strides is None:
        strides = [n.const or 0 for n in contiguous_strides(tuple(ix.const(n) for n in x.shape))]
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True)) if x.numel() else 0
    out = torch.empty(span, dtype=x.dtype).as_strided(x.shape, strides)
    # an expanded operand (stride 0) has one element at several indices, all with the same value
    free = tuple(slice(0, 1) if s == 0 and n > 1 else slice(None) for n, s in zip(x.shape, strides, strict=True))
    out[free] = x[free]
    return out


class _Operands(Sequence[Tensor]):
    """The values of a list of reads over the reader's axes, each gathered when first asked for (reads may address by the
    values of others)."""

    def __init__(self, run: Evaluation, reads: tuple[Read, ...], extents: list[int], rounded: bool) -> None:
        self.run, self.reads, self.extents, self.rounded = run, reads, extents, rounded
        self._found: dict[int, Tensor] = {}
        self._masks: dict[int, Tensor | None] = {}
        self._axes = axis_values(extents)

    def __len__(self) -> int:
        return len(self.reads)

    def __getitem__(self, k: int) -> Tensor:  # type: ignore[override]
        if k not in self._found:
            self._found[k] = self._gather(k)
        return self._found[k]

    def mask(self, k: int) -> Tensor | None:
        """Where read k's guard holds; None for everywhere."""
        if k not in self._masks:
            mask: Tensor | None = None
            for g in self.reads[k].guard:
                holds = torch.as_tensor(self.eval(g)) >= 0
                mask = holds if mask is None else mask & holds
            self._masks[k] = mask
        return self._masks[k]

    def eval(self, e: Expr) -> IndexValue:
        """An index expression over the reader's axes."""
        env = dict(self.run.symbols)
        for a in e.leaves():
            place = a.args[0]
            if a.kind == "axis":
                assert isinstance(place, int)
                env[a] = self._axes[place]
            elif a.kind == "value":
                assert isinstance(place, int)
                env[a] = self[place].to(torch.int64)
        return eval_index(e, env)

    def _gather(self, k: int) -> Tensor:
        r = self.reads[k]
        value = self.run.values[r.source]
        source = value.rounded if self.rounded else value.wide
        if 0 in self.extents:
            return source.new_empty(self.extents)
        view = _as_view(self, r, source)
        if view is not None:
            return view
        mask = self.mask(k)
        if mask is not None and not bool(mask.any()):
            return source.new_full((), _fill(r, source))
        places = [torch.as_tensor(self.eval(e)) for e in r.index]
        safe = [self._in_bounds(r, d, p, mask, source.shape[d]) for d, p in enumerate(places)]
        found = source[tuple(safe)] if safe else source
        return found if mask is None else torch.where(mask, found, found.new_full((), _fill(r, source)))

    def _in_bounds(self, r: Read, d: int, place: Tensor, mask: Tensor | None, size: int) -> Tensor:
        wrong = (place < 0) | (place >= size)
        if mask is not None:
            wrong = wrong & mask
        if bool(wrong.any()):
            worst = place.expand(wrong.shape)[wrong].flatten()[0].item()
            sentence = f"index {worst} is out of bounds for dimension {d} with size {size}"
            if r.index[d].values():
                raise IndexError(sentence)
            raise CheckFailed("graph", "T1", f"read of {r.source!r} at {r.index[d]!r}: {sentence}")
        return place.clamp(0, size - 1)


def _fill(r: Read, source: Tensor) -> bool | int | float:
    # NaN and infinities have no integer form; an importer never asks for one
    return bool(r.fill) if source.dtype is torch.bool else r.fill


def _as_view(operands: _Operands, r: Read, source: Tensor) -> Tensor | None:
    """The read as a strided view, when its index map is affine with no guard and no negative step."""
    if r.guard:
        return None
    extents = operands.extents
    steps = [0] * len(extents)
    offset = 0
    for d, e in enumerate(r.index):
        coefficients, rest = e.linear()
        if any(a.kind != "axis" for a in coefficients) or any(c.axes() or c.values() for c in coefficients.values()):
            return None
        least = most = operands.run.size(rest)
        offset += least * source.stride(d)
        for a, c in coefficients.items():
            axis, step = a.args[0], operands.run.size(c)
            assert isinstance(axis, int)
            steps[axis] += step * source.stride(d)
            most += max(step, 0) * (extents[axis] - 1)
            least += min(step, 0) * (extents[axis] - 1)
        if least < 0 or most >= source.shape[d]:
            return None  # the gathering path says what is wrong
    if any(s < 0 for s in steps):
        return None
    return source.as_strided(extents, steps, source.storage_offset() + offset)
