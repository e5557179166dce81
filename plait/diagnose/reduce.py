"""A smaller program that still shows a fault: some nodes of a captured graph, with what they read as inputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from plait.diagnose.program import copies
from plait.diagnose.trials import Case, Trial
from plait.frontend.saved import as_wanted

_TRIES = 24  # compilations that shrinking may take


def reduced(case: Case, trial: Trial, about: Sequence[str], shows: Callable[[Case], bool]) -> Case:
    """The smallest part found around `about`, names of FX nodes, for which `shows` holds: what shares a
    kernel with them, made smaller node by node; the whole graph where no part shows it."""
    values = _values(case)
    whole = [n.name for n in case.gm.graph.nodes if n.op not in ("placeholder", "output", "get_attr")]
    best = cut_out(case, whole, values)
    if best is None:
        return case
    tries = _TRIES
    kept = whole
    for part in (near := _near(case, trial, about)), _with_neighbours(case, near):
        found = cut_out(case, part, values) if part and len(part) < len(whole) else None
        tries -= 1
        if found is not None and shows(found):
            best, kept = found, part
            break
    # halves first, then node by node: a part of n nodes takes about log n and then as many tries as there are left
    size = max(len(kept) // 2, 1)
    while tries > 0 and len(kept) > 1:
        for start in range(0, len(kept), size):
            part = kept[:start] + kept[start + size :]
            found = cut_out(case, part, values) if part else None
            tries -= found is not None
            if found is not None and shows(found):
                best, kept = found, part
                break
            if tries <= 0:
                break
        else:
            if size == 1:
                break
            size = max(size // 2, 1)
    return best


def cut_out(case: Case, names: Collection[str], values: Mapping[str, Any]) -> Case | None:
    """The graph of these nodes alone. None where something at its border is not a tensor, or nothing of it is read."""
    inside = _closed(case.gm, set(names), values)
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    inputs: list[Any] = []

    def border(n: fx.Node) -> fx.Node:
        if n not in new:
            new[n] = graph.placeholder(n.name)
            new[n].meta = {k: v for k, v in n.meta.items() if k != "val"} | {"val": values[n.name]}
            inputs.append(values[n.name])
        return new[n]

    order = [n for n in case.gm.graph.nodes if n.name in inside]
    if not order or any(isinstance(values.get(n.name), torch.SymInt) for n in order):
        return None
    for n in order:
        for source in n.all_input_nodes:
            if source.name not in inside:
                border(source)
    for n in order:
        new[n] = graph.node_copy(n, lambda s: new[s])
    shown = [n for n in order if isinstance(values.get(n.name), Tensor) and any(u.name not in inside for u in n.users)]
    if not shown:
        return None
    graph.output(tuple(new[n] for n in shown))
    made = fx.GraphModule(case.gm, graph)
    given = tuple(inputs)
    return replace(case, gm=made, examples=given, inputs=given, kind="inference", _truth=None)


def _closed(gm: fx.GraphModule, names: set[str], values: Mapping[str, Any]) -> set[str]:
    """With what is needed so that only tensors cross the border, and without writes to arguments."""
    out = set(names)
    for n in reversed(list(gm.graph.nodes)):
        if n.name in out and n.op == "call_function":
            out |= {
                s.name
                for s in n.all_input_nodes
                if s.op == "call_function" and not isinstance(values.get(s.name), Tensor)
            }
    return {n.name for n in gm.graph.nodes if n.name in out and not _writes(n)}


def _writes(n: fx.Node) -> bool:
    return n.target is torch.ops.aten.copy_.default


def _near(case: Case, trial: Trial, about: Sequence[str]) -> list[str]:
    """FX nodes of the kernels that hold something of these."""
    graph, names = trial.compiled.graph, set(about)
    found = set(names)
    for step in trial.compiled.launches:
        members = [n for g in step.groups for n in trial.compiled.plan.reading.with_inline(g.nodes)]
        mine = {o.fx for n in members for o in graph.origins.get(n, ())}
        if mine & names:
            found |= mine
    return [n.name for n in case.gm.graph.nodes if n.name in found and n.op == "call_function"]


def _with_neighbours(case: Case, names: Sequence[str]) -> list[str]:
    inside = set(names)
    for n in case.gm.graph.nodes:
        if n.name in names:
            inside |= {m.name for m in (*n.all_input_nodes, *n.users) if m.op == "call_function"}
    return [n.name for n in case.gm.graph.nodes if n.name in inside]


def _values(case: Case) -> dict[str, Any]:
    """The value of every FX node in eager, arguments as they were before the call."""
    found = Values(case.gm)
    torch.set_rng_state(case.rng)
    with torch.no_grad():
        found.run(*as_wanted(case.gm, case.examples, copies(case.inputs)), enable_io_processing=False)
    return found.values


class Values(fx.Interpreter):
    """Runs a captured graph and keeps copies of the value of every node."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        """One node."""
        found = super().run_node(n)
        self.values[n.name] = copies([found.detach()])[0] if isinstance(found, Tensor) else found
        return found
