"""Which regions of the user's each operator of a graph lies in: those of `with plait.fuse(...)` and `plait.no_fuse(...)`, and those
that options force or forbid by name.

A gradient lies where its operator lies. Of what the backward forms a second time only the edges of `no_fuse` count: it is needed where
its readers are. The sum of two gradients lies where both of them lie; autograd says of it nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from plait.frontend.baseline import Operator, operators
from plait.frontend.origins import entries
from plait.ir.graph import Graph, Region
from plait.ir.names import module_under, names_of
from plait.options import Options


def mark_regions(graph: Graph, gm: fx.GraphModule, options: Options, kind: str) -> list[str]:
    """Give the origins of an imported graph their regions; the names in options that mean nothing here."""
    found = _Regions(gm, kind)
    unknown = found.of_options(options)
    if any(found.of.values()):
        for n, origins in graph.origins.items():
            graph.origins[n] = tuple(replace(o, regions=tuple(found.of.get(o.fx, ()))) for o in origins)
    return unknown


class _Regions:
    """`of`: the regions of FX nodes, by name. Regions are numbered as they are met."""

    def __init__(self, gm: fx.GraphModule, kind: str) -> None:
        self.backward = kind == "backward"
        self.gm, self.count = gm, 0
        self.of: dict[str, list[Region]] = {}
        self.keys = {n.name: [(key, label) for key, (_, label, _) in entries(n)] for n in gm.graph.nodes}
        made: dict[str, Region] = {}
        for n in gm.graph.nodes:
            own = self.of[n.name] = []
            for key, (what, label, backward) in entries(n):
                if key not in made:
                    made[key] = self.new(what, label)
                if what == "no_fuse" or not self.backward or (backward and not _is_formed_again(n)):
                    own.append(made[key])
            if self.backward and not own:
                own += self.of_sum(n)

    def new(self, kind: str, label: str, side: int = 0) -> Region:
        self.count += 1
        return Region(kind, self.count - 1, label, side)

    def of_sum(self, n: fx.Node) -> list[Region]:
        """Regions of a sum of gradients."""
        if n.target is not torch.ops.aten.add.Tensor or _is_formed_again(n):
            return []
        first, *rest = [self.of[a.name] for a in n.all_input_nodes] or [[]]
        return [r for r in first if all(r in other for other in rest)]

    # ---------------------------------------------------------------- options
    def of_options(self, options: Options) -> list[str]:
        """Add the regions that options name. Names that mean no operator here."""
        if not options.forbid and not options.force:
            return []
        self.operators = operators(self.gm, self.backward)
        self.unknown: list[str] = []
        for names in options.forbid:
            if len(names) == 1:
                for members in self.instances(names[0]).values():
                    self.add(self.new("no_fuse", f"option forbid: {names[0]}"), members)
            else:
                self.keep_apart(names)
        for names in options.force:
            sets = self.instances(names[0]).values() if len(names) == 1 else self.neighbours(names)
            for members in sets:
                free = [o for o in members if not o.recomputed]
                self.add(self.new("fuse", f"option force: {', '.join(names)}"), free)
        return self.unknown

    def keep_apart(self, names: Sequence[str]) -> None:
        first = self.new("forbid", f"option forbid: {', '.join(names)}")
        taken: set[Operator] = set()
        for side, name in enumerate(names, 1):
            members = [o for found in self.instances(name).values() for o in found if o not in taken]
            taken.update(members)
            self.add(replace(first, side=side), members)

    def add(self, region: Region, members: Sequence[Operator]) -> None:
        for o in members:
            for name in o.fx:
                self.of[name].append(region)

    def instances(self, name: str) -> Mapping[object, list[Operator]]:
        """What a name means, apart: each module of that path, each region of that label, else each operator."""
        out: dict[object, list[Operator]] = {}
        wanted = self.here(name)
        if wanted is None:
            return out
        for o in self.operators:
            key = self.meant(o, wanted)
            if key is not None:
                out.setdefault(key, []).append(o)
        if not out:
            self.unknown.append(name)
        return out

    def here(self, name: str) -> str | None:
        """The name without the kind of graph that it is for; None for the other kind's."""
        kind, slash, rest = name.partition("/")
        if not slash or kind not in ("forward", "backward"):
            return name
        return rest if (kind == "backward") is self.backward else None

    def meant(self, o: Operator, name: str) -> object:
        module = module_under(o.module, name)
        if module is not None:
            return module
        for key, label in self.keys.get(o.fx[-1], ()):
            if label == name:
                return key
        return o.fx if name in names_of(o.call, o.aten, line=o.line) else None

    def neighbours(self, names: Sequence[str]) -> list[list[Operator]]:
        """Operators that the names mean and that feed each other, by way of none but such, where all names are among them."""
        of_name = {name: [o for found in self.instances(name).values() for o in found] for name in names}
        members = [o for o in self.operators if any(o in found for found in of_name.values())]
        home = {name: o for o in members for name in o.fx}
        groups: list[set[Operator]] = []
        for o in members:
            near = {o, *(home[f] for f in o.feeds if f in home)}
            touching = [g for g in groups if g & near]
            groups = [g for g in groups if not g & near] + [near.union(*touching)]
        whole = [g for g in groups if all(g & set(found) for found in of_name.values())]
        return [[o for o in members if o in g] for g in whole]


def _is_formed_again(n: fx.Node) -> bool:
    return bool(n.meta.get("partitioner_tag") == "is_forward")
