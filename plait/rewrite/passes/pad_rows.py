"""Let rows of values between kernels begin at multiples of 16 bytes: strides with gaps, where products read or write them.

    %cast_7: bf16[8192, 50257], read by aten.mm      strides (50257, 1) -> (50304, 1)

The vendor's products take three times as long on rows that begin at odd places (on an H200), and neither tensor descriptors
nor vectorised copies can be made of them. A value is padded if only kernels and PRODUCTS read it, and if the only outputs
that show it are saved for the backward, whose own compilation sees how they lie. Addresses stay as simple as they were, and
an ATen operand stays a view. Runs last: every read is what it will be. Before products are opened it says what will come of it.
"""

from __future__ import annotations

from dataclasses import replace

from plait.ir import index as ix
from plait.ir.graph import WRITES_ROWS_APART, Graph, Node, Output, Read, Shape
from plait.ir.index import Expr
from plait.ir.recombine import recombine
from plait.plan.cost import size_at_hints
from plait.plan.device import DeviceSpec
from plait.plan.inline import Reading
from plait.plan.layout import ALIGNED, Layouts, address, as_strided, is_matrix, is_product, rows_apart


def pad_rows(graph: Graph, spec: DeviceSpec, numerics: str, reading: Reading | None = None) -> Graph:
    """The graph with strides chosen; `reading` is the graph's, if there is one. What a call asks for stays. Nothing is chosen
    under eager's numerics: the library may add up in another order."""
    owed = {r.source for n in graph.nodes() if n.kind == "extern" and not is_product(n) for r in n.reads}
    kept = owed.union(i.node for i in graph.inputs)
    graph = replace(graph, padded={n: s for n, s in graph.padded.items() if n in kept})
    if not spec.row_bytes or numerics != "fused":
        return graph
    found = _Padding(graph, spec, reading).found()
    if not found:
        return graph
    graph = replace(graph, padded=graph.padded | found)
    layouts = Layouts(graph)
    return replace(graph, outputs=tuple(_shown(o, layouts) if o.read.source in found else o for o in graph.outputs))


def _shown(o: Output, layouts: Layouts) -> Output:
    view = layouts.view(o.read)
    assert view is not None
    return replace(o, read=replace(o.read, strides=view.strides), strides=view.strides)


class _Padding:
    def __init__(self, graph: Graph, spec: DeviceSpec, reading: Reading | None) -> None:
        self.graph, self.spec, self._reading = graph, spec, reading
        self.layouts = Layouts(graph)
        self.nodes = graph.nodes()
        self.users = graph.users()
        self.outputs: dict[Node, list[Output]] = {}
        for o in graph.outputs:
            self.outputs.setdefault(o.read.source, []).append(o)

    def found(self) -> dict[Node, Shape]:
        """Padded strides of the values that are to have some."""
        near = self._near_products()
        odd = {n: s for n in self.nodes if n in near and (s := self._apart(n)) is not None}
        if not odd:
            return {}
        self.reading = self._reading or Reading(
            self.graph, lambda extents: size_at_hints(self.graph, extents), self.spec
        )
        return {n: s for n, s in odd.items() if n not in self.reading.inline and self._is_seen_well(n, s)}

    def _near_products(self) -> set[Node]:
        """Values that a product gives or reads, with what is computed point by point on the way."""
        product = {n for n in self.nodes if n.kind == "contract" or is_product(n)}
        behind, before = set(product), set(product)
        for n in self.nodes:
            if n.kind == "map" and any(r.source in behind for r in n.reads):
                behind.add(n)
        for n in reversed(self.nodes):
            if any(u in product or (u.kind == "map" and u in before) for u in self.users[n]):
                before.add(n)
        return behind | before

    def _apart(self, n: Node) -> Shape | None:
        """The strides that a value of ours, shown to nobody else, would have."""
        ours = n.kind in ("map", "reduce", "contract", "scan", "random")
        if not ours and not (n.kind == "extern" and n.attr("target") in WRITES_ROWS_APART):
            return None
        nbytes = n.dtype.nbytes
        if all(e is ix.ONE or (e.const or 0) * nbytes % ALIGNED == 0 for e in n.shape):
            return None  # in whichever order
        if n in self.graph.partials or not all(o.private and o.writes_to is None for o in self.outputs.get(n, ())):
            return None
        return rows_apart(self.graph, n, self.layouts.strides(n), self.spec.row_bytes)

    def _is_seen_well(self, n: Node, strides: Shape) -> bool:
        """Whether reads stay views and simple addresses; the backward is told strides as numbers."""
        shown = [as_strided(o.read, strides, self.graph.facts(o.read.domain or ())) for o in self.outputs.get(n, ())]
        told = all(v is not None and all(s.const is not None for s in v.strides) for v in shown)
        return told and all(self._reads_well(u, r, strides) for u, r in self._reads(n))

    def _reads(self, n: Node) -> list[tuple[Node, Read]]:
        """Every read that memory serves, where inline nodes lie between at the reader's own places."""
        return [(u, r) for u in self.reading.users[n] for r in self.reading.reads(u) if r.source is n]

    def _reads_well(self, u: Node, r: Read, strides: Shape) -> bool:
        if u.kind == "extern":
            view = as_strided(r, strides, self.graph.facts(r.domain or ()))
            # a term that is added is copied, or read, by its strides
            matrix = view is not None and (is_matrix(view) or r not in u.reads[-2:])
            return is_product(u) and matrix
        facts = self.graph.facts(u.axes)
        old, new = (recombine(address(r.index, s), facts) for s in (self.layouts.strides(r.source), strides))
        return _divisions(new) <= _divisions(old)


def _divisions(e: Expr) -> int:
    return sum(a.kind in ("div", "mod") for a in e.atoms())
