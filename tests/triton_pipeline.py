"""Whole functions through import, planning and lowering for a GPU, run by Triton's interpreter and compared with eager.

As a program (TRITON_INTERPRET=1) it runs every function and prints one JSON line each: {"case": name, "error": text or ""}.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from plait.compiler import plan_and_lower, simplify
from plait.frontend.externs import decompositions
from plait.frontend.fx_import import import_fx
from plait.options import Options
from plait.plan.device import SPECS
from plait.plan.layout import Layouts
from plait.runtime.assemble import assemble
from plait.runtime.link import link

FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {}


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def function(*args: torch.Tensor) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function with its arguments."""

    def add(f: Callable[..., Any]) -> Callable[..., Any]:
        FUNCTIONS[f.__name__] = (f, args)
        return f

    return add


BF16 = torch.bfloat16


@function(randn(5, 48, dtype=BF16), randn(48, dtype=BF16))
def rmsnorm(x, w):
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


@function(randn(4, 3, 17))
def softmax(x):
    return torch.softmax(x, -1), torch.log_softmax(x, 1), x.logsumexp(0)


@function(randn(6, 40), randn(6, 40), randn(40), randn(40))
def add_layernorm(x, r, w, b):
    return F.layer_norm(x + r, (40,), w, b)


@function(randn(2, 8, 4, 4), randn(8), randn(8))
def groupnorm_silu(x, w, b):
    return F.silu(F.group_norm(x, 2, w, b))


@function(randn(3, 2, 16, dtype=BF16), randn(3, 16, dtype=BF16), randn(3, 16, dtype=BF16))
def rope(q, cos, sin):
    a, b = q.chunk(2, -1)
    return q * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]


@function(randn(9, 33), torch.arange(9) * 3)
def cross_entropy(x, t):
    return F.cross_entropy(x, t)


@function(randn(12, 3), torch.tensor([[0, 11, -1], [5, 3, 2]]))
def embedding(w, i):
    return F.embedding(i.clamp(min=0), w) * 2, w[i]


@function(randn(7, 20))
def reductions(x):
    return x.mean(-1), x.var(-1), x.amax(-1), x.abs().sum(-1), (x**2).sum(), x.amin(0), x.prod(1), (x > 1).any(0)


@function(randn(6, 9))
def indices(x):
    return x.argmax(), x.argmin(-1), x.argmax(0), x.max(-1), x.cumsum(0), x.cumsum(-1), x.cummax(-1).values


@function(randn(5, 64))
def block_quant(x):
    y = x.unflatten(-1, (-1, 16))
    s = torch.exp2(torch.ceil(torch.log2(y.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 448.0)))
    return (y / s).flatten(-2).to(torch.float8_e4m3fn), s.squeeze(-1)


@function(randn(4, 10), randn(10, 4))
def transposed(x, y):
    return (x + y.t()).contiguous(), (x.t() * y).sum(1), torch.cat((x, y.t()), 0), torch.stack((x, y.t()), 1)


@function(randn(3, 10), torch.randint(-9, 9, (3, 10)), torch.randint(1, 5, (3, 10)))
def integers(x, a, b):
    return a // b, a % b, a * b - a, torch.bitwise_xor(a, b), (a > b) & (x > 0), a.sum(), a.amax(1), a.float() / b


@function(randn(2, 3, 8, 8))
def windows(x):
    return (
        F.pad(x, (1, 2, 0, 1), value=1.5),
        torch.roll(x, (1, -2), (2, 3)),
        x.flip(-1),
        x[:, :, ::2, 1:] + 1,
        x.tril(1),
    )


@function(randn(40))
def elementary(x):
    y = x.abs() + 0.1
    out = [
        f(x) for f in (torch.sin, torch.tanh, torch.erf, F.gelu, F.softplus, torch.expm1, torch.sigmoid, torch.floor)
    ]
    return *out, y.log1p(), y.rsqrt(), y.pow(1.7), torch.atan2(x, y), x.remainder(0.3), torch.where(x > 0, x, y)


@function(randn(70, 20))
def columns(x):
    return x.sum(0), x.amax(0), (x * x).mean(0), x.std(0)


@function(randn(8, 24, dtype=torch.float16), randn(24, dtype=torch.float16))
def halves(x, w):
    y = F.layer_norm(x, (24,), w)
    return y, (y.float() * 2).to(torch.float16), x.sum(-1), F.gelu(x, approximate="tanh")


@function(randn(3, 4, 5).double())
def doubles(x):
    return torch.softmax(x, 1), x.exp().sum((0, 2)), x / 3, x.to(torch.float32), x.var(-1)


def compiled(f: Callable[..., Any], args: tuple[torch.Tensor, ...]) -> Callable[..., Any]:
    """f for an H200, its kernels in Triton."""

    def flat(*a: torch.Tensor) -> Any:
        return torch.utils._pytree.tree_leaves(f(*a))

    gm = make_fx(torch.func.functionalize(flat), decomposition_table=decompositions(), tracing_mode="fake")(*args)
    options = replace(Options.make(None, {}), backend="triton", strict=True)
    graph = import_fx(gm, args, numerics=options.numerics, rng=options.rng)
    whole = plan_and_lower(simplify(graph, SPECS["h200"], options), SPECS["h200"], options)
    return assemble(gm, whole, link(whole.graph, whole.plan.reading, whole.launches, Layouts(whole.graph)), options)


def wrong(name: str) -> str:
    """What differs from eager, or nothing."""
    import triton_interpreter  # noqa: F401  (gives the interpreter its libdevice)

    f, args = FUNCTIONS[name]
    try:
        got = compiled(f, args)(*args)
    except Exception:
        return traceback.format_exc()[-3000:]
    for i, (g, w) in enumerate(zip(got, torch.utils._pytree.tree_leaves(f(*args)), strict=True)):
        tolerance = 2e-5 if w.dtype in (torch.float32, torch.float64) else 2**-7
        floor = tolerance * float(w.double().abs().max()) if w.is_floating_point() else 0.0
        if g.dtype is not w.dtype or not torch.allclose(g.double(), w.double(), tolerance, floor, equal_nan=True):
            return f"output {i}: {g} {w}"
    return ""


if __name__ == "__main__":
    for each in sys.argv[1:] or FUNCTIONS:
        print(json.dumps({"case": each, "error": wrong(each)}), flush=True)
