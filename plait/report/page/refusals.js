// What was not fused, in words, most bytes first; and which reasons there are.

function pairTimes(list) {
  const known = list.filter((r) => r.together_us !== null && r.apart_us !== null);
  if (!known.length) return "";
  const of =
    known.length < list.length
      ? `${known.length} of ${list.length} pairs: `
      : list.length > 1
        ? `${list.length} pairs: `
        : "";
  return `${of}${timeText(d3.sum(known, (r) => r.together_us))} together, ${timeText(d3.sum(known, (r) => r.apart_us))} apart, predicted`;
}

function unlockText(unlock) {
  return unlock.startsWith("nothing")
    ? [`Nothing would change it${unlock.slice("nothing".length)}.`]
    : [el("b", {}, "To change it: "), `${unlock}.`];
}

function drawRefusals(root) {
  const kinds = facts.refusals.map((entry, number) => ({
    ...entry,
    number,
    list: entry.pairs.map(([g, n]) => ({ graph: g, refusal: report.graphs[g].refusals[n] })),
  }));
  if (!kinds.length) return void root.append(el("p.none", {}, "Everything that could share a kernel does."));
  const list = el("ol.refusals");
  const reasons = d3
    .rollups(
      kinds,
      (v) => v.length,
      (e) => e.list[0].refusal.reason,
    )
    .sort((a, b) => b[1] - a[1]);
  const state = { reason: "", words: "" };
  const fill = () =>
    list.replaceChildren(
      ...kinds
        .filter(
          (e) => (!state.reason || e.list[0].refusal.reason === state.reason) && refusalText(e).includes(state.words),
        )
        .map(refusalItem),
    );
  root.append(
    el(
      "div.tools",
      {},
      segments(
        "Reason",
        [["", `all ${kinds.length}`], ...reasons.map(([r, n]) => [r, `${r} ${n}`])],
        "",
        (v) => ((state.reason = v), fill()),
      ),
    ),
    list,
  );
  on("find", (words) => ((state.words = words), fill()));
  on("select", () => {
    for (const li of list.children) li.classList.toggle("on", li.entry.list.some(touchesSelected));
  });
  fill();
}

function touchesSelected({ graph, refusal }) {
  return (
    graph === selection.graph &&
    selection.step !== null &&
    [refusal.producer.step, refusal.consumer.step].includes(selection.step)
  );
}

function refusalText(entry) {
  const r = entry.list[0].refusal;
  return [entry.title, r.sentence, r.producer.line, r.consumer.line, r.producer.module, r.consumer.module]
    .join("\n")
    .toLowerCase();
}

function refusalItem(entry) {
  const { graph, refusal } = entry.list[0];
  const times = pairTimes(entry.list.map((p) => p.refusal));
  const li = el(
    "li.refusal",
    {},
    el(
      "div.cost",
      {},
      bytesText(entry.nbytes),
      el("span", {}, entry.list.length > 1 ? `in ${entry.list.length} pairs` : "at stake"),
    ),
    el(
      "div",
      {},
      el("h3", {}, entry.title),
      el("p", {}, sentenceCase(refusal.sentence), "."),
      times ? el("p.times", {}, times) : null,
      el("p.unlock", {}, unlockText(refusal.unlock)),
      el(
        "div.jump",
        {},
        el("span.muted", {}, refusal.reason),
        sideLink(graph, refusal.producer),
        sideLink(graph, refusal.consumer),
      ),
    ),
  );
  li.entry = entry;
  return li;
}

function sentenceCase(text) {
  return text.replace(/^an? /, (m) => m[0].toUpperCase() + m.slice(1));
}

function sideLink(graph, side) {
  if (side.step < 0) return null;
  return el(
    "button.link",
    { type: "button", onclick: () => select(graph, side.step, side.operator >= 0 ? side.operator : null, "refusals") },
    `step ${side.step}: ${side.name}`,
  );
}
