"""From the recorded levels of a compiled graph to GraphFacts. Nothing is decided or measured here, only written down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plait.compiler import Compiled
from plait.frontend.baseline import Operator
from plait.ir.graph import Node
from plait.plan.cost import size_at_hints
from plait.plan.device import DeviceSpec
from plait.plan.inline import Reading
from plait.plan.plan import Group
from plait.report.eager import eager_operators, operator_name
from plait.report.facts import (
    Flops,
    GraphFacts,
    Intermediate,
    Kernel,
    Member,
    Resources,
    Totals,
    Traffic,
    Variant,
)
from plait.report.refusals import Places, collect_fusions, collect_refusals, why_call, why_open
from plait.report.roofline import bound_of, ceilings_of, roofline_us
from plait.report.work import flops_of, product_flops
from plait.runtime.link import Launch
from plait.runtime.memory import input_bytes, peak_bytes
from plait.runtime.steps import Script

_PLUMBING = frozenset(("cast", "copy", "const", "index"))
_VALUELESS = frozenset(("const", "index"))


@dataclass(frozen=True)
class Measured:
    """What is known of a built kernel: its resources, the schedules that were timed (ms; `remembered`: before now), and the one
    chosen; its text."""

    resources: Resources | None = None
    times_ms: Mapping[str, float] = field(default_factory=dict)
    chosen: str = ""
    failure: str = ""
    source: str = ""
    remembered: bool = False


def collect(
    compiled: Compiled, script: Script, operators: Sequence[Operator], measured: Mapping[str, Measured]
) -> GraphFacts:
    """A graph's steps, decisions and totals. `operators`: what eager would run; `measured`: by kernel's name."""
    return _Collector(compiled, operators, measured).run(script)


class _Collector:
    def __init__(self, compiled: Compiled, operators: Sequence[Operator], measured: Mapping[str, Measured]) -> None:
        self.compiled, self.operators, self.measured = compiled, operators, measured
        self.graph, self.plan, self.spec = compiled.graph, compiled.plan, compiled.spec
        self.reading: Reading = compiled.plan.reading
        self.of_fx = {name: k for k, o in enumerate(operators) for name in o.fx}
        # a zero that many share has the origin of whoever made it first: no sign of that operator
        self.evaluated = [
            [n for g in launch.groups for n in evaluated(self.reading, g) if n.op not in _VALUELESS or n in g.stored]
            for launch in compiled.launches
        ]
        self.step_of = {n: k for k, launch in enumerate(compiled.launches) for g in launch.groups for n in g.nodes}
        self.ceilings = ceilings_of(self.spec)
        self.home = self._homes()
        self.absorbed = self._absorbed()

    def run(self, script: Script) -> GraphFacts:
        steps = tuple(self._step(k, launch) for k, launch in enumerate(self.compiled.launches))
        eager = eager_operators(self.operators, self._made_of(), self.home, self.spec, self.size)
        origins = {n: at for n in self.graph.nodes() if (at := self.operator_number(n)) is not None}
        places = Places(self.graph, {n: eager[at] for n, at in origins.items()}, self.step_of)
        known = [k.predicted_us for k in steps if k.predicted_us is not None]
        totals = Totals(
            operators=sum(o.alone_us is not None for o in eager),
            kernels=sum(k.kind == "kernel" for k in steps),
            calls=sum(k.kind == "call" for k in steps),
            before=sum((Traffic(o.bytes_read, o.bytes_written) for o in self.operators), Traffic()),
            after=sum((k.after for k in steps), Traffic()),
            flops=sum((k.flops for k in steps), Flops()),
            predicted_us=sum(known) if known else None,
            peak_bytes=peak_bytes(self.graph, self.compiled.launches, script, self.compiled.loop_bytes()),
            input_bytes=input_bytes(self.graph),
            eager_us=sum(o.alone_us or 0.0 for o in eager),
        )
        return GraphFacts(
            name="",
            kind="",
            status="compiled",
            line="",
            kernels=steps,
            fusions=collect_fusions(self.plan, places),
            refusals=collect_refusals(self.plan, places, self.compiled.openings),
            fallbacks=(),
            totals=totals,
            compile_seconds=0.0,
            operators=eager,
        )

    def size(self, extents: Iterable[Any]) -> float:
        return size_at_hints(self.graph, extents)

    def nbytes(self, n: Node) -> float:
        return self.size(n.shape) * n.dtype.nbytes

    def operator_number(self, n: Node) -> int | None:
        """That of the operator of eager's that a node came from; None for what plait made."""
        return next((self.of_fx[o.fx] for o in self.graph.origins.get(n, ()) if o.fx in self.of_fx), None)

    def _made_of(self) -> dict[int, dict[Node, None]]:
        """Operator -> the nodes that became of it, each once however often it is formed."""
        out: dict[int, dict[Node, None]] = {}
        for n in dict.fromkeys(n for nodes in self.evaluated for n in nodes):
            at = self.operator_number(n)
            if at is not None:
                out.setdefault(at, {})[n] = None
        return out

    def _homes(self) -> dict[int, int]:
        """Operator -> the step that does most of its work; the first of those that do as much."""
        work: dict[int, dict[int, float]] = {}
        for k, nodes in enumerate(self.evaluated):
            for n in nodes:
                for o in self.graph.origins.get(n, ()):
                    if o.fx in self.of_fx:
                        found = work.setdefault(self.of_fx[o.fx], {})
                        found[k] = found.get(k, 0.0) + self.size(n.axes)
        return {at: max(found, key=lambda k: (found[k], -k)) for at, found in work.items()}

    def _absorbed(self) -> dict[int, list[int]]:
        """Step -> operators of which no node is left, as when a factor moved into a product: they are where what reads them
        is. Fills in their homes."""
        out: dict[int, list[int]] = {}
        for at in reversed(range(len(self.operators))):
            readers = [self.of_fx[name] for name in self.operators[at].feeds if name in self.of_fx]
            homes = [self.home[r] for r in readers if r in self.home]
            if at not in self.home and homes:
                self.home[at] = min(homes)
                out.setdefault(min(homes), []).append(at)
        return out

    # ---------------------------------------------------------------- steps
    def _step(self, number: int, launch: Launch) -> Kernel:
        members = self._members(number)
        before = sum((m.before for m in members), Traffic())
        flops = sum((m.flops for m in members), Flops())
        if launch.groups[0].kind == "extern":
            return self._call(number, launch.groups[0].nodes[0], members, before)
        after = sum((_traffic(g) for g in launch.groups), Traffic())
        predicted, bound = _time(launch, self.spec)
        seen = self.measured.get(launch.name, Measured())
        took = seen.times_ms.get(seen.chosen)
        roofline = roofline_us(self.ceilings, after, flops)
        return Kernel(
            number=number,
            name=launch.name,
            kind="kernel",
            members=members,
            lines=_lines(members),
            directions=self._directions(launch),
            mapping=self._mapping(launch),
            schedule=tuple(str(p.program.schedule) for p in launch.parts),
            intermediates=self._intermediates(launch),
            before=before,
            after=after,
            flops=flops,
            intensity_before=_per(flops.counted, before.total),
            intensity_after=_per(flops.counted, after.total),
            predicted_us=predicted,
            bound=bound,
            roofline_us=roofline,
            resources=seen.resources,
            measured_us=None if took is None else took * 1e3,
            roofline_share=None if not took else roofline / (took * 1e3),
            variants=tuple(Variant(n, ms * 1e3, n == seen.chosen, seen.remembered) for n, ms in seen.times_ms.items()),
            failure=seen.failure,
            why=why_open((name for m in members for name in m.fx), self.compiled.openings),
            needs=self._needs(launch),
            source=seen.source,
        )

    def _call(self, number: int, n: Node, members: tuple[Member, ...], before: Traffic) -> Kernel:
        at = self.operator_number(n)
        operator = self.operators[at] if at is not None else None
        half = bool(n.reads) and n.reads[0].source.dtype.nbytes <= 2
        flops = product_flops(operator.product_flops if operator is not None else 0.0, half, self.spec)
        read = sum(min(self.size(r.domain or ()) * r.source.dtype.nbytes, self.nbytes(r.source)) for r in n.reads)
        outs = [o for o in n.attr("outs") if len(o) == 3 and isinstance(o[0], tuple)]
        after = Traffic(read, sum(self.size(o[0]) * o[1].nbytes for o in outs))
        if operator is not None and operator.bytes_read + operator.bytes_written < after.total:
            after = Traffic(operator.bytes_read, operator.bytes_written)  # updates rows, or picks some
        roofline = roofline_us(self.ceilings, after, flops)
        return Kernel(
            number=number,
            name=str(n.attr("target")),
            kind="call",
            members=members,
            lines=_lines(members),
            directions=(),
            mapping="",
            schedule=(),
            intermediates=(),
            before=before,
            after=after,
            flops=flops,
            intensity_before=_per(flops.counted, before.total),
            intensity_after=_per(flops.counted, after.total),
            predicted_us=self.ceilings.launch_us + roofline,
            bound=bound_of(self.ceilings, after, flops),
            roofline_us=roofline,
            why=why_call(self.graph, n, self.compiled.openings),
            needs=self._needs(self.compiled.launches[number]),
        )

    def _needs(self, launch: Launch) -> tuple[int, ...]:
        """Steps whose results it reads."""
        nodes = [n for g in launch.groups for n in g.nodes]
        sources = {r.source for n in nodes for r in self.reading.reads(n)}
        made = {s.reads[0].source if s.kind == "project" else s for s in sources}
        own = self.step_of[nodes[0]]
        return tuple(sorted({self.step_of[s] for s in made if s in self.step_of} - {own}))

    def _members(self, number: int) -> tuple[Member, ...]:
        parts: dict[int, list[Node]] = {}
        for n in self.evaluated[number]:
            at = self.operator_number(n)
            if at is not None:
                parts.setdefault(at, []).append(n)
        parts |= {at: [] for at in self.absorbed.get(number, ())}
        return tuple(self._member(at, parts[at], self.home[at] == number) for at in sorted(parts))

    def _member(self, at: int, nodes: list[Node], counted: bool) -> Member:
        o = self.operators[at]
        before = Traffic(o.bytes_read, o.bytes_written) if counted else Traffic()
        flops = sum((flops_of(n, self.spec, self.size) for n in nodes), Flops())
        ops = [n.op for n in nodes if n.op not in _PLUMBING]
        return Member(
            name=operator_name(o),
            aten=o.aten,
            parts=tuple(dict.fromkeys(ops)) or tuple(dict.fromkeys(n.op for n in nodes)),
            fx=o.fx,
            feeds=o.feeds,
            line=o.line,
            module=o.module,
            before=before,
            flops=flops,
            intensity_before=_per(flops.counted, before.total),
            counted=counted,
            regions=o.regions,
            backward=o.backward,
            recomputed=o.recomputed,
            operator=at,
        )

    # ---------------------------------------------------------------- what a kernel is
    def _directions(self, launch: Launch) -> tuple[str, ...]:
        """vertical: a member feeds another; input: members that do not feed each other read one tensor; horizontal: parts
        that share nothing but the launch."""
        found: set[str] = set()
        for g in launch.groups:
            inside = set(g.nodes)
            real = [n for n in evaluated(self.reading, g) if n.op not in _PLUMBING]
            if len(real) > 1 and any(
                r.source in inside or r.source in self.reading.inline for n in real for r in n.reads
            ):
                found.add("vertical")
            readers: dict[Node, int] = {}
            for n in g.nodes:
                for s in {r.source for r in self.reading.reads(n)} - inside:
                    readers[s] = readers.get(s, 0) + 1
            if len(_components(g, self.reading)) > 1 and any(k > 1 for k in readers.values()):
                found.add("input")
        if len(launch.groups) > 1:
            found.add("horizontal")
        return tuple(d for d in ("vertical", "horizontal", "input") if d in found)

    def _mapping(self, launch: Launch) -> str:
        nodes = [n for g in launch.groups for n in g.nodes]
        partials = self.graph.partials
        if any(n in partials or any(r.source in partials for r in self.reading.reads(n)) for n in nodes):
            return "across blocks"
        return "block" if any(n.reduces or n.kind == "scan" for n in nodes) else "thread"

    def _intermediates(self, launch: Launch) -> tuple[Intermediate, ...]:
        out = []
        for g in launch.groups:
            stored, shared = set(g.stored), _shared(g, self.reading)
            for n in evaluated(self.reading, g):
                if n.op in _PLUMBING and n not in stored:
                    continue
                lives = "memory" if n in stored else "tile" if n in shared else "register"
                line = next((o.line for o in self.graph.origins.get(n, ()) if o.line), "")
                out.append(Intermediate(f"{n.op}_{n.serial}", lives, self.nbytes(n), line))
        return tuple(out)


