"""The report as one page: our page's parts and the vendored libraries, inlined beside the report's own JSON.

The page makes no request, and a policy in it forbids any: scripts and styles run by their hashes alone, so that whatever a
source line, a path or a kernel holds stays text.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from dataclasses import asdict
from pathlib import Path
from string import Template
from typing import Any

from plait.report.facts import Facts
from plait.report.json_form import plain
from plait.report.repeats import repeated_operators, repeated_steps
from plait.report.summary import entries, rows

_HERE = Path(__file__).parent
LIBRARIES = ("d3.min.js", "dagre.min.js")
STYLES = ("tokens.css", "layout.css", "graph.css", "lists.css", "inspector.css")
# in this order: one scope, and what runs at once is last
SCRIPTS = (
    "format.js",
    "dom.js",
    "model.js",
    "fold.js",
    "layout.js",
    "source.js",
    "headline.js",
    "strips.js",
    "graph.js",
    "graphs.js",
    "roofline.js",
    "table.js",
    "refusals.js",
    "inspector.js",
    "overview.js",
    "main.js",
)


def to_html(facts: Facts) -> str:
    """The whole page."""
    scripts = [_library(name) for name in LIBRARIES]
    scripts.append("(() => {\n'use strict';\n" + "\n".join(_part(name) for name in SCRIPTS) + "\n})();\n")
    style = "\n".join(_part(name) for name in STYLES)
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; "
        f"script-src {' '.join(map(_hash, scripts))}; style-src {_hash(style)}"
    )
    return Template(_part("page.html")).substitute(
        policy=policy,
        title=html.escape(f"{facts.program} on {facts.target}"),
        style=style,
        data=_script_text(json.dumps(page_data(facts), separators=(",", ":"), allow_nan=False)),
        scripts="\n".join(f"<script>{text}</script>" for text in scripts),
    )


def page_data(facts: Facts) -> dict[str, Any]:
    """What the page is given: the report's JSON, and how its lists are gathered (as the table for terminals gathers them)."""
    return {
        "report": plain(facts),
        "rows": [
            [{"title": row.title, "label": row.label, "steps": [k.number for k in row.steps]} for row in rows(g)]
            for g in facts.graphs
        ],
        "refusals": [
            {"title": e.title, "nbytes": e.nbytes, "pairs": [list(pair) for pair in e.pairs]}
            for e in entries(facts.graphs)
        ],
        "repeats": [
            {
                "steps": [asdict(r) for r in repeated_steps(g)],
                "operators": [asdict(r) for r in repeated_operators(g)],
            }
            for g in facts.graphs
        ],
    }


def _part(name: str) -> str:
    return (_HERE / "page" / name).read_text(encoding="utf-8")


def _library(name: str) -> str:
    """Without the address of its source map, which a browser's tools would ask for."""
    text = (_HERE / "vendor" / name).read_text(encoding="utf-8")
    return "\n".join(line for line in text.splitlines() if not line.startswith("//# sourceMappingURL")) + "\n"


def _hash(text: str) -> str:
    """As a content security policy names a text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _script_text(text: str) -> str:
    """JSON that no parser of HTML finds an end or a comment in."""
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
