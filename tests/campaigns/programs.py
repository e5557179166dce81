"""Programs for campaigns that ask the same of all kinds of graph: small, and each of another kind.

Every maker gives (fn, args, train). The file stands alone (it needs torch and nothing else), so that a copy of it elsewhere is the
same program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Made = tuple[Callable[..., Any], list[Any], bool]
PROGRAMS: dict[str, Callable[[], Made]] = {}


def program(make: Callable[[], Made]) -> Callable[[], Made]:
    """Register under the function's name, seeded."""

    def seeded() -> Made:
        torch.manual_seed(0)
        return make()

    PROGRAMS[make.__name__] = seeded
    return make


@program
def softmax() -> Made:
    return (
        lambda x, m: torch.softmax(x.masked_fill(m, -1e9) * 0.3, -1),
        [torch.randn(48, 200), torch.rand(48, 200) < 0.2],
        False,
    )


@program
def norms() -> Made:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        y = F.layer_norm(x + x.mean(0), (96,), w, b)
        return F.gelu(y), y.pow(2).mean(-1)

    return fn, [torch.randn(64, 96), torch.randn(96), torch.randn(96)], False


@program
def attention() -> Made:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * 0.125
        causal = torch.ones(128, 128, dtype=torch.bool).tril()
        return torch.softmax(scores.masked_fill(~causal, float("-inf")), -1) @ v

    return fn, [torch.randn(2, 2, 128, 64) for _ in range(3)], False


@program
def attention_training() -> Made:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-1, -2) * 0.125, -1) @ v

    return fn, [torch.randn(2, 2, 128, 64, requires_grad=True) for _ in range(3)], True


@program
def mlp_training() -> Made:
    mlp = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 10))

    def fn(x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(mlp(x), labels)

    return fn, [torch.randn(32, 64), torch.randint(0, 10, (32,))], True


@program
def scatter() -> Made:
    def fn(x: Tensor, at: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.zeros_like(x).index_add(0, at, v * 2)
        x[at] = v.exp()
        return y + 1, x.sum(1)

    return fn, [torch.randn(40, 24), torch.randperm(40)[:16], torch.randn(16, 24)], False


@program
def several_graphs() -> Made:
    def fn(x: Tensor) -> Tensor:
        y = torch.tanh(x).sum(-1)
        torch._dynamo.graph_break()
        z = (x - y[:, None]).cumsum(1)
        torch._dynamo.graph_break()
        return z.amax(0) + z.amin(0)

    return fn, [torch.randn(30, 50)], False


@program
def shared_inputs() -> Made:
    """Readers of the same tensors that cost alike: which are tried first is a matter of ties."""

    def fn(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        return a.sin() + b, a.cos() + c, b.exp() * c, (a * b).sum(0), (b * c).sum(0), (a * c).sum(1), a.flip(1) * b

    return fn, [torch.randn(60, 44) for _ in range(3)], False


@program
def pointwise() -> Made:
    """Nothing but points: every plan must give the same bits."""

    def fn(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        a = torch.exp(-x.abs()) * w + y.t()
        b = torch.tanh(a.flip(0)) / (1.0 + x * x)
        c = F.pad(b[:, 3:], (1, 2)).sigmoid() * torch.where(y.t() > 0, x, a).sin()
        return a, b.t().contiguous(), torch.cat((b, c), 1), F.gelu(c)[::2], (a * 0.1).to(torch.bfloat16)

    return fn, [torch.randn(37, 50), torch.randn(50, 37), torch.randn(50)], False


@program
def dropout_training() -> Made:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return F.dropout(torch.relu(x @ w), 0.25, training=True).mean()

    return fn, [torch.randn(32, 64, requires_grad=True), torch.randn(64, 48, requires_grad=True)], True


@program
def dynamic_sizes() -> Made:
    x, y = torch.randn(24, 40), torch.randn(24, 16)
    for t in (x, y):
        torch._dynamo.mark_dynamic(t, 0)
    torch._dynamo.mark_dynamic(x, 1)
    return lambda x, y: torch.cat((x.softmax(-1), y.sigmoid()), 1).sum(0) + x.shape[0] * x.shape[1], [x, y], False
