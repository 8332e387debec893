"""Style and script of the page that ``explain_html`` renders."""

from __future__ import annotations

# Levels have one hue and increasing contrast, so that their order is visible in grey
# prints and to colour-blind readers.
STYLE = """
:root {
  color-scheme: light dark;
  --bg: #fbfcfd; --panel: #fff; --line: #dfe5ec; --ink: #17212e; --soft: #5d6b7c;
  --gone: #707c8a; --accent: #b4510b;
  --c1: #e3eef9; --c2: #c5dcf1; --c3: #9cc6e6; --c4: #6aa9d8; --c5: #3f86bf;
  --c6: #1d639f; --c7: #0a3d74; --on-low: #17212e; --on-high: #fff;
}
@media (prefers-color-scheme: dark) {
  :root {
    --bg: #0f1419; --panel: #161d25; --line: #2a3542; --ink: #e4eaf1;
    --soft: #93a1b2; --gone: #7d8a99; --accent: #ffb069;
    --c1: #14293f; --c2: #193d62; --c3: #1f5488; --c4: #2c70b0; --c5: #5c9bd6;
    --c6: #93c1ec; --c7: #cfe5fb; --on-low: #e4eaf1; --on-high: #0b1a2b;
  }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem clamp(.75rem, 3vw, 2.5rem) 4rem;
  max-width: 92rem; background: var(--bg); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { margin: 0 0 .8rem; font-size: 1.5rem; overflow-wrap: anywhere; }
h1 small { font-weight: 400; color: var(--soft); font-size: 1rem; }
h2 { margin: 0; font-size: 1.05rem; }
section { margin-top: 1.75rem; }
dl { margin: 0; display: flex; flex-wrap: wrap; gap: .6rem; }
.facts div { background: var(--panel); border: 1px solid var(--line);
  border-radius: 8px; padding: .5rem .9rem; min-width: 8.5rem; }
dt { color: var(--soft); font-size: .8rem; }
dd { margin: 0; font-variant-numeric: tabular-nums; }
.facts dd { font-size: 1.25rem; font-weight: 600; }
.settings { margin-top: .9rem; }
.settings summary { cursor: pointer; color: var(--soft); font-size: .9rem; }
.settings dl { gap: .3rem 1.6rem; margin-top: .35rem; }
.settings dd { font-family: ui-monospace, monospace; font-size: .85rem;
  overflow-wrap: anywhere; }
.hint, .axis { color: var(--soft); font-size: .85rem; margin: .2rem 0 .5rem; }
.axis { display: flex; justify-content: space-between; margin: .15rem 0 0; }
.scroll { overflow-x: auto; }
table { border-collapse: separate; border-spacing: 2px; font-size: .75rem;
  font-variant-numeric: tabular-nums; }
th { font-weight: 500; color: var(--soft); padding: .1rem .35rem; text-align: center; }
th[scope=row], thead th:first-child { text-align: left; white-space: nowrap;
  position: sticky; left: 0; background: var(--bg); }
td { padding: .28rem .3rem; min-width: 2.1rem; text-align: center; border-radius: 3px; }
[data-layer], [data-head] { cursor: pointer; }
#strip .on { outline: 2px solid var(--accent); outline-offset: -1px; }
#strip th.on { color: var(--accent); outline: none; font-weight: 700; }
#density { display: block; width: 100%; height: 72px; margin-top: .4rem;
  background: var(--panel); border: 1px solid var(--line); border-radius: 8px;
  cursor: pointer; }
#density rect { fill: var(--c5); }
.bar { position: sticky; top: 0; z-index: 2; display: flex; flex-wrap: wrap;
  align-items: center; gap: .5rem 1rem; padding: .6rem 0; background: var(--bg);
  border-bottom: 1px solid var(--line); }
.bar label { color: var(--soft); font-size: .9rem; }
select, button { font: inherit; color: var(--ink); background: var(--panel);
  border: 1px solid var(--line); border-radius: 6px; padding: .15rem .5rem; }
#legend { display: flex; flex-wrap: wrap; align-items: center; gap: 2px;
  font-size: .75rem; margin-left: auto; }
#legend span { padding: .15rem .5rem; border-radius: 3px;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
#legend b { font-weight: 500; color: var(--soft); margin-right: .4rem; }
#prompt { margin-top: .8rem; padding: 1rem 1.1rem; background: var(--panel);
  border: 1px solid var(--line); border-radius: 8px; white-space: pre-wrap;
  overflow-wrap: anywhere; line-height: 1.75; }
#prompt span { border-radius: 3px; padding: .1em 0; -webkit-box-decoration-break: clone;
  box-decoration-break: clone; box-shadow: inset -1px 0 var(--panel); }
#prompt span:hover { outline: 2px solid var(--accent); }
.l0 { color: var(--gone); }
#legend .l0 { border: 1px solid var(--line); }
.l1 { background: var(--c1); color: var(--on-low); }
.l2 { background: var(--c2); color: var(--on-low); }
.l3 { background: var(--c3); color: var(--on-low); }
.l4 { background: var(--c4); color: var(--on-low); }
.l5 { background: var(--c5); color: var(--on-high); }
.l6 { background: var(--c6); color: var(--on-high); }
.l7 { background: var(--c7); color: var(--on-high); }
#tip { position: fixed; z-index: 3; max-width: 22rem; padding: .5rem .7rem;
  pointer-events: none; background: var(--ink); color: var(--bg); border-radius: 6px;
  font-size: .82rem; box-shadow: 0 3px 14px #0005; overflow-wrap: anywhere;
  white-space: pre-line; }
#tip code { font-weight: 700; white-space: pre-wrap; }
"""

