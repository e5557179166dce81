// The report, indexed: steps with their titles, equals and refusals; operators with their steps. Also what is selected.

const facts = JSON.parse(byId("facts").textContent);
const report = facts.report;

function stepTime(kernel) {
  return kernel.measured_us ?? kernel.predicted_us ?? 0;
}

const graphs = report.graphs.map((graph, at) => {
  const steps = graph.kernels.map((kernel) => ({
    kernel,
    graph: at,
    number: kernel.number,
    time: stepTime(kernel),
    refusals: [],
    readers: [],
  }));
  const rows = facts.rows[at].map((row) => ({
    title: row.title,
    label: row.label,
    steps: row.steps.map((n) => steps[n]),
  }));
  for (const row of rows)
    for (const step of row.steps) Object.assign(step, { title: row.title, label: row.label, row });
  for (const step of steps) for (const n of step.kernel.needs) steps[n].readers.push(step.number);
  const operators = graph.operators.map((operator) => ({
    operator,
    graph: at,
    number: operator.number,
    step: operator.step,
    time: operator.alone_us ?? 0,
    refusals: [],
  }));
  for (const refusal of graph.refusals) {
    for (const n of new Set([refusal.producer.step, refusal.consumer.step]))
      if (n >= 0) steps[n].refusals.push(refusal);
    for (const n of new Set([refusal.producer.operator, refusal.consumer.operator]))
      if (n >= 0) operators[n].refusals.push(refusal);
  }
  return { at, facts: graph, name: graph.name, kind: graph.kind, steps, rows, operators, repeats: facts.repeats[at] };
});

const allSteps = graphs.flatMap((g) => g.steps);

/** What a step or an operator weighs, by the measure that colours it. */
const MEASURES = {
  time: { label: "time", of: (item) => item.time, text: timeText },
  traffic: {
    label: "traffic",
    of: (item) => (item.kernel ? item.kernel.after.total : item.operator.before.total),
    text: bytesText,
  },
  refusals: { label: "not fused", of: (item) => d3.sum(item.refusals, (r) => r.bytes_at_stake), text: bytesText },
};

function textOf(item) {
  const module = (m) => [m.name, m.aten, m.line, m.module, ...(m.regions ?? [])];
  const parts = item.kernel
    ? [item.title, item.kernel.name, ...item.kernel.members.flatMap(module)]
    : module(item.operator);
  return parts.join("\n").toLowerCase();
}

// -------------------------------------------------------------------------------------------------------- selection
const selection = { graph: null, step: null, operator: null };
const listeners = { select: [], find: [] };

function on(event, listener) {
  listeners[event].push(listener);
}

function emit(event, ...values) {
  for (const listener of listeners[event]) listener(...values);
}

/** Select a step, or an operator and the step that does most of it. */
function select(graph, step, operator = null, from = "") {
  Object.assign(selection, { graph, step, operator });
  emit("select", from);
  const place =
    graph === null
      ? location.pathname
      : `#g${graph}${step !== null ? `.k${step}` : ""}${operator !== null ? `.o${operator}` : ""}`;
  try {
    history.replaceState(null, "", place);
  } catch {
    // an embedded page may have no history
  }
}

function selectFromAddress() {
  const found = /^#g(\d+)(?:\.k(\d+))?(?:\.o(\d+))?$/.exec(location.hash);
  if (!found) return;
  const [graph, step, operator] = found.slice(1).map((n) => (n === undefined ? null : Number(n)));
  const known =
    graphs[graph] &&
    (step === null || graphs[graph].steps[step]) &&
    (operator === null || graphs[graph].operators[operator]);
  if (known) select(graph, step, operator);
}

function selectedStep() {
  return selection.graph !== null && selection.step !== null ? graphs[selection.graph].steps[selection.step] : null;
}

function selectedOperator() {
  return selection.graph !== null && selection.operator !== null
    ? graphs[selection.graph].operators[selection.operator]
    : null;
}

function isSelected(item) {
  if (item.graph !== selection.graph) return false;
  return item.kernel ? item.number === selection.step : item.number === selection.operator;
}

/** An operator that is in the selected step, or the step that the selected operator is in. */
function isKin(item) {
  return item.graph === selection.graph && !item.kernel && selection.step !== null && item.step === selection.step;
}

function selectItem(item, from) {
  if (item.kernel) select(item.graph, item.number, null, from);
  else select(item.graph, item.step >= 0 ? item.step : null, item.number, from);
}
