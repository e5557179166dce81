"""Tables for the terminal: rich where it is installed and a person is watching, aligned plain text everywhere else."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO


def plain_table(head: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """Aligned columns: the first to the left, the others to the right."""
    widths = [max(len(r[c]) for r in [head, *rows]) for c in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths)))
        return (indent + "  ".join([first, *rest])).rstrip()

    return "\n".join([line(head), indent + "  ".join("-" * w for w in widths), *(line(r) for r in rows)])


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], title: str = "", out: TextIO | None = None) -> None:
    """Print a table; plain when the output is not a terminal, so that it can be piped and diffed."""
    out = out or sys.stdout
    if out.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ModuleNotFoundError:
            pass
        else:
            table = Table(title=title or None, title_justify="left")
            for i, name in enumerate(head):
                table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
            for row in rows:
                table.add_row(*row)
            Console(file=out).print(table)
            return
    if title:
        print(title, file=out)
    print(plain_table(head, rows), file=out)


def number(value: object, digits: int = 3) -> str:
    """A figure with about `digits` significant digits; a dash for what was not measured."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return "-"
    if value != value:
        return "nan"
    if isinstance(value, int) or abs(value) >= 10**digits:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"
