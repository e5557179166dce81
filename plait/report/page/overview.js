// The inspector when no step is selected: an operator of which nothing is left, or where the time goes.

function operatorParts({ operator: o, graph }) {
  const { place, code } = splitLine(o.line);
  const became = o.recomputed
    ? "Formed again for the backward; nothing of it is left."
    : "Nothing of it is left: it equals another, or is a mere move that its readers make.";
  return [
    el(
      "div.top",
      {},
      idLine(el("span", {}, `${graphs[graph].name}, in eager`), el("code", {}, o.aten)),
      el("h2", {}, o.name),
      el("p.why", {}, became),
    ),
    el(
      "div.body",
      {},
      el(
        "div.part",
        {},
        el("h3", {}, place || "No line is known"),
        el("pre", {}, code),
        el("p.muted.small", {}, o.module),
      ),
      el(
        "div.part",
        {},
        el("h3", {}, "Alone"),
        el("p", {}, o.alone_us === null ? "launches nothing" : `${timeText(o.alone_us)}, ${bytesText(o.before.total)}`),
      ),
    ),
  ];
}

function overview() {
  const total = d3.sum(allSteps, (s) => s.time);
  const rows = graphs
    .flatMap((g) => g.rows.map((r) => ({ ...r, time: d3.sum(r.steps, (s) => s.time) })))
    .sort((a, b) => b.time - a.time);
  const most = rows[0]?.time ?? 1;
  const item = (r) =>
    el(
      "li",
      {},
      el(
        "button",
        { type: "button", onclick: () => selectItem(r.steps[0]) },
        el("span.label", {}, r.steps.length > 1 ? el("span.muted", {}, `${r.steps.length}× `) : null, r.title),
        el("span", {}, timeText(r.time), el("span.muted", {}, `  ${share(r.time, total)}`)),
        el("span.gauge", {}, gauge("i", r.time / most)),
      ),
    );
  return [
    el(
      "div.top",
      {},
      el("h2", {}, "Where the time goes"),
      el(
        "p.why",
        {},
        "Select a step here, in the graph, the table or the roofline to see its operators, source and schedule.",
      ),
    ),
    el("div.body", {}, el("ul.bars", {}, rows.slice(0, 40).map(item))),
  ];
}
