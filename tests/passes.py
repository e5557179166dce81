"""The passes of a function under torch.compile, planned for a device and run in eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from plait.compiler import Compiled, all_levels
from plait.frontend.capture import capture
from plait.frontend.externs import decompositions
from plait.frontend.fx_import import import_fx
from plait.frontend.joint import rewrites_for
from plait.options import Options
from plait.plan.device import SPECS


def planning(out: dict[str, Compiled], options: Options, device: str = "h200") -> Callable[..., Any]:
    """A backend that puts what it compiles into `out`, by kind of pass."""

    def one(graph: fx.GraphModule, example: Sequence[Any], kind: str) -> Any:
        out[kind] = all_levels(import_fx(graph, example), SPECS[device], options)

        def boxed(args: list[Any]) -> Any:
            return fx.Interpreter(graph).boxed_run(list(args))

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return capture(gm, inputs, one, decompositions(), rewrites_for(options))

    return backend


def planned(fn: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Compiled:
    """A function of tensors of these shapes, planned for a card."""
    with FakeTensorMode() as mode:
        args = [mode.from_tensor(torch.empty(s, dtype=dtype)) for s in shapes]
        gm = make_fx(torch.func.functionalize(fn), decomposition_table=decompositions())(*args)
    return all_levels(import_fx(gm, args), SPECS["h200"], Options.make(None, {"check": 2}))
