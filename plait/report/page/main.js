// Starts the page: theme, tabs, search, keys.

function themeToggle() {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const stored = (value) => {
    try {
      if (value !== undefined) localStorage.setItem("plait-theme", value);
      return localStorage.getItem("plait-theme");
    } catch {
      return null; // a page opened from a file may have no storage
    }
  };
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const label = () => (byId("theme").textContent = dark() ? "Light" : "Dark");
  const found = stored();
  if (found === "light" || found === "dark") root.dataset.theme = found;
  byId("theme").addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    stored(root.dataset.theme);
    label();
  });
  system.addEventListener("change", label);
  label();
}

/** The inspector as wide as a person drags it: sources have long lines. */
function sideGrip() {
  const grip = byId("grip");
  const work = document.querySelector(".work");
  grip.addEventListener("pointerdown", (e) => {
    grip.setPointerCapture(e.pointerId);
    grip.classList.add("held");
  });
  grip.addEventListener("pointermove", (e) => {
    if (!grip.classList.contains("held")) return;
    const width = work.getBoundingClientRect().right - e.clientX;
    work.style.setProperty("--side", `${Math.max(300, Math.min(width, work.clientWidth - 360))}px`);
  });
  grip.addEventListener("lostpointercapture", () => grip.classList.remove("held"));
}

function start() {
  themeToggle();
  sideGrip();
  drawHeadline();
  const views = {
    graph: drawGraphs(byId("view-graph")),
    kernels: drawTable(byId("view-kernels")),
    roofline: drawRoofline(byId("view-roofline")),
    refusals: drawRefusals(byId("view-refusals")),
  };
  const open = (key) => {
    for (const name of Object.keys(views)) byId(`view-${name}`).hidden = name !== key;
    views[key]?.shown?.();
  };
  tabs(
    byId("tabs"),
    [
      { key: "graph", label: "Graph" },
      { key: "kernels", label: "Steps", count: allSteps.length },
      { key: "roofline", label: "Roofline" },
      { key: "refusals", label: "Not fused", count: facts.refusals.length },
    ],
    "graph",
    open,
  );
  on("select", drawInspector);
  drawInspector();
  byId("find").addEventListener("input", (e) => emit("find", e.target.value.trim().toLowerCase()));
  addEventListener("keydown", (e) => {
    if (e.key === "Escape") select(null, null);
    if (e.key === "/" && e.target.tagName !== "INPUT") {
      e.preventDefault();
      byId("find").focus();
    }
  });
  selectFromAddress();
}

start();
document.documentElement.dataset.ready = "";
