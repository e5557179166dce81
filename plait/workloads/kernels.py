"""Fusion workloads in plain PyTorch: what a user writes before anyone optimises it.

Each workload is `make(device, scale) -> Workload`, `scale` being "gpu" (fills a data-centre GPU) or "cpu" (two cores).
`bytes_moved` is the least traffic one pass must make, each input read once and each output written once; `flops` is the
arithmetic of its matrix products. With a machine's measured ceilings they give the floor no implementation can beat.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Fn = Callable[..., Any]


@dataclass
class Workload:
    """A program, its arguments and what it must cost at least. `hand`: peers that a person rewrote, with the same arguments."""

    fn: Fn
    args: tuple[Any, ...]
    bytes_moved: int = 0
    flops: int = 0
    train: bool = False
    hand: dict[str, Fn] = field(default_factory=dict)
    # a program that drops elements at random: the probability, and the same program without dropping but with its scaling
    drop: float = 0.0
    undropped: Fn | None = None


Maker = Callable[[str, str], Workload]
WORKLOADS: dict[str, Maker] = {}


def workload(make: Maker) -> Maker:
    """Register under the function's name, in order of definition."""
    WORKLOADS[make.__name__] = make
    return make


class _Make:
    """Random tensors for one workload, in its device's usual dtype."""

    def __init__(self, device: str, scale: str) -> None:
        self.device, self.gpu = device, scale == "gpu"
        self.dtype = torch.bfloat16 if self.gpu else torch.float32

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype or self.dtype)

    def ids(self, limit: int, *shape: int) -> Tensor:
        return torch.randint(0, limit, shape, device=self.device)


def _nbytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def rms_norm(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    """RMS norm as people write it: statistics in float32, the result back in the input's dtype, then the weight."""
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * w


# ------------------------------------------------------------------ memory-bound: vertical, reduction and input fusion


@workload
def l2norm(device: str, scale: str) -> Workload:
    """Rows divided by their length."""
    n, d = (16384, 4096) if scale == "gpu" else (4096, 2048)
    x = _Make(device, scale)(n, d, dtype=torch.float32)
    return Workload(lambda x: x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-12), (x,), 2 * _nbytes(x))


@workload
def rmsnorm(device: str, scale: str) -> Workload:
    """RMS norm."""
    randn = _Make(device, scale)
    n, d = (16384, 4096) if scale == "gpu" else (4096, 2048)
    x, w = randn(n, d), randn(d)
    return Workload(rms_norm, (x, w), 2 * _nbytes(x))


def _add_layer_norm(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x + r, (x.shape[-1],), w, b)


