"""However a mask is put, its bounds of the loop are found: negations of "and" and "or" say what their De Morgan forms say."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from plait.compiler import all_levels
from plait.emit.cpp import CppKernel, emit_cpp
from plait.emit.triton import emit_triton
from plait.frontend.externs import decompositions
from plait.frontend.fx_import import import_fx
from plait.options import Options
from plait.oracle.compare import FAIL, compare
from plait.oracle.reference import reference
from plait.plan.device import SPECS
from plait.tile.masks import logic
from plait.tile.program import Dot, TileProgram

Hidden = Callable[[Tensor, Tensor, Tensor], Tensor]
SPELLINGS: dict[str, Hidden] = {  # what a mask hides that shows (a or b) and c
    "not and": lambda a, b, c: ~((a | b) & c),
    "or of nots": lambda a, b, c: ~(a | b) | ~c,
    "all at the leaves": lambda a, b, c: (~a & ~b) | ~c,
    "not not": lambda a, b, c: ~~~((a | b) & c),
    "other order": lambda a, b, c: ~(c & (b | a)),
    "not or of nots inside": lambda a, b, c: ~(~(~a & ~b) & c),
    "logical words": lambda a, b, c: torch.logical_not(torch.logical_and(torch.logical_or(a, b), c)),
}


def attend(hidden: Hidden) -> Callable[..., Tensor]:
    def f(q: Tensor, k: Tensor, v: Tensor, shown: Tensor) -> Tensor:
        i = torch.arange(q.shape[-2])[:, None]
        j = torch.arange(k.shape[-2])[None, :]
        s = q @ k.transpose(-1, -2) * 0.125
        s = s.masked_fill(hidden(shown[None, :], j < 37, j <= i), -math.inf)
        return torch.softmax(s, -1) @ v

    return f


def arguments(n: int, d: int) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return (*(torch.randn(2, n, d) for _ in range(3)), torch.rand(n) < 0.5)


def text_for(device: str, hidden: Hidden) -> str:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with FakeTensorMode():
        args = [torch.empty(16, 2048, 64, dtype=dtype) for _ in range(3)] + [torch.empty(2048, dtype=torch.bool)]
        gm = make_fx(torch.func.functionalize(attend(hidden)), decomposition_table=decompositions())(*args)
    made = all_levels(import_fx(gm, args), SPECS[device], Options.make(None, {}))
    # beside it, the summary of `shown`
    (programs,) = (ps for ps in (tuple(p.program for p in x.parts) for x in made.launches) if _has_product(ps))
    return emit_cpp([CppKernel("k", programs)]) if device == "cpu" else emit_triton(programs, "k").text


def _has_product(programs: tuple[TileProgram, ...]) -> bool:
    return any(isinstance(s, Dot) for p in programs for s in p.walk())


@pytest.mark.parametrize("name", list(SPELLINGS))
def test_loops_end_at_the_diagonal(name: str) -> None:
    triton = [line for line in text_for("h200", SPELLINGS[name]).splitlines() if "in tl.range(" in line]
    assert any("tl.minimum(2048, p1_start + " in line for line in triton), triton
    cpp = [line for line in text_for("cpu", SPELLINGS[name]).splitlines() if "for (int64_t r" in line]
    assert any("r0_lo < plait::at_most_of(" in line and "(p1_lo + " in line for line in cpp), cpp


@pytest.mark.parametrize("name", ["not and", "or of nots", "not or of nots inside"])
def test_what_is_left_is_right(name: str) -> None:
    torch._dynamo.reset()
    fn, args = attend(SPELLINGS[name]), arguments(150, 24)
    got = torch.compile(fn, backend="plait", options={"strict": True})(*args)
    verdict = compare(got, fn(*args), reference(fn, args), name=name)
    assert verdict.status != FAIL, verdict.message


def test_logic_says_what_every_value_of_the_unknown_would_give() -> None:
    known = {
        "bit_and": lambda x, y: x and y,
        "bit_or": lambda x, y: x or y,
        "bit_xor": lambda x, y: x != y,
        "eq": lambda x, y: x == y,
    }
    for op, exact in known.items():
        for args in itertools.product((False, True, None), repeat=2):
            free = [(False, True) if a is None else (a,) for a in args]
            results = {exact(*values) for values in itertools.product(*free)}
            assert logic(op, args) == (results.pop() if len(results) == 1 else None), (op, args)
    assert [logic("bit_not", [a]) for a in (False, True, None, 0.0)] == [True, False, None, None]
    assert logic("bit_and", [0.0, None]) is None and logic("exp", [True]) is None
