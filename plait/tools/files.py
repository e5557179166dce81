"""Files that a command writes its answer to: looked at before the work, written in one place."""

from __future__ import annotations

import os
from pathlib import Path

from plait.errors import UserError


def can_write(path: str | None) -> None:
    """Raises UserError for a file that cannot be written ("-": the output), before the work that it is for."""
    if path is None or path == "-":
        return
    folder = Path(path).parent
    if not folder.exists():
        raise UserError(f"cannot write {path}: there is no folder {folder}", hint=f"mkdir -p {folder}")
    if not folder.is_dir():
        raise UserError(f"cannot write {path}: {folder} is a file", hint="name a file in a folder")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise UserError(f"cannot write {path}: it is not yours to write", hint="name a file in a folder of your own")


def write_file(path: str, text: str) -> None:
    """The text into a file, as UTF-8. Raises UserError in one line where that fails all the same."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}", hint="free some space, or name another file"
        ) from error
