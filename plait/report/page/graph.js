// One drawing of a graph that a person pans, zooms and clicks.

const NODE = { steps: { width: 196, height: 46 }, operators: { width: 164, height: 40 } };
const LEGIBLE = 0.36; // a scale at which the large names can still be read
const NAME_FONT = "600 12px system-ui, sans-serif";
const SUB_FONT = "11px system-ui, sans-serif";
const BIG_FONT = "600 20px system-ui, sans-serif";

/** A pane with a drawing; `.paint()` after the measure changed. */
function graphPane(graph, what, fold, title) {
  const g = laidOut(drawn(graph, what, fold), what);
  const svg = d3.create("svg").attr("aria-label", `${title} of ${graph.name}`);
  const world = svg.append("g");
  const pane = el(
    "div.pane",
    { "data-what": what },
    el(
      "h3",
      {},
      title,
      el(
        "span",
        {},
        what === "steps"
          ? countText(graph.steps.length, "step")
          : countText(graph.facts.totals.operators, "launch", "launches"),
      ),
    ),
    svg.node(),
  );
  drawBlocks(world, g);
  const edges = drawEdges(world, g);
  const nodes = drawNodes(world, g, what);
  const zoom = zooming(svg, world, g, pane);
  const selected = (from) => {
    nodes.classed("on", (n) => n.items.some(isSelected)).classed("kin", (n) => n.items.some(isKin));
    const on = new Set(
      nodes
        .data()
        .filter((n) => n.items.some((i) => isSelected(i) || isKin(i)))
        .map((n) => n.id),
    );
    edges.classed("near", (e) => on.has(e.from) || on.has(e.to));
    const first = nodes.data().find((n) => n.items.some(isSelected)) ?? nodes.data().find((n) => on.has(n.id));
    if (first && from !== pane) zoom.show(first);
  };
  const find = (words) => {
    pane.classList.toggle("finding", Boolean(words));
    nodes.classed("found", (n) => Boolean(words) && n.items.some((i) => textOf(i).includes(words)));
  };
  nodes.on("click", (event, n) => selectItem(n.items.find(isSelected) ?? n.items[0], pane));
  nodes.on("keydown", (event, n) => event.key === "Enter" && selectItem(n.items[0], pane));
  edges.on(
    "mousemove",
    (event, e) =>
      e.refusals.length &&
      tip(event, `Not fused: ${e.refusals[0].reason}`, [e.refusals[0].sentence, pairTimes(e.refusals)]),
  );
  edges.on("mouseleave", hideTip);
  const dearest = d3.max(g.edges, (e) => d3.sum(e.refusals, (r) => r.bytes_at_stake)) || 1;
  const paint = (measure, most) => {
    nodes.style("--heat", (n) => Math.sqrt((d3.max(n.items, measure.of) || 0) / (most || 1)));
    edges.classed("refused", (e) => measure === MEASURES.refusals && e.refusals.length > 0);
    edges.style("--cost", (e) => Math.sqrt(d3.sum(e.refusals, (r) => r.bytes_at_stake) / dearest));
  };
  return { element: pane, paint, selected, find, fit: zoom.start };
}

function drawBlocks(world, g) {
  const blocks = world.append("g").selectAll("g").data(g.blocks).join("g");
  blocks
    .append("rect")
    .attr("class", "block")
    .attr("x", (b) => b.x - b.width / 2)
    .attr("y", (b) => b.y - b.height / 2)
    .attr("width", (b) => b.width)
    .attr("height", (b) => b.height);
  blocks
    .append("text")
    .attr("class", "block-label")
    .attr("x", (b) => b.x - b.width / 2 + 10)
    .attr("y", (b) => b.y - b.height / 2 + 16)
    .text((b) => `× ${b.count}${b.label ? `   ${b.label}` : ""}`);
}

function drawEdges(world, g) {
  const line = d3
    .line(
      (p) => p.x,
      (p) => p.y,
    )
    .curve(d3.curveBasis);
  const edges = world.append("g").selectAll("path").data(g.edges).join("path");
  return edges
    .attr("class", (e) => `edge${e.next ? " next" : ""}${e.far ? " far-edge" : ""}${e.inside ? " inside" : ""}`)
    .attr("d", (e) => line(e.points));
}

function drawNodes(world, g, what) {
  const { width, height } = NODE[what];
  const nodes = world.append("g").selectAll("g").data(g.nodes).join("g");
  nodes
    .attr("class", (n) => `node ${classesOf(n.items[0])}`)
    .attr("transform", (n) => `translate(${n.x - width / 2},${n.y - height / 2})`)
    .attr("tabindex", 0)
    .attr("role", "button")
    .attr("aria-label", (n) => nameOf(n.items[0]))
    .attr("data-items", (n) => n.items.map((i) => i.number).join(" "))
    .on("mousemove", (event, n) =>
      tip(event, nameOf(n.items[0]), [
        n.items.length > 1 ? `${n.items.length} times, ${timeText(d3.sum(n.items, (i) => i.time))} in all` : "",
        ...tipLines(n.items[0]),
      ]),
    )
    .on("mouseleave", hideTip);
  nodes
    .append("rect")
    .attr("class", "box")
    .attr("width", width)
    .attr("height", height)
    .attr("rx", what === "steps" ? 7 : 20);
  const pad = what === "steps" ? 10 : 15;
  nodes
    .append("text")
    .attr("class", "name")
    .attr("x", pad)
    .attr("y", height / 2 - 3)
    .text((n) => fitted(shortName(n.items[0]), width - 2 * pad - (n.items.length > 1 ? 26 : 0), NAME_FONT));
  nodes
    .append("text")
    .attr("class", "sub")
    .attr("x", pad)
    .attr("y", height / 2 + 12)
    .text((n) => fitted(subline(n.items[0]), width - 2 * pad, SUB_FONT));
  nodes
    .filter((n) => n.items.length > 1)
    .append("text")
    .attr("class", "times")
    .attr("x", width - pad)
    .attr("y", height / 2 - 3)
    .attr("text-anchor", "end")
    .text((n) => `×${n.items.length}`);
  nodes
    .append("text")
    .attr("class", "big")
    .attr("x", pad)
    .attr("y", height / 2 + 7)
    .text((n) =>
      fitted(`${n.items.length > 1 ? `${n.items.length}× ` : ""}${shortName(n.items[0])}`, width - 2 * pad, BIG_FONT),
    );
  return nodes;
}

