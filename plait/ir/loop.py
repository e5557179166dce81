"""Loops: a call whose work is a Graph of one block, run once a block, so that a large value is only ever there in part.

    extern(%x, %w, %g) {role="loop", target="plait.loop", template=("loop", 25, ($0, $1, $2), "graph 1 ...")}

The body is a Graph with the arguments: the loop's operands, then memory for each of the loop's results, then the block's
number. Index maps and guards hold that number as the symbol `BLOCK`. Results are zeros before the first block; each output
of the body writes to one of them: over a box (`at`) that moves with the block, or over all of it, with what was there added.
The body travels as its text, so that the node prints, parses and is interned as any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from plait.ir.dtype import DType
from plait.ir.graph import Arg, Builder, Graph, Node, Read, Shape, contiguous_strides
from plait.ir.parse import parse_graph
from plait.ir.text import print_graph

LOOP = "plait.loop"
BLOCK = "block"


@dataclass(frozen=True)
class Loop:
    """What a loop's call says: how many blocks there are, and the Graph of one."""

    count: int
    body: Graph


def loop_of(n: Node) -> Loop | None:
    """The loop that a node is, or None."""
    return _read(n) if n.kind == "extern" and n.attr("target") == LOOP else None


@lru_cache(maxsize=64)
def _read(n: Node) -> Loop:
    _, count, _, text = n.attr("template")
    return Loop(count, parse_graph(text))


def loop_node(
    builder: Builder, operands: Sequence[Read], results: Sequence[tuple[Shape, DType]], count: int, body: Graph
) -> list[Node]:
    """A loop over reads with domains, as one node for each of its results."""
    outs = tuple((shape, dtype, contiguous_strides(shape)) for shape, dtype in results)
    marks = tuple(Arg(k) for k in range(len(operands)))
    call = builder.node(
        "extern",
        results[0][0],
        operands,
        dtype=results[0][1],
        target=LOOP,
        role="loop",
        template=("loop", count, ("tuple", marks), print_graph(body)),
        outs=outs,
        serial=None,
    )
    return [
        builder.node("project", shape, [Read(call, ())], item=k, dtype=dtype)
        for k, (shape, dtype) in enumerate(results)
    ]
