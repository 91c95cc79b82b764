"use strict";
// The page: takes updates from the stream, and redraws what they change.

let window_s = 900, isPaused = false, isLost = false;
const byId = (id) => document.getElementById(id);

const process = () => (model.latest.kind === "rank" ? "rank" : "server");

function status() {
  const { servers = [], every_s } = model.latest, here = servers.filter((one) => one.step !== undefined);
  const last = model.times[model.times.length - 1];
  let text = "no answer yet";
  if (isLost) text = "The board itself does not answer: was it ended? Trying again.";
  else if (isPaused) text = `paused at ${clock(last)}`;
  else if (servers.length && !here.length) text = `No ${process()} answers: the job has ended, or is not there yet.`;
  else if (servers.length) text = `${here.length} of ${servers.length} ${process()}s answer, every ${every_s} s; ${clock(last)}`;
  byId("status").textContent = text;
  byId("status").className = isLost || here.length < servers.length ? "bad" : "";
}

function filterScalars() {
  const wanted = byId("scalar-filter").value.toLowerCase();
  let all = 0, shown = 0;
  for (const [key, chart] of charts) {
    if (!key.startsWith("scalar/")) continue;
    chart.figure.hidden = !key.slice(7).toLowerCase().includes(wanted);
    all += 1;
    shown += chart.figure.hidden ? 0 : 1;
  }
  const hidden = unplaced > 0 ? `; ${unplaced} lines of more metrics are left out` : "";
  byId("scalar-count").textContent = all === 0 ? "No trainer has reported a scalar metric." : `${shown} of ${all} metrics${hidden}`;
}

function draw() {
  if (isPaused || document.hidden || model.times.length === 0) return;
  placeSeries();
  filterScalars();
  drawCharts(window_s);
  drawStrip(window_s);
  fillServers();
  fillTrainers();
  fillTables();
  const left = model.latest.left_out;
  byId("note").textContent = left > 0 ? `${left} more lines are left out: the board keeps ${model.series.length}.` : "";
}

function taken(event) {
  const update = JSON.parse(event.data), run = event.lastEventId.split("-")[0];
  isLost = false;
  if (take(run, update)) {
    forgetCharts();
    byId("events").replaceChildren();
  }
  showEvents(update.events);
  if (update.events.length) byId("announced").textContent = update.events[update.events.length - 1][2];
  if (!update.more) draw();
  status();
}

function pause() {
  isPaused = !isPaused;
  byId("pause").setAttribute("aria-pressed", String(isPaused));
  draw();
  status();
}

function show(seconds) {
  window_s = seconds;
  document.querySelector(`input[name=window][value="${seconds}"]`).checked = true;
  draw();
}

byId("pause").addEventListener("click", pause);
byId("scalar-filter").addEventListener("input", draw);
byId("windows").addEventListener("change", (event) => show(Number(event.target.value)));
document.addEventListener("visibilitychange", draw);
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.type === "search") return;
  const seconds = { 1: 300, 2: 900, 3: 3600 }[event.key];
  if (seconds) show(seconds);
  else if (event.key === "p") pause();
});

const stream = new EventSource("stream");
stream.addEventListener("message", taken);
stream.addEventListener("error", () => { isLost = true; status(); });
status();
