// Arithmetic intensity against the rate of work, under the device's ceilings: every operator before, every step after.

const LEAST_INTENSITY = 0.005;
const LEAST_RATE = 1e-6; // of the highest roof

function points() {
  const rate = (flops, us) => flops / (us * 1e-6);
  const before = graphs
    .flatMap((g) => g.operators)
    .filter((o) => o.operator.alone_us !== null && o.operator.flops.counted > 0 && o.operator.before.total > 0)
    .map((item) => ({
      item,
      kind: "eager",
      x: item.operator.flops.counted / item.operator.before.total,
      y: rate(item.operator.flops.counted, item.time),
      time: item.time,
    }));
  const after = allSteps
    .filter((s) => s.kernel.flops.counted > 0 && s.kernel.after.total > 0 && s.time > 0)
    .map((item) => ({
      item,
      kind: item.kernel.kind === "call" ? "plait call" : "plait",
      x: item.kernel.intensity_after,
      y: rate(item.kernel.flops.counted, item.time),
      time: item.time,
    }));
  return { before, after };
}

function drawRoofline(root) {
  const { before, after } = points();
  const svg = d3.create("svg").attr("role", "img").attr("aria-label", "roofline");
  const without = allSteps.length - after.length;
  const shown = { eager: true, plait: true };
  const switchOf = (kind, words, mark) =>
    el(
      "label.key",
      {},
      el("input", { type: "checkbox", checked: true, onchange: (e) => ((shown[kind] = e.target.checked), draw()) }),
      keyMark(mark),
      words,
    );
  root.append(
    el(
      "div.roofline",
      {},
      el(
        "div.tools",
        {},
        switchOf("eager", `eager: ${countText(before.length, "operator")}`, "eager"),
        switchOf("plait", `plait: ${countText(after.length, "step")}`, "plait"),
        el("span.key", {}, keyMark("plait call"), "library call"),
        el(
          "span",
          {},
          without ? `${countText(without, "step")} without arithmetic ${without === 1 ? "is" : "are"} not drawn` : "",
        ),
        el("span.legend", {}, "area: time"),
      ),
      svg.node(),
    ),
  );
  const draw = () => svg.node().clientWidth && plot(svg, shown, before, after);
  new ResizeObserver(draw).observe(svg.node());
  const mark = () => markPoints(svg);
  on("select", mark);
  on("find", (words) => {
    svg.node().parentElement.classList.toggle("finding", Boolean(words));
    svg.selectAll(".dot").classed("found", (p) => Boolean(words) && textOf(p.item).includes(words));
  });
  return { shown: draw };
}

function keyMark(kind) {
  const svg = d3.create("svg").attr("viewBox", "-6 -6 12 12").attr("aria-hidden", "true");
  svg.append("circle").attr("class", `dot ${kind}`).attr("r", 4.5);
  return svg.node();
}

function plot(svg, shown, before, after) {
  const [width, height] = [svg.node().clientWidth, svg.node().clientHeight];
  const margin = { left: 92, right: 26, top: 18, bottom: 46 };
  const c = report.ceilings;
  const roofs = [
    ["arithmetic", c.arithmetic_per_us],
    ["tensor cores", c.tensor_core_per_us],
  ]
    .filter(([, rate]) => rate > 0)
    .map(([name, rate]) => ({ name, rate: rate * 1e6 }));
  const bandwidth = c.bytes_per_us * 1e6;
  const all = [...before, ...after];
  const ridge = d3.max(roofs, (r) => r.rate) / bandwidth;
  // what does next to no arithmetic is drawn at the edge: its true place would leave no room for the rest
  const low = (of, least) => Math.max(d3.min(all, of) ?? least, least);
  const x = d3.scaleLog(
    [
      Math.min(
        low((p) => p.x, LEAST_INTENSITY),
        0.1,
      ) / 1.6,
      Math.max(d3.max(all, (p) => p.x) ?? 1, ridge * 4) * 1.3,
    ],
    [margin.left, width - margin.right],
  );
  const top = d3.max(roofs, (r) => r.rate);
  const y = d3.scaleLog([low((p) => p.y, top * LEAST_RATE) / 2, top * 2.2], [height - margin.bottom, margin.top]);
  const place = { x: (v) => x(Math.max(v, x.domain()[0] * 1.05)), y: (v) => y(Math.max(v, y.domain()[0] * 1.1)) };
  const radius = d3.scaleSqrt([0, d3.max(all, (p) => p.time) ?? 1], [2.6, 15]);
  svg.selectAll("*").remove();
  axes(svg, x, y, width, height, margin);
  drawRoofs(svg, x, y, roofs, bandwidth);
  svg.append("g").attr("class", "ways");
  const seen = [...(shown.eager ? before : []), ...(shown.plait ? after : [])].sort((a, b) => b.time - a.time);
  svg
    .append("g")
    .selectAll("circle")
    .data(seen)
    .join("circle")
    .attr("class", (p) => `dot ${p.kind}`)
    .attr("cx", (p) => place.x(p.x))
    .attr("cy", (p) => place.y(p.y))
    .attr("r", (p) => radius(p.time))
    .on("click", (event, p) => selectItem(p.item, "roofline"))
    .on("mousemove", (event, p) =>
      tip(event, `${nameOf(p.item)}${p.kind === "eager" ? " in eager" : ""}`, [
        `${intensityText(p.x)} flop/B, ${flopsText(p.y)}flop/s`,
        ...tipLines(p.item),
      ]),
    )
    .on("mouseleave", hideTip);
  svg.node().scales = place;
  labelRoofs(svg, x, y, roofs, bandwidth);
  markPoints(svg);
}

