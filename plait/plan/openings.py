"""Which contractions to open: those whose neighbours' traffic is worth more than the vendor's edge in products.

An open product shares a kernel with what is around it, so the tensors between them never reach memory; a closed one runs
at the vendor's throughput. Judged from the call's own surroundings: planning then has the last word, and a product that
stays alone in its kernel is closed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from plait.ir.graph import Graph, Node, Read, made_of
from plait.ir.index import Expr
from plait.plan.contract_cost import DWARFS, FEW, STREAM, UNEVEN, call_ns, depth_of, product_ns, share, vendor_ns
from plait.plan.cost import size_at_hints
from plait.plan.device import DeviceSpec
from plait.plan.layout import Layouts, begins_oddly
from plait.plan.plan import Group, Plan

_LINE = 128  # bytes that a row of a tile in shared memory has


@dataclass(frozen=True, slots=True)
class Opening:
    """What was decided of one call that can be opened. `gain_ns`: predicted, of opening it; `state`: "closed" (it loses),
    "open", or "closed again" (planning found it no company that pays). `fx` names the FX node it came from. `call_ns`, `open_ns`:
    both predictions, where they were made of whole forms; `why`: what decided instead of them."""

    fx: str
    gain_ns: float
    state: str
    call_ns: float | None = None
    open_ns: float | None = None
    why: str = ""


def opening_gains(graph: Graph, spec: DeviceSpec, can_open: Callable[[Node], bool]) -> dict[Node, float]:
    """Nanoseconds that opening each call (that `can_open`) saves in traffic and launches, less what it costs in throughput."""
    judge = _Judge(graph, spec, can_open)
    return {n: judge.gain_ns(n) for n in graph.nodes() if can_open(n)}


class _Judge:
    def __init__(self, graph: Graph, spec: DeviceSpec, can_open: Callable[[Node], bool]) -> None:
        self.graph, self.spec, self.can_open = graph, spec, can_open
        self.users = graph.users()
        self.demanded = {o.read.source for o in graph.outputs}
        self.layouts = Layouts(graph)

    def gain_ns(self, n: Node) -> float:
        """Nanoseconds that opening a call saves; negative when the vendor's throughput is worth more."""
        saved, operands, joined = 0.0, self.nbytes(n), False
        # a product that is only another's factor stays in memory: its own loop would be inside the other's
        if n not in self.demanded and self.users[n] and all(u.kind in ("map", "reduce") for u in self.users[n]):
            saved += 2 * self.nbytes(n)
            joined = True
        for r in n.reads:
            size = size_at_hints(self.graph, r.domain or ()) * r.source.dtype.nbytes
            operands += min(size, self.nbytes(r.source))
            if self.layouts.view(r) is None:
                saved += 2 * size  # the call would be given a copy
            elif self.computed_for(r.source):
                saved += 2 * size
                joined = True
            elif self.dwarfs(r.source, n):
                readers = sum(u.kind != "map" for u in self.users[r.source])
                saved += (1 + readers) / readers * size
                joined = True
        rows, depth, columns = (size_at_hints(self.graph, [e]) for e in (n.shape[-2], depth_of(n), n.shape[-1]))
        points, ragged = size_at_hints(self.graph, n.shape) * depth, any(map(self.is_ragged, n.reads))
        memory = operands / self.spec.bytes_per_ns
        reached = share(self.spec, n, ragged or any(map(self.is_in_pieces, n.reads))) * (UNEVEN if ragged else 1.0)
        ours = max(product_ns(self.spec, n, points) / reached, memory / self.streaming(n))
        slower = ours - max(vendor_ns(self.spec, n, points, rows, depth, columns, ragged), memory)
        return saved / self.spec.bytes_per_ns + (self.spec.launch_ns if joined else 0.0) - slower

    def is_ragged(self, r: Read) -> bool:
        """Whether a factor's rows begin at odd places: no copy of 16 bytes, and no descriptor, can be made of them."""
        seen = self.layouts.view(r) if self.spec.descriptors else None
        return seen is not None and begins_oddly(seen, r.source.dtype.nbytes)

    def is_in_pieces(self, r: Read) -> bool:
        """Whether an axis of a factor is put together of pieces that are no whole lines of a tile in shared memory."""
        if self.layouts.view(r) is not None:
            return False
        return size_at_hints(self.graph, r.source.shape[-1:]) * r.source.dtype.nbytes % _LINE != 0

    def streaming(self, n: Node) -> float:
        """The share of the vendor's bandwidth that a generated product reaches."""
        few = min(self.graph.hint(e) for e in n.shape[-2:]) <= FEW[self.spec.kind]
        return STREAM[self.spec.kind] if few else 1.0

    def computed_for(self, s: Node) -> bool:
        """Whether a value is computed for one product alone, which may take it in."""
        users = self.users[s]
        return s.kind in ("map", "reduce") and s not in self.demanded and len(users) == 1 and self.can_open(users[0])

    def dwarfs(self, s: Node, n: Node) -> bool:
        """Whether a value that only products and what is computed point by point read, so that each may form it for itself, is
        much larger than all else that this product has to do with."""
        alone = s.kind == "map" and s not in self.demanded
        rest = self.nbytes(n) + sum(self.nbytes(r.source) for r in n.reads if r.source is not s)
        return (
            alone
            and all(u.kind == "map" or self.can_open(u) for u in self.users[s])
            and self.nbytes(s) >= DWARFS * rest
        )

    def nbytes(self, n: Node) -> float:
        return size_at_hints(self.graph, n.shape) * n.dtype.nbytes


