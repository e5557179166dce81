"""JSON of the commands: a name and a version first, so that a reader knows what it has; no NaN, which JSON does not have.

The schemas are in plait/tools/schemas, `plait explain`'s in plait/report.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.report.finite import json_text

VERSIONS = {"bench": 1, "cache": 1, "compare": 1, "demo": 1, "doctor": 1, "tune": 1}
"""Of each form: raised when a field changes its meaning or goes."""


def as_json(command: str, facts: Mapping[str, Any]) -> str:
    """The facts of a command; what is not finite as null."""
    body = {"schema": f"plait.{command}", "version": VERSIONS[command], **facts}
    return json_text(body)
