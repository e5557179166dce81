"""The work of `plait compare`: read two files, tell what changed, 1 when something got worse. Free of torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from plait.errors import UserError
from plait.tools.plain import VERSIONS, as_json

_HINT = "plait explain FILE.py --json OUT.json, or plait bench --json OUT.json"


class _File(NamedTuple):
    path: str
    kind: str
    data: dict[str, Any]


def run(old: str, new: str, *, everything: bool = False, json_wanted: bool = False) -> int:
    """Compare two files; 0 when nothing got worse."""
    a, b = _read(old), _read(new)
    if a.kind != b.kind:
        raise UserError(f"{old} is of plait {a.kind}, {new} of plait {b.kind}", hint="compare two files of one command")
    found = _reports(a, b) if a.kind == "explain" else _benches(a, b)
    comparison, page = found
    print(as_json("compare", comparison.facts()) if json_wanted else page(everything), end="\n" if json_wanted else "")
    return 1 if comparison.worse else 0


def _reports(a: _File, b: _File) -> tuple[Any, Any]:
    from plait.report.compare import compare_reports
    from plait.report.compare_text import render
    from plait.report.json_read import read_facts

    facts = []
    for f in (a, b):
        try:
            facts.append(read_facts(f.data))
        except UserError as error:
            raise UserError(f"{f.path}: {error.message}", hint=error.hint) from error
    found = compare_reports(facts[0], facts[1], a.path, b.path)
    return found, lambda everything: render(found, everything=everything)


def _benches(a: _File, b: _File) -> tuple[Any, Any]:
    from plait.tools.compare_bench import compare_bench, render

    found = compare_bench(a.data, b.data, a.path, b.path)
    return found, lambda everything: render(found, everything=everything)


def _read(path: str) -> _File:
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", hint=_HINT) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error or 'too deep'}", hint=_HINT) from error
    return _File(path, _kind(path, data), data)


def _kind(path: str, data: Any) -> str:
    """Which command wrote it."""
    if not isinstance(data, dict):
        raise UserError(f"{path} holds no object", hint=_HINT)
    schema, version = data.get("schema"), data.get("version")
    if isinstance(schema, str) and schema.startswith("plait.report/"):
        return "explain"
    # files from before they said what they are
    if schema == "plait.bench" or (schema is None and {"rows", "commit", "date"} <= data.keys()):
        if version not in (None, VERSIONS["bench"]):
            raise UserError(f"{path} is of version {version!r} of plait.bench, not {VERSIONS['bench']}", hint=_HINT)
        return "bench"
    what = (
        f"is of {schema}, which cannot be compared" if isinstance(schema, str) else "does not say what it is (schema)"
    )
    raise UserError(f"{path} {what}", hint=_HINT)
