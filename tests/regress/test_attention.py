"""Attention written plainly, in the forms people use: masks, biases, grouped heads, rotary embeddings, sinks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from harness import agree
from torch import Tensor


def _leaf(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).requires_grad_()


def test_query_without_a_visible_key_is_zero_with_finite_gradients() -> None:
    """It gave NaN gradients."""

    def fn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    mask = torch.ones(2, 1, 6, 7, dtype=torch.bool).tril()
    mask[0, 0, 2] = mask[1, 0, 0] = False
    agree(fn, (_leaf(2, 3, 6, 8), _leaf(2, 3, 7, 8), _leaf(2, 3, 7, 8), mask), train=True)


def test_causal_attention_with_more_queries_than_keys() -> None:
    """Early queries see nothing; their gradients were NaN."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n, m = q.shape[-2], k.shape[-2]
        visible = torch.arange(m)[None] <= torch.arange(n)[:, None] + (m - n)
        s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible, -1e30)
        return s.softmax(-1) * visible.any(-1, keepdim=True) @ v

    agree(fn, tuple(_leaf(2, n, 8, scale=3.0) for n in (11, 3, 3)), train=True)


def test_grouped_heads_with_a_causal_mask() -> None:
    """Grouped query attention gave NaN."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        n = q.shape[2]
        visible = torch.ones(n, n, dtype=torch.bool).tril()
        return ((q @ k.mT) * q.shape[-1] ** -0.5).masked_fill(~visible, float("-inf")).softmax(-1) @ v

    agree(fn, (_leaf(2, 6, 13, 8), _leaf(2, 2, 13, 8), _leaf(2, 2, 13, 8)), train=True)


def test_linear_bias_with_an_odd_number_of_heads() -> None:
    """Head counts that are no power of two were not supported, and the slopes got no gradient."""

    def fn(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        i = torch.arange(q.shape[2])
        distance = (i[None] - i[:, None]).float()
        s = q @ k.mT * 0.3 + slopes[:, None, None] * distance
        return s.masked_fill(distance > 0, float("-inf")).softmax(-1, dtype=torch.float32).to(q.dtype) @ v

    slopes = (2.0 ** -torch.arange(1, 6).float()).requires_grad_()
    agree(fn, (*(_leaf(1, 5, 10, 8) for _ in range(3)), slopes), train=True)


def test_sink_takes_part_in_the_denominator_only() -> None:
    """A learned sink joins the softmax but has no value row."""

    def fn(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        s = q @ k.mT * 0.35
        n = s.shape[-1]
        s = s.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
        z = torch.cat([s, sink.view(1, -1, 1, 1).expand(s.shape[0], -1, n, 1)], -1)
        z = z - z.max(-1, keepdim=True).values
        return z.softmax(-1)[..., :-1] @ v

    agree(fn, (*(_leaf(2, 3, 9, 8) for _ in range(3)), _leaf(3)), train=True)


def test_learned_bias_table_gets_gradients_from_every_use() -> None:
    """Biases inside fused attention failed, or their gradients had the wrong shape."""

    def fn(q: Tensor, k: Tensor, v: Tensor, table: Tensor, temperature: Tensor) -> Tensor:
        i = torch.arange(q.shape[2])
        distance = (i[:, None] - i[None]).clamp(-3, 3) + 3
        return ((q @ k.mT) * temperature + table[distance].permute(2, 0, 1)).softmax(-1) @ v

    temperature = torch.tensor(0.3, requires_grad=True)
    agree(fn, (*(_leaf(1, 2, 8, 8) for _ in range(3)), _leaf(7, 2), temperature), train=True)


def test_rotary_embedding_of_packed_interleaved_heads() -> None:
    """Slices of every other lane of a split tensor tripped the scheduler."""

    def turn(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)

    def fn(qkv: Tensor, angle: Tensor) -> tuple[Tensor, ...]:
        q, k, v = qkv.split([16, 8, 8], -1)
        q, k = q.unflatten(-1, (2, 8)).transpose(1, 2), k.unflatten(-1, (1, 8)).transpose(1, 2)
        c, s = angle.cos()[None, None], angle.sin()[None, None]
        return turn(q, c, s), turn(k, c, s), v.contiguous()

    angle = torch.outer(torch.arange(6.0), 100.0 ** (-torch.arange(4.0) / 4))
    agree(fn, (_leaf(2, 6, 32), angle), train=True)


def test_document_mask_that_changes_between_calls() -> None:
    """Masks of packed documents gave NaN when the packing changed."""

    def fn(q: Tensor, k: Tensor, v: Tensor, document: Tensor) -> Tensor:
        n = document.shape[0]
        visible = (document[:, None] == document[None]) & torch.ones(n, n, dtype=torch.bool).tril()
        return (q @ k.mT * 0.35).masked_fill(~visible, -torch.inf).softmax(-1) @ v

    def packed(*lengths: int) -> tuple[Tensor, ...]:
        document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        return *(torch.randn(2, sum(lengths), 8) for _ in range(3)), document

    agree(fn, packed(3, 1, 5), packed(7, 2), packed(1, 1, 1, 9))
