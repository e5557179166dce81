"""A plan that the user wrote: the groups that a plan's text names, judged by the laws, and all else worked out anew.

    kernel 0: %exp_1 %sum_2 -> %sum_2
    extern 1: %extern_3 -> %extern_3

What a kernel stores, in which order kernels run and what they cost follows from their members; lines of refusals are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from plait.errors import CheckFailed, TextError
from plait.ir.graph import Graph, Node
from plait.plan.align import Alignment
from plait.plan.device import DeviceSpec
from plait.plan.forced import grow
from plait.plan.inline import Reading
from plait.plan.legality import why_not
from plait.plan.plan import Decision, Plan
from plait.plan.reasons import Reason, Why
from plait.plan.search import Fits, Setting, finish

_GROUP = re.compile(r"(kernel|extern) \d+: (?P<members>[^>]*?)\s*->")


def parse_plan(text: str, graph: Graph, spec: DeviceSpec, reading: Reading, fits: Fits) -> Plan:
    """The plan that a text says, of a graph. Raises TextError."""
    setting = Setting(graph, spec, reading, fits)
    named = {repr(n): n for n in setting.nodes}
    taken: dict[Node, int] = {}
    alignments: list[Alignment] = []
    last = 1
    for last, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith(("#", "apart:")):
            continue
        m = _GROUP.match(line)
        if m is None:
            raise TextError("plan", last, "expected 'kernel <number>: %member ... -> %stored ...'", line)
        nodes = _members(m["members"].split(), named, setting, taken, last, line)
        if m[1] == "kernel":
            alignments.append(_aligned(nodes, setting, last, line))
    missing = [n for n in setting.nodes if setting.fusible(n) and n not in taken]
    if missing:
        raise TextError("plan", last, f"no kernel has {missing[0]!r}")
    try:
        return finish(setting, alignments, _apart(setting, taken))
    except CheckFailed as error:
        raise TextError("plan", last, error.args[0]) from error


def _members(
    names: Sequence[str], named: dict[str, Node], setting: Setting, taken: dict[Node, int], number: int, line: str
) -> list[Node]:
    out: list[Node] = []
    for name in names:
        n = named.get(name)
        if n is None:
            raise TextError("plan", number, f"the graph has no node {name}", line)
        if n in taken:
            raise TextError("plan", number, f"{name} is in line {taken[n]} already", line)
        if not setting.fusible(n) and n.kind != "extern":
            raise TextError("plan", number, f"{name} is evaluated where it is read, and in no kernel", line)
        taken[n] = number
        out.append(n)
    if not out:
        raise TextError("plan", number, "a kernel has members", line)
    if any(n.kind == "extern" for n in out) and (len(out) > 1 or not line.startswith("extern")):
        raise TextError("plan", number, "an ATen call runs on its own, as 'extern'", line)
    return sorted(out, key=lambda n: n.serial)


def _aligned(nodes: Sequence[Node], setting: Setting, number: int, line: str) -> Alignment:
    al = grow(nodes, setting.aligner.single, setting.aligner, setting.reading.reads)[-1][1]
    reason = why_not(setting.laws, al) if len(nodes) > 1 else None
    if reason is not None:
        raise TextError("plan", number, f"these cannot be one kernel: {reason}", line)
    return al


def _apart(setting: Setting, taken: dict[Node, int]) -> list[Decision]:
    """Neighbours that the text keeps apart."""
    out: list[Decision] = []
    for n in taken:
        for s in dict.fromkeys(r.source for r in setting.reading.reads(n)):
            if s in taken and taken[s] != taken[n] and "extern" not in (s.kind, n.kind):
                out.append(Decision(s, n, Reason(Why.FORBIDDEN, "the plan was read from a file")))
    return out
