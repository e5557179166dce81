"""The page of explain without a browser: what is in the file, what cannot get out of its data, and what repeats."""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import json
import pathlib
import re
import time
import tomllib
from html.parser import HTMLParser

import pytest
from arch.tree import ROOT
from click.testing import CliRunner
from page_reports import HOSTILE, hostile, layers, long_report

from plait.report.facts import GraphFacts
from plait.report.html import LIBRARIES, SCRIPTS, STYLES, to_html
from plait.report.repeats import Repeat, repeated_operators, repeated_steps, repeats
from plait.report.report import Report
from plait.tools.cli import main

PAGE, VENDOR = ROOT / "plait/report/page", ROOT / "plait/report/vendor"


class _Elements(HTMLParser):
    """Every element with its attributes, and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append((self.found[-1][0] if self.found else "", data))


@pytest.fixture(scope="module")
def report() -> Report:
    return layers()


def test_data_is_the_reports_own_json(report: Report) -> None:
    (data,) = re.findall(r'<script id="facts" type="application/json">(.*?)</script>', to_html(report), re.S)
    given = json.loads(data)
    assert given["report"] == json.loads(report.to_json())
    assert all(k["source"] for g in given["report"]["graphs"] for k in g["kernels"] if k["kind"] == "kernel")
    steps = [n for g in given["rows"] for row in g for n in row["steps"]]
    assert len(steps) == report.totals.launches
    assert sum(len(e["pairs"]) for e in given["refusals"]) == sum(len(g.refusals) for g in report.graphs)


def test_nothing_in_the_page_names_another_address(report: Report) -> None:
    for tag, attributes in _Elements(to_html(report)).found:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form", "image", "use")
        assert not {"src", "href", "style", "srcdoc", "action"} & set(attributes), (tag, attributes)
    assert "sourceMappingURL" not in to_html(report)


def test_policy_runs_what_is_there_and_nothing_else(report: Report) -> None:
    page = _Elements(to_html(report))
    (policy,) = [a["content"] or "" for t, a in page.found if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'" and rules["base-uri"] == "'none'" and rules["form-action"] == "'none'"
    assert "unsafe" not in policy and "http" not in policy
    scripts = re.findall(r"<script>(.*?)</script>", to_html(report), re.S)
    styles = re.findall(r"<style>(.*?)</style>", to_html(report), re.S)
    for name, texts in (("script-src", scripts), ("style-src", styles)):
        sums = [base64.b64encode(hashlib.sha256(t.encode()).digest()).decode() for t in texts]
        assert rules[name].split() == [f"'sha256-{s}'" for s in sums]


def test_hostile_text_stays_text(report: Report) -> None:
    clean, bad = _Elements(to_html(report)), _Elements(to_html(hostile(report)))
    assert [t for t, _ in bad.found] == [t for t, _ in clean.found]  # not an element more
    assert not [t for tag, t in bad.texts if "alert(1)" in t and tag not in ("script", "title")]
    (data,) = re.findall(r'<script id="facts" type="application/json">(.*?)</script>', to_html(hostile(report)), re.S)
    assert json.loads(data)["report"]["graphs"][0]["kernels"][0]["members"][0]["line"] == HOSTILE
    assert not set("<>&") & set(data)


def test_vendored_files_are_those_of_the_table() -> None:
    rows = re.findall(r"^\| `(\S+)` \|.*`([0-9a-f]{64})` \|$", (VENDOR / "README.md").read_text(), re.M)
    assert {name for name, _ in rows} == set(LIBRARIES)
    for name, wanted in rows:
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == wanted
        assert "Permission" in (VENDOR / name.replace(".min.js", ".LICENSE")).read_text()
    assert sum(p.stat().st_size for p in VENDOR.iterdir()) < 1_500_000


def test_every_part_is_used_and_packaged() -> None:
    assert {p.name for p in PAGE.iterdir()} == {"page.html", *STYLES, *SCRIPTS}
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["plait"]
    for path in [*PAGE.iterdir(), *VENDOR.iterdir()]:
        name = str(path.relative_to(ROOT / "plait"))
        assert any(fnmatch.fnmatch(name, p) for p in patterns), name


def test_parts_stay_small() -> None:
    for path in PAGE.iterdir():
        assert len(path.read_text().splitlines()) <= 300, path.name


def test_cli_writes_the_page(tmp_path: pathlib.Path) -> None:
    program, out = tmp_path / "prog.py", tmp_path / "out.html"
    program.write_text("import torch\ndef make():\n    return (lambda x: torch.tanh(x) + 1), [torch.randn(8, 8)]\n")
    done = CliRunner().invoke(main, ["explain", str(program), "--target", "cpu", "--html", str(out)])
    assert done.exit_code == 0, done.output
    assert "prog.py on cpu" in done.output  # the table is still printed
    assert out.read_text().startswith("<!doctype html>") and "<title>prog.py on cpu · plait</title>" in out.read_text()
    done = CliRunner().invoke(
        main, ["explain", str(program), "--target", "cpu", "--html", str(tmp_path / "no" / "x.html")]
    )
    assert done.exit_code == 2 and "cannot write" in done.output and "Traceback" not in done.output


# ------------------------------------------------------------------------------------------------------- what eager does
def test_operators_as_eager_runs_them(report: Report) -> None:
    for g in report.graphs:
        assert [o.number for o in g.operators] == list(range(len(g.operators)))
        assert sum(o.alone_us is not None for o in g.operators) == g.totals.operators
        assert sum(o.alone_us or 0 for o in g.operators) == pytest.approx(g.totals.eager_us)
        assert sum(o.before.total for o in g.operators) == pytest.approx(g.totals.before.total)
        for k in g.kernels:
            for m in k.members:
                o = g.operators[m.operator]
                assert (o.name, o.line) == (m.name, m.line)
                assert (o.step == k.number) == m.counted
    forward = report.graphs[0]
    (tanh,) = [o for o in forward.operators if o.name == "tanh"][:1]
    assert {forward.operators[n].name for n in tanh.feeds} == {"mul"}
    again = [o for o in report.graphs[1].operators if o.recomputed]
    assert again and all(o.alone_us is None and o.before.total == 0 for o in again)
    c = report.ceilings
    n = tanh.before.total
    assert tanh.alone_us == pytest.approx(c.launch_us + n / c.bytes_per_us)
    assert tanh.flops.special == n / 8


# --------------------------------------------------------------------------------------------------------------- repeats
def test_repeats() -> None:
    assert repeats("abcabcabc") == (Repeat(0, 3, 3),)
    assert repeats("xabababy") == (Repeat(1, 2, 3),)
    assert repeats("aab") == ()  # one alone has to come three times
    assert repeats("aaab") == (Repeat(0, 1, 3),)
    assert repeats("abcd") == () and repeats("") == ()
    assert repeats("pqpq" + "wxyz" * 5) == (Repeat(0, 2, 2), Repeat(4, 4, 5))
    # a block that begins in what looks like another one
    assert repeats("ababcdeabcdeabcde") == (Repeat(2, 5, 3),)


def test_layers_of_a_model_repeat(report: Report) -> None:
    (block,) = repeated_operators(report.graphs[0])
    assert block.count == 6
    g: GraphFacts = report.graphs[0]
    once = g.operators[block.start : block.start + block.period]
    again = g.operators[block.start + block.period : block.start + 2 * block.period]
    assert [o.name for o in once] == [o.name for o in again]
    assert [r.count for r in repeated_steps(g)] and repeated_steps(g)[0].count >= 4


def test_a_long_program_is_quick() -> None:
    big = long_report(layers(), 60)
    assert big.totals.launches > 400
    began = time.process_time()
    text = to_html(big)
    assert time.process_time() - began < 5
    assert len(text.encode()) < len(big.to_json().encode()) + 1_000_000
