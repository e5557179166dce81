"""ATen calls and reference evaluation as steps: a frozen call becomes a function that fills its operands in and runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from plait.errors import ImportFailed, InternalError
from plait.frontend.externs import Item, instantiate, resolve
from plait.ir.graph import Arg, topological
from plait.runtime import tensors
from plait.runtime.kernel import Launch, Slots
from plait.runtime.sizes import Sizes
from plait.runtime.steps import EagerStep, ExternStep, OperandView

Fetch = Callable[[Slots], Any]
Attributes = Callable[[str], Any] | None

# in-place operators that are not called like their functional form
_INPLACE_NAMES = {
    "_unsafe_index_put": "index_put_",
    "slice_scatter": "",
    "select_scatter": "",
    "as_strided_scatter": "",
}


def inplace_form(target: str) -> str:
    """The operator that writes into its first operand: "aten.index_put.default" → "aten.index_put_.default"."""
    namespace, base, overload = target.rsplit(".", 2)
    name = _INPLACE_NAMES.get(base, base + "_")
    if not name:
        raise ImportFailed(f"{target} has no in-place form")
    return f"{namespace}.{name}.{overload}"


def fetch_view(
    view: OperandView,
    sizes: Sizes,
    layout: tuple[tuple[int, ...], tuple[int, ...]] | None,
    make: tensors.View = tensors.view,
) -> Fetch:
    """How to get an operand. `layout` is the (shape, strides) that the slot's tensor is known to have, if it is."""
    slot = view.slot
    if view.whole:
        return lambda slots: slots[slot]
    shape, strides = sizes.all(view.shape), sizes.all(view.strides)
    offset = 0 if view.offset is None else sizes.one(view.offset)
    if offset == 0 and layout == (shape, strides):
        return lambda slots: slots[slot]

    return lambda slots: make(slots[slot], shape, strides, offset)


def extern_call(step: ExternStep, sizes: Sizes, operands: Sequence[Fetch], attributes: Attributes) -> Launch:
    """The function that makes the call and puts its results into slots. An in-place operator returns its first operand, so
    its result needs no other treatment."""
    name = inplace_form(step.target) if step.inplace is not None else step.target
    op = tensors.direct(name, resolve(name))
    marks = [Arg(k) for k in range(len(operands))]
    args, kwargs = instantiate(step.template, marks, sizes.one, attributes)
    if step.inplace is not None and (not args or args[0] != Arg(step.inplace)):
        raise InternalError(f"{step.target} in place: operand {step.inplace} is not its first argument")
    fill = _filler(args, operands)
    fill_named = {name: _filler_of(value, operands) for name, value in kwargs.items()}
    constant = not any(_holds_operand(v) for v in kwargs.values())
    if step.into:
        return _written(op, step.outs, fill)
    outs = [(k, slot, _settle(step, k, sizes)) for k, slot in enumerate(step.outs) if slot is not None]
    if len(step.outs) == 1 and len(outs) == 1 and outs[0][2] is None:
        only = outs[0][1]

        def call_one(slots: Slots) -> None:
            named = kwargs if constant else {name: get(slots) for name, get in fill_named.items()}
            slots[only] = op(*fill(slots), **named)

        return call_one

    def call(slots: Slots) -> None:
        named = kwargs if constant else {name: get(slots) for name, get in fill_named.items()}
        results = op(*fill(slots), **named)
        items = results if isinstance(results, (tuple, list)) else (results,)
        for k, slot, settle in outs:
            slots[slot] = items[k] if settle is None else settle(items[k])

    return call


def _written(op: Callable[..., Any], outs: Sequence[int | None], fill: Callable[[Slots], list[Any]]) -> Launch:
    """The call with `out=`: the library writes a matrix whose rows lie apart where it is."""
    (slot,) = outs
    assert slot is not None

    def call_into(slots: Slots) -> None:
        op(*fill(slots), out=slots[slot])

    return call_into


def _settle(step: ExternStep, k: int, sizes: Sizes) -> Callable[[Any], Any] | None:
    """Copies a result whose strides are not those its readers rely on."""
    expected = step.expects[k] if k < len(step.expects) else None
    if expected is None or step.inplace is not None:
        return None
    shape, strides = sizes.all(expected[0]), sizes.all(expected[1])
    needed = [(d, s) for d, (n, s) in enumerate(zip(shape, strides, strict=True)) if n > 1]
    empty = 0 in shape

    def settle(x: torch.Tensor) -> torch.Tensor:
        if x.layout is not torch.strided:  # sparse: it has none
            return x
        given = x.stride()
        if given == strides or empty or all(given[d] == s for d, s in needed):
            return x
        return torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device).copy_(x)

    return settle


def _holds_operand(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_operand, value))
    if isinstance(value, dict):
        return any(map(_holds_operand, value.values()))
    return isinstance(value, (Arg, Item))


def _filler(args: Sequence[Any], operands: Sequence[Fetch]) -> Callable[[Slots], list[Any]]:
    """All positional arguments at once; quick when operands stand at the top level, as they mostly do."""
    gets = [_filler_of(a, operands) for a in args]
    tail = len(gets)
    while tail and not _holds_operand(args[tail - 1]):
        tail -= 1
    head, rest = gets[:tail], list(args[tail:])
    return lambda slots: [get(slots) for get in head] + rest


def _filler_of(value: Any, operands: Sequence[Fetch]) -> Fetch:
    if isinstance(value, Arg):
        return operands[value.k]
    if isinstance(value, Item):
        get_tensor = operands[value.arg.k]
        return lambda slots: get_tensor(slots).item()
    if not _holds_operand(value):
        return lambda slots: value
    if isinstance(value, dict):
        named = {k: _filler_of(v, operands) for k, v in value.items()}
        return lambda slots: {k: get(slots) for k, get in named.items()}
    parts, kind = [_filler_of(v, operands) for v in value], type(value)
    return lambda slots: kind([get(slots) for get in parts])


def eager_group(step: EagerStep, symbols: Mapping[str, int | float]) -> Launch:
    """Evaluates a group's nodes with the reference evaluator, and copies the results into the slots made for them."""
    from plait.ir.bindings import sym_values
    from plait.oracle.eval_graph import Evaluation, Value

    # sizes are bound already, and the group's inputs stand in for the graph's
    graph = replace(step.graph, bindings={}, constants={}, inputs=())
    atoms = sym_values(symbols)
    order = topological(step.outputs, {n for n, _ in step.inputs})

    def run(slots: Slots) -> None:
        evaluation = Evaluation(graph, (), step.mode, {})
        evaluation.symbols.update(atoms)
        for node, slot in step.inputs:
            given = slots[slot].detach().cpu()
            evaluation.values[node] = Value(given, given)
        with torch.no_grad():
            for node in order:
                evaluation.values[node] = evaluation.compute(node)
            for node, slot in zip(step.outputs, step.slots, strict=True):
                slots[slot].copy_(evaluation.values[node].rounded)

    return run
