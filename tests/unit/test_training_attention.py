"""Training through attention written plainly: one kernel forward, two backward, and no square matrix between or in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import plait
from plait.compiler import Compiled, all_levels
from plait.emit.triton import emit_triton
from plait.frontend.externs import decompositions
from plait.frontend.fx_import import import_fx
from plait.ir.graph import Node
from plait.options import Options
from plait.oracle.compare import FAIL, check, compare
from plait.plan.device import SPECS
from plait.runtime import report
from plait.tile.program import Dot, Let, Sweep, TileProgram
from tests.attention_variants import VARIANTS, Sizes, arguments, training_step, widened
from tests.passes import planning

LENGTH = 2048
BF16, F16 = torch.bfloat16, torch.float16
# forms whose gradients need no sum over pairs of positions but those of queries, keys and values
PLAIN = (
    "full",
    "half_precision_throughout",
    "causal",
    "causal_by_tril",
    "window",
    "prefix",
    "softcap",
    "grouped_query",
    "multi_query",
    "padding",
    "documents",
    "sigmoid",
    "dropped",
)


def planned(name: str, **options: Any) -> dict[str, Compiled]:
    """The forward and the backward of a variant's training step, planned for a card."""
    out: dict[str, Compiled] = {}
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        args = [mode.from_tensor(x) for x in arguments(name, Sizes(m=LENGTH, n=LENGTH, d=128))]
        args[:3] = [x.requires_grad_() for x in args[:3]]
        torch.compile(VARIANTS[name][0], backend=planning(out, Options.make(None, options)), dynamic=False)(
            *args
        ).sum().backward()
    return out


def stored_by(compiled: Compiled) -> list[Node]:
    return [n for launch in compiled.launches for g in launch.groups for n in g.stored]


def products(program: TileProgram) -> int:
    return sum(isinstance(s, Dot) for s in program.walk())


def squares(compiled: Compiled) -> list[Node]:
    """Tensors with two axes of the sequence's length that are inputs or are stored."""
    stored = stored_by(compiled)
    inputs = [i.node for i in compiled.graph.inputs]
    return [n for n in (*inputs, *stored) if sum(e.const == LENGTH for e in n.shape) > 1]


@pytest.mark.parametrize("name", PLAIN)
def test_no_square_matrix(name: str) -> None:
    levels = planned(name)
    calls = [n.attr("target") for c in levels.values() for n in c.graph.nodes() if n.kind == "extern"]
    assert calls == (["aten.randint.low"] if name == "dropped" else [])
    # heads that share keys and values are given to the backward spread out
    spread = name in ("grouped_query", "multi_query")
    assert len([launch for launch in levels["forward"].launches if launch.parts]) == 1 + spread
    assert len([launch for launch in levels["backward"].launches if launch.parts]) <= 3
    assert not squares(levels["forward"]) and not squares(levels["backward"])


def test_one_row_statistic_is_saved_and_the_loops_hold_no_more_than_they_must() -> None:
    """The backward takes exp(scores - log of the sum of all): no second statistic, no division, no scale but in the exponent's
    multiply-add; queries and gradients are loaded once a step, and what is multiplied first is multiplied early."""
    levels = planned("causal")
    rows = [n for n in stored_by(levels["forward"]) if n.shape[-1].const == 1 or n.shape[-1].const == LENGTH]
    assert len(rows) == 1
    programs = [p.program for launch in levels["backward"].launches for p in launch.parts]
    assert [products(p) for p in programs] == [3, 4]
    for p in programs:
        inside = [s for sweep in p.body if isinstance(sweep, Sweep) for s in sweep.body]
        lets = {s.out: s for s in inside if isinstance(s, Let)}
        constants = {s.out for s in p.walk() if isinstance(s, Let) and s.op == "const"}
        assert all(s.args[1] in constants for s in lets.values() if s.op == "div")
        factors = [
            lets[k] for s in inside if isinstance(s, Dot) and 3 not in s.span for k in (s.arg, s.other) if k in lets
        ]
        assert factors and not [s for s in factors if s.op in ("mul", "div") and constants & set(s.args)]
        loops = emit_triton(p, "kernel").text.split("    for ")[1:]
        assert len(loops) == 2, "with and without the mask"
        for text in loops:
            tiles = [line for line in text.split("\n") if "[None, :] + r0_lane[:, None]" in line and "tl.load(" in line]
            assert len(tiles) == 2
    lines = emit_triton(programs[1], "kernel").text.split("    for ")[2].split("\n")
    values, keys = [n for n, line in enumerate(lines) if line.strip().startswith("acc")][:2]
    assert any(" * " in line and "tl.load" not in line for line in lines[values:keys])


