"""Reasons: why two groups are not one kernel. An enum with parameters, worded in one place."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Why(Enum):
    """The laws and judgements that keep groups apart."""

    GLOBAL_SYNC = "global sync across blocks"
    MISALIGNED = "axes do not align"
    CAPACITY = "exceeds on-chip capacity"
    CYCLE = "would create a cycle"
    EFFECT_ORDER = "effect order"
    OPAQUE = "opaque operator"
    NUMERICS = "numerics forbid reassociation"
    NO_GAIN = "does not pay"
    SLOWER = "slower when measured"
    FORBIDDEN = "forbidden by user"
    DEVICE = "other device"
    ARGUMENTS = "argument limit"
    BUDGET = "budget is used up"


@dataclass(frozen=True, slots=True)
class Reason:
    """One refusal: the law, and what in this case broke it."""

    why: Why
    detail: str = ""
    together_ns: float = 0.0
    apart_ns: float = 0.0

    def __str__(self) -> str:
        text = f"{self.why.value}: {self.detail}" if self.detail else self.why.value
        if self.why is Why.NO_GAIN:
            text += f" ({self.together_ns / 1e3:.1f} us together, {self.apart_ns / 1e3:.1f} us apart)"
        return text


BETWEEN = "an ATen call runs between them"  # of neighbours that one call keeps apart

UNLOCK: dict[Why, str] = {
    Why.GLOBAL_SYNC: "a block must see a result of all blocks first; reduce over fewer axes, or let the reduction be split",
    Why.MISALIGNED: "index both operators by the same axes (the same reshape and order of dimensions)",
    Why.CAPACITY: "shorten the reduced axis or process it in chunks",
    Why.CYCLE: "an operator between the two runs on its own; move it before or after both",
    Why.EFFECT_ORDER: "separate the mutation or the random draw from the two operators",
    Why.OPAQUE: "the operator runs in ATen; write it with operators that plait imports",
    Why.NUMERICS: 'numerics="fused" permits it',
    Why.NO_GAIN: "nothing: together they would take longer",
    Why.SLOWER: "nothing: it was tried and took longer",
    Why.FORBIDDEN: "remove the region or option that forbids it",
    Why.DEVICE: "move both to one device",
    Why.ARGUMENTS: "fewer tensors in one kernel",
    Why.BUDGET: "a larger option budget, or none: the pair was not looked at",
}
"""What would let the fusion happen, for every law."""
