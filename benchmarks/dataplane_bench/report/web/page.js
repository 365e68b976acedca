"use strict";
// Draws the plots of the page, one after another, and again when the page turns dark or light.
(() => {
  const plots = JSON.parse(document.getElementById("drawings").textContent);
  const hidden = new Map();

  // "--blue" is the value of that variable: each colour is there for light pages and for dark ones.
  const resolved = (value, style) => {
    if (typeof value === "string") {
      return value.startsWith("--") ? style.getPropertyValue(value).trim() : value;
    }
    if (Array.isArray(value)) return value.map((each) => resolved(each, style));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, resolved(each, style)]));
  };

  const draw = (plot) => {
    const style = getComputedStyle(document.documentElement);
    const off = hidden.get(plot.group) || new Set();
    const traces = resolved(plot.data, style);
    traces.forEach((trace) => { if (off.has(trace.meta)) trace.visible = false; });
    return Plotly.react(plot.id, traces, resolved(plot.layout, style), { displayModeBar: false, responsive: true });
  };

  // A few at a time, so that the page can be read and scrolled meanwhile.
  const drawAll = async () => {
    document.body.dataset.drawn = "0";
    for (const [index, plot] of plots.entries()) {
      // A plot that cannot be drawn is no reason to leave out the others.
      await Promise.resolve().then(() => draw(plot)).catch(console.error);
      document.body.dataset.drawn = String(index + 1);
      await new Promise((done) => setTimeout(done));
    }
  };

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-system]");
    if (!button) return;
    const shown = button.getAttribute("aria-pressed") === "true";
    button.setAttribute("aria-pressed", String(!shown));
    const of = button.dataset.of;
    if (!hidden.has(of)) hidden.set(of, new Set());
    hidden.get(of)[shown ? "add" : "delete"](button.dataset.system);
    plots.filter((plot) => plot.group === of).forEach(draw);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  drawAll();
})();
