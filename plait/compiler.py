"""The compiler on one page: every stage named, from an FX graph to something that runs.

FX graph -import-> Graph -simplify-> Graph -plan-> Plan -lower-> TilePrograms -emit-> source -build-> kernels -run->
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from plait.errors import FusionRefused, InternalError, LowerFailed
from plait.frontend.device import spec_of
from plait.frontend.fx_import import import_fx
from plait.frontend.open_attention import noted
from plait.frontend.regions import mark_regions
from plait.frontend.saved import report_strides
from plait.ir.budget import current, leaves_out
from plait.ir.check import check_graph
from plait.ir.fault import passed
from plait.ir.fuel import aside, is_limited, limited, take, take_at, told
from plait.ir.graph import Graph, Node
from plait.ir.loop import BLOCK, loop_of
from plait.options import Options
from plait.plan.align import Alignment
from plait.plan.cost import size_at_hints
from plait.plan.device import DeviceSpec
from plait.plan.given import parse_plan
from plait.plan.horizontal import launches
from plait.plan.inline import Reading
from plait.plan.layout import Layouts
from plait.plan.openings import Opening, better_closed, in_order, opening_gains
from plait.plan.plan import Group, Plan
from plait.plan.reasons import Reason, Why
from plait.plan.regions import is_forced
from plait.plan.search import Fits, make_plan
from plait.rewrite.passes.block_bounds import block_bounds
from plait.rewrite.passes.block_values import Blocked, block_values
from plait.rewrite.passes.even_rows import even_rows
from plait.rewrite.passes.gathered_products import gathered_products
from plait.rewrite.passes.linear_sums import linear_sums
from plait.rewrite.passes.materialise import materialise
from plait.rewrite.passes.open_contractions import can_open, open_contractions
from plait.rewrite.passes.pad_rows import pad_rows
from plait.rewrite.passes.single_points import single_points
from plait.rewrite.passes.split_cascades import split_cascades
from plait.rewrite.passes.split_reductions import split_reductions
from plait.rewrite.passes.twin_products import twin_products
from plait.rewrite.passes.write_rows import write_rows
from plait.runtime import override, report
from plait.runtime.assemble import assemble
from plait.runtime.executable import Executable
from plait.runtime.follow import doing
from plait.runtime.link import Launch, link
from plait.runtime.memory import output_bytes, peak_bytes
from plait.runtime.steps import Script
from plait.tile.check import check_program
from plait.tile.flat import Env
from plait.tile.lower import Lowered, lower
from plait.tile.pin import pinned
from plait.tile.schedule import Schedule

_SMALL_NS = 3000.0  # of work beyond the launch
_UNOPENED = "open product"


@dataclass(frozen=True)
class Compiled:
    """Every level of one compiled graph, for tools that explain it. `openings`: what was decided of its products."""

    graph: Graph
    plan: Plan
    launches: tuple[Launch, ...]
    spec: DeviceSpec
    openings: tuple[Opening, ...] = ()
    loops: tuple[Compiled, ...] = ()  # the graph of a block of each loop, in order of the launches
    blocked: tuple[Blocked, ...] = ()  # values that the option memory had made in blocks, and those that could not be

    def loop_bytes(self) -> list[float]:
        """The most bytes that a block of each loop holds at once, beside what the loop reads and writes."""
        return [peak_bytes(c.graph, c.launches, scripted(c)) for c in self.loops]


def compile_graph(
    gm: Any, example_inputs: Sequence[Any], options: Options, *, kind: str = "inference"
) -> Callable[..., Sequence[Any]]:
    """Compile one FX graph of ATen calls. Raises CompileError (of a kind) where it cannot."""
    with doing("importing"):
        graph = imported(gm, example_inputs, options, kind)
    spec = spec_of(graph.device)
    with limited(options.fuel) as tank:
        with telling(kind):
            compiled = within_memory(all_levels(graph, spec, options), graph, spec, options)
            compiled = explained(compiled, gm)
        report.compiled(compiled)
        _note_fusions(compiled.plan)
        script = passed("script", scripted(compiled), kind)
        report.current().details |= {"script": script, "fuel": tank}
        loops = [_block_run(gm, block, options, kind) for block in compiled.loops]
        made = assemble(gm, compiled, script, options, loops)
    report_strides(compiled.graph)
    return made


def scripted(compiled: Compiled) -> Script:
    """The steps of a compiled graph."""
    layouts, cuda = Layouts(compiled.graph), compiled.spec.kind == "cuda"
    return link(compiled.graph, compiled.plan.reading, compiled.launches, layouts, overwrite=cuda)


def alive_bytes(compiled: Compiled) -> float:
    """The most bytes that values hold at once beyond inputs and outputs."""
    most = peak_bytes(compiled.graph, compiled.launches, scripted(compiled), compiled.loop_bytes())
    return most - output_bytes(compiled.graph)


def within_memory(compiled: Compiled, graph: Graph, spec: DeviceSpec, options: Options) -> Compiled:
    """The same graph, with large values in blocks where the option memory says that less is to be alive at once."""
    if options.memory is None:
        return compiled
    limit = options.memory * 1_000_000
    beyond = alive_bytes(compiled)
    if beyond <= limit:
        return compiled
    blocked, said = block_values(graph, limit)
    if blocked is graph:
        return replace(compiled, blocked=tuple(said))
    check_graph(blocked, level=options.check)
    found = all_levels(blocked, spec, options)
    loops = [loop for launch in found.launches if (loop := loop_of(launch.groups[0].nodes[0])) is not None]
    blocks = tuple(all_levels(loop.body, spec, replace(options, override="")) for loop in loops)
    found = replace(found, loops=blocks, blocked=tuple(said))
    # kernels that never hold the value whole need no blocks
    return found if alive_bytes(found) < beyond else compiled


def _block_run(gm: Any, block: Compiled, options: Options, kind: str) -> Executable:
    """What runs a block of a loop: a graph of its own, for reports too."""
    with report.compiling(kind):
        report.compiled(block)
        script = scripted(block)
        report.current().details["script"] = script
        made = assemble(gm, block, script, options)
        made.kept = max(made.kept, (block.graph.symbols[BLOCK][1] or 0) + 1)
        return made


def _note_fusions(plan: Plan) -> None:
    """Fusions that the option budget left out, of the plan that stands."""
    budget = current()
    if budget is not None:
        budget.note("fusion", sum(d.reason is not None and d.reason.why is Why.BUDGET for d in plan.decisions))


def imported(gm: Any, example_inputs: Sequence[Any], options: Options, kind: str) -> Graph:
    """The Graph of an FX graph, with the regions that the user wants or forbids."""
    graph = import_fx(gm, example_inputs, numerics=options.numerics, rng=options.rng)
    for name in mark_regions(graph, gm, options, kind):
        if kind != "backward":  # not every operator has a gradient
            report.warn_once(f"options name {name!r}, and nothing in {report.current().name} ({kind}) is called so")
    return graph


def explained(compiled: Compiled, gm: Any) -> Compiled:
    """With what was decided of calls before the FX graph was there."""
    return replace(compiled, openings=(*compiled.openings, *noted(gm)))


@contextmanager
def telling(kind: str) -> Iterator[None]:
    """Says of a fusion that is refused in a backward that it is there."""
    try:
        yield
    except FusionRefused as e:
        if kind != "backward":
            raise
        hint = f"{e.hint}; or leave the gradients free: plait.fuse(..., backward=False)"
        raise FusionRefused(f"in the backward, {e.message}", origin=e.origin, hint=hint) from e


def simplify(graph: Graph, spec: DeviceSpec, options: Options) -> Graph:
    """Graph to Graph: what every later stage may rely on."""
    for name, rewrite in (
        ("import", lambda g: g),
        ("split_cascades", lambda g: split_cascades(g, spec, options.numerics)),
        ("split_reductions", lambda g: split_reductions(g, spec)),
        ("write_rows", write_rows),
        ("materialise", materialise),
    ):
        graph = passed("rewrite", rewrite(graph), name)
        if options.check >= (2 if name != "materialise" else 1):
            check_graph(graph, level=options.check)
    return graph


def all_levels(graph: Graph, spec: DeviceSpec, options: Options) -> Compiled:
    """Imported Graph to Plan to TilePrograms. Contractions worth it are opened, and closed again where what joins them is worth less."""
    mine = override.of(options)
    given = mine.graph(graph) if mine is not None else None
    if given is not None:
        return plan_and_lower(given, spec, options)
    graph = even_rows(single_points(graph), spec, options.numerics)
    with aside():
        gains = _gains(graph, spec, options)
    calls = list(gains)
    worth = frozenset(n for n, gain in gains.items() if gain > 0 or is_forced(graph, n))
    with aside():  # what stays open is found by planning several times; only the last is what is run
        plan, env, chosen = _opened(graph, calls, worth, spec, options)
    if is_limited():
        chosen = frozenset(
            n for n in calls if n in chosen and (is_forced(graph, n) or take_at("open", "product", graph, [n]))
        )
        plan, env = _planned_with(graph, chosen, spec, options)
    plan = _as_given(plan, env, spec, options)
    return replace(_lowered(plan, env, spec, options), openings=_openings(graph, gains, worth, chosen))


def _gains(graph: Graph, spec: DeviceSpec, options: Options) -> dict[Node, float]:
    """What opening each call would save, of those that the options let be opened: at lower levels, what the user wants fused."""
    if not options.fuses or any(n.kind == "contract" for n in graph.nodes()):
        return {}  # a loop's body has products that are open already; which are which is counted below

    free = [n for n in graph.nodes() if can_open(n) and not is_forced(graph, n)] if options.opens_products else []
    opened = options.opens_products and not leaves_out(_UNOPENED, len(free))

    def may(n: Node) -> bool:
        return can_open(n) and (opened or is_forced(graph, n))

    return opening_gains(padded(graph, spec, options), spec, may)


def _opened(
    graph: Graph, calls: list[Node], chosen: frozenset[Node], spec: DeviceSpec, options: Options
) -> tuple[Plan, Env, frozenset[Node]]:
    """The plan with those of `chosen` open that find company which pays."""
    while True:
        plan, env = _planned_with(graph, chosen, spec, options)
        if not chosen:
            return plan, env, chosen
        alone = better_closed(plan, spec)
        alone -= {k for k, call in enumerate(n for n in calls if n in chosen) if is_forced(graph, call)}
        if not alone:
            return plan, env, chosen
        mine = [n for n in calls if n in chosen]
        products = in_order(plan.graph.nodes())
        if len(products) != len(mine):
            raise InternalError(f"{len(mine)} calls were opened, {len(products)} products are there")
        chosen -= {call for number, call in enumerate(mine) if number in alone}
        free = [n for n in chosen if not is_forced(graph, n)]
        if leaves_out(_UNOPENED, len(free)):
            chosen -= set(free)


def _planned_with(graph: Graph, chosen: frozenset[Node], spec: DeviceSpec, options: Options) -> tuple[Plan, Env]:
    """The plan with these calls open."""
    opened = open_contractions(graph, chosen.__contains__) if chosen else graph
    opened = twin_products(linear_sums(gathered_products(opened), options.numerics))
    with doing("rewriting"):
        simplified = simplify(block_bounds(opened, spec), spec, options)
    return _planned(simplified, spec, options)


def _openings(
    graph: Graph, gains: dict[Node, float], worth: frozenset[Node], chosen: frozenset[Node]
) -> tuple[Opening, ...]:
    def state(n: Node) -> str:
        return "open" if n in chosen else "closed again" if n in worth else "closed"

    return tuple(Opening(o.fx, gain, state(n)) for n, gain in gains.items() for o in graph.origins.get(n, ())[:1])


def padded(graph: Graph, spec: DeviceSpec, options: Options, reading: Reading | None = None) -> Graph:
    """The same graph, with the last word on where its values lie."""
    out = pad_rows(graph, spec, options.numerics, reading)
    more = [n for n in out.padded if n not in graph.padded]
    if not more:
        return out
    if not take_at("rewrite", "pad_rows", graph, more):
        return graph
    check_graph(out, level=options.check)
    return out


def plan_and_lower(graph: Graph, spec: DeviceSpec, options: Options) -> Compiled:
    """Simplified Graph to Plan to TilePrograms."""
    plan, env = _planned(graph, spec, options)
    return _lowered(_as_given(plan, env, spec, options), env, spec, options)


def _as_given(plan: Plan, env: Env, spec: DeviceSpec, options: Options) -> Plan:
    """The plan, or the one that a file of the user's has in its place."""
    mine, graph = override.of(options), plan.graph
    if mine is None:
        return plan
    fits = _fits(graph, env, spec)
    return mine.plan(lambda text: parse_plan(text, graph, spec, plan.reading, fits)) or plan


