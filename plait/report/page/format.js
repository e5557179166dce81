// Numbers as people read them: three figures and a unit.

function figure(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3);
}

function scaled(value, units, step = 1000) {
  let at = 0;
  while (value >= step && at < units.length - 1) {
    value /= step;
    at += 1;
  }
  return [value, units[at]];
}

function bytesText(value) {
  const [n, unit] = scaled(value, ["B", "KB", "MB", "GB", "TB"]);
  return `${unit === "B" ? n.toFixed(0) : figure(n)} ${unit}`;
}

function timeText(us) {
  if (us === null) return "–";
  const [n, unit] = scaled(us, ["µs", "ms", "s"]);
  return `${figure(n)} ${unit}`;
}

function flopsText(value) {
  const [n, unit] = scaled(value, ["", "k", "M", "G", "T", "P"]);
  return unit ? `${figure(n)} ${unit}` : n.toFixed(0);
}

function intensityText(value) {
  return value === null ? "–" : value < 10 ? value.toFixed(3) : figure(value);
}

function share(part, whole) {
  return whole ? `${((100 * part) / whole).toFixed(part / whole < 0.0995 ? 1 : 0)} %` : "–";
}

function countText(n, one, many = `${one}s`) {
  return `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
}

/** "file.py:12" and the code of "file.py:12 y = x + 1". */
function splitLine(line) {
  const at = line.indexOf(" ");
  return at < 0 ? { place: line, code: "" } : { place: line.slice(0, at), code: line.slice(at + 1) };
}

/** blocks.*.attn: the numbers of repeated layers left out. */
function starred(module) {
  return module.replace(/(^|[.[])\d+/g, "$1*");
}

const measure = document.createElement("canvas").getContext("2d");

/** Text that fits a width, in the font of a node. */
function fitted(text, width, font) {
  measure.font = font;
  if (measure.measureText(text).width <= width) return text;
  let low = 0;
  let high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (measure.measureText(`${text.slice(0, middle).trimEnd()}…`).width <= width) low = middle;
    else high = middle - 1;
  }
  return `${text.slice(0, low).trimEnd()}…`;
}
