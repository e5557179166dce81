// Two bars on one scale of time: every operator as eager launches it, every step as plait does.

function strips() {
  if (!graphs.length) return null;
  const box = el("div.strips");
  const draw = () => {
    if (box.isConnected) fillStrips(box);
  };
  new ResizeObserver(draw).observe(box);
  on("select", () => d3.select(box).selectAll(".seg").classed("on", isSelected));
  return box;
}

function fillStrips(box) {
  const width = Math.max(200, box.clientWidth - 56);
  const eager = graphs.flatMap((g) => g.operators.filter((o) => o.operator.alone_us !== null));
  const most =
    Math.max(
      d3.sum(eager, (o) => o.time),
      d3.sum(allSteps, (s) => s.time),
    ) || 1;
  const x = d3.scaleLinear([0, most], [0, width]);
  const axis = d3.create("svg").attr("class", "axis").attr("aria-hidden", "true");
  axis.call(
    d3
      .axisBottom(x)
      .ticks(Math.min(8, width / 110))
      .tickSize(4)
      .tickFormat((v) => (v ? timeText(v) : "0")),
  );
  axis.select(".domain").remove();
  box.replaceChildren(
    el("span", {}, "eager"),
    bar(eager, x, "eager"),
    el("span", {}, "plait"),
    bar(allSteps, x, "plait"),
    el("span"),
    axis.node(),
  );
}

function bar(items, x, kind) {
  const svg = d3
    .create("svg")
    .attr("role", "img")
    .attr("aria-label", `time of each ${kind === "eager" ? "operator in eager" : "step in plait"}`);
  const most = d3.max(items, (i) => i.time) || 1;
  let at = 0;
  const placed = items.map((item) => ({ item, from: at, to: (at += item.time) }));
  svg
    .selectAll("rect")
    .data(placed)
    .join("rect")
    .attr("class", `seg ${kind}`)
    .attr("x", (d) => x(d.from))
    .attr("width", (d) => Math.max(0.2, x(d.to) - x(d.from)))
    .attr("height", 22)
    .style("stroke-width", (d) => (x(d.to) - x(d.from) < 3 ? 0 : null))
    .style("--heat", (d) => Math.sqrt(d.item.time / most))
    .datum((d) => d.item)
    .on("click", (event, item) => selectItem(item, "strip"))
    .on("mousemove", (event, item) => tip(event, nameOf(item), tipLines(item)))
    .on("mouseleave", hideTip);
  for (const g of graphs.slice(1)) {
    const first = placed.find((p) => p.item.graph === g.at);
    if (first)
      svg
        .append("line")
        .attr("class", "cut")
        .attr("x1", x(first.from))
        .attr("x2", x(first.from))
        .attr("y1", -3)
        .attr("y2", 25);
  }
  return svg.node();
}

function nameOf(item) {
  return item.kernel ? item.title : item.operator.name;
}

/** A few words on a step or an operator. */
function tipLines(item) {
  if (item.kernel) {
    const k = item.kernel;
    return [
      `${k.measured_us === null ? "" : "measured "}${timeText(item.time)}, ${k.bound || "unknown"} bound`,
      `${bytesText(k.before.total)} alone, ${bytesText(k.after.total)} fused`,
      item.row.steps.length > 1 ? `one of ${item.row.steps.length} equal` : "",
      k.failure,
    ];
  }
  const o = item.operator;
  return [
    o.line,
    o.alone_us === null
      ? o.recomputed
        ? "formed again for the backward"
        : "launches nothing"
      : `${timeText(item.time)} alone, ${bytesText(o.before.total)}`,
    o.step < 0 ? "nothing of it is left" : "",
  ];
}
