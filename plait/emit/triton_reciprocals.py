"""One reciprocal of the hardware for four quotients, as text of an assembly block.

The special-function unit gives 16 results a clock and multiprocessor, multiplications come at 128. With p = a b and q = c d

    r = 1 / (p q);   1/a = b (r q), 1/b = a (r q), 1/c = d (r p), 1/d = c (r p)

Four quotients tie four values together: one that is NaN or infinite, or a product that overflows, would spoil the other three. So
whoever holds such a product takes a reciprocal for each of its values, behind a branch that is not taken otherwise.
"""

from __future__ import annotations

POINTS = 16  # values of a thread that one branch serves
_QUAD = 4
_MOST = "0f7E000000"  # 2^125: the reciprocal of less is no subnormal number, which the hardware flushes to zero


def assembly(points: int = POINTS) -> tuple[str, str]:
    """(text, constraints) of a block that takes `points` values x of one sign, |x| >= 1 or NaN, and gives 1 / x, within a few
    2^-24 of it relatively."""
    lines = [".reg .f32 p, q, r, u, v;", ".reg .pred fit;"]
    for k in range(0, points, _QUAD):
        a, b, c, d = (f"${points + k + i}" for i in range(_QUAD))
        lines += [
            f"mul.f32 p, {a}, {b};",
            f"mul.f32 q, {c}, {d};",
            "mul.f32 r, p, q;",
            f"setp.lt.and.f32 fit, r, {_MOST}, fit;" if k else f"setp.lt.f32 fit, r, {_MOST};",
            "rcp.approx.ftz.f32 r, r;",
            "mul.f32 u, r, q;",
            "mul.f32 v, r, p;",
            *(f"mul.f32 ${k + i}, {x}, {y};" for i, (x, y) in enumerate(((b, "u"), (a, "u"), (d, "v"), (c, "v")))),
        ]
    lines.append("@fit bra done;")
    lines += [f"rcp.approx.ftz.f32 ${i}, ${points + i};" for i in range(points)]
    constraints = ",".join(["=&f"] * points + ["f"] * points)  # results are written while factors are still read
    return "{ " + " ".join(lines) + " done: }", constraints


def helper(name: str) -> str:
    """The device function."""
    text, constraints = assembly()
    return (
        f"def {name}(x):\n"
        f"    # 1 / x of values of one sign, |x| >= 1: of four at once, or each by itself where their product is too large\n"
        f'    return tl.inline_asm_elementwise("{text}", "{constraints}", [x], dtype=tl.float32, is_pure=True, pack={POINTS})'
    )
