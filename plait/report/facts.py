"""What explain knows of a program, as plain values: every face (table, JSON, HTML) and every assertion reads these alone.

Units: bytes, flops (floating-point operations, a multiply-add being two), microseconds (`_us`). Numbers are taken at the sizes
of the call that was explained. "Before" is eager: every operator that computes is a kernel that reads its operands from
memory and writes its results there. "After" is the plan: what its time model counts. None means not known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

VERSION = 1
"""Of the schema that to_json follows (schema_1.json): raised when a field changes its meaning or goes."""


@dataclass(frozen=True, slots=True)
class Flops:
    """Work by unit. `arithmetic`: additions, multiplications, divisions, extremes, sums; `special`: roots, exponentials,
    trigonometry (one a value, whatever it costs); `tensor_core`: products of matrices on units of their own."""

    arithmetic: float = 0.0
    special: float = 0.0
    tensor_core: float = 0.0

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            self.arithmetic + other.arithmetic, self.special + other.special, self.tensor_core + other.tensor_core
        )

    @property
    def counted(self) -> float:
        """What arithmetic intensity counts: all but special functions."""
        return self.arithmetic + self.tensor_core


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes from and to device memory, and those that are read again and served by the last-level cache."""

    read: float = 0.0
    written: float = 0.0
    cached: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.read + other.read, self.written + other.written, self.cached + other.cached)

    @property
    def total(self) -> float:
        """Bytes over the memory bus."""
        return self.read + self.written


@dataclass(frozen=True, slots=True)
class EagerOperator:
    """An operator of the user's program as eager runs it: a kernel of its own. `alone_us`: predicted, a launch and the roofline
    of its traffic and work (None: it launches nothing); `step`: where plait does most of it (-1: nothing of it is left);
    `feeds`: numbers of the operators that read its results. Views are none."""

    number: int
    name: str
    aten: str
    line: str
    module: str
    before: Traffic
    flops: Flops
    alone_us: float | None
    step: int
    feeds: tuple[int, ...]
    backward: bool = False
    recomputed: bool = False


@dataclass(frozen=True, slots=True)
class Member:
    """An operator of the user's program inside a kernel. `name`: what the program calls ("softmax"); `aten`: the operator it
    is ("aten._softmax"); `parts`: what plait made of it. `counted`: its traffic before is part of this kernel's (an operator
    spread over kernels counts once, where most of its work is done). `recomputed`: formed again for the backward, which eager
    does not do. `fx`: its nodes in the captured graph, `feeds`: nodes of the operators that read its results; `regions`:
    labels of the user's regions around it; `operator`: its number among the graph's operators."""

    name: str
    aten: str
    parts: tuple[str, ...]
    fx: tuple[str, ...]
    feeds: tuple[str, ...]
    line: str
    module: str
    before: Traffic
    flops: Flops
    intensity_before: float | None
    counted: bool = True
    regions: tuple[str, ...] = ()
    backward: bool = False
    recomputed: bool = False
    operator: int = -1


@dataclass(frozen=True, slots=True)
class Intermediate:
    """A value inside a kernel. `lives`: "register" (each thread has its own points), "tile" (a block's threads share it, in
    registers and shared memory) or "memory" (written, for others to read). `nbytes`: of the whole value."""

    name: str
    lives: str
    nbytes: float
    line: str = ""


@dataclass(frozen=True, slots=True)
class Resources:
    """What a compiled kernel takes, read off its binary: registers a thread, bytes of spills a thread (local memory), bytes of
    shared memory a block, and the share of a multiprocessor's warps that are resident."""

    registers: int
    spills: int
    shared: int
    occupancy: float


@dataclass(frozen=True, slots=True)
class Variant:
    """A schedule that was timed on the device; `remembered`: by an earlier compilation, and not in this one."""

    name: str
    measured_us: float
    chosen: bool
    remembered: bool = False


@dataclass(frozen=True, slots=True)
class Kernel:
    """A step of the compiled program: a kernel of plait's ("kernel") or an operator that runs in ATen ("call"), with `why` it
    does; of a kernel, `why` it holds what could have been one. `directions`: vertical, horizontal, input; `mapping`: thread, block, across blocks. `roofline_us`: the least
    time that the device's ceilings allow for this traffic and work; `bound`: memory, compute or launch, as predicted. `needs`:
    numbers of the steps whose results it reads; `source`: its text; `failure`: why it does not compile, or cannot run."""

    number: int
    name: str
    kind: str
    members: tuple[Member, ...]
    lines: tuple[str, ...]
    directions: tuple[str, ...]
    mapping: str
    schedule: tuple[str, ...]
    intermediates: tuple[Intermediate, ...]
    before: Traffic
    after: Traffic
    flops: Flops
    intensity_before: float | None
    intensity_after: float | None
    predicted_us: float | None
    bound: str
    roofline_us: float | None
    resources: Resources | None = None
    measured_us: float | None = None
    roofline_share: float | None = None
    variants: tuple[Variant, ...] = ()
    failure: str = ""
    why: str = ""
    needs: tuple[int, ...] = ()
    source: str = ""


