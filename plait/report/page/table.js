// Every step in a table that sorts; equal steps share a row unless asked otherwise.

const COLUMNS = [
  {
    key: "number",
    label: "#",
    of: (r) => r.steps[0].graph * 1e6 + r.steps[0].number,
    cell: (r) => (graphs.length > 1 ? `${r.steps[0].graph}.${r.steps[0].number}` : r.steps[0].number),
    rises: true,
  },
  { key: "what", label: "Step", left: true, of: (r) => r.title, cell: whatCell, rises: true },
  { key: "count", label: "×", of: (r) => r.steps.length, cell: (r) => r.steps.length },
  { key: "time", label: "Time", of: (r) => r.time, cell: timeCell },
  {
    key: "bound",
    label: "Bound",
    left: true,
    of: (r) => r.kernel.bound,
    cell: (r) => r.kernel.bound || "–",
    rises: true,
  },
  {
    key: "after",
    label: "Traffic",
    of: (r) => r.after,
    cell: (r) => over(bytesText(r.after), `${bytesText(r.before)} alone`),
  },
  {
    key: "saved",
    label: "Saved",
    of: (r) => r.before - r.after,
    cell: (r) => (r.before > r.after ? bytesText(r.before - r.after) : "–"),
  },
  {
    key: "intensity",
    label: "flop/B",
    of: (r) => r.kernel.intensity_after ?? -1,
    cell: (r) =>
      over(
        intensityText(r.kernel.intensity_after),
        r.kernel.intensity_before === null ? "" : `${intensityText(r.kernel.intensity_before)} alone`,
      ),
  },
  {
    key: "registers",
    label: "Registers",
    card: true,
    of: (r) => r.kernel.resources?.registers ?? -1,
    cell: registersCell,
  },
  {
    key: "occupancy",
    label: "Occupancy",
    card: true,
    of: (r) => r.kernel.resources?.occupancy ?? -1,
    cell: (r) => (r.kernel.resources ? share(r.kernel.resources.occupancy, 1) : "–"),
  },
  { key: "refusals", label: "Not fused", of: (r) => r.refusals, cell: (r) => r.refusals || "–" },
];

function over(value, under) {
  return [value, el("span.under", {}, under)];
}

function registersCell(r) {
  const found = r.kernel.resources;
  if (!found) return "–";
  return found.spills
    ? over(found.registers, el("span.bad", {}, `${bytesText(found.spills)} spilled`))
    : found.registers;
}

function tableRow(title, steps) {
  return {
    title,
    steps,
    kernel: steps[0].kernel,
    time: d3.sum(steps, (s) => s.time),
    before: d3.sum(steps, (s) => s.kernel.before.total),
    after: d3.sum(steps, (s) => s.kernel.after.total),
    refusals: d3.sum(steps, (s) => s.refusals.length),
    text: steps.map(textOf).join("\n"),
  };
}

function whatCell(r) {
  const k = r.kernel;
  const places = [...new Set(k.lines.map((l) => splitLine(l).place))];
  const words = [
    places.slice(0, 3).join(", ") + (places.length > 3 ? ` and ${places.length - 3} more` : ""),
    k.kind === "call" ? "library" : [k.directions.join("+") || "alone", k.mapping].filter(Boolean).join(", "),
  ];
  return [
    el("button", { type: "button" }, r.title),
    el("p", {}, words.filter(Boolean).join(" · ")),
    k.failure ? el("p.bad", {}, k.failure) : null,
  ];
}

function timeCell(r) {
  return el(
    "span.gauge-box",
    {},
    timeText(r.time),
    gauge("span.gauge", r.time / d3.max(allSteps, (s) => d3.sum(s.row.steps, (e) => e.time))),
    el(
      "span.under",
      {},
      share(
        r.time,
        d3.sum(allSteps, (s) => s.time),
      ),
    ),
  );
}

function drawTable(root) {
  const state = { key: "time", down: true, together: true, words: "" };
  const body = el("tbody");
  const columns = COLUMNS.filter((c) => !c.card || allSteps.some((s) => s.kernel.resources));
  const heads = columns.map((c) =>
    el(
      "th",
      { class: c.left ? "left" : null, scope: "col", "data-key": c.key },
      el("button", { type: "button", onclick: () => sortBy(c) }, c.label),
    ),
  );
  const together = el("input", {
    type: "checkbox",
    checked: true,
    onchange: (e) => ((state.together = e.target.checked), fill()),
  });
  root.append(
    el("div.tools", {}, el("label", {}, together, "Equal steps share a row"), el("span.legend", { id: "shown-rows" })),
    el("table.kernels", {}, el("thead", {}, el("tr", {}, ...heads)), body),
  );
  function sortBy(column) {
    Object.assign(state, state.key === column.key ? { down: !state.down } : { key: column.key, down: !column.rises });
    fill();
  }
  function fill() {
    const groups = state.together
      ? graphs.flatMap((g) => g.rows.map((r) => tableRow(r.title, r.steps)))
      : allSteps.map((s) => tableRow(s.title, [s]));
    const { of } = columns.find((c) => c.key === state.key);
    const found = groups
      .filter((r) => r.text.includes(state.words))
      .sort((a, b) => (state.down ? d3.descending : d3.ascending)(of(a), of(b)));
    for (const th of heads) {
      if (th.dataset.key === state.key) th.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      else th.removeAttribute("aria-sort");
    }
    body.replaceChildren(...found.map((r) => rowElement(r, columns)));
    byId("shown-rows").textContent = `${countText(found.length, "row")}, ${countText(
      d3.sum(found, (r) => r.steps.length),
      "step",
    )}`;
    mark(false);
  }
  function mark(scroll) {
    for (const tr of body.children) {
      tr.classList.toggle("on", tr.row.steps.some(isSelected));
      if (scroll && tr.classList.contains("on") && root.clientHeight) tr.scrollIntoView({ block: "nearest" });
    }
  }
  on("select", (from) => mark(from !== "table"));
  on("find", (words) => ((state.words = words), fill()));
  fill();
  return { shown: () => mark(true) };
}

function rowElement(r, columns) {
  const tr = el(
    "tr",
    {
      "data-steps": r.steps.map((s) => `${s.graph}.${s.number}`).join(" "),
      onclick: () => selectItem(r.steps[0], "table"),
    },
    ...columns.map((c) =>
      el(
        "td",
        { class: [c.left ? "left" : "", c.key === "what" ? "what" : ""].join(" ").trim() || null, "data-key": c.key },
        c.cell(r),
      ),
    ),
  );
  tr.row = r;
  return tr;
}
