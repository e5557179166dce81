"""Which products become part of a kernel on a card, and which stay calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from plait.compiler import Compiled, all_levels
from plait.emit.triton import emit_triton
from plait.frontend.externs import decompositions
from plait.frontend.fx_import import import_fx
from plait.options import Options
from plait.plan.device import SPECS
from plait.plan.openings import better_closed
from plait.tile.alternatives import shared_bytes
from plait.tile.program import Dot

Fn = Callable[..., object]


def planned(fn: Fn, *shapes: tuple[int, ...], device: str = "h200") -> Compiled:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with FakeTensorMode() as mode:
        args = [mode.from_tensor(torch.empty(s, dtype=dtype, device="meta").to("cpu")) for s in shapes]
        gm = make_fx(torch.func.functionalize(fn), decomposition_table=decompositions())(*args)
    return all_levels(import_fx(gm, args), SPECS[device], Options.make(None, {}))


def products(compiled: Compiled) -> tuple[int, int]:
    """(in kernels, calls)."""
    programs = [part.program for launch in compiled.launches for part in launch.parts]
    calls = [n for n in compiled.graph.nodes() if n.kind == "extern"]
    return sum(isinstance(s, Dot) for p in programs for s in p.walk()), len(calls)


def gelu_after(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(x @ w.t(), approximate="tanh")


def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(x @ gate.t()) * (x @ up.t())


def low_rank(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return x @ w.t() + 2.0 * (x @ a.t() @ b.t())


@pytest.mark.parametrize(
    ("fn", "shapes", "expected"),
    [
        (gelu_after, ((8192, 4096), (16384, 4096)), (1, 0)),
        (swiglu, ((4096, 4096), (14336, 4096), (14336, 4096)), (2, 0)),
        (low_rank, ((8192, 4096), (4096, 4096), (16, 4096), (4096, 16)), (3, 0)),
        (lambda x, w: x @ w.t(), ((8192, 4096), (16384, 4096)), (0, 1)),
    ],
)
def test_products_open_where_that_saves_traffic(fn: Fn, shapes: tuple[tuple[int, ...], ...], expected: object) -> None:
    assert products(planned(fn, *shapes)) == expected


def test_factors_whose_rows_begin_at_odd_places_are_copied_where_that_is_cheap() -> None:
    compiled = planned(gelu_after, (8192, 4097), (16384, 4097))
    assert products(compiled) == (1, 0)
    assert sum(n.op == "copy" for n in compiled.graph.nodes()) == 2
    assert products(planned(gelu_after, (64, 4097), (64, 4097))) == (0, 1)


def stored_and_summed(x: Tensor, w: Tensor, z: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    f = (x @ w.t()).float()
    h = f * g.float()
    return h.to(x.dtype), f.sum(0), (f * z.float()).sum(0), (h.sum(-1, keepdim=True) * z.float()).to(x.dtype)


def only_summed(x: Tensor, w: Tensor, z: Tensor) -> Tensor:
    return ((x @ w.t()).float().exp() * z.float()).sum(-1)


@pytest.mark.parametrize(
    ("fn", "shapes", "closed"),
    [
        (stored_and_summed, ((8192, 2304), (768, 2304), (8192, 768), (768,)), True),
        (only_summed, ((8192, 256), (32768, 256), (8192, 32768)), False),
    ],
)
def test_a_slow_kernel_that_reduces_is_closed_where_it_stores_the_product_anyway(
    fn: Fn, shapes: tuple[tuple[int, ...], ...], closed: bool
) -> None:
    plan, spec = planned(fn, *shapes).plan, SPECS["h200"]
    (group,) = [g for g in plan.kernels() if any(n.kind == "contract" for n in g.nodes)]
    assert not better_closed(plan, spec)
    slow = replace(plan, groups=(replace(group, predicted_ns=1e12),))
    assert bool(better_closed(slow, spec)) is closed


def after_heads(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    heads, rows, width = x.shape
    return y + x.transpose(0, 1).reshape(rows, heads * width) @ w.t()


@pytest.mark.parametrize("size", [64, 128, 512])
def test_a_step_of_a_product_summed_over_two_axes_is_as_deep_as_of_one(size: int) -> None:
    """Heads merged into rows: blocks held both axes whole, ten times what a card has of shared memory."""
    compiled = planned(after_heads, (4096 // size, 2048, size), (2048, 4096), (2048, 2048))
    (program,) = [p.program for launch in compiled.launches for p in launch.parts]
    depth = [n for name, n in program.schedule.tile if name.startswith("r")]
    assert depth == [1, 64]
    assert shared_bytes(program, program.schedule) <= 227 * 1024
    assert "make_tensor_descriptor" in emit_triton([program], "k").text


@pytest.mark.parametrize("size", [32, 80])
def test_factors_in_pieces_that_fill_no_lines_are_put_together_for_the_call(size: int) -> None:
    heads = 4096 // size
    compiled = planned(after_heads, (heads, 8192, size), (8192, heads * size), (8192, 8192))
    assert products(compiled) == (0, 1)


@pytest.mark.parametrize("rows", [1, 2, 16])
def test_a_product_of_few_rows_is_a_stream_that_needs_no_company(rows: int) -> None:
    compiled = planned(lambda x, w: x @ w.t(), (rows, 4096), (14336, 4096))
    assert products(compiled) == (1, 0)
    (group,) = compiled.plan.kernels()
    floor = group.cost.bytes_read / SPECS["h200"].bytes_per_ns
    assert group.predicted_ns < 1.3 * floor
    (program,) = [p.program for launch in compiled.launches for p in launch.parts]
    assert program.schedule.size(next(d.name for d in program.dims if d.extent.const == 14336)) == (
        4 if rows == 1 else 32
    )


def test_a_norm_before_a_product_of_few_rows_is_not_formed_again_by_every_block() -> None:
    def norm(x: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(x, (4096,)) @ w.t()

    compiled = planned(norm, (16, 4096), (4096, 4096))
    assert [len([n for n in g.nodes if n.kind == "contract"]) for g in compiled.plan.kernels()] == [0, 1]
    assert products(compiled) == (1, 0)


@pytest.mark.parametrize(
    ("columns", "depth", "opened"),
    [(50257, 768, 1), (50304, 768, 0), (1024, 50257, 1), (1024, 50304, 0)],
)
def test_where_rows_end_at_odd_places_our_own_product_is_the_fast_one(columns: int, depth: int, opened: int) -> None:
    """The vendor's takes five to seven times as long there, even where rows begin well."""
    shapes = ((8192, columns), (8192, depth), (columns, depth), (8192, depth), (depth, columns))

    def product(_: Tensor, a: Tensor, b: Tensor, __: Tensor, w: Tensor) -> Tensor:
        return a @ b.t() if depth % 8 == 0 else (a * 2) @ w  # rows of an intermediate begin well

    assert products(planned(product, *shapes)) == (opened, 1 - opened)


