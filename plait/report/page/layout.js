// Where nodes and edges of a drawing are. Layers by dagre; long programs in pieces, one below the other, since its time grows
// with the square of their length.

const PIECE = 70; // nodes, but for blocks, which stay whole
const GAP = 34;

/** The drawing with x and y of nodes, boxes of blocks, points of edges, width and height. */
function laidOut(g, what) {
  const at = new Map(g.nodes.map((n) => [n.id, n]));
  const near = g.edges.filter((e) => !e.next && !e.far);
  let below = 0;
  for (const nodes of pieces(g.nodes)) {
    const placed = dagreLayout(nodes, near, g.blocks, what);
    placed.move(-d3.median(nodes, (n) => placed.get(n.id).x), below);
    below += placed.height + GAP;
  }
  for (const e of g.edges) e.points ??= around(at.get(e.from), at.get(e.to), what);
  return framed(g, what);
}

function pieces(nodes) {
  const out = [[]];
  nodes.forEach((n, k) => {
    const last = out[out.length - 1];
    const split =
      last.length >= PIECE && nodes.length - k > PIECE / 2 && (n.block < 0 || n.block !== nodes[k - 1].block);
    if (split) out.push([n]);
    else last.push(n);
  });
  return out;
}

function dagreLayout(nodes, edges, blocks, what) {
  const inside = new Map(nodes.map((n) => [n.id, n]));
  const within = edges.filter((e) => inside.has(e.from) && inside.has(e.to));
  const held = blocks.filter((b) => nodes.some((n) => n.block === b.id));
  const layout = new dagre.graphlib.Graph({ compound: held.length > 0 });
  layout.setGraph({ rankdir: "TB", nodesep: 16, ranksep: 30, edgesep: 8 });
  layout.setDefaultEdgeLabel(() => ({}));
  for (const b of held) layout.setNode(`b${b.id}`, {});
  for (const n of nodes) {
    layout.setNode(String(n.id), { ...NODE[what] });
    if (n.block >= 0) layout.setParent(String(n.id), `b${n.block}`);
  }
  for (const e of within) layout.setEdge(String(e.from), String(e.to));
  dagre.layout(layout);
  const move = (x, y) => {
    const moved = (p) => ({ x: p.x + x, y: p.y + y });
    for (const n of nodes) Object.assign(n, moved(layout.node(String(n.id))));
    for (const b of held) Object.assign(b, layout.node(`b${b.id}`), moved(layout.node(`b${b.id}`)));
    for (const e of within) e.points = layout.edge(String(e.from), String(e.to)).points.map(moved);
  };
  return { get: (id) => layout.node(String(id)), height: layout.graph().height, move };
}

/** Straight down, or from a block's end beside it back to its start. */
function around(a, b, what) {
  const { width, height } = NODE[what];
  const [from, to] = [a.y + height / 2, b.y - height / 2];
  if (a.y < b.y) {
    const bend = Math.min(40, (to - from) / 2);
    return [
      { x: a.x, y: from },
      { x: a.x, y: from + bend },
      { x: b.x, y: to - bend },
      { x: b.x, y: to },
    ];
  }
  const side = Math.max(a.x, b.x) + width / 2 + 22;
  return [
    { x: a.x, y: from },
    { x: a.x, y: from + 14 },
    { x: side, y: from },
    { x: side, y: to },
    { x: b.x, y: to - 14 },
    { x: b.x, y: to },
  ];
}

/** Everything moved so that the drawing begins at its margin. */
function framed(g, what) {
  const margin = { x: 24, y: 44 };
  const { width, height } = NODE[what];
  const boxes = [...g.nodes.map((n) => ({ ...n, width, height })), ...g.blocks];
  const left = d3.min(boxes, (b) => b.x - b.width / 2) ?? 0;
  const top = d3.min(boxes, (b) => b.y - b.height / 2) ?? 0;
  const moved = (p) => Object.assign(p, { x: p.x - left + margin.x, y: p.y - top + margin.y });
  const right = d3.max(boxes, (b) => b.x + b.width / 2) ?? 0;
  const bottom = d3.max(boxes, (b) => b.y + b.height / 2) ?? 0;
  [...g.nodes, ...g.blocks].forEach(moved);
  for (const e of g.edges) e.points = e.points.map((p) => moved({ ...p }));
  return { ...g, width: right - left + 2 * margin.x, height: bottom - top + 2 * margin.y };
}
