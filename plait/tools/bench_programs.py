"""The bench's view of a workload: one program with its arguments, what it must cost, and how to take one step of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Fn = Callable[..., Any]


@dataclass
class Program:
    """`fn(*args)` is the program. `module` owns its parameters, if it has any; `over(module)` is the program over a copy."""

    name: str
    fn: Fn
    args: tuple[Any, ...]
    train: bool
    bytes_moved: int
    flops: int
    hand: dict[str, Fn] = field(default_factory=dict)
    module: nn.Module | None = None
    over: Callable[[nn.Module], Fn] | None = None
    drop: float = 0.0
    undropped: Fn | None = None
    cotangents: list[Tensor | None] | None = None

    def step(self, fn: Fn) -> Callable[[], Any]:
        """One step of `fn` in place of the program: outputs, and under `train` (outputs, gradients)."""
        args = self.args
        if not self.train:
            return lambda: fn(*args)
        leaves = self.leaves()
        return lambda: self.forward_backward(fn, args, leaves)

    def leaves(self) -> list[Tensor]:
        """What gradients are taken for: the parameters, or every float argument."""
        if self.module is not None:
            return [p for p in self.module.parameters() if p.requires_grad]
        return [a for a in pytree.tree_leaves(self.args) if isinstance(a, Tensor) and a.requires_grad]

    def forward_backward(self, fn: Fn, args: Any, leaves: Sequence[Tensor]) -> tuple[Any, tuple[Tensor, ...]]:
        """Outputs (detached) and the gradients of `leaves` for fixed random cotangents (one, for a scalar loss)."""
        out = fn(*args)
        outs = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
        if self.cotangents is None:
            gen = torch.Generator().manual_seed(7)
            self.cotangents = [
                None if t.dim() == 0 else torch.randn(t.shape, generator=gen).to(t.device, t.dtype) for t in outs
            ]
        given = [c if c is None else c.to(t.dtype) for c, t in zip(self.cotangents, outs)]
        grads = torch.autograd.grad(outs, list(leaves), given)
        return pytree.tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, out), grads


def kernel_names() -> list[str]:
    """Names of the kernels suite, in order."""
    from plait.workloads.kernels import WORKLOADS

    return list(WORKLOADS)


def model_names() -> list[str]:
    """Names of the models suite, in order."""
    from plait.workloads.models import MODELS

    return list(MODELS)


def load(suite: str, name: str, device: str) -> Program:
    """Make a workload's program, with a fixed seed."""
    torch.manual_seed(0)
    scale = "gpu" if device == "cuda" else "cpu"
    return _load_kernel(name, device, scale) if suite == "kernels" else _load_model(name, device, scale)


def _load_kernel(name: str, device: str, scale: str) -> Program:
    from plait.workloads.kernels import WORKLOADS

    work = WORKLOADS[name](device, scale)
    args = work.args
    if work.train:
        args = pytree.tree_map(lambda t: t.requires_grad_() if t.is_floating_point() else t, args)
    module = work.fn if isinstance(work.fn, nn.Module) else None
    return Program(
        name,
        work.fn,
        args,
        work.train,
        work.bytes_moved,
        work.flops,
        work.hand,
        module,
        (lambda m: m) if module is not None else None,
        work.drop,
        work.undropped,
    )


def _load_model(name: str, device: str, scale: str) -> Program:
    from plait.workloads.models import MODELS

    model = MODELS[name](device, scale)
    program = Program(
        name,
        model.bound(),
        model.args,
        model.train,
        _weight_bytes(model.module),
        0,
        module=model.module,
        over=model.bound,
    )
    program.flops = _count_flops(program)
    return program


def _weight_bytes(module: nn.Module) -> int:
    """Parameters but embedding tables (of which a step reads a few rows), and key/value caches: read once a step."""
    tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    tables -= {id(m.weight) for m in module.modules() if isinstance(m, nn.Linear)}  # tied: the last layer reads it all
    sized: list[Tensor] = [p for p in module.parameters() if id(p) not in tables]
    sized += [b for n, b in module.named_buffers() if n.endswith("_cache")]
    return sum(t.numel() * t.element_size() for t in sized)


def _count_flops(program: Program) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    with counter, torch.set_grad_enabled(program.train):
        program.step(program.fn)()
    return int(counter.get_total_flops())


def copy_without_dropout(program: Program) -> tuple[nn.Module, Fn]:
    """A copy of the program's module that drops nothing, so that two runs of it can be compared, and the program over it."""
    assert program.module is not None and program.over is not None
    twin = copy.deepcopy(program.module)
    for m in twin.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
    return twin, program.over(twin)
