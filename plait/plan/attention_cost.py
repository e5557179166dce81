"""The time model of a library's attention: the call against kernels derived together with what is around it.

Both forms multiply as much, and a call of the library's keeps the square of scores out of memory as ours do. What tells them
apart is the traffic of neighbours, which only an open form takes in, and whether there is a kernel of the library's at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from plait.plan.contract_cost import WIDEST
from plait.plan.device import DeviceSpec
from plait.plan.openings import Opening

# of the library's time is what an open form takes that has no neighbours (two cores, full: 1.06; one thread's processor time,
# causal: 0.96 to 1.1, one query: 0.97 to 1.01; an H200: 0.98 to 1.02), and with gradients (two cores: 1.08; an H200: 1.2)
FORWARD = {"cpu": 1.06, "cuda": 1.05}
TRAINING = {"cpu": 1.15, "cuda": 1.25}
# keys that a block visits at once: a causal mask saves what whole blocks hide
VISITED = {"cpu": 512, "cuda": 128}
# of the throughput of products is what the library's attention has (two cores: 0.83; an H200: 0.92)
REACHED = {"cpu": 0.83, "cuda": 0.9}
MARGIN = 0.05  # of the call's time is what opening must gain: the model is no finer
SQUARES = 8  # times that attention without a kernel of the library's writes or reads its square
BACKWARD = 2.5  # times the products of the forward are those of the backward


@dataclass(frozen=True, slots=True)
class Attention:
    """A call of attention, at the sizes of the example. `rows`: queries, of all heads; `queries`, `keys`: of one head; `depth`,
    `width`: of keys and of values; `io_bytes`: of all operands and the result; `nbytes`: of an
    element. `fused`: the library has a kernel for it; `whole`: an open form's backward reads the square from memory. `mask_bytes`: of its mask, in the type that the kernel reads, 0: it has none.
    `saved_bytes`: traffic of neighbours that an open form takes in; `joined`: launches that are saved."""

    rows: int
    queries: int
    keys: int
    depth: int
    width: int
    nbytes: int
    io_bytes: float
    causal: bool = False
    training: bool = False
    fused: bool = True
    whole: bool = False
    mask_bytes: float = 0.0
    saved_bytes: float = 0.0
    joined: int = 0


def attention_ns(a: Attention, spec: DeviceSpec) -> tuple[float, float]:
    """Predicted nanoseconds of the call with its neighbours' own kernels' traffic, and of the open form."""
    work = _work_ns(a, spec, VISITED[spec.kind])
    slower = (TRAINING if a.training else FORWARD)[spec.kind]
    outside = a.saved_bytes / spec.bytes_per_ns + a.joined * spec.launch_ns
    call = spec.launch_ns + max(work, a.io_bytes / spec.bytes_per_ns) + outside
    if a.mask_bytes:
        call += a.rows * a.keys * a.nbytes / spec.cache_bytes_per_ns
    squares = (1.0 + BACKWARD * a.training) * SQUARES * a.rows * a.keys * a.nbytes / spec.bytes_per_ns
    call += 0.0 if a.fused else squares
    opened = spec.launch_ns + max(slower * work, a.io_bytes / spec.bytes_per_ns)
    return call, opened + (squares if a.whole else 0.0)


def _work_ns(a: Attention, spec: DeviceSpec, block: int) -> float:
    """Of the products, at the library's throughput."""
    rate = spec.half_flops_per_ns if a.nbytes <= 2 else spec.float_flops_per_ns
    points = a.rows * a.keys * (_visible(a, block) if a.causal else 1.0)
    passes = 1.0 + (BACKWARD if a.training else 0.0)
    return 2.0 * passes * points * (a.depth + a.width) / (rate * REACHED[spec.kind])


def _visible(a: Attention, block: int) -> float:
    """The share of a head's points that blocks of so many keys visit under a causal mask, aligned at the first of both."""
    blocks = math.ceil(a.keys / block)
    seen = 0.0
    for k in range(blocks):
        width = min(block, a.keys - k * block)
        seen += width * max(a.queries - k * block, 0)
    return seen / max(a.queries * a.keys, 1)


def choose(fx: str, a: Attention, spec: DeviceSpec) -> Opening:
    """Whether to open a call: where the open form is predicted faster by more than the model is wrong."""
    call, opened = attention_ns(a, spec)
    pays = call - opened > MARGIN * call and max(a.depth, a.width) <= WIDEST
    return Opening(fx, call - opened, "open" if pays else "closed", call, opened)
