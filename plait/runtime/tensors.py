"""Making tensors and views with the least overhead this torch offers; each has a public call to fall back on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from plait.plan.layout import room

Ints = tuple[int, ...]
Empty = Callable[[Ints, Ints, torch.dtype], torch.Tensor]
View = Callable[[torch.Tensor, Ints, Ints, int], torch.Tensor]

_guards: Any = getattr(torch._C._dynamo, "guards", None)


def empty_on(device: torch.device) -> Empty:
    """empty(shape, strides, dtype) on a device; for CUDA the current device must be the one meant."""
    fast = getattr(_guards, f"_empty_strided_{device.type}", None)
    if fast is not None and device.type in ("cpu", "cuda"):
        return fast  # type: ignore[no-any-return]
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def tracked_view(base: torch.Tensor, shape: Ints, strides: Ints, offset: int) -> torch.Tensor:
    """A view that autograd knows of: saved for the backward, it notices when its base is overwritten before that."""
    return base.as_strided(shape, strides, base.storage_offset() + offset)


def lay_out(slots: list[Any], slot: int, strides: Ints) -> None:
    """The slot's tensor with these strides, and with memory behind its last row as between its rows: a copy, unless it has
    them."""
    found: torch.Tensor = slots[slot]
    elems = room(found.shape, strides)
    lies = found.stride() == strides or all(
        s == t or n <= 1 for s, t, n in zip(found.stride(), strides, found.shape, strict=True)
    )
    if not lies or not _has(found, elems):
        slots[slot] = roomy(empty_on(found.device), tuple(found.shape), strides, found.dtype, elems).copy_(found)


def _has(x: torch.Tensor, elems: int) -> bool:
    """Whether memory goes on for so many elements from a tensor's first. (Asking its UntypedStorage would be counted among
    the references to it for ever.)"""
    try:
        x.as_strided((elems,), (1,))
    except RuntimeError:
        return False
    return True


def is_forgotten(slots: list[Any], slot: int) -> bool:
    """Whether nothing but the slot refers to its tensor, and nothing but that tensor to its memory."""
    held: torch.Tensor = slots[slot]
    if references is None or not _COUNTED or sys.getrefcount(held) != _KNOWN:
        return False
    return held._use_count() == 1 and references(held) == 1  # type: ignore[attr-defined]


def _known() -> int:
    """What counts as one list's reference to an object, seen from a function that gave it a name."""
    held = [object()]
    found = held[0]
    return sys.getrefcount(found)


_KNOWN = _known()
_COUNTED = hasattr(torch.Tensor, "_use_count")  # by what is not Python: autograd, say


def roomy(empty: Empty, shape: Ints, strides: Ints, dtype: torch.dtype, elems: int) -> torch.Tensor:
    """An empty tensor whose memory has so many elements."""
    return view(empty((elems,), (1,), dtype), shape, strides, 0)


# view(base, shape, strides, offset in elements from base's first element)
view: View = getattr(_guards, "_reinterpret_tensor", tracked_view)


def over(memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of its own over all of another's bytes. Not through an UntypedStorage: what once had one counts it for ever."""
    out = torch.empty(0, dtype=dtype)
    set_: Any = out.set_  # of a tensor's memory, which torch's annotations leave out
    set_(memory, 0, (memory.numel() // dtype.itemsize,), (1,))
    return out


def _references() -> Callable[[torch.Tensor], int] | None:
    """A count of what refers to a tensor's storage: tensors over it, and its UntypedStorage if it ever had one."""
    address, count = (getattr(torch._C, f"_storage_{name}", None) for name in ("address", "Use_Count"))
    if address is None or count is None:
        return None
    return lambda x: count(address(x))


references = _references()

# operators whose public function is bound more directly than the registry's, with the same arguments
_DIRECT: dict[str, Any] = {
    "aten.mm.default": torch.mm,
    "aten.bmm.default": torch.bmm,
    "aten.addmm.default": torch.addmm,
    "aten.baddbmm.default": torch.baddbmm,
}


def direct(target: str, op: Any) -> Callable[..., Any]:
    """The quickest way to call `op`, the operator named `target`."""
    found: Callable[..., Any] = _DIRECT.get(target) or getattr(op, "_op", None) or op
    return found
