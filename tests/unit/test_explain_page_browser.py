"""The page of explain in headless Chromium: it renders, asks for nothing, and every view shows what the report says."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from page_reports import HOSTILE, hostile, layers, long_report

from plait.report.facts import Kernel
from plait.report.report import Report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@dataclass
class Opened:
    """A page, what it said on the console and what it asked for."""

    page: Any
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def count(self, selector: str) -> int:
        """Elements that match."""
        return int(self.page.locator(selector).count())

    def texts(self, selector: str) -> list[str]:
        """Of the elements that match."""
        found: list[str] = self.page.locator(selector).all_inner_texts()
        return found

    def values(self, selector: str, attribute: str) -> list[str]:
        """The words of an attribute of the elements that match."""
        script = "(es, name) => es.flatMap(e => e.getAttribute(name).split(' '))"
        found: list[str] = self.page.eval_on_selector_all(selector, script, attribute)
        return found

    def items(self, pane: str, graph: int = 0, which: str = "") -> list[int]:
        """Numbers of the steps or operators that a pane's nodes stand for."""
        nodes = f".graph[data-graph='{graph}'] .pane[data-what={pane}] .node{which}"
        return sorted(map(int, self.values(nodes, "data-items")))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: the page of explain was not looked at")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM)
        yield found
        found.close()


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Any]:
    contexts = []

    def opened(report: Report, scheme: str = "light", at: str = "") -> Opened:
        report.to_html(tmp_path / "page.html")
        context = browser.new_context(viewport={"width": 1440, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        found = Opened(context.new_page())
        found.page.on("console", lambda m: found.said.append(m.text))
        found.page.on("pageerror", lambda e: found.said.append(str(e)))
        found.page.on("request", lambda r: found.asked.append(r.url))
        found.page.on("dialog", lambda d: found.said.append(f"dialog: {d.message}"))
        found.page.goto((tmp_path / "page.html").as_uri() + at)
        found.page.wait_for_selector("html[data-ready]", state="attached", timeout=60_000)
        return found

    yield opened
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def report() -> Report:
    return layers()


def _kernel(report: Report) -> Kernel:
    """One of plait's with several operators and refusals."""
    return next(k for k in report.graphs[0].kernels if k.kind == "kernel" and len(k.members) > 2)


def test_first_screen_says_what_happened(open_page: Any, report: Report) -> None:
    p = open_page(report)
    t = report.totals
    assert p.texts("#headline .sentence")[0].startswith(f"{t.operators} operators became {t.launches} launches")
    tiles = " ".join(p.texts(".tile"))
    for words in (f"{t.operators} → {t.launches}", f"{t.kernels} kernels, {t.calls} library calls", "Memory at once"):
        assert words in tiles, tiles
    assert p.texts("#program") == [report.program] and "training" in p.texts("#where")[0]
    assert p.said == [] and len(p.asked) == 1 and p.asked[0].startswith("file:")


def test_counts_are_those_of_the_report(open_page: Any, report: Report) -> None:
    p = open_page(report)
    steps = [(g, k) for g in report.graphs for k in g.kernels]
    assert p.count(".seg.plait") == len(steps) == report.totals.launches
    assert p.count(".seg.eager") == report.totals.operators
    p.page.click(".graph[data-graph='1'] > button")
    for at, g in enumerate(report.graphs):
        for pane, wanted in (("steps", g.kernels), ("operators", [o for o in g.operators if not o.recomputed])):
            assert p.items(pane, at) == [w.number for w in wanted]
            # repeated layers are folded
            assert p.count(f".graph[data-graph='{at}'] .pane[data-what={pane}] .node") < len(wanted)
    p.page.click("#tabs [data-key=kernels]")
    shown = p.values(".kernels tbody tr", "data-steps")
    assert sorted(shown) == sorted(f"{at}.{k.number}" for at, g in enumerate(report.graphs) for k in g.kernels)
    assert p.count(".kernels tbody tr") < len(steps)
    p.page.uncheck("#view-kernels input")
    assert p.count(".kernels tbody tr") == len(steps)
    p.page.click("#tabs [data-key=roofline]")
    drawn = [k for _, k in steps if k.flops.counted and k.after.total]
    assert p.count(".roofline .dot.plait:not(.key *)") == len(drawn)
    p.page.click("#tabs [data-key=refusals]")
    pairs = [int(n) for n in re.findall(r"in (\d+) pairs", " ".join(p.texts(".refusal .cost")))]
    single = sum("at stake" in c for c in p.texts(".refusal .cost"))
    assert sum(pairs) + single == sum(len(g.refusals) for g in report.graphs)
    assert p.said == []


def test_a_click_on_a_kernel_shows_all_of_it(open_page: Any, report: Report) -> None:
    k = _kernel(report)
    named = replace(k, members=tuple(replace(m, regions=("my block",)) for m in k.members))
    first = report.graphs[0]
    kernels = tuple(named if x is k else x for x in first.kernels)
    p = open_page(replace(report, graphs=(replace(first, kernels=kernels), *report.graphs[1:])))
    p.page.locator(f".pane[data-what=steps] .node[data-items~='{k.number}']").press("Enter")
    assert k.name in p.texts("#inspector .id")[0]
    shown = p.texts("#inspector .members li")
    assert len(shown) == len(k.members)
    for text, m in zip(shown, k.members, strict=True):
        assert m.name in text and m.line.split(" ", 1)[1] in text  # the user's source line
        assert "region my block" in text
    p.page.click("#inspector [data-key=source]")
    assert p.page.locator("[data-source]").text_content().strip() == k.source.strip()
    p.page.click("#inspector [data-key=schedule]")
    words = " ".join(p.texts("#inspector .body"))
    assert k.schedule[0] in words and all(v.name in words for v in k.intermediates)
    p.page.click("#inspector [data-key=refusals]")
    near = [r for r in report.graphs[0].refusals if k.number in (r.producer.step, r.consumer.step)]
    listed = p.page.locator("#inspector [data-refusals]").all()
    assert sum(int(e.get_attribute("data-refusals")) for e in listed) == len(near) > 0
    assert near[0].sentence[1:] in " ".join(p.texts("#inspector .body"))
    assert p.said == []


def test_views_are_linked(open_page: Any, report: Report) -> None:
    p, k = open_page(report), _kernel(report)
    p.page.click("#tabs [data-key=kernels]")
    p.page.uncheck("#view-kernels input")
    p.page.click(f".kernels tr[data-steps='0.{k.number}'] td")
    assert p.page.evaluate("location.hash") == f"#g0.k{k.number}"
    assert p.count(f".pane[data-what=steps] .node.on[data-items~='{k.number}']") == 1
    kin = [
        int(n)
        for e in p.page.locator(".pane[data-what=operators] .node.kin").all()
        for n in e.get_attribute("data-items").split()
    ]
    assert {o.number for o in report.graphs[0].operators if o.step == k.number} <= set(kin)
    assert p.count(".seg.plait.on") == 1
    p.page.click("#tabs [data-key=roofline]")
    assert p.count(".roofline .dot.plait.on") == 1 and p.count(".roofline .dot.eager.kin") > 0
    assert p.count(".ways line") == p.count(".roofline .dot.eager.kin")
    p.page.keyboard.press("Escape")
    assert p.count(".on:is(.dot, .node, tr, .seg)") == 0 and "Where the time goes" in p.texts("#inspector")[0]
    assert open_page(report, at=f"#g0.k{k.number}").texts("#inspector .id code") == [k.name]  # an address can be sent


def test_the_table_sorts(open_page: Any, report: Report) -> None:
    p = open_page(report)
    p.page.click("#tabs [data-key=kernels]")
    p.page.uncheck("#view-kernels input")

    def order() -> list[tuple[int, int]]:
        rows = p.page.locator(".kernels tbody tr").all()
        return [tuple(map(int, e.get_attribute("data-steps").split("."))) for e in rows]

    def traffic(at: tuple[int, int]) -> float:
        return report.graphs[at[0]].kernels[at[1]].after.total

    def time_of(at: tuple[int, int]) -> float:
        return report.graphs[at[0]].kernels[at[1]].predicted_us or 0.0

    assert [time_of(s) for s in order()] == sorted(map(time_of, order()), reverse=True)  # longest first, unasked
    p.page.click(".kernels th[data-key=after] button")
    assert [traffic(s) for s in order()] == sorted(map(traffic, order()), reverse=True)
    assert p.page.get_attribute(".kernels th[data-key=after]", "aria-sort") == "descending"
    p.page.click(".kernels th[data-key=after] button")
    assert [traffic(s) for s in order()] == sorted(map(traffic, order()))
    assert p.count(".kernels th[aria-sort]") == 1
    p.page.click(".kernels th[data-key=number] button")
    assert order() == sorted(order())


def test_light_and_dark(open_page: Any, report: Report) -> None:
    def shade(p: Opened) -> int:
        found: str = p.page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", found)[:3]))

    light, dark = open_page(report, "light"), open_page(report, "dark")
    assert shade(light) > 700 and shade(dark) < 100
    assert light.texts("#theme") == ["Dark"] and dark.texts("#theme") == ["Light"]
    light.page.click("#theme")
    assert shade(light) < 100 and light.texts("#theme") == ["Light"]
    light.page.click("#theme")
    assert shade(light) > 700


def test_a_person_pans_zooms_folds_and_colours(open_page: Any, report: Report) -> None:
    p = open_page(report)
    world = ".graph[data-graph='0'] .pane[data-what=steps] > svg > g"

    def transform() -> str:
        return str(p.page.get_attribute(world, "transform"))

    p.page.evaluate("document.querySelector('.work').scrollIntoView()")
    box = p.page.locator(".graph[data-graph='0'] .pane[data-what=steps]").bounding_box()
    start = transform()
    p.page.mouse.move(box["x"] + 20, box["y"] + box["height"] - 60)
    p.page.mouse.down()
    p.page.mouse.move(box["x"] + 60, box["y"] + box["height"] - 90, steps=4)
    p.page.mouse.up()
    panned = transform()
    assert panned != start and re.findall(r"scale\((\S+)\)", panned) == re.findall(r"scale\((\S+)\)", start)
    p.page.locator(".pane[data-what=steps] .zooms button").nth(1).click()
    p.page.wait_for_function(
        f"document.querySelector({json.dumps(world)}).getAttribute('transform') !== {json.dumps(panned)}"
    )
    zoomed = transform()
    p.page.mouse.move(box["x"] + 20, box["y"] + box["height"] - 60)
    p.page.keyboard.down("Control")
    p.page.mouse.wheel(0, -200)
    p.page.keyboard.up("Control")
    p.page.wait_for_function(
        f"document.querySelector({json.dumps(world)}).getAttribute('transform') !== {json.dumps(zoomed)}"
    )
    folded = p.count(".pane[data-what=operators] .node")
    p.page.uncheck("#view-graph .tools input")
    assert p.count(".pane[data-what=operators] .node") > folded and p.count(".block") == 0

    def heats() -> list[float]:
        found: list[float] = p.page.eval_on_selector_all(
            ".pane[data-what=steps] .node", "es => es.map(e => Number(e.style.getPropertyValue('--heat')))"
        )
        return found

    by_time = heats()
    p.page.click("#view-graph .segments [data-value=refusals]")
    assert heats() != by_time and max(heats()) > 0
    assert p.count(".pane[data-what=steps] .edge.refused") > 0
    p.page.click("#view-graph .segments [data-value=steps]")
    assert p.count(".pane[data-what=operators]") == 0 and p.count(".pane[data-what=steps]") == 1
    p.page.click(".graph[data-graph='0'] > button")
    assert p.count(".pane") == 0  # closed
    assert p.said == []


def test_find_narrows_every_view(open_page: Any, report: Report) -> None:
    p, k = open_page(report), _kernel(report)
    p.page.fill("#find", k.name.upper())
    wanted = {f"{at}.{x.number}" for at, g in enumerate(report.graphs) for x in g.kernels if k.name in x.name}
    found = p.page.locator(".graph[data-graph='0'] .pane[data-what=steps] .node.found").all()
    assert k.number in {int(n) for e in found for n in e.get_attribute("data-items").split()}
    assert p.count(".pane.finding .node:not(.found)") > 0
    p.page.click("#tabs [data-key=kernels]")
    p.page.uncheck("#view-kernels input")
    assert {e.get_attribute("data-steps") for e in p.page.locator(".kernels tbody tr").all()} == wanted
    p.page.fill("#find", "")
    assert p.count(".kernels tbody tr") == report.totals.launches and p.count(".finding") == 0


def test_hostile_text_is_shown_and_does_nothing(open_page: Any, report: Report) -> None:
    p = open_page(hostile(report))
    clean = open_page(report)
    k = _kernel(report)
    for key in ("source", "schedule", "refusals", "operators"):
        for each in (p, clean):
            each.page.locator(f".pane[data-what=steps] .node[data-items~='{k.number}']").press("Enter")
            each.page.click(f"#inspector [data-key={key}]")
    assert p.page.title().startswith(HOSTILE.replace("\u2028", " ")[:20])
    assert HOSTILE.split(" ", 1)[1] in p.page.locator("#inspector .members pre").first.text_content()
    assert p.texts("#program") == [HOSTILE] or HOSTILE[:30] in p.texts("#program")[0]
    assert p.count("img") == 0 and p.count("script") == clean.count("script")
    assert p.said == [] and len(p.asked) == 1


def test_the_policy_forbids_every_request(open_page: Any, report: Report) -> None:
    p = open_page(report)
    blocked = p.page.evaluate(
        """async () => {
            const seen = [];
            document.addEventListener("securitypolicyviolation", (e) => seen.push(e.effectiveDirective));
            await fetch("http://127.0.0.1:9/").catch(() => 0);
            const image = new Image();
            image.src = "http://127.0.0.1:9/x.png";
            document.body.append(image);
            const script = document.createElement("script");
            try {
                script.textContent = "window.ran = true";
                document.body.append(script);
            } catch { /* trusted types */ }
            script.append("window.ran = true");
            document.body.append(script);
            await new Promise((r) => setTimeout(r, 200));
            return [seen, window.ran === undefined];
        }"""
    )
    assert {"connect-src", "img-src"} <= set(blocked[0]) and blocked[1]


def test_a_long_program_is_ready_soon(open_page: Any, report: Report) -> None:
    p = open_page(long_report(report, 25))
    # of two busy cores; in one piece the layout alone takes minutes
    assert p.page.evaluate("performance.now()") < 60_000
    unfold = """() => {
        const began = performance.now();
        document.querySelector("#view-graph .tools input").click();
        return performance.now() - began;
    }"""
    assert p.page.evaluate(unfold) < 30_000
    assert p.items("steps") == list(range(25 * len(report.graphs[0].kernels)))
    assert p.items("operators") == list(range(25 * len(report.graphs[0].operators)))
    assert p.said == []


def test_a_program_that_computes_nothing(open_page: Any, report: Report) -> None:
    from plait.report.facts import Totals

    p = open_page(replace(report, graphs=(), totals=Totals()))
    assert "Nothing was compiled" in p.texts("#headline")[0]
    for key in ("kernels", "roofline", "refusals", "graph"):
        p.page.click(f"#tabs [data-key={key}]")
    failed = replace(
        report.graphs[0], kernels=(), fusions=(), refusals=(), status="eager", operators=(), totals=Totals()
    )
    p = open_page(replace(report, graphs=(failed,), totals=Totals()))
    assert "nothing of it is plait's" in p.texts(".graph")[0]
    assert p.said == []


@pytest.mark.long
def test_a_whole_training_step(open_page: Any) -> None:
    """GPT-2's, small: forward, loss and their backwards, each a graph."""
    import plait
    from plait.workloads.models import MODELS

    model = MODELS["gpt2_train_b8"]("cpu", "cpu")
    found = plait.explain(model.bound(), *model.args, train=True, target="cpu")
    p = open_page(found)
    p.page.uncheck("#view-graph .tools input")
    for at in range(len(found.graphs)):
        if not p.count(f".graph[data-graph='{at}'].open"):
            p.page.locator(f".graph[data-graph='{at}'] > button").click()
    assert p.count(".pane[data-what=steps] .node") == found.totals.launches > 40
    assert p.count(".pane[data-what=operators] .node") >= found.totals.operators > 150
    assert p.said == [] and len(p.asked) == 1
