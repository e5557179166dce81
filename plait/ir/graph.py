"""Graph: scalar operations over their own axes, with views on the edges as index maps.

    Node = op, axes, reduce (how many trailing axes are reduced), reads, dtype, attrs
    Read = source, index (one Expr a source dimension, in the reader's axes), guard (all >= 0), fill where it fails

A map node's value at a point of its axes is op applied to its reads' values there. A reduce node combines over its
trailing `reduce` axes; its shape is what remains. A contract node adds up the products of its two reads over its trailing
`reduce` axes. A scan runs along its last axis. Externs read whole tensors: each of
their Reads has its own `domain` (the operand's shape) and the strides the call is owed.
Nodes are interned by their Builder, so equal nodes are one object; origins are a side table and no part of identity.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.index import Expr, Facts
from plait.ir.ops import OPS, OpDef

Shape = tuple[Expr, ...]
Scalar = bool | int | float

# calls that take matrices whose rows lie apart as they are, and those of them that write such a result
PRODUCTS = frozenset({"aten.mm.default", "aten.bmm.default", "aten.addmm.default", "aten.baddbmm.default"})
WRITES_ROWS_APART = frozenset({"aten.mm.default", "aten.bmm.default"})


_EVERYWHERE = frozenset({"const", "index", "input"})  # whoever reads them makes them, or nobody


@dataclass(frozen=True, slots=True)
class Read:
    """One operand. `index[d]` addresses dimension d of `source` in the reader's axes; `value(k)` in it is the reader's k-th
    read's value. Where some `guard` expression is negative, the value is `fill` and nothing is read (T1)."""

    source: Node
    index: Shape
    guard: Shape = ()
    fill: Scalar = 0
    domain: Shape | None = None  # externs only: the operand's shape, whose axes `index` speaks of
    strides: Shape | None = None  # externs only: strides (in elements) the operand must have


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One operation; compare by identity. Build with `Builder.node`, which infers `dtype`."""

    op: str
    axes: Shape
    reduce: int
    reads: tuple[Read, ...]
    dtype: DType
    attrs: tuple[tuple[str, Any], ...]
    serial: int  # first-construction order: the deterministic order of everything

    @property
    def defn(self) -> OpDef:
        """The operator's definition."""
        return OPS[self.op]

    @property
    def kind(self) -> str:
        """source, map, reduce, contract, scan, random, extern or project."""
        return OPS[self.op].kind

    @property
    def reduces(self) -> bool:
        """A reduction: by a monoid, or of products."""
        return OPS[self.op].kind in ("reduce", "contract")

    @property
    def shape(self) -> Shape:
        """Extents of the value."""
        return self.axes[: len(self.axes) - self.reduce] if self.reduce else self.axes

    def attr(self, name: str) -> Any:
        """One attribute; KeyError when the operator has none of that name."""
        for k, v in self.attrs:
            if k == name:
                return v
        raise KeyError(name)

    def __repr__(self) -> str:
        return f"%{self.op}_{self.serial}"


@dataclass(frozen=True, slots=True)
class Arg:
    """The place of operand `k` in the template of an extern."""

    k: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a tensor's elements are: strides and offset in elements."""

    strides: Shape
    offset: Expr = ix.ZERO


@dataclass(frozen=True, slots=True)
class Region:
    """What the user wants of some operators. `kind`: "fuse" (they are one kernel), "no_fuse" (no kernel holds one of them and
    one of others), "forbid" (no kernel holds one of each `side`). `label` is the user's; `number` tells regions apart."""

    kind: str
    number: int
    label: str = ""
    side: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.label!r}" if self.label else self.kind


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a node came from: the FX node, the user's module path and source line, and the regions it lies in."""

    fx: str
    module: str = ""
    line: str = ""  # "file.py:12 x = softmax(y)"
    regions: tuple[Region, ...] = ()