function shortName(item) {
  return item.kernel ? item.label : item.operator.name;
}

function classesOf(item) {
  if (item.kernel) return `${item.kernel.kind}${item.kernel.failure ? " failed" : ""}`;
  return item.step < 0 ? "gone" : "operator";
}

function subline(item) {
  if (item.kernel)
    return `${timeText(item.time)} · ${bytesText(item.kernel.after.total)}${item.kernel.kind === "call" ? " · library" : ""}`;
  const place = splitLine(item.operator.line).place;
  return item.operator.alone_us === null
    ? item.operator.recomputed
      ? "formed again"
      : place
    : `${timeText(item.time)} · ${place}`;
}

// --------------------------------------------------------------------------------------------------------- pan and zoom
function zooming(svg, world, g, pane) {
  const zoom = d3
    .zoom()
    .scaleExtent([0.02, 3])
    .filter((event) => (event.type !== "wheel" || event.ctrlKey || event.metaKey) && !event.button);
  zoom.on("zoom", ({ transform }) => {
    world.attr("transform", transform);
    pane.classList.toggle("far", transform.k < 0.5);
  });
  svg.call(zoom).on("dblclick.zoom", null);
  zoom
    .extent(() => [
      [0, 0],
      [pane.clientWidth, pane.clientHeight],
    ])
    .translateExtent([
      [-260, -160],
      [g.width + 260, g.height + 160],
    ]);
  // the wheel moves the drawing; at its end it moves the page, as any inner scroll does
  svg.node().addEventListener(
    "wheel",
    (event) => {
      if (event.ctrlKey || event.metaKey) return;
      const before = d3.zoomTransform(svg.node());
      svg.call(zoom.translateBy, -event.deltaX / before.k, -event.deltaY / before.k);
      const after = d3.zoomTransform(svg.node());
      if (after.x !== before.x || after.y !== before.y) event.preventDefault();
    },
    { passive: false },
  );
  const all = () => Math.min(pane.clientWidth / g.width, pane.clientHeight / g.height, 1.1);
  const fit = () =>
    svg
      .transition()
      .duration(250)
      .call(
        zoom.transform,
        d3.zoomIdentity
          .translate((pane.clientWidth - g.width * all()) / 2, (pane.clientHeight - g.height * all()) / 2)
          .scale(all()),
      );
  const start = () => {
    if (!pane.clientWidth) return;
    const k = all() >= LEGIBLE ? all() : Math.min(0.9, Math.max(0.78, pane.clientWidth / g.width));
    // a small drawing begins at the top, and stays where it is dragged
    const far = { x: Math.max(g.width, pane.clientWidth / k), y: Math.max(g.height, pane.clientHeight / k) };
    zoom.translateExtent([
      [-260, -160],
      [far.x + 260, far.y + 160],
    ]);
    const weight = (n) => (n.y < pane.clientHeight / k ? d3.sum(n.items, (i) => i.time) : 0) + 1e-9;
    const middle = d3.sum(g.nodes, (n) => n.x * weight(n)) / d3.sum(g.nodes, weight);
    const half = pane.clientWidth / k / 2;
    const x = g.width <= 2 * half ? g.width / 2 : Math.min(Math.max(middle, half), g.width - half);
    svg.call(zoom.transform, d3.zoomIdentity.translate(pane.clientWidth / 2 - x * k, 8).scale(k));
  };
  const show = (n) => {
    const t = d3.zoomTransform(svg.node());
    const [x, y] = t.apply([n.x, n.y]);
    const seen = x > 60 && y > 40 && x < pane.clientWidth - 60 && y < pane.clientHeight - 40;
    if (seen || !pane.clientWidth) return;
    const k = Math.max(t.k, 0.62);
    svg
      .transition()
      .duration(300)
      .call(
        zoom.transform,
        d3.zoomIdentity.translate(pane.clientWidth / 2 - n.x * k, pane.clientHeight / 2 - n.y * k).scale(k),
      );
  };
  const by = (factor) => () => svg.transition().duration(150).call(zoom.scaleBy, factor);
  pane.append(
    el(
      "div.zooms",
      {},
      button("−", "Zoom out", by(1 / 1.4)),
      button("+", "Zoom in", by(1.4)),
      button("Fit", "Show all", fit),
    ),
  );
  return { start, show };
}

function button(words, label, onclick) {
  return el("button", { type: "button", title: label, "aria-label": label, onclick }, words);
}
