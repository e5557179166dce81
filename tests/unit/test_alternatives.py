"""Schedules that are worth measuring, and what a block may hold."""

from __future__ import annotations

import torch
import triton_dot_cases as cases

from plait.tile.alternatives import alternatives, shared_bytes
from plait.tile.program import TileProgram
from plait.tile.schedule import parse_schedule
from tests.loss_variants import Sizes
from tests.unit.test_linear_loss import planned as loss_planned

BF16 = torch.bfloat16
WALKING = "form=swept tile=p0:128,p1:256,r0:64 warps=8 stages=4 vector=p1 blocks=132"


def _product(schedule: str, m: int = 512, n: int = 512, k: int = 256) -> TileProgram:
    data = (torch.empty(m, k, dtype=BF16), torch.empty(n, k, dtype=BF16), torch.empty(n, dtype=BF16))
    return cases.gemm_make(m, n, k, BF16, schedule, data=data)[0].program("g")


def test_a_persistent_product_may_also_take_a_block_a_tile_or_another_width() -> None:
    found = [str(s) for s in alternatives(_product(WALKING))]
    assert found == [
        "form=swept tile=p0:128,p1:256,r0:64 warps=8 stages=3 vector=p1",
        "form=swept tile=p0:128,p1:256,r0:64 warps=8 stages=4 vector=p1 blocks=all",
        "form=swept tile=p0:128,p1:128,r0:64 warps=8 stages=4 vector=p1 blocks=132",
    ]
    assert [str(parse_schedule(line)) for line in found] == found


def test_tiles_in_flight_are_counted_and_what_does_not_fit_is_left_out() -> None:
    program = _product(WALKING)
    stage = (128 + 256) * 64 * 2
    assert shared_bytes(program, program.schedule) == 4 * stage
    deep = parse_schedule(WALKING.replace("stages=4", "stages=6"))
    assert shared_bytes(program, deep) == 6 * stage > 232448
    wide = [s for s in alternatives(_product(WALKING.replace("stages=4", "stages=6"))) if s.stages == 6]
    assert not wide


def test_other_programs_vary_their_warps() -> None:
    found = alternatives(_product("form=swept tile=p0:32,p1:32,r0:16 warps=4 stages=3 vector=p1"))
    assert [s.warps for s in found] == [2, 8]


def test_a_product_of_few_rows_varies_its_columns_and_what_is_in_flight() -> None:
    found = [
        str(s) for s in alternatives(_product("form=swept tile=p0:16,p1:32,r0:128 warps=4 stages=6 vector=r0", m=16))
    ]
    assert found == [
        "form=swept tile=p0:16,p1:16,r0:128 warps=2 stages=6 vector=r0",
        "form=swept tile=p0:16,p1:64,r0:128 warps=2 stages=6 vector=r0",
        "form=swept tile=p0:16,p1:32,r0:256 warps=4 stages=4 vector=r0",
    ]


def test_a_product_that_streams_through_columns_may_read_through_descriptors() -> None:
    sizes = Sizes(rows=8192, depth=1024, words=128256, dtype=BF16)
    launches = loss_planned("plain", sizes)["inference"].launches
    (program,) = (x.parts[0].program for x in launches if x.parts and "dot" in x.name)
    assert program.schedule.blocks == 0
    found = [str(s).split(" vector=r1")[1] for s in alternatives(program)]
    assert found == [" blocks=all"]
    assert shared_bytes(program, program.schedule) > 227 * 1024 // 2  # one block a multiprocessor, whatever it reads by
