"""Import an emitted Triton module from a file, since Triton reads its source; run a program of cases interpreted."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from plait.emit.triton import TritonSource

_ROOT = pathlib.Path(__file__).parents[1]


def load_module(source: TritonSource) -> Any:
    """The emitted module, imported from a file (Triton reads the source)."""
    path = pathlib.Path(tempfile.mkdtemp()) / f"{source.name}.py"
    path.write_text(source.text)
    spec = importlib.util.spec_from_file_location(source.name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def interpreted(program: str) -> dict[str, str]:
    """What a program of cases says of each, run under the interpreter; its stderr as case ""."""
    env = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join((str(_ROOT), str(_ROOT / "tests"))),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", str(_ROOT / "tests" / program)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=290, cwd=_ROOT)
    out = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {"": done.stderr, **{r["case"]: r["error"] for r in out}}
