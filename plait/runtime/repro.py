"""Repro folders: a captured graph as a Python file that runs, with the options and the error, for a bug report."""

from __future__ import annotations

import json
import os
import re
import tempfile
import traceback
from collections.abc import Sequence
from typing import Any

from plait.options import Options

_RUN = '''"""Compile this graph again. Inputs are random with the shapes, strides and types of the original."""

import json
import pathlib
import sys

import torch

from graph import Repro, inputs

from plait.api import backend

options = json.loads(pathlib.Path(__file__).with_name("options.json").read_text())
compiled = backend(torch.fx.symbolic_trace(Repro()), inputs(), options={{**options, "strict": True}})
print(compiled(*inputs()))
sys.exit(0)
'''


def write_repro(
    gm: Any, example_inputs: Sequence[Any], kind: str, options: Options, error: BaseException
) -> str | None:
    """Write graph.py, run.py, options.json and error.txt into a new private folder; None when that is not possible."""
    try:
        folder = tempfile.mkdtemp(prefix="plait-repro-")
        texts = {
            "graph.py": _graph_file(gm, example_inputs, kind),
            "run.py": _RUN.replace("{{", "{").replace("}}", "}"),
            "options.json": json.dumps(options.as_dict(), indent=1),
            "error.txt": "".join(traceback.format_exception(error)),
        }
        for name, text in texts.items():
            with open(os.path.join(folder, name), "w", encoding="utf-8") as out:
                out.write(text)
    except Exception:  # the report about a failure must not become a second failure
        return None
    return folder


def module_text(gm: Any) -> str:
    """A captured graph as the class Repro; constants are random."""
    body = re.sub(r"^class [^(\n]*\(", "class Repro(", gm.print_readable(print_output=False), count=1)
    constants = [
        f"        self.{name} = {_tensor(value)}"
        for name, value in [*gm.named_buffers(), *gm.named_parameters(), *_plain_constants(gm)]
        if "." not in name
    ]
    if constants:
        head, _, rest = body.partition("\n")
        init = "\n".join(["    def __init__(self):", "        super().__init__()", *constants])
        body = f"{head}\n{init}\n\n{rest}"
    return f"from math import inf, nan\n\nimport torch\nfrom torch import device\n\n\n{body}\n"


def _graph_file(gm: Any, example_inputs: Sequence[Any], kind: str) -> str:
    made = "".join(f"        {_value(x)},\n" for x in example_inputs)
    return (
        f'"""A captured graph ({kind})."""\n\n{module_text(gm)}'
        f"\n\ndef inputs():\n    torch.manual_seed(0)\n    return [\n{made}    ]\n"
    )


def _plain_constants(gm: Any) -> list[tuple[str, Any]]:
    import torch

    known = dict(gm.named_buffers()) | dict(gm.named_parameters())
    return [(k, v) for k, v in vars(gm).items() if isinstance(v, torch.Tensor) and k not in known]


def _value(x: Any) -> str:
    import torch

    if isinstance(x, torch.Tensor):
        return _tensor(x)
    hint = getattr(getattr(x, "node", None), "hint", None)
    return repr(x if hint is None else hint)


def _tensor(x: Any) -> str:
    import torch

    shape, strides = [_hint(n) for n in x.shape], [_hint(n) for n in x.stride()]
    low, high = ("0", "2") if not x.dtype.is_floating_point and not x.dtype.is_complex else ("-1", "1")
    kind = f"dtype={x.dtype}, device={str(x.device)!r}"
    if x.dtype is torch.bool or not (x.dtype.is_floating_point or x.dtype.is_complex):
        fill = f"torch.randint({low}, {high}, {shape}).to({x.dtype})"
    else:
        fill = f"torch.randn({shape}).to({x.dtype})"
    return f"torch.empty_strided({shape}, {strides}, {kind}).copy_({fill})"


def _hint(n: Any) -> int:
    hint = getattr(getattr(n, "node", None), "hint", None)
    return int(n if hint is None else hint)
