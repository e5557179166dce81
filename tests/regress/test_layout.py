"""Strides, views and odd inputs: results lie in memory as eager's do, and every stride pattern is read right."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from harness import agree
from torch import Tensor, nn


def test_as_strided_on_an_intermediate_reads_eagers_layout() -> None:
    """The intermediate had another layout, so the same strides meant other elements."""

    def fn(x: Tensor) -> Tensor:
        return torch.as_strided(torch.roll(x, shifts=-1, dims=0), (5, 10), (4, 1), 0)

    agree(fn, (torch.arange(100.0).reshape(2, 5, 2, 5).to(memory_format=torch.channels_last),), exact=True)


def test_nearest_resize_keeps_the_layout_of_a_permuted_input() -> None:
    """The result came back contiguous."""

    def fn(x: Tensor) -> Tensor:
        return F.interpolate(x, size=(5, 6, 7), mode="nearest")

    agree(fn, (torch.randn(2, 5, 2, 3, 2).permute(0, 4, 1, 2, 3),), exact=True)


def test_pointwise_results_take_the_layout_of_a_transposed_operand() -> None:
    """copysign and floor division came back row-major."""

    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return a + b, a * 2, torch.copysign(a, b), torch.floor_divide(a, b)

    agree(fn, (torch.rand(6, 5).mT, torch.rand(5, 6) + 1), exact=True)


class GatedBlock(nn.Module):
    """Convolution, norm over channels, gate, scaled residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.beta = nn.Parameter(torch.ones(1, 8, 1, 1) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        u = self.first(x)
        centred = u - u.mean(1, keepdim=True)
        u = centred * torch.rsqrt(centred.square().mean(1, keepdim=True) + 1e-6)
        return x + self.second(F.silu(u)) * self.beta


def test_channels_last_chain_stays_channels_last() -> None:
    """The block gave visibly wrong images after fusion."""
    block = GatedBlock().to(memory_format=torch.channels_last)
    agree(block, (torch.randn(2, 8, 9, 11).to(memory_format=torch.channels_last),))


def test_sum_over_a_merged_expanded_axis_counts_every_copy() -> None:
    """The copies of an expanded axis were counted wrongly once a reshape had merged it."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        copies = x.unsqueeze(2).expand(-1, -1, 3, -1)
        z = copies.reshape(x.shape[0], x.shape[1] * 3, x.shape[2])
        return z.sum(1), z.sum((0, 1)), (z * 2).amax(-1)

    agree(fn, (torch.randn(2, 5, 6, dtype=torch.float64),))


def test_inputs_with_zero_and_overlapping_strides() -> None:
    """Expanded, overlapping, offset and permuted inputs were read by the wrong formula."""

    def fn(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, ...]:
        y = a * b + c
        centred = (y - y.mean(-1, keepdim=True)).transpose(0, 2).contiguous()
        return y, y.sum(1, keepdim=True) - d, centred, d.expand(4, 3, 5) + y

    a = torch.randn(1, 3, 1).expand(4, 3, 5)
    b = torch.as_strided(torch.randn(40), (4, 3, 5), (2, 1, 3), 5)
    c = torch.randn(5, 3, 8)[:, :, ::2].permute(2, 1, 0)
    agree(fn, (a, b, c, torch.randn(4, 1, 1)), (a, b, c.clone(), torch.randn(1, 1, 5)))


def test_split_cat_pad_stack_round_trip() -> None:
    """Uneven and empty pieces broke an invariant of the compiler."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        a, b, c = x.split([3, 1, 5], -1)
        y = torch.cat([c.sin(), a * 2, x[..., :0], b.exp()], -1)
        z = torch.stack([y, x.flip(-1)], 1)
        padded = F.pad(z, (-1, 2, 1, 0), value=0.25)
        turned = torch.stack(z.unbind(1)[::-1], -1)
        return y, padded, turned.roll(1, 0), torch.cat([y, y], 0).narrow(0, 1, 3)

    agree(fn, (torch.randn(2, 9, requires_grad=True),), train=True)


def test_appended_rows_and_casts_of_one_input() -> None:
    """Concatenations feeding pointwise work."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        longer = torch.cat([x, torch.zeros(6, x.shape[1])], 0)
        return longer.relu(), x.to(torch.float16), torch.cat([x * 2, x + 1], 1)

    agree(fn, (torch.randn(200, 96),))


def test_scaled_input_both_padded_and_multiplied() -> None:
    """One activation feeds a pad and a matrix product."""

    def fn(x: Tensor, s: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        y = x * s
        return F.pad(y, [0, 24]), torch.addmm(b, y, w)

    agree(fn, (torch.randn(56, 360), torch.rand(360), torch.randn(360, 64), torch.randn(64)))


def test_padding_fused_with_a_sum_keeps_its_leading_zero() -> None:
    """Offsets of packed sequences began with the total, since the pad had lost its boundary test."""

    def fn(mask: Tensor) -> tuple[Tensor, ...]:
        n = mask.sum(-1, dtype=torch.int32)
        offsets = F.pad(n.cumsum(0, dtype=torch.int32), (1, 0))
        return offsets, F.pad(n, (1, 0)), F.pad(n.float(), (2, 3), value=-1.0), n.max()

    agree(fn, (torch.ones(1, 16384, dtype=torch.bool),), (torch.rand(3, 300) > 0.5,), exact=True)


def test_nearest_resize_and_pixel_shuffle_pick_eagers_pixels() -> None:
    """Other pixels were picked for some sizes."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        doubled = F.interpolate(x, scale_factor=2, mode="nearest")
        return doubled, F.interpolate(x, size=(5, 9), mode="nearest"), F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2)

    agree(fn, (torch.arange(24.0).reshape(1, 2, 3, 4),), exact=True)


