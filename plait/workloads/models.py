"""Whole models with random weights: plain PyTorch, or the public model library's own code.

Each is `make(device, scale) -> Model`; "gpu" is the real size, "cpu" a small one that two cores run in well under a second
a step. Attention is the plain form throughout: fusing it is the work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Model:
    """`step(module, *args)` is one step: the output, or under `train` the loss."""

    module: nn.Module
    args: tuple[Any, ...]
    step: Callable[..., Any]
    train: bool = False

    def bound(self, module: nn.Module | None = None) -> Callable[..., Any]:
        """The step as a function of the arguments alone, over this module or a copy of it."""
        owner = self.module if module is None else module
        step = self.step
        return lambda *args: step(owner, *args)


class RMSNorm(nn.Module):
    """RMS norm with its statistics in float32."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in its half-split form."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class LlamaBlock(nn.Module):
    """One decoder layer with a static key/value cache, written in place."""

    k_cache: Tensor
    v_cache: Tensor

    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int, length: int, batch: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        kv = kv_heads * self.head_dim
        self.attn_norm, self.mlp_norm = RMSNorm(dim), RMSNorm(dim)
        self.q, self.k = nn.Linear(dim, dim, bias=False), nn.Linear(dim, kv, bias=False)
        self.v, self.o = nn.Linear(dim, kv, bias=False), nn.Linear(dim, dim, bias=False)
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.register_buffer("k_cache", torch.zeros(batch, kv_heads, length, self.head_dim))
        self.register_buffer("v_cache", torch.zeros(batch, kv_heads, length, self.head_dim))

    def forward(self, x: Tensor, pos: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        b, t, d = x.shape
        y = self.attn_norm(x)
        q = self.q(y).view(b, t, self.heads, self.head_dim).transpose(1, 2)
        k = self.k(y).view(b, t, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v(y).view(b, t, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotary(q, cos, sin), rotary(k, cos, sin)
        self.k_cache[:, :, pos] = k
        self.v_cache[:, :, pos] = v
        groups = self.heads // self.kv_heads
        keys, values = self.k_cache.repeat_interleave(groups, 1), self.v_cache.repeat_interleave(groups, 1)
        s = (q @ keys.transpose(-1, -2)) * self.head_dim**-0.5
        p = torch.softmax(s.float().masked_fill(~mask, float("-inf")), -1).to(x.dtype)
        x = x + self.o((p @ values).transpose(1, 2).reshape(b, t, d))
        y = self.mlp_norm(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class Llama(nn.Module):
    """Decoder: forward(ids (batch, t), pos (t,)) -> logits of the last position."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        dim: int = 2048,
        heads: int = 32,
        kv_heads: int = 8,
        hidden: int = 8192,
        layers: int = 16,
        vocab: int = 128256,
        length: int = 2048,
        batch: int = 1,
    ) -> None:
        super().__init__()
        self.length, self.vocab, head_dim = length, vocab, dim // heads
        self.embed, self.norm, self.head = nn.Embedding(vocab, dim), RMSNorm(dim), nn.Linear(dim, vocab, bias=False)
        self.blocks = nn.ModuleList(LlamaBlock(dim, heads, kv_heads, hidden, length, batch) for _ in range(layers))
        t = torch.outer(torch.arange(length).float(), 500000.0 ** (-torch.arange(0, head_dim, 2).float() / head_dim))
        t = torch.cat((t, t), -1)
        self.register_buffer("cos", t.cos())
        self.register_buffer("sin", t.sin())

    def forward(self, ids: Tensor, pos: Tensor) -> Tensor:
        x, cos, sin = self.embed(ids), self.cos[pos], self.sin[pos]
        mask = torch.arange(self.length, device=ids.device)[None] <= pos[:, None]
        for block in self.blocks:
            x = block(x, pos, cos, sin, mask)
        logits: Tensor = self.head(self.norm(x[:, -1:]))
        return logits


def _dtype(scale: str) -> torch.dtype:
    return torch.bfloat16 if scale == "gpu" else torch.float32


def _llama(device: str, scale: str, batch: int, prompt: bool) -> Model:
    small = {"dim": 256, "heads": 8, "kv_heads": 2, "hidden": 704, "layers": 4, "vocab": 4096, "length": 256}
    llama = Llama(batch=batch, **({} if scale == "gpu" else small))
    llama = llama.to(device, _dtype(scale)).eval()
    n = llama.length - 8 if prompt else 1
    pos = torch.arange(n, device=device) if prompt else torch.tensor([llama.length - 8], device=device)
    ids = torch.randint(0, llama.vocab, (batch, n), device=device)
    return Model(llama, (ids, pos), lambda m, ids, pos: m(ids, pos))


def _gpt2(device: str, scale: str) -> Model:
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {} if scale == "gpu" else {"n_layer": 2, "n_embd": 128, "n_head": 4, "vocab_size": 2048}
    batch, length = (8, 1024) if scale == "gpu" else (2, 128)
    config = GPT2Config(attn_implementation="eager", use_cache=False, **small)
    gpt2 = GPT2LMHeadModel(config).to(device, _dtype(scale)).train()
    ids = torch.randint(0, config.vocab_size, (batch, length), device=device)
    return Model(gpt2, (ids,), lambda m, ids: m(input_ids=ids, labels=ids).loss, train=True)


def _bert(device: str, scale: str, batch: int) -> Model:
    from transformers import BertConfig, BertModel

    small = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 512}
    length = 384 if scale == "gpu" else 96
    config = BertConfig(attn_implementation="eager", **({} if scale == "gpu" else small))
    bert = BertModel(config).to(device, _dtype(scale)).eval()
    ids = torch.randint(0, 30000, (batch, length), device=device)
    mask = torch.ones(batch, length, dtype=torch.long, device=device)
    mask[:, length * 3 // 4 :] = 0
    return Model(bert, (ids, mask), lambda m, ids, mask: m(input_ids=ids, attention_mask=mask).last_hidden_state)


def _vision(device: str, scale: str, kind: str, small: dict[str, Any]) -> Model:
    import transformers as tf

    options: dict[str, Any] = {"num_labels": 1000, **({} if scale == "gpu" else small)}
    if kind == "ViT":
        options["attn_implementation"] = "eager"
    config = getattr(tf, f"{kind}Config")(**options)
    module = getattr(tf, f"{kind}ForImageClassification")(config)
    module = module.to(device, _dtype(scale)).eval().to(memory_format=torch.channels_last)
    batch = 64 if scale == "gpu" else 1
    x = torch.randn(batch, 3, 224, 224, device=device, dtype=_dtype(scale)).to(memory_format=torch.channels_last)
    return Model(module, (x,), lambda m, x: m(pixel_values=x).logits)


_SMALL_RESNET = {"depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512], "layer_type": "basic"}
_SMALL_CONVNEXT = {"depths": [2, 2, 6, 2], "hidden_sizes": [40, 80, 160, 320]}
_SMALL_VIT = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 768}

MODELS: dict[str, Callable[[str, str], Model]] = {
    "llama1b_decode_b1": lambda d, s: _llama(d, s, 1, prompt=False),
    "llama1b_decode_b8": lambda d, s: _llama(d, s, 8, prompt=False),
    "llama1b_prefill": lambda d, s: _llama(d, s, 1, prompt=True),
    "gpt2_train_b8": _gpt2,
    "bert_base_b1": lambda d, s: _bert(d, s, 1),
    "bert_base_b32": lambda d, s: _bert(d, s, 32 if s == "gpu" else 4),
    "resnet50_b64": lambda d, s: _vision(d, s, "ResNet", _SMALL_RESNET),
    "convnext_tiny_b64": lambda d, s: _vision(d, s, "ConvNext", _SMALL_CONVNEXT),
    "vit_base_b64": lambda d, s: _vision(d, s, "ViT", _SMALL_VIT),
}
