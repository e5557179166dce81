"""What eager does with a graph: every operator a kernel of its own, as long as a launch and its roofline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from plait.frontend.baseline import Operator
from plait.ir.graph import Node
from plait.plan.device import DeviceSpec
from plait.report.facts import EagerOperator, Flops, Traffic
from plait.report.roofline import ceilings_of, roofline_us
from plait.report.work import flops_of, product_flops

Size = Callable[[Iterable[Any]], float]


def eager_operators(
    operators: Sequence[Operator],
    nodes: Mapping[int, Iterable[Node]],
    home: Mapping[int, int],
    spec: DeviceSpec,
    size: Size,
) -> tuple[EagerOperator, ...]:
    """`nodes`: what plait made of each operator, by its number; `home`: the step that does most of it."""
    number = {name: k for k, o in enumerate(operators) for name in o.fx}
    out = []
    for k, o in enumerate(operators):
        before = Traffic(o.bytes_read, o.bytes_written)
        flops = _flops(o, nodes.get(k, ()), spec, size)
        launches = before.total > 0 and not o.recomputed
        ceilings = ceilings_of(spec)
        alone = ceilings.launch_us + roofline_us(ceilings, before, flops) if launches else None
        feeds = dict.fromkeys(number[name] for name in o.feeds if name in number)
        out.append(
            EagerOperator(
                number=k,
                name=operator_name(o),
                aten=o.aten,
                line=o.line,
                module=o.module,
                before=before,
                flops=flops,
                alone_us=alone,
                step=home.get(k, -1),
                feeds=tuple(feeds),
                backward=o.backward,
                recomputed=o.recomputed,
            )
        )
    return tuple(out)


def operator_name(o: Operator) -> str:
    """What the program calls it, else its own name."""
    return o.call or o.aten.removeprefix("aten.").strip("_")


def _flops(o: Operator, nodes: Iterable[Node], spec: DeviceSpec, size: Size) -> Flops:
    """Of products what torch's formulas say, whatever form plait gave them; of the rest what its nodes do, each once."""
    nodes = list(nodes)
    if not o.product_flops:
        return sum((flops_of(n, spec, size) for n in nodes), Flops())
    half = any(n.reads and n.reads[0].source.dtype.nbytes <= 2 for n in nodes if n.kind in ("contract", "extern"))
    rest = sum((flops_of(n, spec, size) for n in nodes if n.kind != "contract"), Flops())
    return rest + product_flops(o.product_flops, half, spec)
