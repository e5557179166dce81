"""What eager would do for a captured graph: operators, bytes, and what counts nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.frontend.baseline import Operator, operators
from plait.frontend.capture import capture
from plait.frontend.externs import decompositions


def _captured(fn: Callable[..., Any], *args: Tensor) -> list[tuple[str, tuple[Operator, ...]]]:
    """(kind, operators) of each graph, the backward's too where an argument wants a gradient."""
    seen: list[tuple[str, tuple[Operator, ...]]] = []

    def one(gm: Any, inputs: Any, kind: str) -> Any:
        seen.append((kind, operators(gm, kind == "backward")))

        def boxed(given: list[Any]) -> Any:
            return torch.fx.Interpreter(gm).boxed_run(given)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    def backend(gm: Any, inputs: Any) -> Any:
        return capture(gm, inputs, one, decompositions())

    out = torch.compile(fn, backend=backend, dynamic=False)(*args)
    if any(a.requires_grad for a in args):
        out.sum().backward()
    return seen


def _inference(fn: Callable[..., Any], *args: Tensor) -> tuple[Operator, ...]:
    ((_, found),) = _captured(fn, *args)
    return found


def test_views_move_nothing_and_count_as_what_they_show() -> None:
    x = torch.randn(8, 16)
    (add,) = _inference(lambda x: x.t()[:4].reshape(2, 2, 8)[0] + 1, x)
    assert (add.aten, add.bytes_read, add.bytes_written) == ("aten.add", 2 * 8 * 4, 2 * 8 * 4)


def test_halves_of_a_tensor_are_read_once_each_and_the_whole_once() -> None:
    def halves(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return a * b

    (mul,) = _inference(halves, torch.randn(4, 32))
    assert mul.bytes_read == 4 * 32 * 4
    (square,) = _inference(lambda x: x * x.t(), torch.randn(6, 6))
    assert square.bytes_read == 6 * 6 * 4


def test_broadcast_operands_count_their_own_size() -> None:
    (add,) = _inference(lambda x, b: x + b, torch.randn(8, 16), torch.randn(16))
    assert add.bytes_read == (8 * 16 + 16) * 4


def test_parts_of_a_decomposed_operator_are_that_operator() -> None:
    found = _inference(lambda x: torch.log_softmax(x, -1) * 2, torch.randn(8, 16))
    assert [o.aten for o in found] == ["aten._log_softmax", "aten.mul"]
    assert len(found[0].fx) > 1
    assert (found[0].bytes_read, found[0].bytes_written) == (8 * 16 * 4, 8 * 16 * 4)
    assert found[0].call == "log_softmax"


def test_updates_and_picks_move_rows() -> None:
    def update(cache: Tensor, at: Tensor, rows: Tensor) -> Tensor:
        cache[at] = rows
        return cache[at] + 1

    cache, at, rows = torch.randn(1000, 8), torch.tensor([3, 5]), torch.randn(2, 8)
    found = {o.aten: o for o in _inference(update, cache, at, rows)}
    row = 2 * 8 * 4
    assert found["aten.index_put"].bytes_read + found["aten.index_put"].bytes_written <= 2 * (row + 16)
    assert found["aten.index"].bytes_read == row + 16
    assert "aten.copy_" not in found  # the update is made in place


def test_operators_on_lists_are_one_operator() -> None:
    def step(ps: list[Tensor], gs: list[Tensor]) -> None:
        torch._foreach_add_(ps, gs)

    ps, gs = [torch.randn(4) for _ in range(3)], [torch.randn(4) for _ in range(3)]
    (add,) = _inference(lambda *ts: step(list(ts[:3]), list(ts[3:])), *ps, *gs)
    assert (add.bytes_read, add.bytes_written) == (6 * 16, 3 * 16)


def test_products_have_flops() -> None:
    found = _inference(lambda x, w: torch.relu(x @ w), torch.randn(8, 16), torch.randn(16, 32))
    assert [o.product_flops for o in found] == [2 * 8 * 16 * 32, 0]


def test_both_gradients_of_a_product_are_operators() -> None:
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    (_, forward), (_, backward) = _captured(lambda x, w: x @ w, x, w)
    assert [o.aten for o in (*forward, *backward)].count("aten.mm") == 3
    assert sum(o.product_flops for o in backward) == 2 * 2 * 8 * 16 * 32


@pytest.mark.parametrize("recompute", [False, True])
def test_what_a_backward_forms_again_counts_nothing(recompute: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    def inner(x: Tensor) -> Tensor:
        return torch.sin(torch.cumsum(x, 0)) * x

    def fn(x: Tensor) -> Any:
        return checkpoint(inner, x, use_reentrant=False) if recompute else inner(x)

    (_, forward), (kind, backward) = _captured(fn, torch.randn(8, 16, requires_grad=True))
    assert kind == "backward"
    assert not any(o.recomputed or o.backward for o in forward)
    again = [o for o in backward if o.recomputed]
    assert bool([o for o in again if o.aten == "aten.cumsum"]) is recompute
    assert all(o.bytes_read == o.bytes_written == 0 for o in again)
    assert any(o.backward and o.bytes_read for o in backward)
