"""Numbers and names as people read them: bytes with a unit, microseconds, lines of the user's files."""

from __future__ import annotations

import re
from collections.abc import Iterable

_UNITS = ("B", "KB", "MB", "GB", "TB")


def figure(value: float) -> str:
    """Three significant digits, no exponent."""
    if value == 0 or value != value:
        return "0" if value == 0 else "nan"
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:.{digits}f}"


def bytes_text(value: float) -> str:
    """1.50 MB (a MB is a million bytes)."""
    for unit in _UNITS:
        if value < 1000 or unit == _UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{figure(value)} {unit}"
        value /= 1000
    raise AssertionError


def us_text(value: float | None) -> str:
    """Microseconds; a dash for what is not known."""
    return "-" if value is None else figure(value)


def intensity_text(value: float | None) -> str:
    """Flops a byte: 0.083."""
    return "-" if value is None else f"{value:.3f}" if value < 10 else figure(value)


def modules(paths: Iterable[str]) -> str:
    """blocks.*.attn: module paths with the numbers of repeated layers left out, each once."""
    return ", ".join(dict.fromkeys(re.sub(r"(?<=[.\[])\d+|^\d+", "*", p) for p in paths if p))


def count(number: int, one: str, many: str = "") -> str:
    """1 kernel, 2 kernels."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def clipped(line: str, width: int) -> str:
    """The line, or the whole words of it that leave room for " ..." (a part of a word that alone is longer)."""
    if len(line) <= width:
        return line
    kept = line[: width - 4]
    whole = kept.rpartition(" ")[0] if line[width - 4] != " " else kept
    return (whole.rstrip() or kept) + " ..."


def listed(names: Iterable[str], most: int = 6) -> str:
    """a, b, c ×2 and 3 more: names in order, repetitions counted."""
    found: dict[str, int] = {}
    for n in names:
        found[n] = found.get(n, 0) + 1
    words = [n if k == 1 else f"{n} x{k}" for n, k in found.items()]
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more