@pytest.mark.parametrize(
    ("numerics", "dtype", "late"), [("fused", BF16, True), ("fused", F16, False), ("eager", BF16, False)]
)
def test_a_constant_moves_past_a_product(numerics: str, dtype: torch.dtype, late: bool) -> None:
    """Not where its place can be seen, and not out of a type that may have no room for what is not scaled yet."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (torch.exp(x @ w) * 0.125) @ w.transpose(-1, -2)

    with FakeTensorMode(allow_non_fake_inputs=True):
        args = [torch.empty(8, 2048, 64, dtype=dtype), torch.empty(8, 64, 2048, dtype=dtype)]
        gm = make_fx(fn, decomposition_table=decompositions())(*args)
    compiled = all_levels(import_fx(gm, args), SPECS["h200"], Options.make(None, {"numerics": numerics}))
    (program,) = [p.program for launch in compiled.launches for p in launch.parts if products(p.program) == 2]
    (sweep,) = [s for s in program.body if isinstance(s, Sweep)]
    scales = [s for s in program.walk() if isinstance(s, Let) and s.op == "mul"]
    assert [s in sweep.body for s in scales] == [not late]


def test_eager_numerics_keep_the_probabilities() -> None:
    """Sums are exchanged only where the last bits are free."""
    assert squares(planned("causal", numerics="eager")["forward"])


@pytest.mark.parametrize(
    "name", ["causal", "window", "softcap", "grouped_query", "padding", "alibi", "bias_of_windows", "sink"]
)
def test_gradients(name: str) -> None:
    torch.manual_seed(3)
    fn = VARIANTS[name][0]
    args = [
        x.requires_grad_(x.is_floating_point()) for x in arguments(name, Sizes(m=200, n=200, d=16, dtype=torch.float32))
    ]
    given = [x for x in args if x.requires_grad]

    g = torch.randn_like(fn(*args))
    report.reset()
    torch._dynamo.reset()
    got = training_step(torch.compile(fn, backend="plait", dynamic=False, options={"strict": True}), args, g)
    assert len(got) == 1 + len(given)
    for a, b, c in zip(got, training_step(fn, args, g), training_step(fn, widened(args), g), strict=True):
        assert compare(a, b, c).status is not FAIL, f"{name}: {compare(a, b, c)}"
    forward = report.all()[0].details["compiled"]
    assert not [n for launch in forward.launches for s in launch.groups for n in s.stored if n.shape[-2:] == (200, 200)]


def test_a_dropped_pair_has_no_gradient() -> None:
    """The backward draws the forward's mask: with one-hot values the result shows the mask, and the gradient must agree."""
    torch.manual_seed(4)
    q, k = (torch.randn(1, 2, 160, 16, requires_grad=True) for _ in range(2))
    v = torch.eye(160)[:, :16].expand(1, 2, 160, 16).clone().requires_grad_()
    y = torch.compile(VARIANTS["dropped"][0], backend="plait", dynamic=False)(q, k, v)
    p = torch.softmax(q @ k.transpose(-1, -2) / 4, -1)[..., :16].detach()
    kept = y.detach() != 0
    torch.testing.assert_close(y.detach(), torch.where(kept, p / 0.8, 0.0), rtol=1e-4, atol=1e-6)
    (dv,) = torch.autograd.grad(y, v, torch.ones_like(y))
    torch.testing.assert_close(dv[..., :16, 0], (p * kept / 0.8).sum(-2), rtol=1e-4, atol=1e-5)
    assert 0.7 < float(kept.float().mean()) < 0.9


def test_products_of_a_batch_that_are_added_up_are_taken_one_by_one() -> None:
    """The gradient of a key that several queries' heads share: a tile of sixteen heads at once was more than a block may hold."""

    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with plait.fuse("summed"):
            return (a @ b).float().sum(1)

    shapes = (4, 2, 300, 300), (4, 2, 300, 64)
    torch._dynamo.reset()
    args = [torch.randn(s, dtype=torch.bfloat16) for s in shapes]
    for target in ("h200", "cpu"):
        report = plait.explain(fn, *args, target=target)
        (kernel,) = report.graphs[0].kernels
        assert "r0:1," in kernel.schedule[0], kernel.schedule
    torch._dynamo.reset()
    check(torch.compile(fn, backend="plait", options={"strict": True})(*args), fn(*args), fn(*widened(args)))
