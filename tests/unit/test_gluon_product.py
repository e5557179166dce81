"""Products in Gluon: values by the emulator, the text, and what it compiles to for sm_90."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("triton")

from gluon_resources import compile_gluon

from plait.compiler import all_levels
from plait.emit.gluon import GluonSource, emit_gluon
from plait.errors import LowerFailed
from plait.frontend.externs import decompositions
from plait.frontend.fx_import import import_fx
from plait.options import Options
from plait.oracle.compare import FAIL, compare
from plait.oracle.reference import reference
from plait.plan import contract_cost
from plait.plan.device import SPECS
from tests.unit.test_gluon_values import emulated


def gelu(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.linear(x, w, b))


def gated(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.silu(F.linear(x, w)) * F.linear(x, v)


def residual(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    return r + F.linear(x, w) * 0.5


def turned(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x.t() @ w)


def both(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = F.linear(x, w, b)
    return torch.relu(y), torch.tanh(y)


def batched(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.bmm(x, w))


M, K, N = 328, 200, 424  # no tile divides them
CASES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "gelu": (gelu, [(M, K), (N, K), (N,)]),
    "gated": (gated, [(M, K), (N, K), (N, K)]),
    "residual": (residual, [(M, K), (N, K), (M, N)]),
    "turned": (turned, [(K, M), (K, N)]),
    "both": (both, [(M, K), (N, K), (N,)]),
    "batched": (batched, [(3, M, K), (3, K, N)]),
}


@pytest.fixture(autouse=True)
def _opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products become part of kernels, however small."""
    monkeypatch.setattr(contract_cost, "OWN", dict.fromkeys(("cuda", "cpu"), 9.0))


def arguments(name: str, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(s).to(dtype) / (s[-1] ** 0.5 if len(s) > 1 and n else 1) for n, s in enumerate(CASES[name][1])]


def source(fn: Callable[..., Any], shapes: list[tuple[int, ...]]) -> GluonSource:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        args = [mode.from_tensor(torch.empty(s, dtype=torch.bfloat16)) for s in shapes]
        gm = make_fx(torch.func.functionalize(fn), decomposition_table=decompositions())(*args)
    whole = all_levels(import_fx(gm, args), SPECS["h200"], Options.make(None, {}))
    (launch,) = (launch for launch in whole.launches if launch.parts)
    return emit_gluon(launch.parts[0].program, "kernel")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, args = CASES[name][0], arguments(name, dtype)
    got, eager, exact = (
        x if isinstance(x, (tuple, list)) else [x]
        for x in (emulated(fn, args, monkeypatch), fn(*args), reference(fn, args))
    )
    for g, e, x in zip(got, eager, exact, strict=True):
        verdict = compare(g, e, x, name=name)
        assert verdict.status != FAIL, verdict.message


def test_several_tiles_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring of tiles and the results' tile serve one tile of the result after the other."""
    monkeypatch.setattr("plait.emit.gluon_product._UNITS", 2)
    fn, args = (
        gelu,
        [torch.randn(520, 328).bfloat16(), torch.randn(648, 328).bfloat16() / 18, torch.randn(648).bfloat16()],
    )
    got = emulated(fn, args, monkeypatch)
    verdict = compare(got, fn(*args), reference(fn, args), name="several")
    assert verdict.status != FAIL, verdict.message


@pytest.mark.parametrize("name", ["gelu", "gated", "residual", "turned", "batched"])
def test_no_register_is_spilled(name: str) -> None:
    fn, shapes = CASES[name]
    grown = [tuple(n * 8 if n > 100 else n for n in s) for s in shapes]
    found = compile_gluon(source(fn, grown))
    assert found.stack == 0 and found.counts["STL"] == 0
    assert found.counts["HGMMA"] == 16  # four for each of two sums, in two groups
    assert found.shared <= 227 * 1024


def test_one_product_is_twice_as_wide_as_two() -> None:
    fn, shapes = CASES["gelu"]
    text = source(fn, [tuple(n * 8 for n in s) for s in shapes]).text
    assert text.count(" finish(sum") == 3 and "p1_start + 128" in text
    fn, shapes = CASES["gated"]
    text = source(fn, [tuple(n * 8 for n in s) for s in shapes]).text
    assert text.count(" finish(sum0, sum1") == 2


@pytest.mark.parametrize(
    ("fn", "shapes", "why"),
    [
        (lambda x, w: F.linear(x, w).float() * 2, [(512, 512), (512, 512)], "16 bits"),
        (lambda x, w: torch.softmax(F.linear(x, w), -1), [(512, 512), (512, 512)], "one loop|reduction"),
        (lambda x, w: torch.relu(F.linear(x, w)), [(512, 512), (64, 512)], "one tile"),
    ],
)
def test_refusals(fn: Callable[..., Any], shapes: list[tuple[int, ...]], why: str) -> None:
    with pytest.raises(LowerFailed, match=why):
        source(fn, shapes)