def test_parts_of_an_argument_that_training_keeps() -> None:
    """Results with gaps between their elements were read from a copy that had none, past its end."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return torch.unsafe_chunk(x, 3, dim=1)

    agree(fn, (torch.randn(6, 9, 4, requires_grad=True),), train=True)


def test_gradients_that_are_parts_of_the_gradient_they_come_from() -> None:
    """The gradient of what was written into a slice, or onto a diagonal, came from memory past the end of a copy."""

    def fn(x: Tensor, y: Tensor, d: Tensor, e: Tensor) -> tuple[Tensor, ...]:
        return torch.slice_scatter(x, y, 1, 2, 6), torch.diag_embed(d), torch.cat([e.mT, e.mT], 1)

    shapes = (5, 8), (5, 4), (6,), (3, 7)
    agree(fn, tuple(torch.randn(s, requires_grad=True) for s in shapes), train=True)


def test_a_part_of_an_argument_that_the_call_overwrites() -> None:
    """A part is taken before the write or after it, as the program says."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        before = x[1:, ::2].clone()
        x.mul_(y)
        return before, x[:, 1::2], x.diagonal() + 0

    agree(fn, (torch.randn(6, 8), torch.randn(6, 8)))


def test_calls_get_the_strides_that_eager_gives_them() -> None:
    """Some operators ask for aligned rows, for which eager pads; a value computed by a kernel came packed, and was refused."""
    seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    @torch.library.custom_op("plait_test::look", mutates_args=())
    def look(x: Tensor) -> Tensor:
        seen.append((tuple(x.shape), tuple(s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1)))
        return x.sum(-1)

    look.register_fake(lambda x: x.new_empty(x.shape[:-1]))

    def aligned(x: Tensor) -> Tensor:
        return look(F.pad(x * 2, (0, 1))[..., :7].expand(2, 3, 6, 7))

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.pad(x * 2, (0, 1))
        return look(y[..., :7]) + look(y[..., :7].contiguous()), x * 2

    def repeated(x: Tensor) -> Tensor:
        return look(F.pad(x, (1, 0)).expand(2, 4, 6, 8))

    def transposed(x: Tensor) -> Tensor:
        return look((x * 2).transpose(1, 3))

    for fn in (aligned, both, repeated, transposed):
        x = torch.randn(2, 1, 6, 7)
        torch._dynamo.reset()
        seen.clear()
        want = fn(x)
        eager = list(seen)
        seen.clear()
        torch.testing.assert_close(torch.compile(fn, backend="plait", options={"strict": True})(x), want)
        assert seen == eager, fn.__name__
