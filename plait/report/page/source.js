// A kernel's text with line numbers and a little colour: C++ and Python share most of their words.

const WORDS = new Set(
  (
    "auto bool break case char class const constexpr continue def double else enum extern false False float for from if import in " +
    "inline int int32_t int64_t lambda long namespace None not and or nullptr pass return short signed sizeof static struct switch " +
    "template true True typename uint32_t uint64_t unsigned using void while with as is"
  ).split(" "),
);
const REST = String.raw`("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|(\b\d[\w.]*)|([A-Za-z_]\w*)`;
const PYTHON = new RegExp(String.raw`(#[^\n]*)|${REST}`, "g");
const CPP = new RegExp(String.raw`(\/\/[^\n]*|\/\*[\s\S]*?\*\/)|${REST}`, "g");

function highlighted(text) {
  const out = document.createDocumentFragment();
  let at = 0;
  for (const found of text.matchAll(/^import triton\b/m.test(text) ? PYTHON : CPP)) {
    const [word, comment, string, number, name] = found;
    const kind = comment ? "c" : string ? "s" : number ? "n" : WORDS.has(name) ? "k" : "";
    if (!kind) continue;
    out.append(text.slice(at, found.index), el(`span.${kind}`, {}, word));
    at = found.index + word.length;
  }
  out.append(text.slice(at));
  return out;
}

function sourceView(text) {
  const lines = text.replace(/\n$/, "").split("\n").length;
  const numbers = Array.from({ length: lines }, (_, k) => k + 1).join("\n");
  const copy = el("button.quiet", { type: "button", onclick: () => copyText(text, copy) }, "Copy");
  return [
    el("div.source-tools", {}, countText(lines, "line"), copy),
    el(
      "div.source",
      {},
      el("pre.numbers", { "aria-hidden": "true" }, numbers),
      el("pre", { "data-source": true }, highlighted(text)),
    ),
  ];
}

async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    // no clipboard for a page opened from a file: select it instead
    getSelection().selectAllChildren(document.querySelector("[data-source]"));
    button.textContent = "Selected";
  }
}
