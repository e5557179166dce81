"""Which values are evaluated wherever they are read."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from plait.compiler import Compiled, all_levels
from plait.frontend.externs import decompositions
from plait.frontend.fx_import import import_fx
from plait.options import Options
from plait.plan.device import SPECS
from plait.tile.program import Dot, Load, Sweep


def normed(x: torch.Tensor, g: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    y = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * g
    return F.silu(F.linear(y, w)) * F.linear(y, v)


def planned(rows: int, device: str = "h200") -> Compiled:
    shapes = [(rows, 2048), (2048,), (8192, 2048), (8192, 2048)]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        args = [mode.from_tensor(torch.empty(s, dtype=torch.bfloat16)) for s in shapes]
        gm = make_fx(normed, decomposition_table=decompositions())(*args)
    return all_levels(import_fx(gm, args), SPECS[device], Options.make(None, {}))


@pytest.mark.parametrize(("rows", "computed"), [(2040, False), (1, True)])
def test_a_factor_that_many_tiles_would_evaluate_is_written_once(rows: int, computed: bool) -> None:
    """64 tiles of columns would normalise the rows again, and no descriptor reads what is computed; where there is one row, it
    is worth less than a launch."""
    programs = [p.program for launch in planned(rows).launches for p in launch.parts]
    (product,) = (p for p in programs if any(isinstance(s, Dot) for s in p.walk()))
    loops = [s for s in product.walk() if isinstance(s, Sweep) and any(isinstance(x, Dot) for x in s.body)]
    assert (len([s for s in loops[-1].body if isinstance(s, Load)]) > 3) is computed
    assert sum(isinstance(s, Dot) for s in product.walk()) == 2
