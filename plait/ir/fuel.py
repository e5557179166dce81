"""Fuel: a limit on how many decisions a compilation may take, so that bisection can find the one that does harm.

Wherever the compiler could also do nothing (a rewrite at one place, a merge of the plan, a schedule other than the plain one),
it asks `take`. Without a tank the answer is yes, at the cost of one look-up. With one, decisions are numbered in the order of
asking, the first `limit` of them are granted and noted, and every later one is declined: what is compiled then is right in
any case, only less of it is fused. Compiling is deterministic, so that a smaller limit takes a prefix of the same list.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from plait.ir.graph import Graph, Node


@dataclass(frozen=True)
class Taken:
    """One decision that was granted. `kind`: rewrite, open, merge, launch, schedule or variants; `name` says which rule of
    the kind, `words` what it did, with the user's lines; `fx` names the nodes of the captured graph that it is about."""

    kind: str
    name: str
    words: str
    fx: tuple[str, ...] = ()


@dataclass
class Tank:
    """The decisions of one graph's compilation, in order, as far as they were granted."""

    limit: int
    taken: list[Taken] = field(default_factory=list)


_tank: contextvars.ContextVar[Tank | None] = contextvars.ContextVar("plait_fuel", default=None)


@contextmanager
def limited(limit: int | None) -> Iterator[Tank | None]:
    """Grant `limit` decisions inside the block (None: no limit, and nothing is noted)."""
    tank = None if limit is None else Tank(limit)
    token = _tank.set(tank)
    try:
        yield tank
    finally:
        _tank.reset(token)


def aside() -> AbstractContextManager[Tank | None]:
    """Decisions inside the block are granted and not counted: they are made again, or only tried."""
    return limited(None)


def is_limited() -> bool:
    """Whether decisions are counted here."""
    return _tank.get() is not None


def take(
    kind: str, name: str, words: Callable[[], str], graph: Graph | None = None, nodes: Sequence[Node] = ()
) -> bool:
    """Whether one more decision, about these nodes of a graph, may be taken; see Taken."""
    tank = _tank.get()
    if tank is None:
        return True
    if len(tank.taken) >= tank.limit:
        return False
    fx = () if graph is None else (o.fx for n in nodes for o in graph.origins.get(n, ()))
    tank.taken.append(Taken(kind, name, words(), tuple(dict.fromkeys(fx))))
    return True


def take_at(kind: str, name: str, graph: Graph, nodes: Sequence[Node]) -> bool:
    """`take` of a decision whose words are the nodes it is about."""
    return take(kind, name, lambda: told(graph, nodes), graph, nodes)


def told(graph: Graph, nodes: Sequence[Node], most: int = 3) -> str:
    """Nodes as people read them: "exp (f.py:3 e = torch.exp(x)), sum (f.py:4 ...)"."""
    out = []
    for n in nodes[:most]:
        line = next((o.line for o in graph.origins.get(n, ()) if o.line), "")
        out.append(f"{n.op} ({line})" if line else n.op)
    more = len(nodes) - most
    return ", ".join(out) + (f" and {more} more" if more > 0 else "")
