"""What verify and bisect found, as people and machines read it."""

from __future__ import annotations

from dataclasses import asdict

from plait.diagnose.findings import VERSION, Findings, Judged
from plait.report.finite import json_text
from plait.report.words import count

_MOST = 6  # outputs of a run that failed, fallbacks


def verification_text(v: Findings) -> str:
    """One line a run, what failed in the first that did, and where; at most about 25 lines."""
    words = {"PASS": "right", "WARN": "right", "FAIL": "wrong"}
    worst = max((r.status for r in v.runs), key=["PASS", "WARN", "FAIL"].index)
    lines = [
        f"{v.program}: {words[worst]} in {count(len(v.runs), 'run')} of {count(v.graphs, 'graph')}, by plait's verdict rule"
    ]
    lines.append(
        f"{'values':24s} {'verdict':8s} {'by value':>12s} {'by place':>9s}  largest error of it and of eager (RMS)"
    )
    lines += [_row(r) for r in _shown(v.runs)]
    failed = next((r for r in v.runs if r.status == "FAIL"), None)
    if failed is not None:
        bad = [x for x in failed.verdicts if x.status == "FAIL"]
        lines.append(f"{failed.name}:")
        lines += [f"  {x.name.strip()}: {x.message}" for x in bad[:_MOST]]
        lines += [f"  and {len(bad) - _MOST} more"] if len(bad) > _MOST else []
    if v.place is not None:
        lines.append(f"first departs in {v.place}")
    lines += [f"in eager: {f}" for f in v.fallbacks[:_MOST]]
    lines += [f"note: {n}" for n in v.notes]
    return "\n".join(lines) + "\n"


def _shown(runs: tuple[Judged, ...]) -> list[Judged]:
    """All runs where they are few; else those of the first call and the ones that failed."""
    return list(runs) if len(runs) <= 12 else [r for k, r in enumerate(runs) if k < 8 or r.status == "FAIL"][:12]


def _row(r: Judged) -> str:
    floats = [x for x in r.verdicts if (x.e_plait or x.e_eager) and not x.name.startswith("arg")]
    worst = max(floats, key=lambda x: x.e_plait, default=None)
    errors = "" if worst is None else f"{worst.e_plait:.2g} and {worst.e_eager:.2g} ({worst.name.strip()})"
    note = r.note or next((x.message for x in r.verdicts if x.status == "WARN" and r.status == "WARN"), "")
    return f"{r.name:24s} {r.status:8s} {r.by_value:12,d} {r.by_place:9,d}  {errors or 'none'}" + (
        f"; {note}" if note else ""
    )


def verification_json(v: Findings) -> str:
    """Stable names, no NaN."""
    body = {
        "schema": "plait.verify",
        "version": VERSION,
        "program": v.program,
        "right": v.right,
        "graphs": v.graphs,
        "runs": [
            {
                "values": r.name,
                "status": r.status,
                "by_value": r.by_value,
                "by_place": r.by_place,
                "note": r.note,
                "verdicts": [asdict(x) for x in r.verdicts],
            }
            for r in v.runs
        ],
        "place": None if v.place is None else asdict(v.place),
        "fallbacks": list(v.fallbacks),
        "notes": list(v.notes),
    }
    return json_text(body)
