"""Re-inplacing: scatters, and products that add a term, that may write into their base instead of a copy of it.

A functional `index_put(base, …)` copies all of base to write a few rows. The copy is not needed when nobody reads base
afterwards, and base is either a value of our own or an input that this very result is written back to. So writing rows
of a cache moves bytes in proportion to the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.ir.graph import Graph, Node, Read, identity
from plait.plan.inline import Reading
from plait.plan.layout import Layouts, same_strides

# calls whose in-place form writes through its first operand
IN_PLACE = frozenset(
    f"aten.{name}"
    for name in (
        "addmm.default",
        "baddbmm.default",
        "index_put.default",
        "_unsafe_index_put.default",
        "scatter.src",
        "scatter.value",
        "scatter.reduce",
        "scatter.value_reduce",
        "scatter_add.default",
        "scatter_reduce.two",
        "index_add.default",
        "index_copy.default",
        "index_fill.int_Scalar",
        "index_fill.int_Tensor",
        "masked_scatter.default",
        "index_reduce.default",
    )
)


@dataclass(frozen=True)
class InPlace:
    """`calls` write into their operand 0; `outputs` (their numbers) need no copy back, their input has the value already."""

    calls: frozenset[Node]
    outputs: frozenset[int]


def in_place(graph: Graph, reading: Reading, order: Sequence[Node], layouts: Layouts) -> InPlace:
    """Which scatters may write in place, given the order in which nodes run (members of one kernel count as one moment:
    `order` lists them together)."""
    when = {n: i for i, n in enumerate(order)}
    written = {o.writes_to: o for o in graph.outputs if o.writes_to is not None}
    position = {i.node: i.position for i in graph.inputs}
    returned = {o.read.source for o in graph.outputs if o.writes_to is None}
    calls: set[Node] = set()
    for n in order:
        base = _base(n, layouts)
        if base is None or base.source in returned or n in returned and base.source in position:
            continue
        b = base.source
        if any(when.get(u, -1) >= when[n] and u is not n for u in reading.users[b]) or _reads_twice(n, b):
            continue
        if b.kind == "source":
            back = written.get(position.get(b, -1))
            if back is None or not _leads_to(back.read.source, n, layouts):
                continue
        elif b.kind == "extern" and b.attr("role") == "opaque" or b.kind == "project":
            continue  # it may be a view of something else
        calls.add(n)
    done = {
        k
        for k, o in enumerate(graph.outputs)
        if o.writes_to is not None
        and _root(o.read, calls, layouts) is not None
        and position.get(_root(o.read, calls, layouts)) == o.writes_to  # type: ignore[arg-type]
    }
    # an input may be overwritten only when every call down to it is in place and nothing is copied back over it
    kept = {
        n
        for n in calls
        if (root := _chain_root(n, calls, layouts)).kind != "source"
        or any(k in done and graph.outputs[k].writes_to == position[root] for k in range(len(graph.outputs)))
    }
    return InPlace(frozenset(kept), frozenset(done))


def _base(n: Node, layouts: Layouts) -> Read | None:
    """The whole tensor a scatter writes over, when its result has the same layout."""
    if n.kind != "extern" or n.attr("target") not in IN_PLACE or not n.reads:
        return None
    r = n.reads[0]
    whole = r.domain == r.source.shape and r.index == identity(r.source.shape) and not r.guard
    if not whole or r.source.dtype is not n.dtype:
        return None
    return r if same_strides(n.shape, layouts.strides(r.source), layouts.strides(n)) else None


def _reads_twice(n: Node, b: Node) -> bool:
    return sum(r.source is b for r in n.reads) > 1


def _leads_to(result: Node, call: Node, layouts: Layouts) -> bool:
    """Whether following bases down from `result` meets `call`."""
    while result is not call:
        base = _base(result, layouts)
        if base is None:
            return False
        result = base.source
    return True


def _chain_root(n: Node, calls: set[Node], layouts: Layouts) -> Node:
    while n in calls:
        base = _base(n, layouts)
        assert base is not None
        n = base.source
    return n


def _root(read: Read, calls: set[Node], layouts: Layouts) -> Node | None:
    """The value at the bottom of a chain of in-place calls that a whole read stands on, or None."""
    n = read.source
    if n not in calls or read.index != identity(n.shape) or read.domain != n.shape or read.guard:
        return None
    return _chain_root(n, calls, layouts)
