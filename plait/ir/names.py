"""What an operator of the user's answers to, for options and for assertions: its names, its module's path, its regions, its line.

A name is the function or module that the program calls ("softmax", "linear"), an operator ("aten.mm"; "matmul" is any
product), a module's path ("layers.0.mlp", or "layers.*.mlp", where * is one part of a path), the label of a region, or a place
("model.py:12").
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_PRODUCTS = frozenset(["mm", "bmm", "addmm", "baddbmm", "linear", "matmul", "dot", "mv", "einsum"])
_PLACE = re.compile(r"(?P<file>.+):(?P<line>\d+)$")


def names_of(
    call: str, aten: str, parts: Iterable[str] = (), line: str = "", labels: Iterable[str] = ()
) -> Iterator[str]:
    """What an operator answers to, its module apart. `call`: what the program calls; `parts`: what plait made of it."""
    plain = aten.removeprefix("aten.")
    yield from (name for name in (call, aten, plain, plain.strip("_"), plain.removeprefix("native_")) if name)
    if plain in _PRODUCTS or call in _PRODUCTS or "dot" in parts:
        yield "matmul"
    if line:
        yield place(line)
    yield from labels


def module_under(module: str, name: str) -> str | None:
    """The part of a module's path that a name means: the path itself, or one that it lies under; None where it means neither."""
    path, pattern = _dotted(module), _dotted(name)
    wanted = r"\.".join(
        "[^.]+" if part == "*" else re.escape(part).replace(r"\*", "[^.]*") for part in pattern.split(".")
    )
    found = re.match(rf"{wanted}(?=\.|$)", path) if pattern else None
    return found[0] if found else None


def place(line: str) -> str:
    """ "file.py:12" of "file.py:12 y = x + 1"."""
    return line.split(" ", 1)[0]


def places(lines: Iterable[str], most: int = 6) -> str:
    """model.py:12,14-16: the places of several lines, by file, in order of the files; `most` ranges of them."""
    found: dict[str, set[int]] = {}
    for line in lines:
        m = _PLACE.match(place(line))
        if m is not None:
            found.setdefault(m["file"], set()).add(int(m["line"]))
    out: list[str] = []
    left = most
    for file, numbers in found.items():
        ranges = _ranges(sorted(numbers))[: max(left, 0)]
        left -= len(_ranges(sorted(numbers)))
        if ranges:
            out.append(f"{file}:{','.join(ranges)}")
    return ", ".join(out) + (", ..." if left < 0 else "")


def _dotted(path: str) -> str:
    """layers.0.mlp of layers[0].mlp, which is how Dynamo spells it."""
    return re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", path)


def _ranges(numbers: list[int]) -> list[str]:
    out: list[tuple[int, int]] = []
    for n in numbers:
        if out and n == out[-1][1] + 1:
            out[-1] = (out[-1][0], n)
        else:
            out.append((n, n))
    return [str(a) if a == b else f"{a}-{b}" for a, b in out]