def _planned(graph: Graph, spec: DeviceSpec, options: Options) -> tuple[Plan, Env]:
    reading = Reading(graph, lambda extents: size_at_hints(graph, extents), spec)
    graph = padded(graph, spec, options, reading)
    strides, apart = Layouts(graph).strides, frozenset(graph.padded)
    env = Env(strides, reading.inline, options.numerics, graph.symbols, reading.reads, apart)

    with doing("planning"):
        return make_plan(graph, spec, reading, _fits(graph, env, spec), fuse=options.fuses), env


def _fits(graph: Graph, env: Env, spec: DeviceSpec) -> Fits:
    """Says why no schedule fits a group, or None."""

    def fits(al: Alignment, stored: Sequence[Node]) -> Reason | None:
        try:
            lower(al, stored, env, spec, graph.hint, name="trial")
        except LowerFailed as refused:
            return Reason(Why.MISALIGNED, refused.message)
        return None

    return fits


def _lowered(plan: Plan, env: Env, spec: DeviceSpec, options: Options) -> Compiled:
    graph = plan.graph
    steps: list[Launch] = []
    for batch in launches(plan, fuse=options.fuses):
        if batch[0].kind == "extern":
            steps.append(Launch(batch))
            continue
        parts = [(g, _as_written(_lower_group(graph, g, env, spec, options), options)) for g in batch]
        for together in split_by_fit(parts, spec):
            groups = tuple(g for g, _ in together)
            steps.append(Launch(groups, sum(1 for s in steps if s.parts), tuple(p for _, p in together), _name(groups)))
    _warn_of_pins(options, {p.program.name for s in steps for p in s.parts})
    return Compiled(graph, plan, tuple(steps), spec)


