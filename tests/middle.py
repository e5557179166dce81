"""The middle of the compiler for tests, free of torch: graphs written short, planned and lowered in every form.

    g = sketch('''
        %input_0: f32[6, 40]
        %exp_1: f32[6, 40] = exp(%input_0)
        out %exp_1
    ''')
    m = middle(g, "cpu")

`middle` does what compiler.simplify and compiler.plan_and_lower do (a test holds the two together), from the same parts.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from plait.errors import LowerFailed
from plait.ir.graph import Graph, Node, contiguous_strides
from plait.ir.parse import parse_expr, parse_graph
from plait.ir.text import print_expr
from plait.plan.align import Alignment
from plait.plan.cost import size_at_hints
from plait.plan.device import SPECS, DeviceSpec
from plait.plan.inline import Reading
from plait.plan.layout import Layouts
from plait.plan.legality import why_not
from plait.plan.plan import Group, Plan
from plait.plan.reasons import Reason, Why
from plait.plan.search import Setting, make_plan
from plait.rewrite.passes.materialise import materialise
from plait.rewrite.passes.split_cascades import split_cascades
from plait.rewrite.passes.split_reductions import split_reductions
from plait.rewrite.passes.write_rows import write_rows
from plait.tile.check import check_program
from plait.tile.coalesce import coalesce
from plait.tile.flat import Env, lower_flat
from plait.tile.lower import Lowered, lower, program_of
from plait.tile.pieces import cut_pieces
from plait.tile.schedule import Schedule

_NODE = re.compile(r"(%\w+_\d+): (\w+)\[([^\]]*)\](.*)")
_BARE = re.compile(r"(%\w+_\d+)(?![\w\[])")


# ------------------------------------------------------------------------------------------------- writing graphs
def sketch(text: str) -> Graph:
    """A graph from its text with the obvious left out: the head, `= input()` with a contiguous layout (or `strides (…)`),
    the index of a whole read, `out %x` (or `out %x writes 0`), and of ATen calls all but the name and the operands."""
    return parse_graph(completed(text))


def completed(text: str) -> str:
    """The text that a sketch stands for."""
    rows = [r for r in textwrap.dedent(text).strip().splitlines() if r.strip() and not r.startswith("#")]
    shapes: dict[str, list[str]] = {}
    symbols: dict[str, str] = {}
    body: list[str] = []
    arguments = outs = 0
    for row in rows:
        m = _NODE.fullmatch(row)
        if m is not None:
            name, dtype, extents, rest = m.groups()
            kept = [e.strip() for e in extents.split("|")[0].split(",") if e.strip()]
            if name.startswith("%input_"):
                body += _input(name, dtype, kept, rest, arguments)
                symbols |= {e: f'bind {e} = ("size", {arguments}, {d})' for d, e in enumerate(kept) if e.isidentifier()}
                arguments += 1
            else:
                body.append(_full(name, dtype, kept, row, shapes))
            shapes[name] = kept
        elif row.startswith("out "):
            body.append(_output(row, shapes, outs))
            outs += 1
        else:
            body.append(row)
    head = ["graph 1", f"arity {arguments}", *(r for r in body if r.startswith(("symbol", "device")))]
    tail = [r for r in body if r.startswith("output ")]
    middle_rows = [r for r in body if not r.startswith(("symbol", "device", "output "))]
    wanted = [k for k, r in enumerate(tail) if " writes " not in r]
    returns = [f'return ("tensor", {k})' for k in wanted]
    return "\n".join([*head, *middle_rows, *symbols.values(), *tail, *returns, ""])


def _input(name: str, dtype: str, kept: list[str], rest: str, position: int) -> list[str]:
    strides = rest.partition("strides ")[2] or f"({_contiguous(kept)})"
    line = f'{name}: {dtype}[{", ".join(kept)}] = input() {{dtype={dtype}, name="x{position}"}}'
    return [line, f'    argument {position} strides {strides} offset 0 on "cpu"']


def _contiguous(kept: Sequence[str]) -> str:
    return ", ".join(print_expr(s) for s in contiguous_strides([parse_expr(e) for e in kept]))


def _whole(name: str, shapes: dict[str, list[str]]) -> str:
    return f"{name}[{', '.join('0' if e == '1' else f'i{d}' for d, e in enumerate(shapes[name]))}]"


def _full(name: str, dtype: str, kept: list[str], row: str, shapes: dict[str, list[str]]) -> str:
    head, _, rest = row.partition(" = ")
    if not rest.startswith("extern "):
        return f"{head} = {_BARE.sub(lambda m: _whole(m.group(1), shapes), rest)}"
    call = re.fullmatch(r"extern (\S+?)\((.*)\)", rest)
    assert call is not None, row
    operands = [a.strip() for a in call.group(2).split(",")]
    reads = ", ".join(
        f"{_whole(a, shapes)} over ({', '.join(shapes[a])}) strides ({_contiguous(shapes[a])})" for a in operands
    )
    shape, strides = ", ".join(f"<{e}>" for e in kept), ", ".join(f"<{e}>" for e in _contiguous(kept).split(", "))
    marks = ", ".join(f"${k}" for k in range(len(operands)))
    return (
        f'{head} = extern({reads}) {{dtype={dtype}, outs=((({shape},), {dtype}, ({strides},)),), role="contract", '
        f'serial=None, target="{call.group(1)}", template=("call", ("tuple", ({marks},)), ("dict", ()))}}'
    )


def _output(row: str, shapes: dict[str, list[str]], number: int) -> str:
    m = re.fullmatch(r"out (%\w+)( writes \d+)?( as \(.*\))?", row)
    assert m is not None, row
    kept = shapes[m.group(1)]
    strides = m.group(3) or f" as ({_contiguous(kept)})"
    return (
        f'output "o{number}" {_whole(m.group(1), shapes)} over ({", ".join(kept)}){strides}{m.group(2) or ""} on "cpu"'
    )


def named(graph: Graph, name: str) -> Node:
    """The node that prints as %name."""
    return next(n for n in graph.nodes() if repr(n) == f"%{name.lstrip('%')}")


# ------------------------------------------------------------------------------------------------------- planning
@dataclass
class Middle:
    """A graph as planned for a device, with what lowering needs."""

    graph: Graph
    spec: DeviceSpec
    setting: Setting
    plan: Plan
    env: Env

    def group(self, name: str) -> Group:
        """The group of the node that prints as %name."""
        return self.plan.group_of[named(self.graph, name)]

    def fused(self, *names: str) -> bool:
        """Whether nodes share a kernel."""
        return len({self.group(n).number for n in names}) == 1

    def refusal(self, a: str, b: str) -> Reason | None:
        """The reason that keeps two nodes' groups apart, as decided for any pair of their members."""
        pair = {self.group(a).number, self.group(b).number}
        for d in self.plan.decisions:
            if {self._number(d.producer), self._number(d.consumer)} == pair and d.reason is not None:
                return d.reason
        return None

    def _number(self, n: Node) -> int:
        found = self.plan.group_of.get(n)
        return -1 if found is None else found.number

    def lower(self, group: Group) -> Lowered:
        """A group as it would be compiled."""
        assert group.alignment is not None
        low = lower(group.alignment, group.stored, self.env, self.spec, self.graph.hint, name=f"k{group.number}")
        check_program(low.program)
        return low

    def forms(self, group: Group) -> Iterator[tuple[str, Lowered]]:
        """A group in every form that it has: as chosen, flat (uncut, and cut in pieces), swept, and swept with private row
        buffers."""
        assert group.alignment is not None
        yield "chosen", self.lower(group)
        uncut = coalesce(lower_flat(group.alignment, group.stored, self.env))
        flat = cut_pieces(uncut)
        rows = [d.name for d in flat.dims if d.role == "row"]
        for form, vector, statements, spec in (
            *([("uncut", "", uncut, self.spec)] if uncut is not flat else ()),
            ("flat", "", flat, self.spec),
            ("swept", "", flat, self.spec),
            *(("swept", r, flat, SPECS["cpu"]) for r in rows[-1:]),
        ):
            schedule = Schedule(form="swept" if form == "swept" else "flat", vector=vector)
            if form != "swept":
                schedule = schedule.having(tile=tuple((r, 0) for r in rows))
            try:
                low = program_of(statements, schedule, spec, f"k{group.number}", ())
            except LowerFailed:
                # rows of several orders: no loop nest has them all, and the flat form stands
                assert form == "swept" and len(rows) > 1
                continue
            check_program(low.program)
            yield f"{form} {vector}", low


