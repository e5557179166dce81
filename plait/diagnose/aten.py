"""Operators of a captured graph as the text of a Python function.

The text is run later, so nothing of the user's becomes code: names are checked to be names and told apart from Python's,
strings are written as ASCII literals, lines of the program stand in comments of one line. What has no such text (subgraphs,
objects) is refused.
"""

from __future__ import annotations

import json
import keyword
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from plait.frontend.fx_nodes import is_view
from plait.frontend.origins import origin_of

_TAKEN = frozenset({"torch", "operator", "math", "eager", "float", "complex", "slice", "self"})
_TORCH_NAME = re.compile(r"torch\.[A-Za-z_]\w*")


class NoText(Exception):
    """Why operators cannot be written down; told to the user in a sentence."""


def function_text(
    nodes: Sequence[fx.Node], given: Mapping[fx.Node, int], count: int, results: Sequence[Any], about: str
) -> str:
    """`def eager(...)` of `nodes`, in order. `given`: nodes that are its argument of that number, of `count`. Raises NoText."""
    writer = _Writer()
    names = {k: writer.name(n) for n, k in given.items()}
    lines = [f"def eager({', '.join(names.get(k, f'unused_{k}') for k in range(count))}):"]
    lines.append(f'    """{about}"""')
    for n, k in given.items():
        writer.names[n] = names[k]
    last = ""
    for n in nodes:
        line = origin_of(n).line
        if line and line != last:
            lines.append(f"    # {one_line(line)}")
            last = line
        lines.append(f"    {writer.name(n)} = {writer.call(n)}")
    lines.append(f"    return [{', '.join(writer.value(r) for r in results)}]")
    return "\n".join(lines) + "\n"


def one_line(text: str, most: int = 160) -> str:
    """Text that stays in its comment: printable ASCII, on one line."""
    return json.dumps(text[:most])[1:-1].replace('\\"', '"')


class _Writer:
    def __init__(self) -> None:
        self.names: dict[fx.Node, str] = {}

    def name(self, n: fx.Node) -> str:
        """A variable for a node; FX makes names identifiers, and this checks it."""
        found = self.names.get(n)
        if found is None:
            plain = n.name if n.name.isidentifier() and n.name.isascii() else f"value_{len(self.names)}"
            taken = plain in _TAKEN or keyword.iskeyword(plain) or plain in self.names.values()
            found = self.names[n] = f"{plain}_v{len(self.names)}" if taken else plain
        return found

    def call(self, n: fx.Node) -> str:
        """The call that a node stands for."""
        if n.op != "call_function":
            raise NoText(f"{n.op} {one_line(str(n.target))} is no operator")
        given = [self.value(a) for a in n.args]
        for key, value in n.kwargs.items():
            if not key.isidentifier() or keyword.iskeyword(key):
                raise NoText(f"an argument is called {key!r}")
            given.append(f"{key}={self.value(value)}")
        return f"{_target(n.target)}({', '.join(given)})"

    def value(self, v: Any) -> str:
        """An argument."""
        if isinstance(v, fx.Node):
            if v not in self.names:
                raise NoText(f"{one_line(v.name)} is not among them")
            return self.names[v]
        if isinstance(v, tuple):
            return f"({', '.join(map(self.value, v))}{',' * (len(v) == 1)})"
        if isinstance(v, list):
            return f"[{', '.join(map(self.value, v))}]"
        if isinstance(v, slice):
            return f"slice({self.value(v.start)}, {self.value(v.stop)}, {self.value(v.step)})"
        return _literal(v)


def _literal(v: Any) -> str:
    if v is None or type(v) in (bool, int):
        return repr(v)
    if type(v) is float:
        return repr(v) if math.isfinite(v) else f'float("{v}")'
    if type(v) is complex:
        return f"complex({_literal(v.real)}, {_literal(v.imag)})"
    if isinstance(v, str):
        return ascii(str(v))
    if isinstance(v, torch.device):
        return f"torch.device({str(v)!a})"
    if isinstance(v, torch.dtype | torch.layout | torch.memory_format) and _TORCH_NAME.fullmatch(repr(v)):
        return repr(v)
    raise NoText(f"a {type(v).__name__} cannot be written down")


def _target(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        if namespace == "plait":
            raise NoText(f"{name} is an operator of plait's own, which eager does not call")
        parts = [namespace, name, target._overloadname]
        if all(p.isidentifier() and p.isascii() and not keyword.iskeyword(p) for p in parts):
            return f"torch.ops.{'.'.join(parts)}"
        if all(p.isidentifier() and p.isascii() for p in parts):
            return f"getattr(torch.ops.{namespace}.{name}, {parts[2]!a})"
    name = getattr(target, "__name__", "")
    for module, home in ((operator, "operator"), (math, "math"), (torch, "torch")):
        if name.isidentifier() and getattr(module, name, None) is target:
            return f"{home}.{name}"
    raise NoText(f"{one_line(str(target))} is no operator of torch")


# ------------------------------------------------------------------------------------------------------------ a part
def with_views(
    gm: fx.GraphModule, names: Iterable[str], known: Mapping[str, int]
) -> tuple[list[fx.Node], dict[fx.Node, int], list[fx.Node]]:
    """Nodes of these names with the views, sizes and constants that they are made of, those of `known` that they read, and
    those of them that others read. Raises NoText where they read anything else."""
    nodes = {n.name: n for n in gm.graph.nodes}
    inside = {n for name in names if (n := nodes.get(name)) is not None and n.op == "call_function"}
    given: dict[fx.Node, int] = {}
    todo = list(inside)
    while todo:
        for source in todo.pop().all_input_nodes:
            if source in inside or source in given:
                continue
            if source.name in known:
                given[source] = known[source.name]
            elif source.op == "call_function" and _costs_nothing(source):
                inside.add(source)
                todo.append(source)
            else:
                raise NoText(f"they read {one_line(source.name)}, which the kernel does not")
    order = [n for n in gm.graph.nodes if n in inside]
    shown = [n for n in order if isinstance(n.meta.get("val"), Tensor) and any(u not in inside for u in n.users)]
    if not shown:
        raise NoText("nothing of them is read")
    return order, given, shown


def _costs_nothing(n: fx.Node) -> bool:
    return is_view(n) or not n.all_input_nodes or not isinstance(n.meta.get("val"), Tensor)