def better_closed(plan: Plan, spec: DeviceSpec) -> frozenset[int]:
    """Numbers (in `in_order`) of products that had better be calls: they share their kernel with nothing that saves traffic
    (casts and the sum of their own call), or with less than it costs. A twin has the number of what it repeats."""
    number = {n: i for i, n in enumerate(in_order(plan.graph.nodes()))}
    out: set[int] = set()
    for g in plan.kernels():
        products = [n for n in g.nodes if n.kind == "contract"]
        if len(products) == 1 and _Closing(plan, g, products[0], spec).is_better():
            (n,) = products
            out.add(number[n] if n in number else int(twin_of(n)[0]))
    return frozenset(out)


class _Closing:
    """A kernel with one product against the call and kernels that would stand for it."""

    def __init__(self, plan: Plan, g: Group, n: Node, spec: DeviceSpec) -> None:
        self.plan, self.g, self.n, self.spec = plan, g, n, spec
        trivial = {"cast", "copy", "const", "index"}
        inside = set(plan.reading.with_inline(g.nodes))
        self.factors = [made_of(r.source, inside) for r in n.reads]
        before = set().union(*self.factors)
        self.before = [m for m in before if m.op not in trivial]
        self.after = [m for m in inside - before if m is not n and m.op not in trivial]
        if dict(n.attrs).get("sums"):  # the call adds by itself
            own = next((m for m in self.after if m.op == "add"), None)
            self.after = [m for m in self.after if m is not own]

    def is_better(self) -> bool:
        """Kernels that reduce and keep the product itself out of memory are never closed: it can be the square of what they
        read."""
        if not self.before and not self.after and not self.is_stream() and self.call_ns() <= self.at_best_ns():
            return True
        kept = all(self.size(m.shape) < self.size(self.n.shape) for m in self.g.stored)
        if kept and any(m.kind != "map" for m in (*self.before, *self.after)):
            return False
        return self.apart_ns() <= self.g.predicted_ns

    def apart_ns(self) -> float:
        """The call, and writing and reading again what it takes in or leaves."""
        n, spec = self.n, self.spec
        half = n.reads[0].source.dtype.nbytes
        sizes = [self.size(n.axes[i] for i in {i for e in r.index for i in e.axes()}) * half for r in n.reads]
        result = self.size(n.shape) * half
        traffic = sum(sizes) + result
        slower, again = 1.0, 0.0
        if self.is_stream():  # every block of the call reads the few rows again, as our own do
            slower = STREAM[spec.kind]
            again = (self.g.cost.cache_bytes if self.g.cost is not None else 0.0) / spec.cache_bytes_per_ns
        ns = again + spec.launch_ns + max(self.call_ns(), slower * traffic / spec.bytes_per_ns)
        for factor, nbytes in zip(self.factors, sizes, strict=True):
            if factor & set(self.before):
                ns += nbytes / spec.bytes_per_ns  # whoever makes it writes it
        if self.after:
            stored = sum(self.size(m.shape) * m.dtype.nbytes for m in self.g.stored)
            read = self.g.cost.bytes_read if self.g.cost is not None else 0.0
            ns += spec.launch_ns + (result + stored + max(read - sum(sizes), 0.0)) / spec.bytes_per_ns
        return ns

    def call_ns(self) -> float:
        """What the library's product takes."""
        size, columns = self.size(self.n.axes), self.size(self.n.shape[-1:])
        return vendor_ns(self.spec, self.n, size, self.rows(), size / self.size(self.n.shape), columns)

    def rows(self) -> float:
        """Of the result, which share each column of the second factor."""
        return self.size(self.n.shape[-2:-1])

    def at_best_ns(self) -> float:
        """What it would take of rows that lie well."""
        return call_ns(self.spec, self.n, self.size(self.n.axes), self.rows())

    def is_stream(self) -> bool:
        """Whether few rows share what is read of the other factor, and calls reach less of the bandwidth, which is all there."""
        kind = self.spec.kind
        first, second = ({i for e in r.index for i in e.axes()} for r in self.n.reads)
        rows = min(self.size(self.n.axes[i] for i in side) for side in (first - second, second - first))
        return STREAM[kind] > 1 and rows <= FEW[kind]

    def size(self, extents: Iterable[Expr]) -> float:
        return size_at_hints(self.plan.graph, extents)


def twin_of(n: Node) -> tuple[Any, int]:
    """(what a product and its twins share, the nest that this one is for)."""
    shared: tuple[Any, int] = dict(n.attrs).get("twin", (n, 0))
    return shared


def in_order(nodes: Sequence[Node]) -> list[Node]:
    """Contract nodes, without twins, by construction: the order of the calls they stand for."""
    return sorted((n for n in nodes if n.kind == "contract" and twin_of(n)[1] == 0), key=lambda n: n.serial)
