"""The report as JSON: the fields of facts.py under their own names, with the totals that are derived from them."""

from __future__ import annotations

import json
import math
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from plait.report.facts import VERSION, Facts, Flops, Totals, Traffic

SCHEMA = f"plait.report/{VERSION}"
SCHEMA_FILE = Path(__file__).with_name(f"schema_{VERSION}.json")


def to_json(facts: Facts) -> str:
    """Pretty-printed; stable order; no NaN."""
    return json.dumps(plain(facts), indent=1, allow_nan=False)


def plain(facts: Facts) -> dict[str, Any]:
    """What JSON can say, as the schema has it."""
    return {"schema": SCHEMA, **_plain(facts)}


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        out = {f.name: _plain(getattr(value, f.name)) for f in fields(value) if not f.name.startswith("_")}
        if isinstance(value, Traffic):
            out["total"] = _plain(value.total)
        if isinstance(value, Flops):
            out["counted"] = _plain(value.counted)
        if isinstance(value, Totals):
            out["launches"] = value.launches
        return out
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return _number(value)
    return value


def _number(value: float) -> float | int | None:
    """Whole numbers without a point; what JSON cannot say as null."""
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else value
