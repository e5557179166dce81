"""A small writer of indented text, shared by the emitters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Writer:
    """Collects lines at a current indentation; `text()` joins them."""

    def __init__(self, indent: str = "    ") -> None:
        self._lines: list[str] = []
        self._depth = 0
        self._indent = indent

    def line(self, text: str = "") -> None:
        """Write text (several lines when it has newlines) at the current indentation; "" is a blank line."""
        for part in text.split("\n"):
            self._lines.append(self._indent * self._depth + part if part else "")

    def lines(self, *texts: str) -> None:
        """Write several lines."""
        for t in texts:
            self.line(t)

    @contextmanager
    def block(self, opening: str = "", closing: str = "") -> Iterator[None]:
        """Write `opening`, indent what follows inside the `with`, write `closing`; either may be empty (nothing written)."""
        if opening:
            self.line(opening)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if closing:
            self.line(closing)

    def text(self) -> str:
        """Everything written so far, ending in a newline."""
        return "\n".join(self._lines) + "\n" if self._lines else ""


def identifier(name: str) -> str:
    """A name usable in C++ and Python alike: other characters become underscores."""
    clean = "".join(c if c.isascii() and (c.isalnum() or c == "_") else "_" for c in name)
    return clean if clean and not clean[0].isdigit() else "_" + clean
