"""May two groups be one kernel? One predicate per law; each returns a Reason or None. No law looks at time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from plait.ir.graph import Node, made_of
from plait.plan.align import Alignment
from plait.plan.cost import CostModel
from plait.plan.openings import twin_of
from plait.plan.reasons import Reason, Why
from plait.plan.regions import why_apart

_MOST_REPEATS = 64  # tiles of a result that may each compute what their operands need

Fits = Callable[[Alignment], "Reason | None"]
Law = Callable[["Context", Alignment], "Reason | None"]


@dataclass(frozen=True, slots=True)
class Context:
    """What laws may ask: sizes, the device's limits, and whether any schedule fits (handed in: plan knows no tiles)."""

    model: CostModel
    stored: Callable[[frozenset[Node]], list[Node]]
    fits: Fits
    partials: frozenset[Node]  # partial results of split reductions
    relaid: frozenset[Node]  # copies whose rows begin well
    ends: frozenset[Node]  # bounds of loops that are found beforehand
    max_arguments: int
    max_nodes: int


def why_not_wanted(ctx: Context, al: Alignment) -> Reason | None:
    """No kernel reaches across the edge of a region that the user keeps apart."""
    reading = ctx.model.reading
    if not reading.walled:
        return None
    return why_apart(reading.graph, [n for n in reading.with_inline(al.nodes) if n not in reading.leafless])


def why_not_arguments(ctx: Context, al: Alignment) -> Reason | None:
    """A kernel takes a bounded number of tensors and operations (registers, compile time)."""
    inside = frozenset(al.nodes)
    outside = {r.source for n in al.nodes for r in ctx.model.reading.reads(n) if r.source not in inside}
    if len(outside) > ctx.max_arguments or len(al.nodes) > ctx.max_nodes:
        return Reason(Why.ARGUMENTS, f"{len(outside)} tensors, {len(al.nodes)} operations")
    return None


def why_not_loose(ctx: Context, al: Alignment) -> Reason | None:
    """What is read at another index is evaluated again there; that must not repeat a reduction, a scan or a random draw's cost."""
    inside = frozenset(al.nodes)
    for consumer, k in sorted(al.loose, key=lambda edge: (edge[0].serial, edge[1])):
        found = made_of(ctx.model.reading.reads(consumer)[k].source, inside, ctx.model.reading.reads)
        for n in sorted(found, key=lambda n: n.serial):
            if n.kind in ("scan", "random"):
                return Reason(Why.MISALIGNED, f"{consumer.op} reads {n.op} at other indices")
    return None


def why_not_blowup(ctx: Context, al: Alignment) -> Reason | None:
    """The common domain must not be larger than the largest member's: else unrelated axes would be crossed."""
    row, grid = ctx.model.row_and_grid(al)
    grid_points = ctx.model.size(al.extent[a] for a in grid)
    floating = al.floating(ctx.stored(frozenset(al.nodes)), ctx.model.reading.reads)
    if any(n.kind != "map" for n in floating):
        return Reason(Why.MISALIGNED, "a reduction is only read at other indices")
    if any(n.kind == "contract" for n in al.nodes):
        return _why_not_again(ctx, al, row, grid)
    most = max(ctx.model.size(n.axes) for n in al.nodes)
    for n in al.nodes:
        if n in floating:
            continue
        own_rows = set(al.span(n)) & row
        executed = grid_points * ctx.model.size(al.extent[a] for a in own_rows)
        if executed > 1.25 * most + 1024:
            return Reason(Why.MISALIGNED, f"{n.op} would run {executed / max(most, 1):.0f} times over")
    return None


def _why_not_again(ctx: Context, al: Alignment, row: set[int], grid: set[int]) -> Reason | None:
    """Products are formed once, by one tile, and so is what is stored along the way that tiles stream; what else tiles do
    again is a matter of time."""
    tiling = ctx.model.tiling(al, grid)
    streamed = {n for n in ctx.stored(frozenset(al.nodes)) if row & set(al.kept(n))}
    for n in al.nodes:
        again = tiling.repeats(n)
        if again > (1 if n.kind == "contract" or n in streamed else _MOST_REPEATS):
            return Reason(Why.MISALIGNED, f"{n.op} would run {again:.0f} times over")
    return None


def why_not_crossed(ctx: Context, al: Alignment) -> Reason | None:
    """Two products that do not feed each other may not each sum the axis along which the other's results lie: no one nest of
    loops forms both, so that a block would run through everything twice and own neither axis."""
    inside = frozenset(al.nodes)
    products = [n for n in al.nodes if n.kind == "contract"]
    summed = {n: set(al.reduced(n)) for n in products}
    for i, a in enumerate(products):
        for b in products[:i]:
            if twin_of(a)[0] == twin_of(b)[0]:
                return Reason(Why.MISALIGNED, "a product and its twin: each is for a nest of its own")
            crossed = summed[a] & set(al.kept(b)) and summed[b] & set(al.kept(a))
            reads = ctx.model.reading.reads
            if crossed and a not in made_of(b, inside, reads) and b not in made_of(a, inside, reads):
                return Reason(Why.MISALIGNED, "two products each sum the axis along which the other's results lie")
    return None


def why_not_fit(ctx: Context, al: Alignment) -> Reason | None:
    """Some schedule must fit: asked only where it is in doubt (several row shapes, a scan along an axis that others cut in
    two, or re-evaluated edges)."""
    rows = {frozenset(al.reduced(n)) for n in al.nodes if (n.reduces or n.kind == "scan")}
    cut = any(n.kind == "scan" and len(al.reduced(n)) > 1 for n in al.nodes)
    products = any(n.kind == "contract" for n in al.nodes)
    if len(rows) <= 1 and not cut and not al.loose and not products:
        return None
    return ctx.fits(al)


def why_not_partial(ctx: Context, al: Alignment) -> Reason | None:
    """The parts of a reduction that was split over blocks are combined when all blocks are done. (Parts of one cascade use
    each other, and what is only scaled by parts waits for their combination.)"""
    inside = frozenset(al.nodes)
    for n in al.nodes:
        if not n.reduces or n in ctx.partials:
            continue
        for r in ctx.model.reading.reads(n):
            if r.source in inside and r.source in ctx.partials:
                return Reason(Why.GLOBAL_SYNC, f"{r.source.op} was split over blocks")
    return None


def why_not_relaid(ctx: Context, al: Alignment) -> Reason | None:
    """A copy whose rows begin well is there for the products that read it: one that took it in would read the odd rows itself."""
    inside = frozenset(al.nodes)
    reads = ctx.model.reading.reads
    for n in al.nodes if ctx.relaid & inside else ():
        if n.kind == "contract" and ctx.relaid & made_of(n, inside, reads):
            return Reason(Why.SLOWER, f"{n.op} would read rows that begin at odd places")
    return None


def why_not_bounded(ctx: Context, al: Alignment) -> Reason | None:
    """Bounds of loops over products are found beforehand: each tile of each head would find them again."""
    if ctx.ends & set(al.nodes) and any(n.kind == "contract" for n in al.nodes):
        return Reason(Why.MISALIGNED, "every tile would find the bounds of its loop again")
    return None


LAWS: tuple[Law, ...] = (
    why_not_wanted,
    why_not_relaid,
    why_not_bounded,
    why_not_partial,
    why_not_arguments,
    why_not_loose,
    why_not_blowup,
    why_not_crossed,
    why_not_fit,
)


def why_not(ctx: Context, al: Alignment) -> Reason | None:
    """The first law that forbids the group, or None."""
    for law in LAWS:
        reason = law(ctx, al)
        if reason is not None:
            return reason
    return None