def _as_written(lowered: Lowered, options: Options) -> Lowered:
    """A group, or what a file of the user's has in its place."""
    mine = override.of(options)
    return lowered if mine is None else mine.program(lowered)


def _warn_of_pins(options: Options, kernels: set[str]) -> None:
    """Say which pins mean no kernel. One without a kind of graph may mean another graph's."""
    kind = report.current().kind
    for name, _ in options.pin:
        side, _, kernel = name.rpartition("/")
        here = side == "backward" if kind == "backward" else side == "forward" or kind == "inference"
        if here and kernel not in kernels:
            known = ", ".join(sorted(kernels))
            report.warn_once(f"a schedule is pinned for {name!r}; the kernels of {report.current().name} are {known}")


def split_by_fit(parts: Sequence[tuple[Group, Lowered]], spec: DeviceSpec) -> list[list[tuple[Group, Lowered]]]:
    """Parts that share a launch. On a GPU these are small ones with as many warps: a part's blocks take the resources of the
    hungriest, and what runs long gains nothing from company."""
    if spec.kind == "cpu":
        return [list(parts)]
    out: dict[object, list[tuple[Group, Lowered]]] = {}
    for g, p in parts:
        small = g.predicted_ns < spec.launch_ns + _SMALL_NS
        out.setdefault(("small", p.program.schedule.warps) if small else g.number, []).append((g, p))
    return list(out.values())


