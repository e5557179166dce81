"""Faults of the call: steps and results of a Script that are not those of the program. Their kernels are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from plait.diagnose.faults.known import Change
from plait.runtime.steps import AllocStep, CopyStep, ExternStep, FreeStep, InputOut, KernelStep, Script, SlotOut, Step


def script(change: Callable[[Script], Script | None], kind: str = "") -> Change:
    """Spoils scripts: all, or those of graphs of one kind."""
    return lambda found, about: change(found) if about == kind or not kind else None


def not_written_back(found: Script) -> Script | None:
    """An argument keeps its old contents."""
    steps = tuple(s for s in found.steps if not isinstance(s, CopyStep))
    return replace(found, steps=steps) if len(steps) < len(found.steps) else None


def argument_returned(found: Script) -> Script | None:
    """A copy of an argument is the argument itself."""
    if not isinstance(found.returns[0], SlotOut):
        return None
    return replace(found, returns=(InputOut(0), *found.returns[1:]))


def one_memory(found: Script) -> Script | None:
    """Two results of the same values are one tensor."""
    first = found.returns[0]
    if len(found.returns) < 2 or found.returns[1] == first:
        return None
    return replace(found, returns=(first, first, *found.returns[2:]))


def new_contents_saved(found: Script) -> Script | None:
    """What the backward wants of an argument that is overwritten is the argument itself, and not a copy from before."""
    position = {i.slot: i.position for i in found.inputs}
    written = [position[s.target.slot] for s in found.steps if isinstance(s, CopyStep) and s.target.slot in position]
    saved = [k for k, r in enumerate(found.returns) if k and isinstance(r, SlotOut)]
    if not written or not saved:
        return None
    returns = list(found.returns)
    returns[saved[-1]] = InputOut(written[0])
    return replace(found, returns=tuple(returns))


def updates_swapped(found: Script) -> Script | None:
    """Two updates of one tensor, each with the other's operands."""
    calls = [k for k, s in enumerate(found.steps) if isinstance(s, ExternStep)]
    if len(calls) < 2:
        return None
    steps = list(found.steps)
    first, second = steps[calls[0]], steps[calls[1]]
    assert isinstance(first, ExternStep) and isinstance(second, ExternStep)
    steps[calls[0]] = replace(first, operands=(first.operands[0], *second.operands[1:]))
    steps[calls[1]] = replace(second, operands=(second.operands[0], *first.operands[1:]))
    return replace(found, steps=tuple(s for s in steps if not isinstance(s, FreeStep)))


def read_too_early(found: Script) -> Script | None:
    """A kernel runs before the one whose result it reads."""
    kernels = [s for s in found.steps if isinstance(s, KernelStep)]
    if len(kernels) < 2:
        return None
    rest: list[Step] = [s for s in found.steps if not isinstance(s, KernelStep | FreeStep | AllocStep)]
    memory: list[Step] = [replace(s, reuse=None) for s in found.steps if isinstance(s, AllocStep)]
    return replace(found, steps=(*memory, *rest, *reversed(kernels)))
