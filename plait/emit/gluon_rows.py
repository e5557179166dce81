"""Extremes of the numbers that masks compare positions with, over a block's rows, in Gluon text.

The copying warp wants to know which tiles come, so that they are found before the groups part: by a function that does for
each group's rows what the groups do for theirs before their loops.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from plait.emit.gluon_merge import names_in
from plait.emit.gluon_shape import GROUP_ROWS, PARTS
from plait.emit.gluon_text import function
from plait.emit.triton_grid import needed_for

_DEFINES = re.compile(r"    (\w+) = (.*)")
_NAME = "row_ends"


def row_ends(
    ends: Sequence[tuple[str, str]],
    before: Sequence[str],
    lanes: Iterable[tuple[str, str]],
    given: set[str],
    start: str,
    layouts: Callable[[str], list[str]],
) -> tuple[list[str], str]:
    """(lines of the kernel, the function): definitions of `ends` (name, text). `before` are the lines before a group's loop,
    `lanes` definitions of the rows' variables, `given` names that the kernel has; `start` is that of the first row."""
    made = [m.groups() for line in before if (m := _DEFINES.fullmatch(line))]
    texts = "\n".join(text for _, text in ends)
    lines = needed_for(texts, [*lanes, *((name, text) for name, text in made)])
    body = [*lines, *(f"    {name} = {text}" for name, text in ends)]
    names = ", ".join(name for name, _ in ends)
    whole = "\n".join(body)
    args = sorted(names_in(whole) & given)
    text = function(_NAME, args, [*layouts(whole), *body, f"    return {names}"])
    if start not in args:
        return [f"{names} = {_NAME}({', '.join(args)})"], text
    calls: list[str] = []
    for k in range(PARTS):
        mine = [f"{start} + {k * GROUP_ROWS}" if k and a == start else a for a in args]
        calls.append(", ".join(f"{name}_{k}" for name, _ in ends) + f" = {_NAME}({', '.join(mine)})")
    for name, _ in ends:
        both = f"{name}_0"
        for k in range(1, PARTS):
            both = f"tl.{'maximum' if name.endswith('_most') else 'minimum'}({both}, {name}_{k})"
        calls.append(f"{name} = {both}")
    return calls, text