@dataclass(frozen=True, slots=True)
class Side:
    """One of two neighbours: the operator, the user's line, the number of the step that it is in (-1: in none), and that of the
    operator of eager's (-1: plait made it)."""

    name: str
    op: str
    line: str
    module: str
    step: int
    operator: int = -1


@dataclass(frozen=True, slots=True)
class Refusal:
    """Neighbours that do not share a kernel. `reason` is a word of docs/reasons.md, `sentence` says it of this pair.
    `direction`: vertical (one reads the other) or input (both read a tensor). Times are predictions."""

    producer: Side
    consumer: Side
    direction: str
    reason: str
    sentence: str
    unlock: str
    together_us: float | None
    apart_us: float | None
    bytes_at_stake: float


@dataclass(frozen=True, slots=True)
class Fusion:
    """Neighbours that were put into one kernel, with the predictions that decided (None: exact chains, always fused)."""

    producer: Side
    consumer: Side
    direction: str
    together_us: float | None
    apart_us: float | None
    bytes_at_stake: float


@dataclass(frozen=True, slots=True)
class Fallback:
    """Something that runs in eager though plait was asked to compile it."""

    scope: str
    op: str
    reason: str
    line: str


@dataclass(frozen=True, slots=True)
class Totals:
    """Of a graph, or of the program. `operators`: that eager launches; `peak_bytes`: the most memory that values made by the
    graph hold at once (its inputs, `input_bytes`, apart). `eager_us`: the operators' `alone_us`, one after another."""

    operators: int = 0
    kernels: int = 0
    calls: int = 0
    before: Traffic = field(default_factory=Traffic)
    after: Traffic = field(default_factory=Traffic)
    flops: Flops = field(default_factory=Flops)
    predicted_us: float | None = None
    peak_bytes: float = 0.0
    input_bytes: float = 0.0
    fallbacks: int = 0
    eager_us: float | None = None

    @property
    def launches(self) -> int:
        """Kernels and ATen calls."""
        return self.kernels + self.calls


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """One compiled graph. `kind`: inference, forward, backward; `status`: compiled, or eager when nothing of it is plait's.
    `left_out`: what was not done because the option `budget` was used up."""

    name: str
    kind: str
    status: str
    line: str
    kernels: tuple[Kernel, ...]
    fusions: tuple[Fusion, ...]
    refusals: tuple[Refusal, ...]
    fallbacks: tuple[Fallback, ...]
    totals: Totals
    compile_seconds: float
    operators: tuple[EagerOperator, ...] = ()
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What bounds a kernel on the device: memory traffic, operations of either unit (0: it has no such unit), and one launch."""

    bytes_per_us: float
    arithmetic_per_us: float
    tensor_core_per_us: float
    launch_us: float


@dataclass(frozen=True, slots=True)
class Facts:
    """A program: its graphs in the order in which they were compiled. `target` names the DeviceSpec; `predicted`: nothing ran
    on that device. `breaks`: why Dynamo cut the program, if it did. `ceilings`: of the device."""

    program: str
    target: str
    predicted: bool
    train: bool
    graphs: tuple[GraphFacts, ...]
    totals: Totals
    breaks: tuple[str, ...] = ()
    ceilings: Ceilings = Ceilings(0.0, 0.0, 0.0, 0.0)
    version: int = VERSION

    def steps(self) -> Iterator[tuple[GraphFacts, Kernel]]:
        """Every step, with the graph it is in."""
        return ((g, k) for g in self.graphs for k in g.kernels)


def sum_totals(parts: list[Totals]) -> Totals:
    """Totals of several graphs, run one after another."""
    known = [t.predicted_us for t in parts if t.predicted_us is not None]
    eager = [t.eager_us for t in parts if t.eager_us is not None]
    return Totals(
        sum(t.operators for t in parts),
        sum(t.kernels for t in parts),
        sum(t.calls for t in parts),
        sum((t.before for t in parts), Traffic()),
        sum((t.after for t in parts), Traffic()),
        sum((t.flops for t in parts), Flops()),
        sum(known) if known else None,
        max((t.peak_bytes for t in parts), default=0.0),
        max((t.input_bytes for t in parts), default=0.0),
        sum(t.fallbacks for t in parts),
        sum(eager) if eager else None,
    )
