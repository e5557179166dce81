"""Attention whose masks compare keys' positions with numbers that are loaded a row, written by hand, for the Triton emitter:
loaded positions, lengths, first points, in any order and far out of range. See triton_dot_cases; run the same way.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
from dot_make import CASES, DotCase, MakeDot, empty
from tile_make import B1, I64, randn
from triton_dot_cases import ATTENTION, BF16, INF, attention_make, unknown_sizes, wrong

from plait.ir.index import Expr

M, N = 70, 53
LEAST, GREATEST = -(2**63), 2**63 - 1
RANDOM = torch.randint(-3, N + 5, (M,), generator=torch.Generator().manual_seed(1))
RANDOM[0], RANDOM[17], RANDOM[33] = -1, GREATEST, LEAST  # the second block of 16 rows sees everything
RANDOM[48:64] = torch.tensor([-1, LEAST, -7, -(2**32)] * 4)  # the fourth sees nothing
ROWS: dict[str, Callable[[], DotCase]] = {}


def keys(op: str, bound: torch.Tensor) -> torch.Tensor:
    """Where the key's position compares so with the row's number."""
    return getattr(torch, op)(torch.arange(N), bound[..., None])


def by_row(
    name: str,
    ops: tuple[str, ...],
    bounds: tuple[torch.Tensor, ...],
    turned: bool = False,
    schedule: str = ATTENTION,
    m: int = M,
) -> None:
    """A case: keys count where their position compares so (`turned`: the number stands on the left) with bounds of the row,
    or of the head where there are few, and all of `ops` hold."""
    heads = 2

    def made() -> DotCase:
        def shown(mk: MakeDot, h: Expr, i: Expr) -> Callable[[Expr], int]:
            loaded = []
            for b in bounds:
                k = mk.load(b, h if len(b) == heads else i)
                loaded.append(k if b.dtype is torch.int64 else mk.let("cast", k, dtype=I64))

            def keep(r: Expr) -> int:
                j = mk.let("index", dtype=I64, expr=r)
                swapped = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
                found = [
                    mk.let(swapped[op], k, j, dtype=B1) if turned else mk.let(op, j, k, dtype=B1)
                    for op, k in zip(ops, loaded, strict=True)
                ]
                both = found[0]
                for other in found[1:]:
                    both = mk.let("bit_and", both, other, dtype=B1)
                return both

            return keep

        mk, (q, k, v) = attention_make(heads, m, N, 16, 16, BF16, schedule=schedule, shown=shown)
        t = q.double() @ k.double().transpose(1, 2) * 16**-0.5
        seen = torch.ones(heads, m, N, dtype=torch.bool)
        for op, b in zip(ops, bounds, strict=True):
            seen &= keys(op, b.long()[:, None] if len(b) == heads else b)
        t = t.masked_fill(~seen, -INF)
        return DotCase(mk, [torch.softmax(t, -1) @ v.double()])

    CASES[name] = ROWS[name] = made


for _op in ("lt", "le", "gt", "ge"):
    by_row(f"rows_{_op}", (_op,), (RANDOM,))
    by_row(f"rows_{_op}_turned", (_op,), (RANDOM,), turned=True)
SORTED = RANDOM.clamp(-1, N).sort().values
by_row("rows_sorted", ("le",), (SORTED,))
by_row("rows_between", ("le", "gt"), (RANDOM, RANDOM.clamp(-(2**40), 2**40) - 20))
by_row("rows_between_sorted", ("le", "gt"), (SORTED, SORTED - 30))
by_row("lengths", ("lt",), (torch.tensor([37, 0]),))
by_row("lengths_i32", ("lt",), (torch.tensor([1000, 16], dtype=torch.int32),))
by_row("starts_and_positions", ("ge", "le"), (torch.arange(M) // 20 * 20, torch.arange(M)))
by_row("one_row_a_block", ("le",), (RANDOM,), schedule=ATTENTION.replace("p1:16", "p1:1"))
by_row("few_rows", ("lt",), (torch.tensor([37, 16]),), schedule=ATTENTION.replace("p1:16", "p1:all"), m=5)
by_row("all_rows", ("le",), (RANDOM,), schedule=ATTENTION.replace("p1:16", "p1:all"))
ROWS["unknown_rows"] = CASES["unknown_rows"] = lambda: unknown_sizes("rows_between", "p1 r0")


def sum_besides() -> DotCase:
    """Beside what the mask hides a sum over all keys: no tile may be left out."""
    m, n = 40, 53
    q, k, pos = randn(m, 16, dtype=BF16), randn(n, 16, dtype=BF16), RANDOM[:40].contiguous()
    from plait.ir.index import axis

    mk = MakeDot("p0 r0 r1", [m, n, 16], "form=swept tile=p0:16,r0:16,r1:all warps=4 stages=2 vector=r1")
    i, r, s = axis(0), axis(1), axis(2)
    at = mk.load(pos, i)
    with mk.sweep(1):
        with mk.sweep(2):
            t = mk.dot(mk.load(q, i * 16 + s), mk.load(k, r * 16 + s), (2,), BF16)
        c = mk.let("le", mk.let("index", dtype=I64, expr=r), at, dtype=B1)
        some = mk.reduce("sum", mk.let("where", c, t, mk.const(0.0)), (1,))
        every = mk.reduce("sum", t, (1,))
    mk.store(empty(m, dtype=torch.float32), i, some)
    mk.store(empty(m, dtype=torch.float32), i, every)
    y = q.double() @ k.double().t()
    return DotCase(mk, [y.masked_fill(~keys("le", pos), 0).sum(1), y.sum(1)])


CASES["sum_besides"] = ROWS["sum_besides"] = sum_besides


if __name__ == "__main__":
    for each in sys.argv[1:] or ROWS:
        print(json.dumps({"case": each, "error": wrong(each)}), flush=True)
