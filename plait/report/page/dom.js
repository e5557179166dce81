// Elements from values. Text only ever becomes text: nothing here reads HTML.

function el(tag, attributes = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const node = document.createElement(name);
  if (classes.length) node.classList.add(...classes);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return node;
}

function byId(id) {
  return document.getElementById(id);
}

/** Choices of which one is pressed. `options`: [[value, label], …]. */
function segments(label, options, value, chosen) {
  const box = el("div.segments", { role: "group", "aria-label": label });
  const press = (now) => {
    for (const b of box.children) b.setAttribute("aria-pressed", String(b.dataset.value === now));
  };
  for (const [key, words] of options) {
    const button = el("button", { type: "button", "data-value": key, onclick: () => (press(key), chosen(key)) }, words);
    box.append(button);
  }
  press(value);
  return box;
}

/** Tabs over panels: [{key, label, count}]. */
function tabs(list, options, value, chosen) {
  const show = (now) => {
    for (const b of list.children) b.setAttribute("aria-selected", String(b.dataset.key === now));
  };
  list.replaceChildren(
    ...options.map(({ key, label, count }) =>
      el(
        "button",
        { type: "button", role: "tab", "data-key": key, onclick: () => (show(key), chosen(key)) },
        label,
        count === undefined ? null : el("span.count", {}, String(count)),
      ),
    ),
  );
  show(value);
  return show;
}

function gauge(tag, part) {
  const bar = el(tag);
  bar.style.setProperty("width", `${Math.max(0, Math.min(1, part)) * 100}%`);
  return bar;
}

// ------------------------------------------------------------------------------------------------------------ the tip
function tip(event, head, lines) {
  const box = byId("tip");
  box.replaceChildren(el("b", {}, head), ...lines.filter(Boolean).map((line) => el("div", {}, line)));
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  const x = Math.min(event.clientX + 14, innerWidth - width - 8);
  const y = event.clientY + 16 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 16;
  box.style.setProperty("left", `${x}px`);
  box.style.setProperty("top", `${y}px`);
}

function hideTip() {
  byId("tip").hidden = true;
}
