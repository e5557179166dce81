"""Integer and bool arithmetic: widths, wrapping, signs of quotients, promotion, and errors where eager has them."""

from __future__ import annotations

import torch
from harness import agree, both_raise
from torch import Tensor


def test_bytes_wrap_before_they_are_widened() -> None:
    """Sums and negations of bytes were computed in int and not wrapped before the next operator widened them."""

    def fn(x: Tensor, f: Tensor) -> tuple[Tensor, ...]:
        n = torch.neg(x)
        sums = (x + x).to(torch.int16), n, n < 4, n + f
        return *sums, (x * 3) // 2, (x - 200).to(torch.int32), x.to(torch.int8) >> 1

    x = torch.tensor([128, 6, 255, 0, 7, 100, 90, 201] * 5, dtype=torch.uint8)
    agree(fn, (x, torch.randn(40)), (x[0], torch.randn(())), exact=True)


def test_any_and_all_of_bytes_are_bytes() -> None:
    """They came back as bool, so that arithmetic on them no longer wrapped."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        a = torch.any(x)
        return a, torch.all(x), x.any(0), x.all(1), a * 200 + 100, torch.any(x.float(), 1)

    agree(fn, (torch.tensor([[0, 3, 0], [1, 7, 0]], dtype=torch.uint8),), exact=True)


def test_batched_product_of_int8_stays_int8() -> None:
    """It came back as int64."""

    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return torch.matmul(a, b), a.to(torch.int32) @ b.to(torch.int32), torch.bmm(a, b)

    def ints(*shape: int) -> Tensor:
        return torch.randint(-9, 9, shape, dtype=torch.int8)

    agree(fn, (ints(1, 1, 2), ints(1, 2, 2)), (ints(3, 4, 70), ints(3, 70, 5)), exact=True)


def test_most_negative_integer_divided_by_minus_one() -> None:
    """The division trap killed the process."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return torch.floor_divide(x, y), torch.remainder(x, y), x // -1

    low32, low64 = -(2**31), -(2**63)
    narrow = torch.tensor([low32, 7, -7], dtype=torch.int32), torch.tensor([-1, -1, 2], dtype=torch.int32)
    agree(fn, narrow, (torch.tensor([low64, 9] * 9), torch.tensor([-1, -2] * 9)), exact=True)


def test_quotients_and_remainders_of_negative_integers() -> None:
    """Remainders followed C, and an exact quotient was off by one through a float reciprocal."""

    def fn(a: Tensor, b: Tensor, scalar: Tensor) -> tuple[Tensor, ...]:
        whole = a // b, a % b, torch.fmod(a, b), torch.div(a, b, rounding_mode="trunc"), a // -3, a % 5, a % -5
        return *whole, torch.floor_divide(a, scalar), a / b

    a = torch.tensor([110, -110, 7, -7, 7, -7, 0, -1, 2**40])
    b = torch.tensor([55, 55, 3, 3, -3, -3, 4, 9, -7])
    small = a[:8].to(torch.int8), b[:8].to(torch.int8), torch.tensor(3, dtype=torch.int8)
    agree(fn, (a, b, torch.tensor(3)), small, exact=True)


def test_integer_division_by_zero_is_an_error() -> None:
    """It was a number, or a crash."""
    both_raise(lambda a, b: torch.floor_divide(a, b) + 1, torch.arange(5), torch.tensor([1, 0, 2, 0, 3]))


def test_values_beyond_32_bits() -> None:
    """Offsets and constants above two to the 31 were handled in 32 bits."""

    def fn(n: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        offset = torch.arange(n.shape[0]) * 2**33 + n * 4097
        wide = x.long() * 2**20
        return offset, offset // 3, offset % 1000003, x * x, x.sum(), wide, (x.float() * 1.0).long()

    agree(fn, (torch.arange(2**31 - 4, 2**31 + 36), torch.full((40,), 70000, dtype=torch.int32)), exact=True)


def test_sum_of_half_into_bool() -> None:
    """The generated code did not compile."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sum(x, dtype=torch.bool), torch.sum(x, -1, dtype=torch.bool)

    agree(fn, (torch.randn(3, 20).half(),), exact=True)


def test_running_sum_of_a_constant_has_the_dtype_asked_for() -> None:
    """A range of another dtype took its place."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        c = torch.ones((2, 4, 4), dtype=torch.bool).cumsum(1, dtype=torch.bfloat16)
        return c, c + x, torch.full((5,), 3).cumsum(0), torch.ones(6).cumsum(0, dtype=torch.int32)

    agree(fn, (torch.randn(2, 4, 4).bfloat16(),), exact=True)


def test_ldexp_promotes_both_operands() -> None:
    """The result had another dtype than eager's."""

    def fn(b: Tensor, i: Tensor, h: Tensor, f: Tensor) -> tuple[Tensor, ...]:
        return torch.ldexp(b, h), torch.ldexp(i, h.bfloat16()), torch.ldexp(h, f), torch.ldexp(f, i)

    flags, counts = torch.ones(3, 4, dtype=torch.bool), torch.randint(1, 4, (3, 4))
    agree(fn, (flags, counts, torch.randn(3, 4).half(), torch.randn(3, 4)))


def test_tokens_sorted_by_expert_and_put_back() -> None:
    """Histogram, offsets and ranks without leaving the graph."""

    def fn(x: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
        expert = logits.argmax(-1)
        order = torch.argsort(expert, stable=True)
        count = torch.nn.functional.one_hot(expert, 5).sum(0)
        start = count.cumsum(0) - count
        rank = torch.arange(expert.shape[0]) - start[expert[order]]
        y = x[order] * (expert[order] + 1).unsqueeze(1)
        back = torch.empty_like(y)
        back[order] = y
        return back, count, rank, (rank < 3).sum()

    agree(fn, (torch.randn(20, 6), torch.randn(20, 5)), (torch.randn(9, 6), torch.randn(9, 5)))


def test_dropout_gradient_of_integers() -> None:
    """The lowering kept the integers' type where eager's product with the scale is a float."""

    def fn(grad: Tensor, mask: Tensor) -> Tensor:
        return torch.ops.aten.native_dropout_backward(grad, mask, 1.25)

    agree(fn, (torch.randint(-5, 5, (4, 6)), torch.rand(4, 6) < 0.5))
