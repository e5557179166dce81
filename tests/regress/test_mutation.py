"""Programs that write to their inputs, to views of them, or to what they read: order and sharing must be eager's."""

from __future__ import annotations

import torch
from harness import agree
from torch import Tensor


def test_copy_holds_the_values_from_before_its_source_changes() -> None:
    """The destination of a full-slice copy ended up with later values of the source."""

    def fn(target: Tensor, source: Tensor) -> Tensor:
        target[0:, :] = source[0:, :]
        source.mul_(3.0)
        return source.sum(0)

    agree(fn, (torch.zeros(3, 4), torch.arange(12.0).reshape(3, 4)), exact=True)


def test_rows_move_down_inside_one_tensor() -> None:
    """Without a real temporary the first row was copied everywhere."""

    def fn(history: Tensor) -> Tensor:
        history[1:] = history[:-1].clone()
        return history

    agree(fn, (torch.randn(3, 16, 16),), (torch.randn(33, 7),), exact=True)


def test_indexed_store_then_read_back_to_front() -> None:
    """The flipped read was fused with the write-back, so that some rows were added twice."""

    def fn(x: Tensor, rows: Tensor) -> Tensor:
        x[rows] = x[rows] * 2.0
        x.add_(x.flip(0))
        return x.sum()

    agree(fn, (torch.rand(4, 8), torch.arange(4)), (torch.rand(32, 33), torch.arange(32)))


def test_augmented_assignment_with_a_repeated_index() -> None:
    """All reads come before all stores, so the value doubles once."""

    def fn(x: Tensor, rows: Tensor) -> Tensor:
        x[rows] += x[rows]
        return x

    twice = torch.tensor([[-0.8, 0.1]], dtype=torch.float64), torch.tensor([0, 0])
    agree(fn, twice, (torch.randn(5, 9), torch.tensor([3, 3, 1, 1, 1])), exact=True)


def test_momentum_buffer_that_is_read_after_its_update() -> None:
    """The buffer's memory was handed on while a later kernel still read it."""

    def fn(p1: Tensor, p2: Tensor, x: Tensor, m1: Tensor, m2: Tensor) -> Tensor:
        low = x.bfloat16()
        hidden = low @ p1.bfloat16()
        y = hidden @ p2.bfloat16()
        g2 = hidden.t() @ y
        g1 = low.t() @ (y @ p2.bfloat16().t())
        m1.lerp_(g1.float(), 0.05)
        p1.add_(m1, alpha=-0.01)
        m2.lerp_(g2.float(), 0.05)
        p2.add_(m2, alpha=-0.01)
        return y.float().mean()

    agree(fn, tuple(torch.randn(32, 32) * 0.1 for _ in range(5)))


def test_view_of_an_input_that_overlaps_a_mutated_one() -> None:
    """The returned view showed other rows; an exception is acceptable, wrong rows are not."""

    def fn(whole: Tensor, tail: Tensor) -> Tensor:
        whole.add_(100)
        return tail[0]

    base = torch.arange(24, dtype=torch.float64).reshape(4, 6)
    agree(fn, (base, base[1:]), exact=True, may_raise=True)


def test_rows_written_to_a_cache_through_a_flat_view() -> None:
    """The cache must hold exactly the new rows."""

    def fn(cache: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
        flat = cache.view(-1, cache.shape[-1])
        flat[slots] = rows
        return rows.sum()

    agree(fn, (torch.zeros(512, 16, 64), torch.tensor([3, 700, 41, 8000]), torch.randn(4, 64)))


def test_equal_results_are_two_objects_and_a_view_is_a_view() -> None:
    """Equal expressions collapsed into one tensor, or a view that changes nothing came back as the tensor itself."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        a, b = x + 1, x + 1
        return a, b, a.view(a.shape), x.view(-1)

    agree(fn, (torch.randn(4, 6),), exact=True)


def test_inner_value_of_a_familiar_pattern_is_also_a_result() -> None:
    """Fusing a norm and a GELU dropped the sum inside, which the program returns as well."""

    def fn(x: Tensor, skip: Tensor, b: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        h = x + b + skip
        n = torch.nn.functional.layer_norm(h, (h.shape[-1],), w, None, 1e-5)
        return n, h, torch.nn.functional.gelu(n + b)

    agree(fn, (torch.randn(3, 7, 24), torch.randn(3, 7, 24), torch.randn(24), torch.randn(24)))


def test_segment_sums_are_complete_before_they_are_gathered() -> None:
    """The gather read partial sums when both shared a loop."""

    def fn(x: Tensor, segment: Tensor, start: Tensor) -> Tensor:
        u = x * x + 0.01
        total = start.index_add(0, segment, u)
        return u / (total[segment] + 1e-6)

    x = torch.rand(200, 3)
    one = (x, torch.zeros(200, dtype=torch.long), torch.zeros(1, 3))
    agree(fn, one, (x.clone(), torch.randint(0, 7, (200,)), torch.zeros(7, 3)))


def test_mask_built_by_an_indexed_store() -> None:
    """A mask stored in the graph and read by a softmax crashed the code generator."""

    def fn(x: Tensor) -> Tensor:
        n = x.shape[-1]
        mask = torch.full((n, n), -10000.0)
        i = torch.arange(n)
        mask[i.unsqueeze(0), i.unsqueeze(1)] = 0
        return torch.softmax(x + mask, -1)

    agree(fn, (torch.randn(8, 8),))
