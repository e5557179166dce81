"""Where an FX node came from, in the user's words: module path, source line, and regions."""

from __future__ import annotations

import re
from typing import Any

from plait.ir.graph import Origin
from plait.regions import PREFIX

ATTENTION = "plait.attention"
"""The annotation of what was decided of a call of attention (frontend/open_attention.py)."""

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*\n\s*(?P<code>[^\n]*)')


def origin_of(fx: Any) -> Origin:
    """The origin of a torch.fx.Node; backward nodes carry the module of their forward."""
    return Origin(fx.name, _module(fx.meta), _line(fx.meta.get("stack_trace") or ""))


def entries(fx: Any) -> list[tuple[str, tuple[str, str, bool]]]:
    """The user's regions around an FX node, outermost first: which entry, and (kind, label, whether the backward is meant)."""
    noted = fx.meta.get("custom") or {}
    return [(key, what) for key, what in noted.items() if isinstance(key, str) and key.startswith(PREFIX)]


def _module(meta: dict[str, Any]) -> str:
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    path = ""
    for entry in stack.values():
        path = entry[0] if isinstance(entry, (tuple, list)) else str(entry)
    # dynamo spells it L['self'].blocks[0].attn, and by another name where a function has the module
    return re.sub(r"^[LG]\['\w+'\]\.?(_modules)?\.?", "", path)


def _line(trace: str) -> str:
    frames = list(_FRAME.finditer(trace))
    if not frames:
        return ""
    last = frames[-1]
    return f"{last['file'].rsplit('/', 1)[-1]}:{last['line']} {last['code'].strip()}".strip()