function axes(svg, x, y, width, height, margin) {
  const grid = { x: height - margin.top - margin.bottom, y: width - margin.left - margin.right };
  const powers = (scale) => scale.ticks().filter((v) => Math.abs(Math.log10(v) - Math.round(Math.log10(v))) < 1e-9);
  svg
    .append("g")
    .attr("transform", `translate(0,${height - margin.bottom})`)
    .call(
      d3
        .axisBottom(x)
        .tickValues(powers(x))
        .tickFormat((v) => String(+v.toPrecision(1)))
        .tickSize(-grid.x)
        .tickPadding(8),
    );
  svg
    .append("g")
    .attr("transform", `translate(${margin.left},0)`)
    .call(
      d3
        .axisLeft(y)
        .tickValues(powers(y))
        .tickFormat((v) => `${flopsText(v).replace(/\.0+(?= |$)/, "")}flop/s`)
        .tickSize(-grid.y)
        .tickPadding(8),
    );
  svg
    .append("text")
    .attr("class", "label")
    .attr("x", width - margin.right)
    .attr("y", height - 8)
    .attr("text-anchor", "end")
    .text("arithmetic intensity, flops a byte of memory traffic");
}

function drawRoofs(svg, x, y, roofs, bandwidth) {
  const g = svg.append("g");
  const [left, right] = x.domain();
  const top = d3.max(roofs, (r) => r.rate);
  const from = Math.max(left, y.domain()[0] / bandwidth);
  g.append("path")
    .attr("class", "roof")
    .attr("d", `M${x(from)},${y(from * bandwidth)}L${x(top / bandwidth)},${y(top)}`);
  for (const r of roofs)
    g.append("path")
      .attr("class", "roof")
      .attr("d", `M${x(r.rate / bandwidth)},${y(r.rate)}L${x(right)},${y(r.rate)}`);
}

/** Over the points, which crowd under the roofs. */
function labelRoofs(svg, x, y, roofs, bandwidth) {
  const g = svg.append("g");
  const from = Math.max(x.domain()[0], y.domain()[0] / bandwidth);
  const slope = (Math.atan2(y(10 * bandwidth) - y(bandwidth), x(10) - x(1)) * 180) / Math.PI;
  const near = from * (x(from * 10) - x(from) > 130 ? 4 : 10);
  g.append("text")
    .attr("class", "roof-label")
    .attr("transform", `translate(${x(near)},${y(near * bandwidth)}) rotate(${slope})`)
    .attr("dy", -7)
    .attr("text-anchor", "middle")
    .text(`memory ${bytesText(bandwidth)}/s`);
  for (const r of roofs) {
    g.append("text")
      .attr("class", "roof-label")
      .attr("x", x(x.domain()[1]) - 4)
      .attr("y", y(r.rate) - 6)
      .attr("text-anchor", "end")
      .text(`${r.name} ${flopsText(r.rate)}flop/s`);
  }
}

/** The selected step, its operators, and the way from each of them to it. */
function markPoints(svg) {
  const { scales } = svg.node();
  if (!scales) return;
  const dots = svg
    .selectAll(".dot")
    .classed("on", (p) => isSelected(p.item))
    .classed("kin", (p) => isKin(p.item));
  dots.filter((p) => isKin(p.item) || isSelected(p.item)).raise();
  const to = dots.data().find((p) => p.item.kernel && isSelected(p.item));
  const from = to ? dots.data().filter((p) => isKin(p.item)) : [];
  svg
    .select(".ways")
    .selectAll("line")
    .data(from)
    .join("line")
    .attr("class", "way")
    .attr("x1", (p) => scales.x(p.x))
    .attr("y1", (p) => scales.y(p.y))
    .attr("x2", scales.x(to?.x ?? 1))
    .attr("y2", scales.y(to?.y ?? 1));
}
