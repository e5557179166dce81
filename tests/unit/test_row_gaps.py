"""What lies between rows that lie apart: programs stay out of it, kernels run into it, and memory has it behind the last row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton_resources import compile_sm90

from plait.emit.triton import emit_triton
from plait.errors import CheckFailed
from plait.oracle.eval_tile import run_tile
from plait.plan import contract_cost
from plait.plan.layout import room
from plait.runtime.tensors import lay_out
from plait.tile.program import Store, Sweep
from tests.passes import planned


def of_a_product(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.gelu((x @ w) @ v, approximate="tanh")


def test_masks_end_in_the_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels move 16 bytes at once though rows end inside a vector."""
    monkeypatch.setitem(contract_cost.OWN, "cuda", 1e-9)
    c = planned(normed, (256, 64), (64, 4097), (4097, 64))
    kernels = [tuple(p.program for p in launch.parts) for launch in c.launches if launch.parts]
    (apart,) = [parts for parts in kernels if sum(b.rows is not None for p in parts for b in p.buffers) == 2]
    found = compile_sm90(emit_triton(apart, "kernel"))
    assert found.widest_load == 4
    assert "st.global.v4.b32" in found.ptx and "st.global.b16" not in found.ptx


def normed(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(x @ w, -1) @ v


def test_sums_of_products_end_with_their_rows() -> None:
    """Both factors are zeros beyond the depth: a mask that ended in the gap would add up what lies there."""
    c = planned(of_a_product, (8192, 1024), (1024, 4097), (4097, 8192))
    programs = [p.program for launch in c.launches for p in launch.parts]
    program = programs[-1]
    assert program.buffers[0].rows == (4097, 4160)
    plain = replace(program, schedule=replace(program.schedule, blocks=0))
    loads = [line for line in emit_triton(plain, "kernel").text.splitlines() if "tl.load" in line]
    assert len(loads) == 2 and all("r0_ok" in line for line in loads)


def test_programs_stay_inside_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(contract_cost.OWN, "cuda", 1e-9)
    c = planned(normed, (40, 24), (24, 37), (37, 16), dtype=torch.float64)
    (p,) = [p.program for launch in c.launches for p in launch.parts if any(b.rows for b in p.program.buffers)]
    assert [b.rows for b in p.buffers] == [(37, 40), (37, 40)]
    memory = [torch.zeros(40 * 40, dtype=torch.float64) for _ in p.buffers]
    run_tile(p, memory, complete=True)

    def shifted(s: Any) -> Any:
        if isinstance(s, Sweep):
            return replace(s, body=tuple(map(shifted, s.body)))
        return replace(s, address=s.address + 1) if isinstance(s, Store) else s

    wrong = replace(p, body=tuple(map(shifted, p.body)))
    with pytest.raises(CheckFailed, match="between two rows"):
        run_tile(wrong, memory)


def test_memory_goes_on_behind_the_last_row() -> None:
    """A saved tensor that comes back with the right strides, but ends with its last element, is laid out again."""
    assert room((40, 37), (40, 1)) == 40 * 40 and room((40, 37), (37, 1)) == 40 * 37 and room((0, 37), (40, 1)) == 0
    exact = torch.empty(39 * 40 + 37).as_strided((40, 37), (40, 1)).fill_(3.0)
    slots: list[Any] = [exact]
    lay_out(slots, 0, (40, 1))
    assert slots[0].untyped_storage().nbytes() == 40 * 40 * 4 and torch.equal(slots[0], exact)
    again = slots[0]
    lay_out(slots, 0, (40, 1))
    assert slots[0] is again