def evaluated(reading: Reading, g: Group) -> list[Node]:
    """A group's members and the inline values that they are made of, in order."""
    nodes = reading.with_inline(g.nodes) if g.kind == "kernel" else g.nodes
    return sorted(nodes, key=lambda n: n.serial)


def _shared(g: Group, reading: Reading) -> set[Node]:
    """Values that a block's threads share: what reductions, scans and products read and give."""
    out: set[Node] = set()
    for n in evaluated(reading, g):
        if n.reduces or n.kind == "scan":
            out |= {n, *(r.source for r in n.reads)}
    return out


def _components(g: Group, reading: Reading) -> list[set[Node]]:
    """Members connected by what they feed each other."""
    found: list[set[Node]] = []
    inside = set(g.nodes)
    for n in g.nodes:
        near = {n, *({r.source for r in reading.reads(n)} & inside)}
        touching = [c for c in found if c & near]
        found = [c for c in found if not c & near] + [near.union(*touching)]
    return found


def _traffic(g: Group) -> Traffic:
    return Traffic(g.cost.bytes_read, g.cost.bytes_written, g.cost.cache_bytes) if g.cost is not None else Traffic()


def _time(launch: Launch, spec: DeviceSpec) -> tuple[float, str]:
    """Predicted microseconds of one launch of all its parts, and what most of it is."""
    terms = {"launch": float(spec.launch_ns), "memory": 0.0, "compute": 0.0}
    total = float(spec.launch_ns)
    for g in launch.groups:
        beyond = max(g.predicted_ns - spec.launch_ns, 0.0)
        total += beyond
        if g.cost is not None:
            memory, work = g.cost.terms(spec)
            terms["memory" if memory >= work else "compute"] += beyond
    return total / 1e3, max(terms, key=lambda k: terms[k])


def _lines(members: Sequence[Member]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(m.line for m in members if m.line))


def _per(flops: float, nbytes: float) -> float | None:
    return flops / nbytes if nbytes else None