SCRIPT = """
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = id => document.getElementById(id);
const prompt = byId("prompt"), spans = prompt.children, tip = byId("tip");
const strip = byId("strip"), density = byId("density");
const pick = { layer: byId("layer"), head: byId("head") };
const size = data.tokens.length;
const masks = data.kept.map(text => Uint8Array.from(atob(text), c => c.charCodeAt(0)));
const keeps = (row, p) => (masks[row][p >> 3] >> (p & 7)) & 1;
const level = (count, most) => Math.ceil(data.levels * count / most);
const chosen = name => pick[name].value === "" ? null : Number(pick[name].value);
let rows = [], counts = [];

function selectedRows() {
  const layer = chosen("layer"), head = chosen("head"), found = [];
  for (let l = 0; l < data.layers; l++)
    for (let h = 0; h < data.heads; h++)
      if ((layer === null || layer === l) && (head === null || head === h))
        found.push(l * data.heads + h);
  return found;
}

function count() {
  const sums = new Uint32Array(size);
  for (const row of rows)
    for (let p = 0; p < size; p++) sums[p] += keeps(row, p);
  return sums;
}

function element(parent, name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.textContent = text;
  parent.append(made);
  return made;
}

function drawLegend() {
  const legend = byId("legend"), most = rows.length;
  legend.replaceChildren();
  const what = most === 1 ? "this head" : "kept by … of " + most + " heads";
  element(legend, "b", "", what);
  if (most === 1) {
    element(legend, "span", "l0", "dropped");
    element(legend, "span", "l" + data.levels, "kept");
    return;
  }
  element(legend, "span", "l0", "0");
  for (let step = 1; step <= data.levels; step++) {
    const low = Math.floor((step - 1) * most / data.levels) + 1;
    const high = Math.floor(step * most / data.levels);
    if (low > high) continue;
    element(legend, "span", "l" + step, low === high ? low : low + "–" + high);
  }
}

function drawDensity() {
  const bins = Math.min(size, 160), shares = [];
  for (let b = 0; b < bins; b++) {
    const first = Math.floor(b * size / bins), stop = Math.floor((b + 1) * size / bins);
    let sum = 0;
    for (let p = first; p < stop; p++) sum += counts[p];
    shares.push(sum / ((stop - first) * rows.length));
  }
  const top = Math.max(...shares) || 1, width = 1000 / bins;
  density.replaceChildren(...shares.map((share, b) => {
    const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    const height = 78 * share / top;
    bar.setAttribute("x", b * width);
    bar.setAttribute("width", width * 0.9);
    bar.setAttribute("y", 80 - height);
    bar.setAttribute("height", height);
    return bar;
  }));
  byId("density-note").textContent =
    "share kept along the prompt; the highest bar is " + (100 * top).toFixed(0) + "%";
}

function markStrip() {
  const layer = chosen("layer"), head = chosen("head");
  for (const cell of strip.querySelectorAll("[data-layer], [data-head]")) {
    const l = cell.dataset.layer, h = cell.dataset.head;
    const on = (l === undefined || layer === null ? null : Number(l) === layer);
    const oh = (h === undefined || head === null ? null : Number(h) === head);
    cell.classList.toggle("on", on !== false && oh !== false && (on || oh) === true);
  }
}

function shade() {
  rows = selectedRows();
  counts = count();
  for (let p = 0; p < size; p++)
    spans[p].className = "l" + level(counts[p], rows.length);
  drawLegend();
  drawDensity();
  markStrip();
}

function choose(layer, head) {
  pick.layer.value = layer;
  pick.head.value = head;
  shade();
}

function headsThatKeep(p) {
  const layer = chosen("layer");
  if (layer === null) return "";
  const kept = rows.filter(row => keeps(row, p)).map(row => row % data.heads);
  const heads = kept.length ? "head " + kept.join(", ") : "none";
  return "\\nlayer " + layer + ": " + heads;
}

const index = new Map(Array.from(spans, (span, p) => [span, p]));
prompt.addEventListener("pointerover", event => {
  const p = index.get(event.target);
  if (p === undefined) return;
  tip.replaceChildren();
  element(tip, "code", "", JSON.stringify(data.tokens[p]));
  tip.append("\\nposition " + p + " · token id " + data.ids[p] +
    "\\nkept by " + counts[p] + " of " + rows.length + headsThatKeep(p));
  tip.hidden = false;
  const box = tip.getBoundingClientRect(), at = event.target.getClientRects()[0];
  const below = at.bottom + 8 + box.height < innerHeight;
  tip.style.top = (below ? at.bottom + 8 : at.top - box.height - 8) + "px";
  tip.style.left = Math.max(4, Math.min(at.left, innerWidth - box.width - 8)) + "px";
});
prompt.addEventListener("pointerleave", () => { tip.hidden = true; });
addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
strip.addEventListener("click", event => {
  const cell = event.target.closest("[data-layer], [data-head]");
  if (cell) choose(cell.dataset.layer ?? "", cell.dataset.head ?? "");
});
density.addEventListener("click", event => {
  const box = density.getBoundingClientRect();
  const p = Math.floor(size * (event.clientX - box.left) / box.width);
  spans[Math.max(0, Math.min(p, size - 1))].scrollIntoView({ block: "center" });
});
for (const name of ["layer", "head"]) pick[name].addEventListener("change", shade);
byId("reset").addEventListener("click", () => choose("", ""));
shade();
"""
