"""The files of this checkout, as the architecture tests see them."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def modules() -> dict[str, tuple[str, bool]]:
    """Every module of the package: name -> (source, is it a package)."""
    found = {}
    for path in sorted((ROOT / "plait").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        found[".".join(parts[:-1] if is_package else parts)] = (path.read_text(), is_package)
    return found


@functools.cache
def tracked() -> dict[str, str]:
    """Text files that version control knows, or, outside a checkout, the project's own folders: path -> text."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    names = listing.stdout.split("\0") if listing.returncode == 0 else []
    if not any(names):
        folders = ("plait", "tests", "docs", "bench")
        names = [str(p.relative_to(ROOT)) for f in folders for p in (ROOT / f).rglob("*") if p.is_file()]
    texts = {}
    for name in filter(None, names):
        try:
            texts[name] = (ROOT / name).read_text()
        except (UnicodeDecodeError, FileNotFoundError):
            continue  # a binary file, or one deleted and not yet committed
    return texts
