"""Arguments of a program as plain data: what a tensor is like, from which another like it is drawn, or its very values.

A recipe is a dict of numbers, strings and lists (a Python or JSON literal):

    {"value": 16}                                             a number
    {"dtype": "float32", "shape": [8, 64], "strides": [64, 1], "offset": 0, "device": "cpu", ...}     a tensor, with one of
        "floats": {"mean": ..., "quantiles": [...], "zero": share, "nan": share, "inf": share, "-inf": share, "whole": True}
        "integers": {"low": 0, "high": 9, "order": "any" | "sorted" | "permutation" | "steps"}
        "true": share                                         bools
        "exact": [...]                                        few elements
        "packed": 0                                           its very bytes: the number of a packed text
        "same as": 3                                          the tensor that argument 3 is

Sizes, strides and offsets count elements.
"""

from __future__ import annotations

import base64
import binascii
import ctypes
import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from plait.errors import UserError
from plait.plan.layout import room

Recipe = dict[str, Any]
_FEW = 16  # elements that are written down as they are: seeds, lengths, scales
_SAMPLE = 1 << 20  # elements that statistics are taken of
_SHARES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
_WHOLE = 2.0**24  # below it floats that count are taken for what they are
MOST_BYTES = 1 << 20
"""Of the values that a file may hold."""


# ---------------------------------------------------------------------------------------------------------- where it lies
def form_of(x: Tensor) -> Recipe:
    """Type, shape, strides and place, without values. Raises UserError for what has no strides."""
    if x.layout is not torch.strided:
        raise UserError(f"a tensor of layout {x.layout} cannot be written down", hint="only strided tensors can")
    return {
        "dtype": str(x.dtype).removeprefix("torch."),
        "shape": list(x.shape),
        "strides": list(x.stride()),
        "offset": x.storage_offset() if x.numel() else 0,
        "device": x.device.type,
    }


def elements(x: Tensor) -> Tensor:
    """The elements that a tensor has in memory, in one row: those that several indices share once."""
    x = x.detach().resolve_conj().resolve_neg().cpu()
    if _is_packed(x.shape, x.stride()):
        return x.as_strided((_span(x.shape, x.stride()),), (1,)).clone()
    return x[_once(x.shape, x.stride())].contiguous().flatten()


def laid_out(flat: Tensor, form: Recipe, device: str | None = None) -> Tensor:
    """A tensor of that form with those elements; `device`: in another place."""
    shape, strides, offset = form["shape"], form["strides"], form["offset"]
    wanted = device or form["device"]
    if math.prod(shape) == 0:
        return torch.empty(offset, dtype=flat.dtype, device=wanted).as_strided(shape, strides, offset)
    memory = torch.zeros(offset + room(shape, strides), dtype=flat.dtype)
    if _is_packed(shape, strides):
        memory[offset : offset + flat.numel()] = flat
    else:
        inner = memory.as_strided(shape, strides, offset)[_once(shape, strides)]
        inner.copy_(flat.view(inner.shape))
    return memory.to(wanted).as_strided(shape, strides, offset)


def count_of(form: Recipe) -> int:
    """How many elements it has in memory."""
    shape, strides = form["shape"], form["strides"]
    if _is_packed(shape, strides):
        return _span(shape, strides)
    return math.prod(1 if s == 0 else n for n, s in zip(shape, strides, strict=True))