def simplified(graph: Graph, device: str = "cpu", numerics: str = "fused") -> Graph:
    """The graph as the planner gets it."""
    spec = SPECS[device]
    return materialise(write_rows(split_reductions(split_cascades(graph, spec, numerics), spec)))


def middle(graph: Graph, device: str = "cpu", *, fuse: bool = True, numerics: str = "fused") -> Middle:
    """Plan a graph for "cpu" or "h200"."""
    spec = SPECS[device]
    graph = simplified(graph, device, numerics)
    reading = Reading(graph, lambda extents: size_at_hints(graph, extents), spec)
    env = Env(Layouts(graph).strides, reading.inline, numerics, graph.symbols, reading.reads, frozenset(graph.padded))

    def fits(al: Alignment, stored: Sequence[Node]) -> Reason | None:
        try:
            lower(al, stored, env, spec, graph.hint, name="trial")
        except LowerFailed as refused:
            return Reason(Why.MISALIGNED, refused.message)
        return None

    plan = make_plan(graph, spec, reading, fits, fuse=fuse)
    return Middle(graph, spec, Setting(graph, spec, reading, fits), plan, env)


def check_plan(m: Middle, fuse: bool = True) -> None:
    """The invariants of plan/plan.py."""
    plan, reading = m.plan, m.plan.reading
    where: dict[Node, list[Group]] = {}
    for g in plan.groups:
        for n in g.nodes:
            where.setdefault(n, []).append(g)
    for n in m.graph.nodes():
        if n.kind in ("map", "reduce", "scan", "random", "extern"):
            homes = len(where.get(n, ()))
            assert homes == 1 or (homes == 0 and n in reading.inline), f"P1: {n} is in {homes} groups"
    for g in plan.groups:
        for n in g.nodes:
            for s in (r.source for r in reading.reads(n)):
                s = s.reads[0].source if s.kind == "project" else s
                home = plan.group_of.get(s)
                if home is None:
                    assert s.kind == "source", f"{n} reads {s}, which nobody computes"
                elif home is not g:
                    assert home.number < g.number, f"P2: {g.number} reads {s} of {home.number}"
                    assert s in home.stored, f"P3: {s} crosses from {home.number} to {g.number} unstored"
        if g.alignment is not None and len(g.nodes) > 1:
            assert why_not(m.setting.laws, g.alignment) is None, f"P4: {why_not(m.setting.laws, g.alignment)}"
    decided = {frozenset((m._number(d.producer), m._number(d.consumer))) for d in plan.decisions}
    for d in plan.decisions:
        assert d.fused == (plan.group_of[d.producer] is plan.group_of[d.consumer]) or d.producer.kind == "project"
    for n in m.graph.nodes() if fuse else ():
        for s in (r.source for r in reading.reads(n)) if n in plan.group_of else ():
            a, b = plan.group_of.get(s), plan.group_of[n]
            if a is not None and a is not b:
                assert frozenset((a.number, b.number)) in decided, f"P5: nothing says why {s} and {n} are apart"
