"""plait: a kernel-fusion compiler for PyTorch whose decisions can be read.

`torch.compile(model, backend="plait")` needs no import of this package. Names below are loaded when first used, so that
`import plait` costs nothing and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import Any

from plait.regions import fuse, no_fuse

__version__ = "0.1.0"

_LAZY = {
    "compile": "plait.api",
    "backend": "plait.api",
    "Options": "plait.options",
    "explain": "plait.report.run",
    "verify": "plait.diagnose.verify",
    "bisect": "plait.diagnose.bisect",
}

__all__ = ["Options", "__version__", "backend", "bisect", "compile", "errors", "explain", "fuse", "no_fuse", "verify"]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("plait.errors")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'plait' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
