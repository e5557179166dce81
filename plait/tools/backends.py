"""torch.compile with plait or a peer, by name; plait is found whether or not its entry point is installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def compiled_by(
    fn: Callable[..., Any], who: str, mode: str | None = None, options: Mapping[str, Any] | None = None, **keywords: Any
) -> Callable[..., Any]:
    """`fn` compiled by the named backend; "plait" is this checkout's own."""
    chosen: Any = who
    if who == "plait":
        from plait.api import backend

        chosen = backend
    given: Any = dict(options) if options else None
    return torch.compile(fn, backend=chosen, mode=mode, options=given, **keywords)
