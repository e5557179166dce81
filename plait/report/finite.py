"""JSON of plain values, as every command writes it: what is not finite is null, which JSON has a word for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def json_text(body: Mapping[str, Any]) -> str:
    """Pretty-printed, in the order given."""
    return json.dumps(_finite(body), indent=1, allow_nan=False)


def _finite(x: Any) -> Any:
    if isinstance(x, Mapping):
        return {k: _finite(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_finite(v) for v in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x