def dtype_of(form: Recipe) -> torch.dtype:
    """The torch type that it names."""
    found = getattr(torch, str(form["dtype"]), None)
    if not isinstance(found, torch.dtype):
        raise UserError(
            f"this torch has no type {form['dtype']!r}", hint="use the torch that the file was written with"
        )
    return found


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def _is_packed(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Without gaps, or overlapping itself so much that its memory is no larger than it is."""
    return _span(shape, strides) <= math.prod(1 if s == 0 else n for n, s in zip(shape, strides, strict=True))


def _once(shape: Sequence[int], strides: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(0, 1) if s == 0 and n > 1 else slice(None) for n, s in zip(shape, strides, strict=True))


def to_bytes(flat: Tensor) -> bytes:
    """The bytes of a dense tensor that lies on the CPU."""
    return ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()) if flat.numel() else b""


def from_bytes(data: bytes, dtype: torch.dtype) -> Tensor:
    """The row of elements that they are."""
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


# ---------------------------------------------------------------------------------------------------------- what it is like
def recipes_of(args: Sequence[Any], names: Sequence[str], packed: list[str] | None = None) -> list[Recipe]:
    """One recipe an argument; with `packed` the very values, whose bytes are appended to it as text. Raises UserError naming
    the argument that is neither a number nor a strided tensor, and for values that are more than MOST_BYTES."""
    first: dict[int, int] = {}
    out: list[Recipe] = []
    room_left = MOST_BYTES
    for k, (x, name) in enumerate(zip(args, names, strict=True)):
        if not isinstance(x, Tensor):
            out.append({"value": plain_number(x, name)})
        elif first.setdefault(id(x), k) != k:
            out.append({"same as": first[id(x)]})
        elif packed is None or x.numel() <= _FEW:
            out.append(form_of(x) | _likeness(x))
        else:
            form = form_of(x)
            room_left -= count_of(form) * x.element_size()
            if room_left < 0:
                whole = sum(t.numel() * t.element_size() for t in args if isinstance(t, Tensor))
                raise UserError(
                    f"the values are {whole / 2**20:.1f} MiB, and a file holds {MOST_BYTES / 2**20:.0f} MiB",
                    hint="without values it draws others that are like them; or explain a smaller call",
                )
            out.append(form | {"packed": len(packed)})
            packed.append(base64.b64encode(zlib.compress(to_bytes(elements(x)), 9)).decode())
    return out


def plain_number(x: Any, name: str) -> bool | int | float:
    """A number as Python has it, sizes among them."""
    if isinstance(x, bool | float):
        return x
    if isinstance(x, int | torch.SymInt):
        return int(x)
    raise UserError(f"{name} is a {type(x).__name__}", hint="only tensors and numbers can be written down")


def _likeness(x: Tensor) -> Recipe:
    flat = elements(x)
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten()
    if flat.numel() <= _FEW:
        return {"exact": [_literal(v) for v in _wide(flat).tolist()]}
    if flat.dtype is torch.bool:
        return {"true": round(float(flat.double().mean()), 6)}
    return {"floats": _floats(flat)} if flat.is_floating_point() else {"integers": _integers(flat, x.shape[-1:])}


def _wide(flat: Tensor) -> Tensor:
    return flat.double() if flat.is_floating_point() else flat if flat.dtype is torch.bool else flat.to(torch.int64)


def _literal(v: Any) -> Any:
    """Numbers that no literal writes are words."""
    return str(v) if isinstance(v, float) and not math.isfinite(v) else v


def _floats(flat: Tensor) -> Recipe:
    low, high = _ends(flat)
    some = flat[:: -(-flat.numel() // _SAMPLE)].double()
    shares = {
        "zero": some == 0,
        "nan": some.isnan(),
        "inf": some == math.inf,
        "-inf": some == -math.inf,
    }
    out: Recipe = {name: float(hit.double().mean()) for name, hit in shares.items() if bool(hit.any())}
    rest = some[some.isfinite() & (some != 0)]
    if rest.numel():
        found = torch.quantile(
            rest[:: -(-rest.numel() // _SAMPLE)], torch.tensor(_SHARES, dtype=torch.float64)
        ).tolist()
        # the ends are the ends of all, not of the sample
        found[0], found[-1] = min(low, found[0]), max(high, found[-1])
        out |= {
            "mean": float(f"{float(rest.mean()):.4g}"),
            "quantiles": [found[0], *(float(f"{q:.6g}") for q in found[1:-1]), found[-1]],
        }
        if bool((rest == rest.round()).all()) and float(rest.abs().max()) < _WHOLE:
            out["whole"] = True
    return out


def _ends(flat: Tensor) -> tuple[float, float]:
    """Least and greatest finite value that is not zero; (inf, -inf) where there is none."""
    if flat.dtype.itemsize == 1:
        flat = flat.float()
    usable = flat.isfinite() & (flat != 0)
    if not bool(usable.any()):
        return math.inf, -math.inf
    found = flat[usable]
    return float(found.min()), float(found.max())


def _integers(flat: Tensor, last: Sequence[int]) -> Recipe:
    wide = flat.to(torch.int64)
    low, high = int(wide.min()), int(wide.max())
    out = {"low": low, "high": high, "order": "any"}
    if wide.numel() > _SAMPLE:
        return out
    steps = wide[1:] - wide[:-1]
    if bool((steps == steps[0]).all()):
        return out | {"order": "steps", "low": int(wide[0]), "step": int(steps[0])}
    if bool((steps >= 0).all()):
        return out | {"order": "sorted"}
    row = last[0] if last else 1
    if 1 < row == high - low + 1 and wide.numel() % row == 0:
        wanted = torch.arange(low, high + 1)
        if bool((wide.view(-1, row).sort(-1).values == wanted).all()):
            return out | {"order": "permutation", "row": row}
    return out


# ---------------------------------------------------------------------------------------------------------- another like it
def drawn(recipes: Sequence[Recipe], packed: Sequence[str] = (), device: str | None = None) -> list[Any]:
    """Arguments after recipes: the same ones every time. `device`: tensors lie there instead."""
    out: list[Any] = []
    for k, r in enumerate(recipes):
        if "value" in r:
            out.append(r["value"])
        elif "same as" in r:
            out.append(out[r["same as"]])
        else:
            dtype = dtype_of(r)
            if "packed" in r:
                flat = from_bytes(_unpacked(packed[r["packed"]], k), dtype)
            else:
                flat = _drawn(r, count_of(r), dtype, torch.Generator().manual_seed(k + 1))
            out.append(laid_out(flat, r, device))
    return out


def _unpacked(text: str, argument: int) -> bytes:
    try:
        return zlib.decompress(base64.b64decode(text, validate=True))
    except (binascii.Error, zlib.error, ValueError) as error:
        raise UserError(
            f"the values of argument {argument} are damaged: {error}", hint="write the file again"
        ) from error


def _drawn(r: Recipe, count: int, dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    if dtype.is_complex:
        parts = {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, torch.float16)
        return torch.view_as_complex(_drawn(r, 2 * count, parts, rng).view(count, 2))
    if "exact" in r:
        if dtype.is_floating_point:
            return torch.tensor([float(v) for v in r["exact"]], dtype=torch.float64).to(dtype)
        return torch.tensor(r["exact"], dtype=torch.bool if dtype is torch.bool else torch.int64).to(dtype)
    if "true" in r:
        share: float = r["true"]
        return torch.rand(count, generator=rng) < share
    if "integers" in r:
        return _drawn_integers(r["integers"], count, rng).to(dtype)
    return _drawn_floats(r["floats"], count, rng).to(dtype)


def _drawn_floats(r: Recipe, count: int, rng: torch.Generator) -> Tensor:
    if "quantiles" in r:
        at = torch.tensor(_SHARES, dtype=torch.float64)
        ends = torch.tensor(r["quantiles"], dtype=torch.float64)
        u = torch.rand(count, generator=rng, dtype=torch.float64)
        k = torch.searchsorted(at, u, right=True).clamp(1, len(_SHARES) - 1)
        # a weighted mean and no difference: ends may be as far apart as the type has numbers
        t = (u - at[k - 1]) / (at[k] - at[k - 1])
        out = ends[k - 1] * (1 - t) + ends[k] * t
        # both ends are met
        out[torch.randint(count, (2,), generator=rng)] = ends[[0, -1]]
    else:
        out = torch.zeros(count, dtype=torch.float64)
    if r.get("whole"):
        out = out.round()
    u, reach = torch.rand(count, generator=rng, dtype=torch.float64), 0.0
    for name, value in (("zero", 0.0), ("nan", math.nan), ("inf", math.inf), ("-inf", -math.inf)):
        if name in r:
            hit = (u >= reach) & (u < reach + r[name])
            reach += r[name]
            out[hit] = value
            if not bool(hit.any()):
                out[torch.randint(count, (1,), generator=rng)] = value
    return out


def _drawn_integers(r: Recipe, count: int, rng: torch.Generator) -> Tensor:
    low: int = r["low"]
    order, rows = r["order"], r.get("row", 1)
    if order == "steps":
        step: int = r["step"]
        return torch.arange(count) * step + low
    if order == "permutation":
        return torch.cat([torch.randperm(rows, generator=rng) + low for _ in range(count // rows)])
    # the greatest number there is has no successor to stop before
    found = torch.randint(low, min(r["high"] + 1, torch.iinfo(torch.int64).max), (count,), generator=rng)
    return found.sort().values if order == "sorted" else found
