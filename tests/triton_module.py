"""Import an emitted Triton module from a file: Triton reads its source."""

from __future__ import annotations

import importlib.util
import pathlib
import tempfile
from typing import Any

from plait.emit.triton import TritonSource


def load_module(source: TritonSource) -> Any:
    """The emitted module, imported from a file (Triton reads the source)."""
    path = pathlib.Path(tempfile.mkdtemp()) / f"{source.name}.py"
    path.write_text(source.text)
    spec = importlib.util.spec_from_file_location(source.name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
