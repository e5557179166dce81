// Graphs to draw: operators or steps as nodes, repeated blocks folded into one with a count.

const FAN = 4; // more readers than that make a value one of those that everything reads
const FEW = 40; // nodes of a graph in which edges may span any distance
const REACH = 14; // items of the program that one may span in a larger one

/** {nodes: [{id, items, block}], edges: [{from, to, next, inside, far, refusals}], blocks: [{id, count, label}]}. `next`: from one
 * repetition to the next; `far`: drawn, but no part of the layout. */
function drawn(graph, what, fold) {
  const items = what === "operators" ? graph.operators.filter((o) => !o.operator.recomputed) : graph.steps;
  const blocks = fold ? graph.repeats[what] : [];
  const place = items.map((_, n) => ({ id: n, turn: 0, block: -1 }));
  blocks.forEach(({ start, period, count }, block) => {
    for (let k = 0; k < period * count; k += 1)
      place[start + k] = { id: start + (k % period), turn: Math.floor(k / period), block };
  });
  const nodes = new Map();
  items.forEach((item, n) => {
    const { id, block } = place[n];
    if (!nodes.has(id)) nodes.set(id, { id, what, items: [], block });
    nodes.get(id).items.push(item);
  });
  const edges = new Map();
  const refused = refusalsBetween(graph, what);
  for (const [a, b] of pairs(items, what)) {
    const [from, to] = [place[a], place[b]];
    const turns = from.block >= 0 && from.block === to.block && from.turn !== to.turn;
    const key = `${from.id} ${to.id}`;
    const inside = what === "operators" && items[a].step === items[b].step && items[a].step >= 0;
    const between = refused.get(`${items[a].number} ${items[b].number}`) ?? [];
    const refusals = [...(edges.get(key)?.refusals ?? []), ...between];
    const edge = { from: from.id, to: to.id, next: turns, inside, refusals };
    if (from.id === to.id) continue;
    if (edges.has(key) && turns) edges.get(key).refusals = refusals;
    else edges.set(key, edge);
  }
  return {
    nodes: [...nodes.values()],
    edges: withFar([...edges.values()], nodes.size),
    blocks: blocks.map((b, id) => ({
      id,
      count: b.count,
      label: blockLabel(items.slice(b.start, b.start + b.period * b.count)),
    })),
  };
}

function refusalsBetween(graph, what) {
  const side = what === "steps" ? "step" : "operator";
  return d3.group(graph.facts.refusals, (r) => `${r.producer[side]} ${r.consumer[side]}`);
}

/** Places in `items` of who feeds whom. */
function pairs(items, what) {
  if (what === "steps") return items.flatMap((s) => s.kernel.needs.map((from) => [from, s.number]));
  const place = new Map(items.map((o, n) => [o.number, n]));
  return items.flatMap((o, n) => o.operator.feeds.filter((to) => place.has(to)).map((to) => [n, place.get(to)]));
}

/** Masks, seeds and what the backward reads of the forward would pull a large drawing out of shape: what everything
 * reads is far, and what spans much of the program, but for the nearest of each node's operands. */
function withFar(edges, nodes) {
  const nearest = d3.rollup(
    edges.filter((e) => !e.next),
    (v) => d3.max(v, (e) => (e.from < e.to ? e.from : -1)),
    (e) => e.to,
  );
  const fan = d3.rollup(
    edges,
    (v) => v.length,
    (e) => e.from,
  );
  return edges.map((e) => ({
    ...e,
    far: !e.next && nearest.get(e.to) !== e.from && ((nodes > FEW && e.to - e.from > REACH) || fan.get(e.from) > FAN),
  }));
}

/** The module that most of a block's operators are in, down to its number. */
function blockLabel(items) {
  const found = new Map();
  for (const item of items) {
    for (const { module } of item.kernel ? item.kernel.members : [item.operator]) {
      const head = /^(.*?\*)/.exec(starred(module));
      if (head) found.set(head[1], (found.get(head[1]) ?? 0) + 1);
    }
  }
  return [...found].sort((a, b) => b[1] - a[1])[0]?.[0] ?? "";
}
