"""Random numbers that one run draws and another is given again: a float64 run draws others than eager does, and would say nothing.

with (drawn := Draws()).recorded(): eager = fn(*args)
with drawn.again(): exact = fn(*wide_args)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_SEEDED = torch.Tag.nondeterministic_seeded


class Draws:
    """The results of every call that asked torch's generators, in order."""

    def __init__(self) -> None:
        self.made: list[tuple[str, list[Any]]] = []

    def recorded(self) -> TorchDispatchMode:
        """Inside, draws are kept."""
        self.made.clear()
        return _Each(self._keep)

    def again(self) -> TorchDispatchMode:
        """Inside, calls that draw give what was kept, in the type that they have now. Raises RuntimeError where they are others."""
        left = iter(list(self.made))
        return _Each(lambda func, args, kwargs: _given(next(left, None), func, args, kwargs))

    def _keep(self, func: Any, args: Any, kwargs: Any) -> Any:
        found = func(*args, **kwargs)
        kept = [x.detach().clone() if isinstance(x, Tensor) else x for x in pytree.tree_leaves(found)]
        self.made.append((str(func), kept))
        return found


class _Each(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands every call that draws to `call`."""

    def __init__(self, call: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._call = call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _SEEDED in getattr(func, "tags", ()):
            return self._call(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _given(kept: tuple[str, list[Any]] | None, func: Any, args: Any, kwargs: Any) -> Any:
    """What a call drew before, in its present types."""
    found = func(*args, **kwargs)
    leaves, form = pytree.tree_flatten(found)
    if kept is None or kept[0] != str(func) or len(kept[1]) != len(leaves):
        raise RuntimeError(f"{func} draws where there was another draw, or none, before")
    if func is torch.ops.aten.native_dropout.default and args[2] is not False:
        # the mask is what was drawn
        return args[0] * kept[1][1] * (1.0 / (1.0 - args[1])), kept[1][1].clone()
    for k, (now, then) in enumerate(zip(leaves, kept[1], strict=True)):
        if isinstance(now, Tensor) and now.shape == then.shape:
            leaves[k] = now.copy_(then)
    return pytree.tree_unflatten(leaves, form)