@dataclass(frozen=True, slots=True)
class Input:
    """A graph input. `position` is the argument's place in the call (constants come after the arguments, see
    Graph.constants); `layout` None for a Python scalar."""

    node: Node
    position: int
    layout: Layout | None
    device: str = "cpu"
    private: bool = False  # a value that a forward of ours computed and left for this graph alone


@dataclass(frozen=True, slots=True)
class Output:
    """A graph output: `read` (with domain) of a node, delivered with `strides`. `writes_to` is the position of the input
    whose memory receives it (a functionalised mutation); such an output is not returned. What the call returns, and in
    which order, is Graph.returns. With `at`, it is
    written over the box of that input that starts there."""

    name: str
    read: Read
    strides: Shape
    writes_to: int | None = None
    device: str = "cpu"
    at: Shape | None = None
    # which memory eager returns this in: outputs with equal numbers >= 0 share memory, others must not, though one node
    # may give both; -1 - position: a view of that input. None: not known, any memory is right
    memory: int | None = None
    private: bool = False  # saved for the backward, which is compiled for whatever strides it comes with


@dataclass
class Graph:
    """Nodes reachable from `outputs`, in first-construction order (G1: closed and acyclic)."""

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    # least and greatest value of each symbol (None: unbounded above)
    symbols: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    hints: dict[str, int] = field(default_factory=dict)
    # how to compute a symbol at run time, each after those it needs: forms and their evaluator are in ir/bindings.py
    bindings: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    origins: dict[Node, tuple[Origin, ...]] = field(default_factory=dict)
    # strides eager gave to a node's value, where it is a dense tensor: the preferred layout of its buffer
    layouts: dict[Node, Shape] = field(default_factory=dict)
    # strides with gaps between rows: of values that only kernels see, PRODUCTS, and calls that ask for just these; and of
    # inputs that a forward of ours left like that
    padded: dict[Node, Shape] = field(default_factory=dict)
    # partial results of reductions that were split over blocks: their combination waits for all blocks
    partials: frozenset[Node] = frozenset()
    device: str = "cpu"
    # number of arguments of the call; `constants` names the module attribute to pass at each position from `arity` on
    arity: int = 0
    constants: dict[int, str] = field(default_factory=dict)
    # what the call returns, in order: ("tensor", k) outputs[k] | ("item", k) its value as a Python float | ("input",
    # position) the argument itself | ("scalar", Expr) | ("value", constant) | ("none",)
    returns: tuple[tuple[Any, ...], ...] = ()
    # externs that must run though no output depends on them (asserts, prints, collectives); with every other extern
    # whose `serial` attribute is not None they run in the order of their node serials
    effects: tuple[Node, ...] = ()
    # why an extern was not lowered, in words
    refusals: dict[Node, str] = field(default_factory=dict)

    def nodes(self) -> list[Node]:
        """Reachable nodes; every node comes after its sources."""
        return topological([*(o.read.source for o in self.outputs), *self.effects])

    def facts(self, axes: Shape = ()) -> Facts:
        """Facts for simplification in the context of `axes`."""
        return Facts(axes=axes, symbols=self.symbols)

    def users(self) -> dict[Node, list[Node]]:
        """Readers of each node, in order, without repetition."""
        out: dict[Node, list[Node]] = {n: [] for n in self.nodes()}
        for n in self.nodes():
            for s in dict.fromkeys(r.source for r in n.reads):
                out[s].append(n)
        return out

    def regions(self, n: Node) -> tuple[Region, ...]:
        """The user's regions that a node lies in. What has no value of its own, as constants, lies in none."""
        origins = self.origins.get(n)
        return origins[0].regions if origins and n.op not in _EVERYWHERE else ()

    def hint(self, e: Expr) -> int:
        """The value of an axis-free expression at the hinted sizes."""
        return e.evaluate({a: self.hints.get(str(a.args[0]), 64) for a in e.leaves()})


