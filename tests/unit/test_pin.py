"""The option pin: a kernel keeps the schedule that the user says, or compiling refuses it with the reason."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import plait
from plait.errors import BadOption


def schedules(fn: Any, *args: Any, target: str | None = None, train: bool = False, **pin: str) -> list[tuple[str, ...]]:
    torch._dynamo.reset()
    r = plait.explain(
        fn, *args, target=target, train=train, options={"pin": {k.replace("__", "/"): v for k, v in pin.items()}}
    )
    return [k.schedule for g in r.graphs for k in g.kernels]


def rows(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


X = torch.randn(64, 512)
CHOSEN = "form=flat tile=p0:1,r0:all warps=2 stages=1 vector=r0"
NAME = "k0_max_sum_div"


def test_a_pinned_kernel_keeps_its_schedule_and_its_values() -> None:
    ((default,),) = schedules(lambda x: x.exp(), X)
    mine = "form=flat tile=p0:64 warps=4 stages=1 vector=p0"
    assert default != mine
    assert schedules(lambda x: x.exp(), X, k0_exp=mine) == [(mine,)]
    torch._dynamo.reset()
    compiled = torch.compile(rows, backend="plait", options={"pin": {NAME: "form=swept tile=r0:all vector=r0"}})
    torch.testing.assert_close(compiled(X), rows(X))


def test_on_a_card_too() -> None:
    assert schedules(rows, X, target="h200", **{NAME: CHOSEN}) == [(CHOSEN,)]


@pytest.mark.parametrize(
    ("schedule", "why"),
    [
        ("form=flat tile", "cannot be read: not a schedule field: 'tile'"),
        ("form=round", "there is no form 'round'"),
        ("form=flat tile=q7:4,r0:all", "there is no dim 'q7'"),
        ("form=flat tile=p0:3,r0:all", "tile p0:3 is no power of two"),
        ("form=flat tile=p0:4,r0:all warps=3", "3 warps"),
        ("form=flat tile=p0:4,r0:all stages=99", "99 stages"),
        ("form=flat tile=p0:4,r0:all blocks=8", "only products"),
        ("form=flat tile=p0:32768,r0:all", "a block would hold 16777216 points at once"),
        ("form=flat tile=p0:4,p0:4,r0:all", "a dim is tiled twice"),
        ("form=flat tile=p0:4,r0:64 vector=r0", "the flat form has rows whole (r0:all)"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused_with_the_reason(schedule: str, why: str) -> None:
    with pytest.raises(BadOption, match=re.escape(why)) as raised:
        schedules(rows, X, target="h200", **{NAME: schedule})
    assert NAME in str(raised.value) and "by itself it takes form=flat" in str(raised.value)


def test_shared_memory_is_reckoned_with() -> None:
    a = torch.zeros(512, 512, dtype=torch.bfloat16)

    def fn(a: torch.Tensor) -> torch.Tensor:
        with plait.fuse():
            return torch.relu(a @ a)

    deep = "form=swept tile=p0:128,p1:128,r0:128 warps=4 stages=8 vector=p1"
    with pytest.raises(BadOption, match="KB of shared memory, a block of a a100 has 163"):
        schedules(fn, a, target="a100", k0_dot=deep)


def test_pins_of_one_kind_of_graph_and_of_no_kernel() -> None:
    mine = "form=flat tile=p0:64 warps=4 stages=1 vector=p0"
    found = schedules(lambda x: x.exp(), X.clone().requires_grad_(), train=True, backward__k0_mul=mine)
    assert mine not in found[0] and found[1] == (mine,)
    with pytest.warns(UserWarning, match="a schedule is pinned for 'k9_exp'; the kernels of graph"):
        schedules(rows, X, k9_exp=mine)
