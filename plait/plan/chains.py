"""Chains to try whole: a contraction, what follows from it, and the reductions or contractions where that ends.

Merging pair by pair never gets there: softmax's maximum and sum without the product behind them would have to write the
quotients, for which the scores would be formed twice, so that every step of the way is refused though the whole is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from plait.ir.graph import Node

Users = Mapping[Node, Sequence[Node]]


def chains(nodes: Sequence[Node], users: Users) -> Iterator[list[Node]]:
    """Members of each chain in order: what leads to one contraction from several, then from each contraction to the next,
    then to all reductions before one."""
    starts = [n for n in nodes if n.kind == "contract"]
    reach = {n: _reach(n, users) for n in starts}
    for end in starts:
        together = [n for n in starts if end in reach[n]]
        if len(together) > 1:
            members = {m for n in together for m in _between(n, [end], reach[n], nodes, users)}
            yield sorted(members, key=lambda n: n.serial)
    for n in starts:
        yield from _from(n, reach[n], nodes, users)


def _from(start: Node, after: set[Node], nodes: Sequence[Node], users: Users) -> Iterator[list[Node]]:
    ends = [n for n in nodes if n in after and n.kind == "contract"]
    for end in ends:
        yield _between(start, [end], after, nodes, users)
    reductions = [n for n in nodes if n in after and n.kind == "reduce"]
    if reductions:
        yield _between(start, reductions, after, nodes, users)


def _reach(start: Node, users: Users) -> set[Node]:
    """What hangs on a node, up to and including the next contractions."""
    seen: set[Node] = set()
    stack = list(users[start])
    while stack:
        n = stack.pop()
        if n not in seen:
            seen.add(n)
            if n.kind != "contract":
                stack.extend(users[n])
    return seen


def _between(start: Node, ends: Sequence[Node], after: set[Node], nodes: Sequence[Node], users: Users) -> list[Node]:
    leads = set(ends)
    for n in reversed(nodes):
        if n in after and n.kind != "contract" and any(u in leads for u in users[n]):
            leads.add(n)
    return [start, *(n for n in nodes if n in leads)]
