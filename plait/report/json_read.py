"""Facts from the JSON that json_form writes. Fields that are not known are passed over (new ones may come), those that are
missing have their defaults; whatever else is not as schema_1.json says is a UserError that names the place."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from plait.errors import UserError
from plait.report.facts import VERSION, Facts

_HINT = "plait explain FILE.py --json OUT.json writes one"


def read_facts(data: Mapping[str, Any]) -> Facts:
    """The report that a file holds."""
    if data.get("version") != VERSION:
        raise UserError(f"it is of version {data.get('version')!r} of plait.report, not {VERSION}", hint=_HINT)
    found = _read(Facts, data, "the report")
    assert isinstance(found, Facts)
    return found


def _read(kind: Any, value: Any, at: str) -> Any:
    if is_dataclass(kind) and isinstance(kind, type):
        return _object(kind, value, at)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong(at, "a list", value)
        return tuple(_read(arguments[0], v, f"{at}[{k}]") for k, v in enumerate(value))
    if origin in (typing.Union, types.UnionType):
        rest = [a for a in arguments if a is not type(None)]
        return None if value is None else _read(rest[0], value, at)
    if kind is float:
        if value is None:  # JSON has no word for what is not finite
            return float("nan")
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        raise _wrong(at, "a number", value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _wrong(at, {int: "a whole number", str: "text", bool: "true or false"}[kind], value)
    return value


def _object(kind: type, value: Any, at: str) -> Any:
    if not isinstance(value, Mapping):
        raise _wrong(at, "an object", value)
    given: dict[str, Any] = {}
    for f in fields(kind):
        if f.name in value:
            given[f.name] = _read(_types(kind)[f.name], value[f.name], f"{at}.{f.name}")
        elif f.default is MISSING and f.default_factory is MISSING:
            raise UserError(f"{at} lacks {f.name!r}", hint=_HINT)
    return kind(**given)


@functools.cache
def _types(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _wrong(at: str, wanted: str, value: Any) -> UserError:
    return UserError(f"{at} is not {wanted}: {value!r:.40}", hint=_HINT)