def test_gradients_of_odd_rows_that_come_from_outside_are_copied_once_for_both_products() -> None:
    def gradients(g: Tensor, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return g @ w, g.t() @ h

    compiled = planned(gradients, (8192, 50257), (8192, 768), (50257, 768))
    assert products(compiled) == (1, 1)
    (copy,) = [n for n in compiled.graph.nodes() if n.op == "copy"]
    assert [s.const for s in compiled.graph.padded[copy]] == [50304, 1]
    assert "would read rows that begin at odd places" in str([str(d.reason) for d in compiled.plan.refusals()])


def normed(x: Tensor, w: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) @ w.t()


def lone(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


@pytest.mark.parametrize(
    ("fn", "rows", "expected"),
    [
        (lone, 1, (1, 0)),
        (lone, 8, (1, 0)),
        (lone, 16, (0, 1)),
        (normed, 16, (1, 0)),
        (normed, 512, (0, 1)),
    ],
)
def test_on_a_cpu_products_of_few_rows_are_ours(fn: Fn, rows: int, expected: tuple[int, int]) -> None:
    assert products(planned(fn, (rows, 1024), (1024, 1024), device="cpu")) == expected


@pytest.mark.parametrize(("columns", "tiles"), [(1792, 28), (1024, 16), (300, 6), (200, 4)])
def test_on_a_cpu_every_thread_gets_as_many_tiles_of_few_rows(columns: int, tiles: int) -> None:
    compiled = planned(lone, (1, 512), (columns, 512), device="cpu")
    (program,) = (part.program for launch in compiled.launches for part in launch.parts)
    sizes = dict(program.schedule.tile)
    wide, depth = (next(sizes[d.name] for d in program.dims if d.extent.const == n) for n in (columns, 512))
    assert -(-columns // wide) == tiles
    assert depth == 512
