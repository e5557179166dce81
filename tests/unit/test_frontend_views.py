"""Views and moves: each lowered to index maps, read by brute force, and compared with torch element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.frontend_eval import check

X = [3, 4, 6]


def _x(*shape: int) -> Tensor:
    return torch.arange(1, 1 + int(torch.Size(shape).numel()), dtype=torch.float32).reshape(shape)


CASES: dict[str, tuple[Callable[..., Any], list[list[int]]]] = {
    "view": (lambda x: x.view(12, 6), [X]),
    "view split": (lambda x: x.view(3, 2, 2, 3, 2), [X]),
    "view merge and split": (lambda x: x.view(2, 6, 3, 2), [X]),
    "view minus one": (lambda x: x.view(-1, 9), [X]),
    "view of ones": (lambda x: x.view(1, 3, 1, 4, 6, 1), [X]),
    "view to scalar": (lambda x: x.view(()), [[1, 1]]),
    "view empty": (lambda x: x.view(0, 5), [[3, 0]]),
    "reshape of permuted": (lambda x: x.permute(2, 0, 1).reshape(9, 8), [X]),
    "permute": (lambda x: x.permute(2, 0, 1).clone(), [X]),
    "permute negative": (lambda x: x.permute(-1, 0, -2), [X]),
    "t": (lambda x: x.t(), [[3, 5]]),
    "t of vector": (lambda x: x.t(), [[3]]),
    "transpose": (lambda x: x.transpose(-1, 0), [X]),
    "movedim": (lambda x: x.movedim((0, 1), (-1, 0)), [X]),
    "expand": (lambda x: x.expand(2, 3, 4), [[3, 1]]),
    "expand minus one": (lambda x: x.expand(5, -1, 4), [[3, 1]]),
    "squeeze": (lambda x: x.squeeze(), [[1, 3, 1]]),
    "squeeze dim": (lambda x: x.squeeze(-1), [[1, 3, 1]]),
    "squeeze no dim": (lambda x: x.squeeze(1), [[1, 3, 1]]),
    "squeeze dims": (lambda x: x.squeeze((0, 2)), [[1, 3, 1]]),
    "unsqueeze": (lambda x: x.unsqueeze(-1).unsqueeze(0), [[3, 4]]),
    "slice": (lambda x: x[1:, :3, 1:6:2], [X]),
    "slice negative": (lambda x: x[-2:, :-1], [X]),
    "slice past the end": (lambda x: x[1:100, -100:2], [X]),
    "slice empty": (lambda x: x[2:1, 5:], [X]),
    "select": (lambda x: x[1, -1], [X]),
    "narrow": (lambda x: x.narrow(-1, 2, 3), [X]),
    "split": (lambda x: x.split(4, -1), [X]),
    "split with sizes": (lambda x: x.split([1, 0, 5], -1), [X]),
    "unbind": (lambda x: x.unbind(1), [X]),
    "chunk": (lambda x: x.chunk(4, -1), [X]),
    "diagonal": (lambda x: x.diagonal(1, -1, 0), [X]),
    "diagonal below": (lambda x: x.diagonal(-2), [X]),
    "unfold": (lambda x: x.unfold(-1, 3, 2), [X]),
    "as_strided": (lambda x: x.clone().as_strided((3, 4), (7, 2), 5), [X]),
    "as_strided of permuted": (lambda x: x.permute(2, 0, 1).clone().as_strided((5, 5), (1, 6), 2), [X]),
    "as_strided of a view": (lambda x: (x + 0).view(-1)[7:].as_strided((3, 4), (7, 2)), [X]),
    "flip": (lambda x: x.flip(0, 2), [X]),
    "roll": (lambda x: x.roll((2, -9), (0, 2)), [X]),
    "roll flat": (lambda x: x.roll(7), [X]),
    "cat": (lambda x, y: torch.cat([x, y, x], 1), [[2, 3], [2, 5]]),
    "cat legacy empty": (lambda x, y: torch.cat([x, y]), [[0], [2, 5]]),
    "cat promotes": (lambda x, y: torch.cat([x.int(), y]), [[3], [4]]),
    "cat of padded": (lambda x: torch.cat([F.pad(x, (1, 1)), F.pad(x, (2, 0), value=5.0)]), [[2, 3]]),
    "cat of slices": (lambda x: torch.cat([x[:, 3:], x[:, :3]], 1), [[2, 6]]),
    "stack": (lambda x, y: torch.stack([x, y, x], 1), [[2, 3], [2, 3]]),
    "pad": (lambda x: F.pad(x, (1, 2, 0, 3), value=-1.5), [X]),
    "pad crops": (lambda x: F.pad(x, (-1, 2, -2, 0)), [X]),
    "pad twice": (lambda x: F.pad(F.pad(x, (1, 1), value=2.0), (1, 0), value=3.0), [[2, 3]]),
    "pad bool": (lambda x: F.pad(x > 3, (1, 1), value=1), [[2, 3]]),
    "repeat": (lambda x: x.repeat(2, 1, 3), [[2, 3]]),
    "repeat zero": (lambda x: x.repeat(2, 0), [[2, 3]]),
    "tile": (lambda x: x.tile(2), [[2, 3]]),
    "repeat_interleave": (lambda x: x.repeat_interleave(3, 1), [[2, 3]]),
    "repeat_interleave flat": (lambda x: x.repeat_interleave(2), [[2, 3]]),
    "clone channels last": (lambda x: x.clone(memory_format=torch.channels_last), [[2, 3, 4, 5]]),
    "contiguous": (lambda x: x.transpose(0, 1).contiguous(), [[2, 3]]),
    "slice_scatter": (lambda x, y: x.slice_scatter(y, 1, 1, 5, 2), [[2, 6], [2, 2]]),
    "select_scatter": (lambda x, y: x.select_scatter(y, 1, -2), [[2, 6], [2]]),
    "diagonal_scatter": (lambda x, y: x.diagonal_scatter(y, 1), [[4, 4], [3]]),
    "diagonal_scatter below": (lambda x, y: x.diagonal_scatter(y, -1, 1, 0), [[4, 3], [2]]),
    "diag_embed": (lambda x: torch.diag_embed(x, -1, 0, 2), [[2, 3]]),
    "select_backward": (lambda x: torch.ops.aten.select_backward(x, [2, 5], 1, -1), [[2]]),
    "slice_backward": (lambda x: torch.ops.aten.slice_backward(x, [2, 9], 1, 1, 8, 3), [[2, 3]]),
    "reflection pad 1d": (lambda x: F.pad(x, (2, 3), mode="reflect"), [[2, 4]]),
    "reflection pad 2d": (lambda x: F.pad(x, (2, 1, 0, 2), mode="reflect"), [[2, 3, 4]]),
    "replication pad 3d": (lambda x: F.pad(x, (1, 2, 0, 1, 2, 0), mode="replicate"), [[1, 2, 3, 2]]),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), [[2, 8, 3, 2]]),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2), [[2, 4, 6]]),
    "channel_shuffle": (lambda x: F.channel_shuffle(x, 3), [[2, 6, 2, 2]]),
    "tril": (lambda x: x.tril(-1), [X]),
    "triu": (lambda x: x.triu(1), [[3, 5]]),
    "bitcast": (lambda x: x.view(torch.int32), [[2, 3]]),
    "rot90": (lambda x: x.rot90(1), [[2, 3]]),
    "unflatten": (lambda x: x.unflatten(-1, (2, 3)).flatten(0, 1), [X]),
    "permute_copy": (lambda x: torch.permute_copy(x, (1, 0)), [[2, 3]]),
    "output is an input": (lambda x, y: (x, y.clone(), y), [[2], [3]]),
    "attention heads": (lambda x: x.view(2, 5, 4, 3).transpose(1, 2).reshape(8, 5, 3), [[2, 5, 12]]),
}


@pytest.mark.parametrize("name", CASES)
def test_view_by_brute_force(name: str) -> None:
    fn, shapes = CASES[name]
    check(fn, [_x(*s) for s in shapes])


_SYMBOLIC = """view split|view|reshape of permuted|slice|slice past the end|slice negative|split|chunk|diagonal|unfold|flip|
roll|roll flat|cat|stack|pad|pad crops|repeat|repeat_interleave flat|slice_scatter|select_scatter|diag_embed|slice_backward|
reflection pad 2d|replication pad 3d|pixel_shuffle|channel_shuffle|tril|attention heads|as_strided""".replace("\n", "")


@pytest.mark.parametrize("name", _SYMBOLIC.split("|"))
def test_view_with_symbolic_sizes(name: str) -> None:
    fn, shapes = CASES[name]
    check(fn, [_x(*s) for s in shapes], "symbolic")


def test_views_make_no_nodes() -> None:
    graph = check(lambda x: x.view(2, 6, 6).permute(2, 0, 1)[1:4].flip(0).unsqueeze(1).expand(3, 2, 2, 6), [_x(*X)])
    assert [n.op for n in graph.nodes()] == ["input"]


def test_split_heads_has_no_division() -> None:
    graph = check(lambda x: x.view(2, 5, 4, 3).transpose(1, 2).clone(), [_x(2, 5, 12)])
    index = graph.outputs[0].read.index
    assert not any(a.kind in ("div", "mod") for e in index for a in e.atoms())


@st.composite
def _chain(draw: st.DrawFn) -> tuple[list[int], list[tuple[str, Any]]]:
    """A start shape and view operators that fit one after another."""
    start = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4))
    shape, steps = list(start), []
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["reshape", "permute", "slice", "flip", "unsqueeze", "expand"]))
        if kind == "reshape":
            primes = [p for n in shape for p in _factors(n)]
            order = primes  # any grouping of the factors, in any order, has the same product
            order = draw(st.permutations(order)) if order else order
            cuts = sorted(draw(st.lists(st.integers(0, len(order)), max_size=3)))
            shape = [
                int(torch.tensor(order[a:b]).prod()) if b > a else 1
                for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)
            ]
            steps.append((kind, list(shape)))
        elif kind == "permute":
            order = draw(st.permutations(range(len(shape))))
            shape = [shape[d] for d in order]
            steps.append((kind, list(order)))
        elif kind == "slice":
            d = draw(st.integers(0, len(shape) - 1))
            a = draw(st.integers(0, shape[d] - 1))
            by = draw(st.integers(1, 3))
            b = draw(st.integers(a + 1, shape[d]))
            steps.append((kind, (d, a, b, by)))
            shape[d] = len(range(a, b, by))
        elif kind == "flip":
            steps.append((kind, [draw(st.integers(0, len(shape) - 1))]))
        elif kind == "unsqueeze" and len(shape) < 5:
            d = draw(st.integers(0, len(shape)))
            shape.insert(d, 1)
            steps.append((kind, d))
        elif kind == "expand" and len(shape) < 5:
            shape = [2, *shape]
            steps.append((kind, list(shape)))
    return start, steps


def _factors(n: int) -> list[int]:
    for p in (2, 3):
        if n % p == 0 and n:
            return [p, *_factors(n // p)]
    return [n] if n > 1 else []


def _apply(x: Tensor, steps: list[tuple[str, Any]]) -> Tensor:
    for kind, arg in steps:
        if kind == "reshape":
            x = x.reshape(arg)
        elif kind == "permute":
            x = x.permute(arg)
        elif kind == "slice":
            d, a, b, by = arg
            x = torch.ops.aten.slice.Tensor(x, d, a, b, by)
        elif kind == "flip":
            x = x.flip(arg)
        elif kind == "unsqueeze":
            x = x.unsqueeze(arg)
        else:
            x = x.expand(arg)
    return x


@settings(max_examples=60, deadline=None, derandomize=True)
@given(_chain())
def test_chain_of_views(chain: tuple[list[int], list[tuple[str, Any]]]) -> None:
    start, steps = chain
    graph = check(lambda x: _apply(x, steps), [_x(*start)])
    assert all(n.op == "input" for n in graph.nodes())