def _lower_group(graph: Graph, group: Group, env: Env, spec: DeviceSpec, options: Options) -> Lowered:
    with doing("lowering", _name((group,))):
        lowered = _under(False, graph, group, env, spec)
    pin = options.pinned(lowered.program.name, report.current().kind)
    if pin is not None:
        return pinned(pin, lowered, lambda s: _under(False, graph, group, env, spec, s), spec)
    if is_limited():
        lowered = _scheduled(lowered, graph, group, env, spec)
    if options.check:
        check_program(lowered.program)
    return lowered


def _under(
    plainly: bool, graph: Graph, group: Group, env: Env, spec: DeviceSpec, schedule: Schedule | None = None
) -> Lowered:
    assert group.alignment is not None
    name, header = _name((group,)), _header(graph, group)
    return lower(
        group.alignment,
        group.stored,
        env,
        spec,
        graph.hint,
        name=name,
        schedule=schedule,
        plainly=plainly,
        header=header,
    )


def _scheduled(chosen: Lowered, graph: Graph, group: Group, env: Env, spec: DeviceSpec) -> Lowered:
    """The group under its chosen schedule, or under the plain one where there is no fuel for another."""
    try:
        plain = _under(True, graph, group, env, spec)
    except LowerFailed:
        return chosen
    mine, other = chosen.program.schedule, plain.program.schedule

    def words() -> str:
        return f"{mine} instead of {other} for {told(graph, group.stored)}"

    return chosen if mine == other or take("schedule", "choose", words, graph, group.nodes) else plain


def _name(batch: tuple[Group, ...]) -> str:
    """A kernel's name says what it computes: the operations of its first group, and how many more parts it has."""
    ops = [n.op for n in batch[0].nodes if n.op not in ("cast", "copy", "const", "index")]
    short = "_".join(dict.fromkeys(ops)) or "copy"
    more = f"_and_{len(batch) - 1}" if len(batch) > 1 else ""
    return f"k{batch[0].number}_{short[:48]}{more}"


def _header(graph: Graph, group: Group) -> tuple[str, ...]:
    """What a reader of the kernel wants first: members, cost, the user's lines."""
    lines: dict[str, None] = {}
    for n in group.nodes:
        for o in graph.origins.get(n, ()):
            if o.line:
                lines.setdefault(o.line)
    cost = group.cost
    head = [f"{len(group.nodes)} operations: {' '.join(dict.fromkeys(n.op for n in group.nodes))}"]
    if cost is not None:
        head.append(
            f"reads {cost.bytes_read / 1e6:.3f} MB, writes {cost.bytes_written / 1e6:.3f} MB, predicted {group.predicted_ns / 1e3:.1f} us"
        )
    return (*head, *list(lines)[:12])


__all__ = ["Compiled", "Node", "all_levels", "compile_graph", "plan_and_lower", "simplify"]
