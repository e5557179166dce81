"""Run an emitted Triton module on CPU tensors with Triton's interpreter (the process must start with TRITON_INTERPRET=1).

The interpreter has no libdevice; importing this module puts torch's functions in its place, so that what calls it can run.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import ptx
import torch
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle
from triton_module import load_module

from plait.emit.triton import TritonSource
from plait.ir.index import Atom
from plait.tile.program import TileProgram

_RENAMED = {
    "rint": "round",
    "hypot": "hypot",
    "acosh": "arccosh",
    "asinh": "arcsinh",
    "atanh": "arctanh",
    "fast_dividef": "div",
}

_NARROW = {
    tl.bfloat16: (torch.bfloat16, np.uint16, float("inf")),
    tl.float8e4nv: (torch.float8_e4m3fn, np.uint8, 448.0),
    tl.float8e5: (torch.float8_e5m2, np.uint8, 57344.0),
}
_convert_float = interpreter._convert_float


def _convert_as_hardware(data: Any, source: Any, to: Any, rounding: Any) -> Any:
    """f32 to bf16 and fp8 as sm_90 does it: to nearest even, fp8 saturating. The interpreter's own cuts bits off."""
    if source is not tl.float32 or to not in _NARROW:
        return _convert_float(data, source, to, rounding)
    dtype, raw, limit = _NARROW[to]
    t = torch.from_numpy(np.ascontiguousarray(data)).clamp(-limit, limit).to(dtype)
    return t.view(torch.int16 if raw is np.uint16 else torch.uint8).numpy().view(raw).reshape(np.shape(data))


def _fused(self: Any, x: Any, y: Any, z: Any) -> Any:
    """One rounding, as the hardware does; the interpreter's own has two."""
    wide = np.float64 if x.data.dtype == np.float32 else np.longdouble
    out = x.data.astype(wide) * y.data.astype(wide) + z.data.astype(wide)
    return TensorHandle(out.astype(x.data.dtype), x.dtype.scalar)


def _assembly(self: Any, text: str, constraints: str, values: Any, kinds: Any, is_pure: bool, pack: int) -> Any:
    (x,) = values
    out = TensorHandle(ptx.run(text, constraints, x.data, pack), x.dtype.scalar)
    return types.SimpleNamespace(get_result=lambda i: out)


def _product(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """A matrix product of what the operands stand for, added up in the accumulator's type; the interpreter's own
    multiplies the bits of bf16."""
    operands = [
        _convert_float(x.data, x.dtype, tl.float32, None).view(np.float32) if x.dtype in _NARROW else x.data
        for x in (a, b)
    ]
    return TensorHandle(np.matmul(*[x.astype(d.data.dtype) for x in operands]) + d.data, d.dtype.scalar)


_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_and_index(tensor: Any, scope: Any) -> None:
    """A scalar that was computed can bound a loop: its array of one element is an index."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).item()))


interpreter._patch_lang_tensor = _patch_tensor_and_index
interpreter._convert_float = _convert_as_hardware
interpreter.InterpreterBuilder.create_dot = _product
interpreter.InterpreterBuilder.create_fma = _fused
interpreter.InterpreterBuilder.create_inline_asm = _assembly


def _by_torch(name: str) -> Any:
    """A libdevice function, through torch."""

    def call(*args: Any) -> Any:
        arrays = [np.asarray(a.handle.data) if isinstance(a, tl.core.tensor) else np.float32(a) for a in args]
        first = next(a for a in args if isinstance(a, tl.core.tensor))
        out = _apply(name, [torch.from_numpy(np.array(a)) for a in np.broadcast_arrays(*arrays)]).numpy()
        scalar = first.dtype
        kind = tl.block_type(scalar, list(out.shape)) if any(_is_block(a) for a in args) else scalar
        return tl.core.tensor(TensorHandle(out, scalar), kind)

    return call


def _is_block(a: Any) -> bool:
    return isinstance(a, tl.core.tensor) and a.type.is_block()


def _apply(name: str, args: list[torch.Tensor]) -> torch.Tensor:
    if name == "cospi":
        return torch.cos(args[0].double() * torch.pi).to(args[0].dtype)
    return getattr(torch, _RENAMED.get(name, name))(*args)


for _name in [n for n in dir(libdevice) if not n.startswith("_")]:
    setattr(libdevice, _name, _by_torch(_name))


def run_interpreted(
    source: TritonSource,
    parts: Sequence[TileProgram],
    tensors: Sequence[Sequence[torch.Tensor]],
    sizes: dict[str, int],
) -> int:
    """Run the kernel of `parts`; `tensors` are each part's buffers in order, outputs are written in place. Returns the failing code, or 0."""
    module = load_module(source)
    fault = torch.zeros(1, dtype=torch.int32)
    args: list[Any] = []
    for a in source.args:
        if a.kind == "buffer":
            args.append(tensors[a.part][a.index])
        elif a.kind == "draw":
            args.append(parts[a.part].draws[a.index])
        else:
            args.append(sizes[a.name] if a.kind == "symbol" else fault)
    n = source.programs.evaluate({Atom.make("sym", k): v for k, v in sizes.items()})
    if n:
        getattr(module, source.name)[(n,)](*args)
    return int(fault.item())