class Builder:
    """The only maker of nodes: interns them and infers their types (N1)."""

    def __init__(self, facts: Facts | None = None) -> None:
        self._table: dict[tuple[Any, ...], Node] = {}
        self.facts = facts or Facts()
        self._count = 0
        self.made: list[Node] = []  # in order

    def start_at(self, serial: int) -> None:
        """Number the next new node `serial`, to continue an existing graph."""
        self._count = serial

    def node(self, op: str, axes: Sequence[Expr], reads: Sequence[Read] = (), *, reduce: int = 0, **attrs: Any) -> Node:
        """Make (or find) a node. Raises TypeMismatch for operands the operator does not take, KeyError for unknown operators."""
        defn = OPS[op]
        if defn.arity is not None and len(reads) != defn.arity:
            raise ValueError(f"{op} takes {defn.arity} reads, got {len(reads)}")
        if set(attrs) - set(defn.optional) != set(defn.attrs):
            raise ValueError(f"{op} takes attributes {defn.attrs}, got {tuple(attrs)}")
        dtype = defn.infer([r.source.dtype for r in reads], attrs)
        packed = tuple(sorted(attrs.items()))
        # repr keeps -0.0 from 0.0, nan equal to itself, and 1 from True, which plain equality of attributes would not
        key = (op, tuple(axes), reduce, _keyed(reads), dtype, repr(packed))
        found = self._table.get(key)
        if found is None:
            found = Node(op, tuple(axes), reduce, tuple(reads), dtype, packed, self._count)
            self._count += 1
            self._table[key] = found
            self.made.append(found)
        return found

    @property
    def count(self) -> int:
        """How many nodes there are; also the serial of the next."""
        return self._count

    def continue_at(self, serial: int) -> None:
        """Give the next new node this serial (or a later one): for parsers, which keep the numbers they read."""
        if serial < self._count:
            raise ValueError(f"serial {serial} comes after {self._count - 1}")
        self._count = serial

    def since(self, count: int) -> list[Node]:
        """Nodes made after `count` was read, in order."""
        out: list[Node] = []
        for n in reversed(self._table.values()):
            if n.serial < count:
                break
            out.append(n)
        return out[::-1]


def _keyed(reads: Iterable[Read]) -> tuple[tuple[Any, ...], ...]:
    return tuple((r.source, r.index, r.guard, repr(r.fill), r.domain, r.strides) for r in reads)


def identity(shape: Sequence[Expr]) -> Shape:
    """The index map that reads a source of `shape` point by point."""
    return tuple(ix.ZERO if n is ix.ONE else ix.axis(d) for d, n in enumerate(shape))


def compose(read_index: Shape, through: Shape, facts: Facts) -> Shape:
    """`read_index` speaks of axes whose values are `through` (in new axes): the same read in the new axes."""
    env = {ix.axis_atom(i): e for i, e in enumerate(through)}
    return tuple(e.substitute(env, facts) for e in read_index)


def topological(outputs: Iterable[Node], given: Container[Node] = ()) -> list[Node]:
    """Nodes under `outputs`, sources first, but for those `given` and what only they need."""
    seen: set[Node] = set()
    stack = list(outputs)
    while stack:
        n = stack.pop()
        if n not in seen and n not in given:
            seen.add(n)
            stack.extend(r.source for r in n.reads)
    # serial numbers grow along edges, because a node is built after its sources
    return sorted(seen, key=lambda n: n.serial)


def made_of(node: Node, inside: Collection[Node], reads: Callable[[Node], Iterable[Read]] | None = None) -> set[Node]:
    """Those of `inside` that a node is made of by way of nothing else, itself included; by `reads` (the nodes' own)."""
    out: set[Node] = set()
    stack = [node]
    while stack:
        n = stack.pop()
        if n in inside and n not in out:
            out.add(n)
            stack.extend(r.source for r in (n.reads if reads is None else reads(n)))
    return out


def contiguous_strides(shape: Sequence[Expr]) -> Shape:
    """Row-major strides, in elements, as torch gives them (an extent of 0 or 1 counts as 1)."""
    out: list[Expr] = []
    step = ix.ONE
    for n in reversed(shape):
        out.append(step)
        step = step * (ix.ONE if n.const == 0 else n)
    return tuple(reversed(out))
