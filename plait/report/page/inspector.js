// All that is known of the selected step; of nothing selected, where the time goes.

const inspecting = { tab: "operators" };

function drawInspector() {
  const root = byId("inspector");
  const step = selectedStep();
  const operator = selectedOperator();
  if (step) root.replaceChildren(...stepParts(step, operator));
  else if (operator) root.replaceChildren(...operatorParts(operator));
  else root.replaceChildren(...overview());
}

function idLine(...words) {
  return el(
    "div.id",
    {},
    ...words,
    el(
      "button.quiet.close",
      { type: "button", "aria-label": "Clear the selection", onclick: () => select(null, null) },
      "✕",
    ),
  );
}

// ------------------------------------------------------------------------------------------------------------- a step
function stepParts(step, operator) {
  const k = step.kernel;
  const body = el("div.body", { role: "tabpanel" });
  const panels = {
    operators: () => membersPanel(step, operator),
    source: () =>
      k.source
        ? sourceView(k.source)
        : el(
            "p.none",
            {},
            k.kind === "call" ? "A library's kernel: there is no source of ours." : "No source: it was not emitted.",
          ),
    schedule: () => schedulePanel(step),
    refusals: () => refusalsPanel(step),
  };
  const show = (key) => {
    inspecting.tab = key;
    body.replaceChildren(...[panels[key]()].flat());
    body.scrollTop = 0;
  };
  const bar = el("div.tabs", { role: "tablist" });
  tabs(
    bar,
    [
      { key: "operators", label: "Operators", count: k.members.length },
      { key: "source", label: "Source" },
      { key: "schedule", label: "Schedule and values" },
      { key: "refusals", label: "Not fused", count: step.refusals.length },
    ],
    inspecting.tab,
    show,
  );
  show(inspecting.tab);
  return [stepHead(step), bar, body];
}

function stepHead(step) {
  const k = step.kernel;
  const how = k.kind === "call" ? ["library call"] : [...k.directions, k.mapping].filter(Boolean);
  return el(
    "div.top",
    {},
    idLine(el("span", {}, `${graphs[step.graph].name}, step ${step.number}`), el("code", {}, k.name)),
    el("h2", {}, step.title),
    el(
      "div.chips",
      {},
      how.map((w) => el("span.chip", {}, w)),
      k.bound ? el("span.chip.strong", {}, `${k.bound} bound`) : null,
    ),
    k.failure ? el("p.why.bad", {}, k.failure) : null,
    k.why ? el("p.why", {}, `${k.members[0]?.name ?? k.name} ${k.why}.`) : null,
    el("dl.stats", {}, stats(k)),
    equals(step),
  );
}

function stats(k) {
  const r = k.resources;
  const shown = [
    [
      k.measured_us === null ? "Time, predicted" : "Time, measured",
      timeText(stepTime(k)),
      k.roofline_share !== null ? `${share(k.roofline_share, 1)} of roofline` : `roofline ${timeText(k.roofline_us)}`,
    ],
    [
      "Traffic",
      [el("s", {}, `${bytesText(k.before.total)} → `), bytesText(k.after.total)],
      `${bytesText(k.after.read)} in, ${bytesText(k.after.written)} out${k.after.cached ? `, ${bytesText(k.after.cached)} cached` : ""}`,
    ],
    [
      "Intensity, flop/B",
      [el("s", {}, `${intensityText(k.intensity_before)} → `), intensityText(k.intensity_after)],
      "",
    ],
    ...[
      ["Arithmetic", k.flops.arithmetic],
      ["Special functions", k.flops.special],
      ["Tensor cores", k.flops.tensor_core],
    ]
      .filter(([, n]) => n)
      .map(([name, n]) => [name, `${flopsText(n)} flop`.replace("  ", " "), ""]),
    ...(r
      ? [
          ["Registers a thread", String(r.registers), r.spills ? `${bytesText(r.spills)} spilled` : "no spills"],
          ["Shared memory", bytesText(r.shared), "a block"],
          ["Occupancy", share(r.occupancy, 1), ""],
        ]
      : []),
  ];
  return shown.map(([name, value, note]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, value, note ? el("span", {}, el("br"), note) : null)),
  );
}

function equals(step) {
  const { steps } = step.row;
  if (steps.length < 2) return null;
  const at = steps.indexOf(step);
  const go = (by) => () => selectItem(steps[(at + by + steps.length) % steps.length]);
  return el(
    "div.equal",
    {},
    el("button.quiet", { type: "button", "aria-label": "Previous equal step", onclick: go(-1) }, "‹"),
    `${at + 1} of ${steps.length} equal steps, ${timeText(d3.sum(steps, (s) => s.time))} in all`,
    el("button.quiet", { type: "button", "aria-label": "Next equal step", onclick: go(1) }, "›"),
  );
}

