"""Results in the place of operands that nobody needs any more."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from plait.compiler import Compiled
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.options import Options
from plait.plan.layout import Layouts
from plait.runtime.link import link
from plait.runtime.memory import peak_bytes
from plait.runtime.steps import AllocStep, Script
from plait.tile.overwrite import overwritable
from plait.tile.program import Buffer, Dim, Let, Load, Reduce, Store, TileProgram
from plait.tile.schedule import Schedule
from tests.passes import planning

ROWS, DEPTH, WORDS = 8192, 4096, 128256


def loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), y)


def planned(overwrite: bool) -> tuple[Compiled, Script]:
    out: dict[str, Compiled] = {}
    torch._dynamo.reset()
    with FakeTensorMode():
        x = torch.empty(ROWS, DEPTH, dtype=torch.bfloat16, requires_grad=True)
        w = torch.empty(WORDS, DEPTH, dtype=torch.bfloat16, requires_grad=True)
        y = torch.zeros(ROWS, dtype=torch.int64)
        torch.compile(loss, backend=planning(out, Options.make(None, {})), dynamic=False)(x, w, y).backward()
    c = out["backward"]
    return c, link(c.graph, c.plan.reading, c.launches, Layouts(c.graph), overwrite=overwrite)


def test_the_gradient_of_logits_lies_where_they_did() -> None:
    """Two matrices of rows and words become one: the gradients of both factors are all that a backward makes besides."""
    logits, gradients = ROWS * WORDS * 2, (ROWS + WORDS) * DEPTH * 2
    (c, script), (same, apart) = planned(True), planned(False)
    (over,) = [s for s in script.steps if isinstance(s, AllocStep) and s.reuse is not None]
    (given,) = [i for i in script.inputs if i.slot == over.reuse]
    (private,) = [i for i in c.graph.inputs if i.position == given.position]
    assert private.private and [e.const for e in private.node.shape] == [ROWS, WORDS]
    assert logits < peak_bytes(same.graph, same.launches, apart) < 1.1 * (logits + gradients)
    assert peak_bytes(c.graph, c.launches, script) < 1.1 * gradients


def test_arguments_of_the_users_are_not_written_over() -> None:
    c, _ = planned(True)
    assert {tuple(e.const for e in i.node.shape) for i in c.graph.inputs if not i.private} >= {(ROWS, DEPTH), (ROWS,)}


# ------------------------------------------------------------------------------------------------------ which programs
P, R = ix.axis(0), ix.axis(1)


def program(*body: Load | Let | Reduce | Store, dtype: DType = DType.f32) -> TileProgram:
    buffers = (Buffer("x", dtype, "in", ix.const(32)), Buffer("y", DType.f32, "out", ix.const(32)))
    dims = (Dim("p0", ix.const(4), "grid"), Dim("p1", ix.const(8), "grid"))
    return TileProgram("k", dims, buffers, (), body, Schedule())


def test_a_program_that_reads_elsewhere_or_sums_needs_memory_of_its_own() -> None:
    load, store = Load(0, 0, P * 8 + R, DType.f32, (0, 1)), Store(1, P * 8 + R, 0, (0, 1))
    assert overwritable(program(load, store)) == [(1, 0)]
    turned = Load(0, 0, R * 4 + P, DType.f32, (0, 1))
    assert not overwritable(program(turned, store))
    again = Load(1, 0, 31 - P * 8 - R, DType.f32, (0, 1))
    assert not overwritable(program(load, again, store))
    assert not overwritable(program(load, store, dtype=DType.f16))
    assert not overwritable(program(load, Reduce(1, "sum", 0, (1,), DType.f32, (0,)), store))
    assert not overwritable(program(load, Store(1, P * 8 + R, 0, (0, 1), (-P,))))
