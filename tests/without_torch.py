"""For tests of the torch-free core, which prove that it is: importing torch or triton while one of them runs fails."""

from __future__ import annotations

import contextlib
import importlib.abc
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

BLOCKED = ("torch", "triton")


class _Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} is imported by a test of the torch-free core")
        return None


@contextlib.contextmanager
def no_torch() -> Iterator[None]:
    """Hide torch and triton, whether another test imported them or not."""
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in BLOCKED}
    refuse = _Refuse()
    sys.meta_path.insert(0, refuse)
    try:
        yield
    finally:
        sys.meta_path.remove(refuse)
        sys.modules.update(hidden)
