"""Decisions on pairs in the user's words: which two operators, why they are apart, and what would let them together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from plait.ir.graph import Graph, Node, made_of
from plait.plan.openings import Opening
from plait.plan.plan import Decision, Plan
from plait.plan.reasons import BETWEEN, UNLOCK, Why
from plait.report.facts import EagerOperator, Fusion, Refusal, Side

_NOTHING_NS = 50.0


@dataclass(frozen=True)
class Places:
    """Where nodes are: the operator of eager's that each came from (absent: plait made it) and the step that it is in."""

    graph: Graph
    operators: Mapping[Node, EagerOperator]
    step_of: Mapping[Node, int]

    def side(self, n: Node) -> Side:
        """One of two neighbours."""
        o = self.operators.get(n)
        op = str(n.attr("target")).removesuffix(".default") if n.kind == "extern" else n.op
        if o is None:
            origin = next(iter(self.graph.origins.get(n, ())), None)
            line, module = (origin.line, origin.module) if origin is not None else ("", "")
            return Side(op, op, line, module, self.step_of.get(n, -1))
        return Side(o.name, op, o.line, o.module, self.step_of.get(n, -1), o.number)


def collect_fusions(plan: Plan, places: Places) -> tuple[Fusion, ...]:
    """Every pair that was put together, in the order of the program."""
    return tuple(
        Fusion(
            places.side(d.producer),
            places.side(d.consumer),
            _direction(plan, d),
            _us(d.together_ns),
            _us(d.apart_ns),
            d.bytes_at_stake,
        )
        for d in plan.decisions
        if d.fused
    )


def _us(ns: float) -> float | None:
    return ns / 1e3 if ns > 0 else None


def collect_refusals(plan: Plan, places: Places, openings: Sequence[Opening]) -> tuple[Refusal, ...]:
    """Every neighbouring pair that stayed apart, most bytes at stake first; also parts of one launch, which share no value."""
    out = []
    beforehand = _beforehand(plan.graph)
    for d in plan.refusals():
        if d.producer in beforehand or d.consumer in beforehand:
            continue
        assert d.reason is not None
        a, b = places.side(d.producer), places.side(d.consumer)
        sentence, unlock = _words(plan.graph, d, a, b, openings)
        sentence += _gain(d) + ("; they are parts of one launch" if a.step == b.step >= 0 else "")
        known = d.together_ns > 0 and d.apart_ns > 0
        out.append(
            Refusal(
                producer=a,
                consumer=b,
                direction=_direction(plan, d),
                reason=d.reason.why.value,
                sentence=sentence,
                unlock=unlock,
                together_us=d.together_ns / 1e3 if known else None,
                apart_us=d.apart_ns / 1e3 if known else None,
                bytes_at_stake=d.bytes_at_stake,
            )
        )
    return tuple(out)


def _beforehand(graph: Graph) -> set[Node]:
    """What is computed for the bounds of loops alone: no operator of the user's."""
    users = graph.users()
    out = {r.source for n in graph.nodes() if n.op == "between" for r in n.reads[1:]}
    for n in reversed(graph.nodes()):
        if users[n] and all(u in out for u in users[n]):
            out.add(n)
    return out


def _gain(d: Decision) -> str:
    """What a law forbids, where the time model has a gain in it."""
    if d.reason is None or d.reason.why is Why.NO_GAIN or not 0 < d.together_ns < d.apart_ns:
        return ""
    return f" ({d.together_ns / 1e3:.1f} us in one kernel, {d.apart_ns / 1e3:.1f} us in two, were it possible)"


def _direction(plan: Plan, d: Decision) -> str:
    """Whether one feeds the other, or both read a tensor."""
    if d.consumer.kind == "extern":
        return "vertical"
    if d.fused:
        below = made_of(d.consumer, plan.group_of[d.producer].nodes, plan.reading.reads)
        return "vertical" if d.producer in below else "input"
    group = plan.group_of.get(d.consumer)
    made = set(plan.group_of[d.producer].nodes) if d.producer in plan.group_of else {d.producer}
    nodes = group.nodes if group is not None else (d.consumer,)
    sources = {r.source for n in nodes for r in plan.reading.reads(n)}
    feeds = any(s in made or (s.kind == "project" and s.reads[0].source in made) for s in sources)
    return "vertical" if feeds else "input"