@workload
def add_layernorm_dropout(device: str, scale: str) -> Workload:
    """Residual, layer norm, dropout."""
    randn = _Make(device, scale)
    n, d = (16384, 4096) if scale == "gpu" else (4096, 2048)
    x, r, w, b = randn(n, d), randn(n, d), randn(d), randn(d)

    def fn(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.dropout(F.layer_norm(x + r, (x.shape[-1],), w, b), 0.1, True)

    def undropped(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return _add_layer_norm(x, r, w, b) / 0.9

    return Workload(fn, (x, r, w, b), 3 * _nbytes(x), drop=0.1, undropped=undropped)


@workload
def add_layernorm_train(device: str, scale: str) -> Workload:
    """Residual and layer norm, forward and backward."""
    randn = _Make(device, scale)
    n, d = (16384, 4096) if scale == "gpu" else (4096, 2048)
    x, r, w, b = randn(n, d), randn(n, d), randn(d), randn(d)
    # forward: read x, r, write y and x+r; backward: read the gradient and x+r, write one gradient (x and r share it)
    return Workload(_add_layer_norm, (x, r, w, b), 7 * _nbytes(x), train=True)


@workload
def softmax_wide(device: str, scale: str) -> Workload:
    """Softmax over rows much longer than a block."""
    n, d = (2048, 131072) if scale == "gpu" else (64, 131072)
    x = _Make(device, scale)(n, d)
    return Workload(lambda x: torch.softmax(x.float(), -1).to(x.dtype), (x,), 2 * _nbytes(x))


@workload
def swiglu_act(device: str, scale: str) -> Workload:
    """The gate of a SwiGLU layer."""
    randn = _Make(device, scale)
    n, d = (16384, 14336) if scale == "gpu" else (2048, 4096)
    a, b = randn(n, d), randn(n, d)
    return Workload(lambda a, b: F.silu(a) * b, (a, b), 3 * _nbytes(a))


@workload
def rmsnorm_fp8_quant(device: str, scale: str) -> Workload:
    """RMS norm, then float8 with one scale a row."""
    randn = _Make(device, scale)
    n, d = (16384, 4096) if scale == "gpu" else (4096, 2048)
    x, w = randn(n, d), randn(d)

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = rms_norm(x, w).float()
        s = y.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 448.0
        return (y / s).to(torch.float8_e4m3fn), s

    return Workload(fn, (x, w), _nbytes(x) + x.numel())


@workload
def rmsnorm_block_quant(device: str, scale: str) -> Workload:
    """RMS norm, then float8 with a power-of-two scale for every 32 elements."""
    randn = _Make(device, scale)
    n, d = (16384, 4096) if scale == "gpu" else (4096, 2048)
    x, w = randn(n, d), randn(d)

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.unflatten(rms_norm(x, w).float(), -1, (-1, 32))
        s = torch.exp2(torch.ceil(torch.log2(y.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 448.0)))
        return (y / s).flatten(-2).to(torch.float8_e4m3fn), s.squeeze(-1)

    return Workload(fn, (x, w), _nbytes(x) + x.numel() + x.numel() // 8)


def _rotate(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


@workload
def qk_norm_rope(device: str, scale: str) -> Workload:
    """RMS norm of queries and keys, then rotary embedding."""
    randn = _Make(device, scale)
    t, hq, hk, d = (8192, 32, 8, 128) if scale == "gpu" else (1024, 16, 4, 64)
    q, k = randn(t, hq, d), randn(t, hk, d)
    wq, wk, cos, sin = randn(d), randn(d), randn(t, d), randn(t, d)

    def fn(q: Tensor, k: Tensor, wq: Tensor, wk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = rms_norm(q, wq), rms_norm(k, wk)
        c, s = cos[:, None], sin[:, None]
        return q * c + _rotate(q) * s, k * c + _rotate(k) * s

    return Workload(fn, (q, k, wq, wk, cos, sin), 2 * _nbytes(q, k) + _nbytes(cos, sin))


@workload
def cross_entropy_train(device: str, scale: str) -> Workload:
    """Cross-entropy of given logits, forward and backward."""
    make = _Make(device, scale)
    n, v = (8192, 128256) if scale == "gpu" else (256, 32000)
    x, t = make(n, v), make.ids(v, n)
    return Workload(lambda x: F.cross_entropy(x.float(), t), (x,), 3 * _nbytes(x), train=True)


@workload
def groupnorm_silu(device: str, scale: str) -> Workload:
    """Group norm and SiLU over images."""
    randn = _Make(device, scale)
    n, c, hw = (32, 320, 64) if scale == "gpu" else (4, 320, 32)
    x, w, b = randn(n, c, hw, hw), randn(c), randn(c)
    return Workload(lambda x, w, b: F.silu(F.group_norm(x, 32, w, b)), (x, w, b), 2 * _nbytes(x))


@workload
def multi_reduce_shared_input(device: str, scale: str) -> Workload:
    """Six reductions of one tensor."""
    n, d = (16384, 8192) if scale == "gpu" else (4096, 2048)
    x = _Make(device, scale)(n, d)

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = x.float()
        return y.mean(-1), y.var(-1), x.amax(-1), y.abs().sum(-1), (y**2).sum(-1), x.amin(-1)

    return Workload(fn, (x,), _nbytes(x))


@workload
def horizontal_small(device: str, scale: str) -> Workload:
    """Sixty-four small independent pointwise operations of slightly different sizes."""
    randn = _Make(device, scale)
    xs = [randn(65536 + 256 * i) for i in range(64)]
    ys = [randn(65536 + 256 * i) for i in range(64)]

    def fn(xs: list[Tensor], ys: list[Tensor]) -> list[Tensor]:
        return [torch.tanh(x) * y + x for x, y in zip(xs, ys)]

    return Workload(fn, (xs, ys), 3 * _nbytes(*xs))


# ---------------------------------------------------------------------------- contractions with prologue and epilogue


@workload
def linear_bias_gelu(device: str, scale: str) -> Workload:
    """Linear layer and GELU."""
    randn = _Make(device, scale)
    m, k, n = (8192, 4096, 16384) if scale == "gpu" else (512, 1024, 4096)
    x, w, b = randn(m, k), randn(n, k) / k**0.5, randn(n)
    return Workload(lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"), (x, w, b), flops=2 * m * k * n)


def _norm_linear(device: str, scale: str, m: int, d: int) -> tuple[Fn, tuple[Tensor, ...]]:
    randn = _Make(device, scale)
    x, r, g, beta, b = randn(m, d), randn(m, d), randn(d), randn(d), randn(d)
    w = randn(d, d) / d**0.5

    def fn(x: Tensor, r: Tensor, g: Tensor, beta: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.linear(F.layer_norm(x + r, (x.shape[-1],), g, beta), w, b)

    return fn, (x, r, g, beta, w, b)


@workload
def residual_layernorm_linear(device: str, scale: str) -> Workload:
    """Residual, layer norm, linear layer."""
    m, d = (8192, 4096) if scale == "gpu" else (512, 1024)
    fn, args = _norm_linear(device, scale, m, d)
    return Workload(fn, args, flops=2 * m * d * d)


@workload
def residual_layernorm_linear_m16(device: str, scale: str) -> Workload:
    """The same with few rows, where reading the weight is all the work."""
    fn, args = _norm_linear(device, scale, 16, 4096 if scale == "gpu" else 1024)
    return Workload(fn, args, _nbytes(args[4]))


def _swiglu(device: str, scale: str, m: int) -> Workload:
    randn = _Make(device, scale)
    d, f = (4096, 14336) if scale == "gpu" else (512, 1792)
    x, gate, up, down = randn(m, d), randn(f, d) / d**0.5, randn(f, d) / d**0.5, randn(d, f) / f**0.5

    def fn(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    return Workload(fn, (x, gate, up, down), _nbytes(gate, up, down), 6 * m * d * f)


@workload
def swiglu_mlp_m4096(device: str, scale: str) -> Workload:
    """SwiGLU feed-forward layer over many rows."""
    return _swiglu(device, scale, 4096 if scale == "gpu" else 512)


@workload
def swiglu_mlp_m1(device: str, scale: str) -> Workload:
    """SwiGLU feed-forward layer over one row, as in decoding."""
    return _swiglu(device, scale, 1)


@workload
def lora_linear(device: str, scale: str) -> Workload:
    """Linear layer with a low-rank addition."""
    randn = _Make(device, scale)
    m, d, r = (8192, 4096, 16) if scale == "gpu" else (512, 1024, 16)
    x, w = randn(m, d), randn(d, d) / d**0.5
    a, b = randn(r, d) / d**0.5, randn(d, r) / r**0.5

    def fn(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return F.linear(x, w) + 2.0 * F.linear(F.linear(x, a), b)

    return Workload(fn, (x, w, a, b), flops=2 * m * d * d)


@workload
def linear_cross_entropy(device: str, scale: str) -> Workload:
    """The last linear layer of a language model and its loss."""
    make = _Make(device, scale)
    n, d, v = (8192, 4096, 128256) if scale == "gpu" else (256, 512, 32000)
    x, w, t = make(n, d), make(v, d) / d**0.5, make.ids(v, n)
    return Workload(lambda x, w: F.cross_entropy(F.linear(x, w).float(), t), (x, w), flops=2 * n * d * v)


@workload
def linear_cross_entropy_train(device: str, scale: str) -> Workload:
    """The same, forward and backward."""
    work = linear_cross_entropy(device, scale)
    return Workload(work.fn, work.args, flops=3 * work.flops, train=True)


# ----------------------------------------------------------------------------------------- attention, written plainly

ScoreMod = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain_attention(q: Tensor, k: Tensor, v: Tensor, score_mod: ScoreMod | None = None, causal: bool = False) -> Tensor:
    """q, k, v: (batch, heads, length, head_dim). `score_mod(scores, i, j)` is any code over scores and positions."""
    s = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    i = torch.arange(q.shape[-2], device=q.device)[:, None]
    j = torch.arange(k.shape[-2], device=q.device)[None]
    if score_mod is not None:
        s = score_mod(s, i, j)
    if causal:
        s = s.masked_fill(j > i, float("-inf"))
    return torch.softmax(s, -1).to(q.dtype) @ v


def _causal_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _attention(
    device: str,
    scale: str,
    fraction: float,
    hand: Fn | None = None,
    train: bool = False,
    causal: bool = False,
    score_mod: ScoreMod | None = None,
) -> Workload:
    randn = _Make(device, scale)
    b, h, n, d = (4, 32, 4096, 128) if scale == "gpu" else (1, 8, 1024, 64)
    q, k, v = randn(b, h, n, d), randn(b, h, n, d), randn(b, h, n, d)
    flops = int(4 * b * h * n * n * d * fraction * (3.5 if train else 1))
    return Workload(
        lambda q, k, v: plain_attention(q, k, v, score_mod, causal),
        (q, k, v),
        flops=flops,
        train=train,
        hand={"sdpa": hand} if hand else {},
    )


@workload
def attention_full(device: str, scale: str) -> Workload:
    """Attention without a mask."""
    return _attention(device, scale, 1.0, F.scaled_dot_product_attention)


@workload
def attention_causal(device: str, scale: str) -> Workload:
    """Causal attention."""
    return _attention(device, scale, 0.5, _causal_sdpa, causal=True)


@workload
def attention_causal_train(device: str, scale: str) -> Workload:
    """Causal attention, forward and backward."""
    return _attention(device, scale, 0.5, _causal_sdpa, train=True, causal=True)


@workload
def attention_softcap_causal(device: str, scale: str) -> Workload:
    """Causal attention whose scores are capped by a tanh."""
    return _attention(device, scale, 0.5, causal=True, score_mod=lambda s, i, j: 30 * torch.tanh(s / 30))


@workload
def attention_alibi_window(device: str, scale: str) -> Workload:
    """Causal attention in a sliding window, with a linear bias a head."""
    h, n, window = (32, 4096, 1024) if scale == "gpu" else (8, 1024, 256)
    slope = torch.exp2(-torch.arange(1, h + 1, device=device).float() * 8 / h)[:, None, None]

    def score_mod(s: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (s - slope * (i - j)).masked_fill(i - j > window, float("-inf"))

    fraction = (window - window * window / (2 * n)) / n
    return _attention(device, scale, fraction, causal=True, score_mod=score_mod)


@workload
def attention_decode_gqa(device: str, scale: str) -> Workload:
    """One query a sequence against a long cache of grouped keys and values."""
    randn = _Make(device, scale)
    b, hq, hk, n, d = (8, 32, 8, 32768, 128) if scale == "gpu" else (2, 8, 2, 8192, 64)
    q, k, v = randn(b, hq, 1, d), randn(b, hk, n, d), randn(b, hk, n, d)

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, h, m, d = q.shape
        g = k.shape[1]
        s = (q.view(b, g, h // g * m, d) @ k.transpose(-1, -2)).float() * d**-0.5
        return (torch.softmax(s, -1).to(q.dtype) @ v).view(b, h, m, d)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return Workload(fn, (q, k, v), _nbytes(k, v), hand={"sdpa": sdpa})


# -------------------------------------------------------------------------------------------------------- convolution


@workload
def conv_bn_relu(device: str, scale: str) -> Workload:
    """Convolution, batch norm in inference, ReLU."""
    randn = _Make(device, scale)
    n, c, hw = (64, 256, 56) if scale == "gpu" else (4, 64, 56)
    conv = torch.nn.Conv2d(c, c, 3, padding=1, bias=False)
    module = torch.nn.Sequential(conv, torch.nn.BatchNorm2d(c), torch.nn.ReLU())
    module = module.to(device, randn.dtype).eval()
    module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # its stub lacks the keyword
    x = randn(n, c, hw, hw).to(memory_format=torch.channels_last)
    return Workload(module, (x,), flops=2 * math.prod(x.shape) * c * 9)
