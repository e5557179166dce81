"""A stream that keeps what is written, and says whether it is a terminal."""

from __future__ import annotations


class Terminal:
    """What is shown."""

    def __init__(self, live: bool = True) -> None:
        self.text, self.live = "", live

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return self.live
