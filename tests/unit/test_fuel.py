"""Fuel: every prefix of a compilation's decisions gives a right program, and the same decisions in the same order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tile_run import run_compiled
from torch.fx.experimental.proxy_tensor import make_fx

import plait
from plait.compiler import Compiled, all_levels
from plait.frontend.fx_import import import_fx
from plait.ir.fuel import Taken, is_limited, limited, take
from plait.options import Options
from plait.oracle.compare import compare
from plait.plan.device import SPECS
from plait.plan.reasons import Why
from plait.runtime import report

ALL = 1 << 20


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * 0.2, -1) @ v


def _long_rows(x: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.exp(x) * 2 + b
    return y / y.sum(-1, keepdim=True), torch.relu(b).neg()


def _islands(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = torch.cumsum(torch.tanh(x) * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1), 0).sort(-1).values
    return x


PROGRAMS: dict[str, tuple[str, Callable[..., Any], list[tuple[int, ...]]]] = {
    "attention": ("h200", _attention, [(1, 2, 16, 16)] * 3),
    "attention on a CPU": ("cpu", _attention, [(1, 2, 16, 16)] * 3),
    "long rows": ("h200", _long_rows, [(2, 40000), (40000,)]),
    "equal islands": ("cpu", _islands, [(6, 10)]),
}


def _compile(name: str, fuel: int | None) -> tuple[Compiled, list[Taken], Any, list[torch.Tensor]]:
    device, fn, shapes = PROGRAMS[name]
    torch.manual_seed(0)
    args = [torch.randn(s) for s in shapes]
    gm = make_fx(fn)(*args)
    with limited(fuel) as tank:
        compiled = all_levels(import_fx(gm, args), SPECS[device], Options())
    return compiled, [] if tank is None else tank.taken, fn, args


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_prefix_is_right_and_is_a_prefix(name: str) -> None:
    plain, _, fn, args = _compile(name, None)
    full, decisions, _, _ = _compile(name, ALL)
    assert str(full.plan) == str(plain.plan)
    assert [s.name for s in full.launches] == [s.name for s in plain.launches]
    assert {"merge"} <= {t.kind for t in decisions}
    want, exact = fn(*args), fn(*[a.double() for a in args])
    want, exact = (want, exact) if isinstance(want, tuple) else ((want,), (exact,))
    launches = []
    for n in range(len(decisions) + 1):
        compiled, taken, _, _ = _compile(name, n)
        assert [(t.kind, t.name, t.words) for t in taken] == [(t.kind, t.name, t.words) for t in decisions[:n]]
        launches.append(len(compiled.launches))
        got = run_compiled(compiled, args).evaluation.returned()
        for g, w, x in zip(got, want, exact, strict=True):
            assert compare(g, w, x).status != "FAIL", (n, taken[-1:])
    assert max(launches) > launches[-1]
    assert all(t.fx for t in decisions)


def test_what_is_declined_says_so() -> None:
    compiled, _, _, _ = _compile("equal islands", 0)
    why = {d.reason.why for d in compiled.plan.decisions if d.reason is not None}
    assert Why.FORBIDDEN in why
    assert "beyond the option fuel" in str(compiled.plan)


def test_a_schedule_is_a_decision_where_it_is_not_the_plain_one() -> None:
    _, decisions, _, _ = _compile("long rows", ALL)
    chosen = [t for t in decisions if t.kind == "schedule"]
    assert chosen
    assert all(" instead of form=" in t.words for t in chosen)


def test_without_a_tank_nothing_is_counted_nor_worded() -> None:
    def words() -> str:
        raise AssertionError("worded for nobody")

    assert not is_limited()
    assert take("merge", "plan", words)
    with limited(0):
        assert not take("merge", "plan", words)


def test_what_the_user_wants_in_one_kernel_is_a_decision_too() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        with plait.fuse("both"):
            rows, columns = x.sum(1), x.sum(0)
        return rows[:, None] * columns

    x = torch.randn(64, 64)
    kernels = []
    for fuel in (0, None):
        torch._dynamo.reset()
        got = plait.compile(program, strict=True, fuel=fuel)(x)
        assert compare(got, program(x), program(x.double())).status != "FAIL"
        kernels.append(report.last().details["compiled"].plan)
    apart, together = (sum(len({n.op for n in g.nodes} & {"sum"}) > 0 for g in p.kernels()) for p in kernels)
    assert apart > together