def _words(graph: Graph, d: Decision, a: Side, b: Side, openings: Sequence[Opening]) -> tuple[str, str]:
    """The reason as a sentence on this pair, and what would unlock it."""
    assert d.reason is not None
    why, detail, unlock = d.reason.why, d.reason.detail, UNLOCK[d.reason.why]
    x, y = _named(a), _named(b)
    if why is Why.OPAQUE and detail == BETWEEN:
        return f"an ATen call runs between {x} and {y}", "move it before or after both"
    if why is Why.OPAQUE:
        call = d.producer if d.producer.kind == "extern" else d.consumer
        said = why_call(graph, call, openings)
        state = opening_of(graph, call, openings)
        if state is not None:
            unlock = "nothing: in one kernel they are predicted to take longer"
        return f"{a.op if call is d.producer else b.op} {said}", unlock
    if why is Why.GLOBAL_SYNC:
        return f"{x} is split over blocks to fill the device, and {y} needs the parts of all of them", unlock
    if why is Why.CYCLE:
        return (
            f"an operator between {x} and {y} runs on its own and would wait for the kernel that waits for it",
            unlock,
        )
    if why is Why.NO_GAIN:
        times = f"{d.together_ns / 1e3:.1f} us in one kernel, {d.apart_ns / 1e3:.1f} us in two"
        return f"{x} and {y} are predicted to take longer together: {times}", unlock
    rest = f": {detail}" if detail else ""
    if why is Why.MISALIGNED:
        return f"{x} and {y} run over axes that cannot be laid over each other{rest}", unlock
    return f"{x} and {y}: {why.value}{rest}", unlock


def _named(side: Side) -> str:
    """The operator and where the user wrote it."""
    where = side.line.split(" ", 1)[0]
    part = f" ({side.op})" if side.op not in (side.name, f"aten.{side.name}") else ""
    return f"{side.name}{part}" + (f" at {where}" if where else "")


def opening_of(graph: Graph, call: Node, openings: Sequence[Opening]) -> Opening | None:
    """What was decided of a product that stayed a call."""
    names = {o.fx for o in graph.origins.get(call, ())}
    return next((o for o in openings if o.fx in names), None)


def why_call(graph: Graph, call: Node, openings: Sequence[Opening]) -> str:
    """Why an operator runs in ATen, as the rest of a sentence about it."""
    opening = opening_of(graph, call, openings)
    if opening is not None and (opening.call_ns is not None or opening.why):
        return f"stays the library's: {_forms(opening)}"
    if opening is not None and opening.state == "closed" and opening.gain_ns > -_NOTHING_NS:
        return "stays the library's product: one of plait's is predicted to gain nothing"
    if opening is not None and opening.state == "closed":
        return (
            f"stays the library's product: one of plait's is predicted to lose {-opening.gain_ns / 1e3:.1f} us in all"
        )
    if opening is not None:
        return "stays the library's product: no neighbour is worth sharing a kernel with"
    if call in graph.refusals:
        return f"runs in ATen: {graph.refusals[call]}"
    role = str(call.attr("role"))
    return f"runs in ATen ({role})" if role else "runs in ATen"


def why_open(fx: Iterable[str], openings: Sequence[Opening]) -> str:
    """What was decided of a whole call of which a kernel has the last of these nodes; "" of others."""
    names = set(fx)
    found = [o for o in openings if o.fx in names and o.state == "open" and (o.call_ns is not None or o.why)]
    return "; ".join(dict.fromkeys(f"scaled_dot_product_attention is opened: {_forms(o)}" for o in found))


def _forms(o: Opening) -> str:
    """What decided between a call and kernels of plait's, with both predictions where there are such."""
    if o.call_ns is None or o.open_ns is None:
        return o.why
    times = f"predicted {o.open_ns / 1e3:.1f} us opened, {o.call_ns / 1e3:.1f} us as a call, with what neighbours read and write"
    return f"{o.why} ({times})" if o.why else times
