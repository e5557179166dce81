// What happened, in one sentence and a few figures, before anything else.

function drawHeadline() {
  const t = report.totals;
  byId("program").textContent = report.program;
  byId("where").replaceChildren(
    el("span.chip.strong", {}, report.target),
    el("span.chip", {}, report.predicted ? "predicted, nothing ran there" : "compiled and run once"),
    report.train ? el("span.chip", {}, "training") : "",
  );
  byId("headline").replaceChildren(...[sentence(t), el("dl.tiles", {}, tiles(t)), notes(), strips()].filter(Boolean));
}

function sentence(t) {
  if (!graphs.length) return el("p.sentence", {}, "Nothing was compiled: the program calls no operators");
  const times = t.after.total ? t.before.total / t.after.total : null;
  const less = times === null ? "" : times >= 1 ? `${figure(times)}× less` : `${figure(1 / times)}× more`;
  return el(
    "p.sentence",
    {},
    `${countText(t.operators, "operator")} became `,
    el("em", { "data-launches": t.launches }, countText(t.launches, "launch", "launches")),
    times === null ? "" : [" with ", el("em", {}, `${less} memory traffic`)],
    ".",
  );
}

function tiles(t) {
  const measured =
    allSteps.length > 0 &&
    allSteps.every((s) => s.kernel.measured_us !== null || s.kernel.kind === "call") &&
    allSteps.some((s) => s.kernel.measured_us !== null);
  const time = measured ? d3.sum(allSteps, (s) => s.time) : t.predicted_us;
  return [
    tile(
      "Launches",
      t.operators.toLocaleString("en"),
      t.launches.toLocaleString("en"),
      `${countText(t.kernels, "kernel")}, ${countText(t.calls, "library call")}`,
    ),
    tile(
      "Memory traffic",
      bytesText(t.before.total),
      bytesText(t.after.total),
      t.after.cached ? `and ${bytesText(t.after.cached)} from cache` : "",
    ),
    tile(
      measured ? "Time, measured" : "Time, predicted",
      timeText(t.eager_us),
      timeText(time),
      "eager: its launches at their roofline",
    ),
    tile("Memory at once", null, bytesText(t.peak_bytes), `at most, beside ${bytesText(t.input_bytes)} of inputs`),
    tile(
      "Not fused",
      null,
      facts.refusals.length ? countText(facts.refusals.length, "kind") : "nothing",
      countText(
        d3.sum(graphs, (g) => g.facts.refusals.length),
        "pair",
      ),
    ),
  ];
}

function tile(name, before, after, note) {
  return el(
    "div.tile",
    {},
    el("dt", {}, name),
    el("dd", {}, before === null ? null : el("s", {}, `${before} → `), after),
    el("p", {}, note),
  );
}

/** What a person has to know before believing the rest. */
function notes() {
  const list = el("ul.notes");
  const failed = d3.rollup(
    allSteps.filter((s) => s.kernel.failure),
    (v) => v,
    (s) => s.kernel.failure.split(":")[0],
  );
  for (const [what, steps] of failed) {
    const first = steps[0];
    list.append(
      el(
        "li.bad",
        {},
        `${countText(steps.length, "kernel")} ${what}: `,
        el("button.link", { type: "button", onclick: () => selectItem(first) }, first.title),
      ),
    );
  }
  for (const why of report.breaks) list.append(el("li", {}, el("b", {}, "Cut by Dynamo: "), why));
  const fallbacks = new Set(graphs.flatMap((g) => g.facts.fallbacks.map((f) => `${f.scope} ${f.op}: ${f.reason}`)));
  for (const words of fallbacks) list.append(el("li.bad", {}, "In eager: ", words));
  return list.children.length ? list : null;
}
