"""The float64 reference: the same callable run in double, and how far its result moves when inputs move by half an ulp."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_NARROW = frozenset({torch.float16, torch.bfloat16, torch.float32})
_ROUNDING = frozenset({torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2})


def reference(fn: Callable[..., Any], args: Sequence[Any], *, with_args: bool = False, all_double: bool = False) -> Any:
    """The result of `fn(*args)` in float64. Modules (fn itself, the owner of a bound method, arguments) are copied and
    cast, float tensors too; nothing that was passed in changes. `with_args`: also the arguments after the call.

    Every operator computes in double, whatever float types the program names. Casts that the program itself makes to a
    type narrower than float32 still round the value: they are what the user asked for. `all_double`: not even those.
    A program that this breaks (it looks at bits, or calls an operator that has no double form) runs on double inputs and
    keeps its own types."""
    try:
        return _run(fn, args, None, with_args, _AllDouble(not all_double))
    except (RuntimeError, TypeError, NotImplementedError):
        return _run(fn, args, None, with_args)


def perturbed(fn: Callable[..., Any], args: Sequence[Any], seed: int) -> Any:
    """`reference` with every float input and parameter moved by up to half an ulp of its own type, at random."""
    generator = torch.Generator().manual_seed(seed)
    try:
        return _run(fn, args, generator, False, _AllDouble(True))
    except (RuntimeError, TypeError, NotImplementedError):
        return _run(fn, args, generator, False)


def noise_of(fn: Callable[..., Any], args: Sequence[Any], exact: Any, runs: int = 2) -> list[float]:
    """For each leaf of the result, the largest RMS change under perturbation (0.0 for what is not float)."""
    leaves = pytree.tree_leaves(exact)
    out = [0.0] * len(leaves)
    for seed in range(runs):
        moved = pytree.tree_leaves(perturbed(fn, args, seed))
        for k, (x, y) in enumerate(zip(leaves, moved, strict=True)):
            if isinstance(x, Tensor) and x.is_floating_point() and x.shape == y.shape and x.numel():
                change = (x.detach().double() - y.detach().double()).abs()
                change = change[change.isfinite()]
                out[k] = max(out[k], float((change**2).mean().sqrt()) if change.numel() else 0.0)
    return out


def _run(
    fn: Callable[..., Any],
    args: Sequence[Any],
    generator: torch.Generator | None,
    with_args: bool,
    mode: TorchDispatchMode | None = None,
) -> Any:
    def widen(x: Any) -> Any:
        if isinstance(x, Tensor):
            return _double(x, generator)
        return _double_module(x, generator) if isinstance(x, torch.nn.Module) else x

    owner = getattr(fn, "__self__", None)
    if isinstance(fn, torch.nn.Module):
        fn = _double_module(fn, generator)
    elif isinstance(owner, torch.nn.Module) and isinstance(fn, types.MethodType):
        fn = types.MethodType(fn.__func__, _double_module(owner, generator))
    wide_args = pytree.tree_map(widen, list(args))
    # the copies above are made outside the mode, in which a module's own tensors cannot be copied
    with _default_double(), mode or nullcontext():
        result = fn(*wide_args)
    return (result, wide_args) if with_args else result


def _double_module(m: torch.nn.Module, generator: torch.Generator | None) -> torch.nn.Module:
    types_before = {k: t.dtype for k, t in m.state_dict(keep_vars=True).items()}
    wide = copy.deepcopy(m).double()
    if generator is not None:
        with torch.no_grad():
            for k, t in wide.state_dict(keep_vars=True).items():
                if t.is_floating_point():
                    t.copy_(_move(t.detach(), types_before[k], generator))
    return wide


def _double(x: Tensor, generator: torch.Generator | None) -> Tensor:
    if x.is_complex():
        return x.detach().to(torch.complex128).clone().requires_grad_(x.requires_grad)
    if not x.is_floating_point():
        return x.detach().clone()
    wide = x.detach().double().clone(memory_format=torch.preserve_format)
    if generator is not None:
        wide = _move(wide, x.dtype, generator)
    return wide.requires_grad_(x.requires_grad)


def _move(wide: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    by = torch.rand(wide.shape, dtype=torch.float64, generator=generator).to(wide.device) * 2 - 1
    return wide * (1 + by * (torch.finfo(dtype).eps / 2))


@contextmanager
def _default_double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _AllDouble(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every float operand, and every float type named in a call, is double; casts to narrow types round if asked to."""

    def __init__(self, round_casts: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._round_casts = round_casts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widen(x: Any) -> Any:
            if isinstance(x, Tensor) and x.dtype in _NARROW:
                return x.double()
            return torch.float64 if isinstance(x, torch.dtype) and (x in _NARROW or x in _ROUNDING) else x

        if func is torch.ops.aten.view.dtype:
            raise NotImplementedError("the bits of a float are those of its own type")
        asked = (kwargs or {}).get("dtype")
        args, kwargs = pytree.tree_map(widen, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if self._round_casts and func is torch.ops.aten._to_copy.default and asked in _ROUNDING:
            return result.to(asked).double()
        return result
