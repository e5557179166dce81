// The view of all graphs: one section each, that opens and closes, with what is before beside what is after.

const view = { sides: "both", measure: "time", fold: true };

function drawGraphs(root) {
  const sections = graphs.map(graphSection);
  const repeated = graphs.some((g) => g.repeats.steps.length || g.repeats.operators.length);
  const again = () => sections.forEach((s) => s.build());
  const fold = el("input", {
    type: "checkbox",
    checked: view.fold,
    onchange: (e) => ((view.fold = e.target.checked), again()),
  });
  root.append(
    el(
      "div.tools",
      {},
      segments(
        "What to show",
        [
          ["both", "Both"],
          ["operators", "Eager"],
          ["steps", "plait"],
        ],
        view.sides,
        (v) => ((view.sides = v), again()),
      ),
      el("span", {}, "Colour by "),
      segments(
        "Colour by",
        Object.entries(MEASURES).map(([k, m]) => [k, m.label]),
        view.measure,
        (v) => (
          (view.measure = v),
          (byId("refused-key").hidden = v !== "refusals"),
          sections.forEach((s) => s.paint())
        ),
      ),
      repeated ? el("label", { title: "Show repeated layers once, with a count" }, fold, "Fold repeats") : null,
      el(
        "span.legend",
        {},
        el("span.key.inside", {}, "inside one kernel"),
        el("span.key.refused", { id: "refused-key", hidden: true }, "not fused"),
        el("span.key.library", {}, "library call"),
        "0",
        el("i"),
        el("span", { id: "most" }),
      ),
    ),
    ...sections.map((s) => s.element),
  );
  const longest = graphs.reduce(
    (a, b) => ((b.facts.totals.predicted_us ?? 0) > (a.facts.totals.predicted_us ?? 0) ? b : a),
    graphs[0],
  );
  const first = graphs.find((g) => g.steps.length > 8) ?? longest;
  if (first) sections[first.at].toggle(true);
  on("select", (from) => {
    if (selection.graph !== null) sections[selection.graph].reveal();
    for (const s of sections) s.selected(from);
  });
  on("find", (words) => sections.forEach((s) => s.find(words)));
  return { shown: () => sections.forEach((s) => s.shown()) };
}

function graphSection(graph) {
  const t = graph.facts.totals;
  const body = el("div.panes", { hidden: true });
  const place = splitLine(graph.facts.line).place;
  const head = el(
    "button",
    { type: "button", "aria-expanded": "false", onclick: () => toggle(body.hidden) },
    el("span.turn", { "aria-hidden": "true" }, "▸"),
    el("b", {}, graph.name),
    el("span.muted", {}, [graph.kind, place].filter(Boolean).join(" from ")),
    el(
      "span.sum",
      {},
      graph.facts.status === "compiled"
        ? `${t.operators.toLocaleString("en")} → ${countText(t.launches, "launch", "launches")} · ${bytesText(t.before.total)} → ${bytesText(t.after.total)} · ${timeText(t.predicted_us)}`
        : `${graph.facts.status}: nothing of it is plait's`,
    ),
  );
  const element = el("section.graph", { "data-graph": graph.at }, head, body);
  let panes = [];
  let found = "";
  function paint() {
    const measure = MEASURES[view.measure];
    const most = d3.max([...graph.steps, ...graph.operators], measure.of) || 0;
    for (const p of panes) p.paint(measure, most);
    if (panes.length) byId("most").textContent = measure.text(most);
  }
  function build() {
    panes = [];
    body.replaceChildren();
    if (body.hidden) return;
    const wanted = [
      ["operators", "Eager"],
      ["steps", "plait"],
    ].filter(([what]) => view.sides === "both" || view.sides === what);
    panes = wanted
      .filter(([what]) => (what === "steps" ? graph.steps : graph.operators).length)
      .map(([what, title]) => graphPane(graph, what, view.fold, title));
    body.replaceChildren(
      ...(panes.length ? panes.map((p) => p.element) : [el("p.none", {}, "No step: nothing is computed here")]),
    );
    paint();
    for (const p of panes) {
      p.fit();
      p.selected("built");
      p.find(found);
    }
  }
  function toggle(open) {
    if (open === !body.hidden) return;
    body.hidden = !open;
    element.classList.toggle("open", open);
    head.setAttribute("aria-expanded", String(open));
    build();
  }
  function reveal() {
    toggle(true);
    const root = element.parentElement;
    const seen =
      element.offsetTop >= root.scrollTop &&
      element.offsetTop + element.clientHeight <= root.scrollTop + root.clientHeight;
    if (!seen) root.scrollTop = element.offsetTop - root.firstElementChild.clientHeight;
  }
  return {
    element,
    reveal,
    build,
    paint,
    toggle,
    selected: (from) => panes.forEach((p) => p.selected(from)),
    find: (words) => ((found = words), panes.forEach((p) => p.find(words))),
    shown: () => panes.forEach((p) => p.selected("tab")),
  };
}