function membersPanel(step, operator) {
  const items = step.kernel.members.map((m) => {
    const { place, code } = splitLine(m.line);
    const work = [
      m.flops.counted ? `${flopsText(m.flops.counted)} flop` : "",
      m.flops.special ? `${flopsText(m.flops.special)} special` : "",
      aloneText(m),
    ];
    const li = el(
      "li",
      { class: operator && m.operator === operator.number ? "on" : null },
      el(
        "div.row",
        {},
        el("b", {}, m.name),
        m.backward ? el("span.chip", {}, "backward") : null,
        el("span", {}, work.filter(Boolean).join(" · ")),
      ),
      code ? el("pre", {}, code) : null,
      el(
        "p",
        {},
        [
          place,
          m.module,
          ...m.regions.map((r) => `region ${r}`),
          m.parts.length && m.parts.join() !== m.name ? `as ${m.parts.join(", ")}` : "",
        ]
          .filter(Boolean)
          .join(" · "),
      ),
    );
    return li;
  });
  return items.length ? el("ul.members", {}, items) : el("p.none", {}, "No operator of the program's: plait made it.");
}

function aloneText(m) {
  if (m.recomputed) return "formed again";
  if (!m.counted) return "counted elsewhere";
  return m.before.total ? `${bytesText(m.before.total)} alone` : "launches nothing alone";
}

function schedulePanel(step) {
  const k = step.kernel;
  const lives = d3.groups(k.intermediates, (v) => v.lives);
  const where = {
    register: "In registers: each thread its own points",
    tile: "In a block's tile: registers and shared memory",
    memory: "Written to memory",
  };
  const links = (list) =>
    list.length
      ? el(
          "ul",
          {},
          list.map((n) => el("li", {}, stepLink(graphs[step.graph].steps[n]))),
        )
      : el("p.muted", {}, "none");
  return [
    el(
      "div.part",
      {},
      el("h3", {}, k.schedule.length > 1 ? "Schedules, one a part" : "Schedule"),
      k.schedule.length ? k.schedule.map((s) => el("pre", {}, s)) : el("p.muted", {}, "the library's own"),
    ),
    k.variants.length
      ? el(
          "div.part",
          {},
          el("h3", {}, "Timed on the device"),
          el(
            "table",
            {},
            k.variants.map((v) =>
              el(
                "tr",
                {},
                el("td", {}, v.name, v.chosen ? " (chosen)" : "", v.remembered ? " (remembered)" : ""),
                el("td", {}, timeText(v.measured_us)),
              ),
            ),
          ),
        )
      : null,
    ...lives.map(([life, values]) =>
      el(
        "div.part",
        {},
        el("h3", {}, where[life]),
        el(
          "table",
          {},
          values.map((v) =>
            el(
              "tr",
              {},
              el("td", {}, el("code", {}, v.name)),
              el("td.muted", {}, splitLine(v.line).place),
              el("td", {}, bytesText(v.nbytes)),
            ),
          ),
        ),
      ),
    ),
    el("div.part", {}, el("h3", {}, "Reads results of"), links(k.needs)),
    el("div.part", {}, el("h3", {}, "Is read by"), links(step.readers)),
  ].filter(Boolean);
}

function stepLink(step) {
  return el("button.link", { type: "button", onclick: () => selectItem(step) }, `${step.number}  ${step.title}`);
}

function refusalsPanel(step) {
  if (!step.refusals.length) return el("p.none", {}, "Nothing beside it was refused.");
  const other = (r) => (r.producer.step === step.number ? r.consumer : r.producer);
  const kinds = d3
    .groups(step.refusals, (r) => `${r.reason}\n${r.sentence}\n${r.unlock}`)
    .map(([, list]) => ({ list, nbytes: d3.sum(list, (r) => r.bytes_at_stake) }));
  return kinds
    .sort((a, b) => b.nbytes - a.nbytes)
    .map(({ list, nbytes }) => {
      const [r] = list;
      const others = [...new Map(list.map((x) => [`${other(x).step} ${other(x).name}`, other(x)])).values()].filter(
        (side) => side.step !== step.number,
      );
      const times = pairTimes(list);
      return el(
        "div.part",
        { "data-refusals": list.length },
        el("h3", {}, `${r.reason} · ${bytesText(nbytes)} at stake${list.length > 1 ? ` in ${list.length} pairs` : ""}`),
        el("p", {}, `${sentenceCase(r.sentence)}.`),
        times ? el("p.muted.small", {}, times) : null,
        el("p.muted", {}, unlockText(r.unlock)),
        el(
          "div.jump",
          {},
          others.map((side) => sideLink(step.graph, side)),
        ),
      );
    });
}
