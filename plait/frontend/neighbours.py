"""What lies around a call in Dynamo's graph: values that a kernel of plait's could form for itself, and traffic that would save.

Dynamo's nodes are functions and methods of Python. What one does is seen by letting it run on the values that Dynamo holds,
which have no memory, and watching the operators that it calls.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._python_dispatch import TorchDispatchMode

from plait.frontend.context import LOWERINGS
from plait.frontend.externs import copying_view, decompositions, is_effectful, needs_serial, role_of
from plait.frontend.origins import entries

_UNKNOWN_SIZE = 64  # of a size that depends on data, as Graph.hint has it
_FARTHEST = 64  # nodes that are looked at behind one operand


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the operators that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def watched(n: fx.Node, *, gradients: bool = False) -> list[torch._ops.OpOverload] | None:
    """The ATen operators that a node calls; with `gradients` as they are where gradients are wanted. None where that cannot be seen."""
    value = n.meta.get("example_value")
    if n.op not in ("call_function", "call_method") or isinstance(n.target, torch._ops.HigherOrderOperator):
        return None
    inputs = [a.meta.get("example_value") for a in n.all_input_nodes]
    if not all(_is_plain(v) for v in (value, *inputs)):
        return None
    modes = {t.fake_mode for t in _tensors([value, *inputs])}
    if len(modes) != 1:
        return None

    def held(a: fx.Node) -> Any:
        v = a.meta["example_value"]
        return v if gradients else _apart(v)

    args, kwargs = fx.map_arg((n.args, n.kwargs), held)
    watch = _Watch()
    with torch.set_grad_enabled(gradients and torch.is_grad_enabled()), modes.pop(), watch:
        if n.op == "call_method":
            getattr(args[0], str(n.target))(*args[1:], **kwargs)
        else:
            assert callable(n.target)
            n.target(*args, **kwargs)
    return [op for op in watch.seen if isinstance(op, torch._ops.OpOverload) and op.namespace in ("aten", "prims")]


def _is_plain(v: Any) -> bool:
    """Whether a value is a tensor of Dynamo's without surprises, or several of one mode."""
    if isinstance(v, (list, tuple)):
        return bool(v) and all(_is_plain(x) for x in v)
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    if type(v) is FakeTensor:
        return not wrapped(v) and v.layout is torch.strided and not free_unbacked_symbols(v)
    return isinstance(v, (int, torch.SymInt)) and not free_unbacked_symbols(v)


def _tensors(values: Any) -> Iterator[FakeTensor]:
    for v in values:
        if isinstance(v, FakeTensor):
            yield v
        elif isinstance(v, (list, tuple)):
            yield from _tensors(v)


def _apart(v: Any) -> Any:
    """The same value, whose shape nobody else sees change."""
    if isinstance(v, (list, tuple)):
        return type(v)([_apart(x) for x in v]) if type(v) in (list, tuple) else v
    return v.detach() if isinstance(v, Tensor) else v


def nbytes_of(v: Any) -> float:
    """Bytes that a tensor of Dynamo's has in memory, at hinted sizes; what is repeated counts once."""
    return float(math.prod(size_of(n) for n, s in zip(v.shape, v.stride(), strict=True) if s != 0) * v.element_size())


def size_of(n: Any) -> int:
    """An extent, or the hint of one that varies."""
    if isinstance(n, int):
        return n
    hint = n.node.hint
    return _UNKNOWN_SIZE if hint is None else int(hint)


@dataclass(frozen=True)
class Formed:
    """A value that kernels could form for themselves. `node`: that computes it, views of it apart; `readers`: who reads it;
    `source_bytes`: of what it is formed from."""

    node: fx.Node
    readers: int
    source_bytes: float


class Neighbours:
    """Of one graph's calls. A region that keeps its inside apart ends the neighbourhood."""

    def __init__(self) -> None:
        self.known: dict[fx.Node, str] = {}

    def formed(self, operand: fx.Node, reader: fx.Node) -> Formed | None:
        """What the operand is, where it is computed; None where it is read from memory anyway."""
        n = operand
        while self.kind(n, reader) == "view" and n.all_input_nodes:
            n = n.all_input_nodes[0]
        if self.kind(n, reader) != "compute":
            return None
        readers = set(self.readers(n))
        return Formed(n, len(readers), self._source_bytes(n, reader))

    def taken_in(self, n: fx.Node) -> bool:
        """Whether all who read a result could do so inside its kernel."""
        readers = list(self.readers(n))
        return bool(readers) and all(self.kind(u, n) == "compute" for u in readers)

    def readers(self, n: fx.Node) -> Iterator[fx.Node]:
        """Users, those behind views included."""
        for u in n.users:
            if self.kind(u, n) == "view":
                yield from self.readers(u)
            else:
                yield u

    def kind(self, n: fx.Node, beside: fx.Node) -> str:
        """view, compute (what plait puts into kernels) or other."""
        if _walls(n) != _walls(beside):
            return "other"
        if n not in self.known:
            self.known[n] = _kind(n)
        return self.known[n]

    def _source_bytes(self, n: fx.Node, beside: fx.Node) -> float:
        stack, seen, found = [n], {n}, 0.0
        while stack:
            x = stack.pop()
            if len(seen) < _FARTHEST and self.kind(x, beside) != "other":
                more = [a for a in x.all_input_nodes if a not in seen]
                seen.update(more)
                stack += more
            else:
                found += sum(map(nbytes_of, _tensors([x.meta.get("example_value")])))
        return found


def _walls(n: fx.Node) -> list[str]:
    return [key for key, (what, _, _) in entries(n) if what == "no_fuse"]


def _kind(n: fx.Node) -> str:
    if n.target is operator.getitem and isinstance(n.all_input_nodes[0].meta.get("example_value"), (list, tuple)):
        return "view"
    ops = watched(n)
    if ops is None or any(needs_serial(op) or is_effectful(op) or role_of(op) != "opaque" for op in ops):
        return "other"
    if all(copying_view(op)[1] for op in ops):
        return "view"
    table = decompositions()
    return "compute" if all(copying_view(op)[1] or str(op) in LOWERINGS or op in table for op in ops) else "other"
