"""Regions of user code that force or forbid fusion: `with plait.fuse("label"):` and `with plait.no_fuse("label"):`.

In eager they do nothing. Under torch.compile they break no graph and add no operator: Dynamo writes them down on the nodes of
its graph (`torch.fx.traceback.annotate`), whence autograd carries them to the gradients of each operator. Compilers that do
not know them pay them no heed. Each entry into a `with` statement is a region of its own.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

PREFIX = "plait.region."
"""Of the keys, in a node's annotations, whose values are (kind, label, whether the backward is meant as well)."""

_numbers = itertools.count()


def fuse(label: str = "", *, backward: bool = True) -> contextlib.AbstractContextManager[None]:
    """The operators inside become one kernel, or compiling raises FusionRefused, which names the law that forbids it. Their
    gradients are one kernel of the backward, unless `backward=False` leaves these free."""
    return _region("fuse", label, backward)


def no_fuse(label: str = "") -> contextlib.AbstractContextManager[None]:
    """No kernel holds operators from both sides of the region's edge; those inside may share kernels, and so may their
    gradients."""
    return _region("no_fuse", label, True)


def _region(kind: str, label: str, backward: bool) -> contextlib.AbstractContextManager[None]:
    import torch

    if not torch.compiler.is_compiling():
        return contextlib.nullcontext()
    found: Any = torch.fx.traceback.annotate({_key(): (kind, label, backward)})
    return found  # type: ignore[no-any-return]


def _key() -> str:
    return f"{PREFIX}{next(_numbers)}"


# Dynamo calls it while it traces and takes what it gives for a constant: another one for each entry
_key._dynamo_marked_constant = True  # type: ignore[attr-defined]
