"use strict";
// One step and one layer are looked at; the slider, the list and a click on any drawing choose them.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const step = document.getElementById("look-step");
  const layer = document.getElementById("look-layer");
  const out = document.getElementById("look-out");
  const drawings = document.querySelectorAll("svg.steps");
  const known = (value, text) => (value === null || value === undefined ? "unknown" : text(value));
  const digits = (value) => String(Number(value.toPrecision(4)));
  const percent = (value) => digits(100 * value) + " %";
  const middle = (column) => data.left + (data.right - data.left) * (column + 0.5) / data.first.length;

  function when(column) {
    const first = data.first[column], last = Math.min(first + data.width - 1, data.steps);
    return first === last ? "Step " + first : "Steps " + first + " to " + last;
  }

  function bytes(column) {
    const parts = Object.entries(data.bytes).filter(([, of]) => of[column] > 0);
    if (!parts.length) return "nothing committed";
    return data.events[column] + " events committed: " +
      parts.map(([reason, of]) => reason + " " + digits(of[column] / 1e6) + " MB").join(", ");
  }

  function show() {
    const column = Number(step.value), row = layer.selectedIndex;
    const ratio = data.ratio[row] ? data.ratio[row][column] : null;
    const saved = data.saved[row] && data.saved[row].includes(column);
    out.textContent = [
      when(column) + ": loss " + known(data.loss[column], digits),
      "oldest layer " + known(data.max_age[column], (v) => digits(v) + " steps"),
      "size-weighted age " + known(data.weighted_age[column], (v) => digits(v) + " steps"),
      "stall " + known(data.stall[column], percent),
      bytes(column),
      layer.value + ": D/K " + known(ratio, digits) + (saved ? ", saved here" : ""),
    ].join("; ");
    step.setAttribute("aria-valuetext", when(column));
    for (const drawing of drawings) {
      const line = drawing.querySelector(".cursor");
      line.setAttribute("x1", middle(column));
      line.setAttribute("x2", middle(column));
    }
    document.querySelector("#heat .pick").setAttribute("y", row * data.row - 0.5);
  }

  function point(event) {
    const drawing = event.currentTarget, box = drawing.getBoundingClientRect();
    const scale = drawing.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
    const share = (x - data.left) / (data.right - data.left);
    if (drawing.id === "heat") layer.selectedIndex = Math.max(0, Math.min(data.ratio.length - 1, Math.floor(y / data.row)));
    if (share >= 0 && share <= 1) step.value = Math.min(data.first.length - 1, Math.floor(share * data.first.length));
    show();
  }

  step.addEventListener("input", show);
  layer.addEventListener("change", show);
  for (const drawing of drawings) drawing.addEventListener("click", point);
  document.documentElement.classList.add("script");
  show();
})();
