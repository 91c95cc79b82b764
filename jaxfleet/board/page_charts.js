"use strict";
// Charts of the samples, drawn by uPlot. Lines differ by dashes too, and a table under each chart has its values.

const MOST_LINES = 12, MOST_SCALAR_CHARTS = 24;
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
const COLOURS = 8;
const GROUPS = [
  ["steps", "Steps per second", number], ["received", "Received by servers", perSecond],
  ["sent", "Sent by servers", perSecond], ["busy", "Servers busy with updates", share],
  ["step_time", "Time of a step", seconds], ["joint", "Ranks in joint steps", share],
  ["late", "Time others waited for it", share], ["behind", "Steps behind the first", number],
  ["queued", "Gradients queued", bytes], ["rows", "Rows in tables", number],
  ["table_bytes", "Bytes in tables", bytes], ["memory", "Resident memory", bytes],
];

const charts = new Map(); // by the name of group and chart
let styles = null;
const styled = (name) => (styles ??= getComputedStyle(document.documentElement)).getPropertyValue(name).trim();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  styles = null;
  for (const chart of charts.values()) chart.plot?.redraw();
});

class Chart {
  constructor(title, format, parent) {
    this.format = format;
    this.places = []; // of its series in the model
    this.plot = null;
    this.figure = make("figure", "", { tabindex: "0", role: "group" });
    const caption = make("figcaption");
    this.caption = caption.appendChild(make("h3", title, { title }));
    this.read = caption.appendChild(make("span", "", { class: "soft num" }));
    this.figure.setAttribute("aria-label", `${title}: arrow keys move through time`);
    this.box = make("div", "", { class: "plot", "aria-hidden": "true" });
    this.lines = make("table", "", { class: "lines", "aria-label": title });
    this.figure.append(caption, this.box, this.lines);
    this.figure.addEventListener("keydown", (event) => this.move(event));
    parent.append(this.figure);
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.box);
  }

  size() { return { width: Math.max(this.box.clientWidth, 50), height: this.box.clientHeight || 170 }; }

  add(place) {
    this.places.push(place);
    if (this.places.length > MOST_LINES) {
      this.more ??= this.figure.appendChild(make("p", "", { class: "soft" }));
      this.more.textContent = `and ${this.places.length - MOST_LINES} more, in the tables`;
      return;
    }
    const at = this.places.length - 1, row = make("tr"), cell = make("td");
    cell.append(dash(at));
    row.append(cell, make("td", model.series[place][2]), make("td", "–", { class: "num" }));
    this.lines.append(row);
    this.plot?.destroy();
    this.plot = null;
  }

  // Draws the samples from one on.
  draw(first) {
    const shown = this.places.slice(0, MOST_LINES);
    const data = [model.times.slice(first), ...shown.map((place) => model.columns[place].slice(first))];
    if (this.plot === null) this.plot = new uPlot(this.options(shown), data, this.box);
    else this.plot.setData(data);
    this.show(this.plot.cursor.idx);
  }

  options(shown) {
    const axis = { stroke: () => styled("--soft"), grid: { stroke: () => styled("--line"), width: 1 }, ticks: { show: false } };
    const lines = shown.map((place, at) => ({
      stroke: () => styled(`--c${at % COLOURS}`), dash: DASHES[at % DASHES.length], width: 1.5, points: { show: false },
    }));
    const time = { ...axis, values: (u, ticks) => ticks.map((time) => clock(time).slice(0, u.scales.x.max - u.scales.x.min > 600 ? 5 : 8)) };
    return {
      ...this.size(), series: [{}, ...lines], legend: { show: false }, cursor: { y: false, drag: { x: false, y: false } },
      axes: [time, { ...axis, size: 68, values: (u, ticks) => ticks.map(this.format) }],
      scales: { y: { range: (u, low, high) => low === null ? [0, 1] : low === high ? [Math.min(low, 0), high || 1] : uPlot.rangeNum(low, high, 0.1, true) } },
      hooks: { setCursor: [(u) => this.show(u.cursor.idx)], draw: [marks] },
    };
  }

  // Shows the values of a sample beside the names of the lines; the newest without one.
  show(at) {
    const times = this.plot.data[0], index = at ?? times.length - 1;
    this.read.textContent = at === null || at === undefined ? "" : clock(times[index]);
    [...this.lines.rows].forEach((row, line) => {
      row.cells[2].textContent = this.format(this.plot.data[line + 1][index]);
    });
  }

  move(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined || this.plot === null) return;
    event.preventDefault();
    const times = this.plot.data[0], last = times.length - 1;
    const at = Math.min(last, Math.max(0, (this.plot.cursor.idx ?? last) + by));
    this.plot.setCursor({ left: this.plot.valToPos(times[at], "x"), top: 0 });
  }
}

// Draws a line and a mark for each event in the time of a chart.
function marks(u) {
  const { ctx, bbox } = u, ratio = devicePixelRatio;
  ctx.save();
  ctx.font = `${11 * ratio}px sans-serif`;
  ctx.textAlign = "center";
  for (const [time, kind] of model.events) {
    if (time < u.scales.x.min || time > u.scales.x.max) continue;
    const x = u.valToPos(time, "x", true);
    ctx.strokeStyle = ctx.fillStyle = styled(BAD.has(kind) ? "--bad" : "--soft");
    ctx.setLineDash([2 * ratio, 3 * ratio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top + 12 * ratio);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.fillText((KINDS[kind] ?? ["•"])[0], x, bbox.top + 10 * ratio);
  }
  ctx.restore();
}

function dash(at) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  const wanted = { x1: 0, y1: 4, x2: 34, y2: 4, stroke: `var(--c${at % COLOURS})`, "stroke-width": 2,
    "stroke-dasharray": DASHES[at % DASHES.length].join(" ") || "none" };
  for (const [name, value] of Object.entries(wanted)) line.setAttribute(name, value);
  svg.setAttribute("viewBox", "0 0 34 8");
  svg.setAttribute("aria-hidden", "true");
  svg.append(line);
  return svg;
}

let placed = 0; // series that have a chart
let unplaced = 0; // scalars whose chart is one too many

function placeSeries() {
  for (; placed < model.series.length; placed += 1) {
    const [group, name] = model.series[placed], isScalar = group === "scalar";
    const key = `${group}/${name}`;
    if (!charts.has(key)) {
      const known = GROUPS.find(([one]) => one === group);
      const parent = document.getElementById(isScalar ? "scalar-charts" : "charts");
      if (isScalar && parent.childElementCount >= MOST_SCALAR_CHARTS) { unplaced += 1; continue; }
      charts.set(key, new Chart(known ? known[1] : name, known ? known[2] : number, parent));
    }
    charts.get(key).add(placed);
  }
}

function forgetCharts() {
  for (const chart of charts.values()) { chart.plot?.destroy(); chart.figure.remove(); }
  charts.clear();
  placed = unplaced = 0;
}

function drawCharts(window_s) {
  const first = firstOf(window_s);
  for (const chart of charts.values()) if (!chart.figure.hidden) chart.draw(first);
}
