"""One kernel of a compiled graph as a graph of its own: what it reads are its inputs, what it writes its outputs.

Nodes keep their numbers, so that a part's members, results and buffers are called the same in both. Sizes that the graph
took from its arguments become arguments themselves.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from plait.errors import UserError
from plait.ir.graph import Graph, Input, Layout, Node, Output, Read, identity, topological
from plait.ir.text import print_graph
from plait.plan.layout import Layouts
from plait.runtime.link import Launch
from plait.runtime.steps import AllocStep, KernelStep, Script

_WORD = re.compile(r"[A-Za-z_]\w*")


def read_and_written(launch: Launch) -> tuple[list[Node], list[Node]]:
    """The values that a launch reads from memory, and those that it writes there, each once, in order."""
    read: dict[Node, None] = {}
    wrote: dict[Node, None] = {}
    for part in launch.parts:
        for n, b in zip(part.tensors, part.program.buffers, strict=False):
            (read if b.role == "in" else wrote).setdefault(n)
    return list(read), list(wrote)


def cut(graph: Graph, launch: Launch, symbols: Mapping[str, int | float], overwritten: Collection[Node]) -> Graph:
    """The graph of one launch. `symbols`: their values at the sizes of the call; `overwritten`: those of what it reads in whose
    place it may write. The arguments are the tensors that it reads, then the symbols in `graph_symbols` of the result."""
    read, wrote = read_and_written(launch)
    layouts = Layouts(graph)
    new: dict[Node, Node] = {}
    for n in read:
        attrs = (("dtype", n.dtype), ("name", n.attr("name") if n.op == "input" else repr(n)))
        new[n] = Node("input", n.shape, 0, (), n.dtype, attrs, n.serial)
    for n in topological(wrote, set(read)):
        new[n] = replace(n, reads=tuple(replace(r, source=new[r.source]) for r in n.reads))
    out = Graph(
        inputs=tuple(
            Input(new[n], k, Layout(layouts.strides(n)), graph.device, n in overwritten) for k, n in enumerate(read)
        ),
        outputs=tuple(
            Output(
                f"{n.op}_{n.serial}",
                Read(new[n], identity(n.shape), domain=n.shape),
                layouts.strides(n),
                device=graph.device,
            )
            for n in wrote
        ),
        origins={new[n]: o for n, o in graph.origins.items() if n in new},
        layouts={new[n]: s for n, s in graph.layouts.items() if n in new and n not in read},
        padded={new[n]: s for n, s in graph.padded.items() if n in new},
        partials=frozenset(new[n] for n in graph.partials if n in new and n not in read),
        device=graph.device,
        returns=tuple(("tensor", k) for k in range(len(wrote))),
    )
    named = set(_WORD.findall(print_graph(out, origins=False)))
    named.update(s for part in launch.parts for s in part.program.symbols)
    wanted = [s for s in graph.bindings if s in named]
    missing = [s for s in wanted if s not in symbols or isinstance(symbols[s], float)]
    if missing:
        raise UserError(
            f"{launch.name} has sizes that its graph's data decide",
            hint="reproduce the graph: report.reproduce(FILE, graph=N)",
        )
    out.symbols = {s: graph.symbols[s] for s in wanted if s in graph.symbols}
    out.hints = {s: int(symbols[s]) for s in wanted}
    out.bindings = {s: ("scalar", len(read) + k) for k, s in enumerate(wanted)}
    out.arity = len(read) + len(wanted)
    return out


def overwritten_by(script: Script, launch: Launch) -> set[Node]:
    """What a launch reads, in whose place the script has it write."""
    step = next(s for s in script.steps if isinstance(s, KernelStep) and s.kernel == launch.kernel)
    taken = {s.reuse for s in script.steps if isinstance(s, AllocStep) and s.kernel == launch.kernel} - {None}
    tensors = [n for part in launch.parts for n in part.tensors]
    return {n for n, slot in zip(tensors, step.buffers, strict=True) if slot in taken}
