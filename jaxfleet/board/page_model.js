"use strict";
// What the page knows of the job: samples of the last hour as columns, events, and tables.

const KEPT_EVENTS = 1000;
const model = { run: "", series: [], columns: [], times: [], events: [], latest: {} };

// Takes an update; returns whether it is the first of another board.
function take(run, update) {
  const isNew = run !== model.run;
  if (isNew) Object.assign(model, { run, series: [], columns: [], times: [], events: [] });
  for (const series of update.series) { // those that are new
    model.series.push(series);
    model.columns.push(new Array(model.times.length).fill(null));
  }
  for (const [time, ...values] of update.rows) {
    model.times.push(time);
    model.columns.forEach((column, at) => column.push(values[at] ?? null));
  }
  forget(update.kept_s);
  model.events.push(...update.events);
  model.events.splice(0, Math.max(0, model.events.length - KEPT_EVENTS));
  model.latest = update;
  return isNew;
}

function forget(kept_s) {
  const last = model.times[model.times.length - 1];
  let old = 0;
  while (model.times[old] < last - kept_s) old += 1;
  if (old === 0) return;
  model.times.splice(0, old);
  for (const column of model.columns) column.splice(0, old);
}

// Returns the first sample of a window of seconds.
function firstOf(window_s) {
  const since = model.times[model.times.length - 1] - window_s;
  let low = 0, high = model.times.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (model.times[middle] < since) low = middle + 1; else high = middle;
  }
  return low;
}

const KINDS = { // of events: a mark that needs no colour, and a word
  died: ["✕", "died"], gone: ["■", "gone"], ended: ["■", "ended"], failed: ["✕", "failed"], returned: ["↺", "returned"], joined: ["+", "joined"],
  left: ["−", "left"], silent: ["?", "silent"], lost: ["✕", "lost"], heard: ["↺", "heard"],
  saved: ["S", "saved"], checkpoint: ["C", "checkpoint"], nonfinite: ["!", "not finite"], finite: ["✓", "finite"],
};
const BAD = new Set(["died", "failed", "lost", "nonfinite", "silent"]);

const number = (value) => {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(3);
  return value.toLocaleString("en", { maximumFractionDigits: size < 1 ? 4 : size < 100 ? 2 : 0 });
};
const share = (value) => value === null || value === undefined ? "–" : `${(100 * value).toFixed(0)} %`;
const bytes = (value) => {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (Math.abs(value) >= 1000 && at < units.length - 1) { value /= 1000; at += 1; }
  return `${value.toFixed(at && value < 100 ? 1 : 0)} ${units[at]}`;
};
const seconds = (value) => value === null || value === undefined ? "–"
  : value < 1 ? `${(1000 * value).toFixed(1)} ms` : `${value.toFixed(2)} s`;
const perSecond = (value) => value === null || value === undefined ? "–" : `${bytes(value)}/s`;
const clock = (time_s) => new Date(1000 * time_s).toLocaleTimeString("en-GB");

// Makes an element; text is always text.
function make(tag, text = "", attributes = {}) {
  const found = document.createElement(tag);
  if (text !== "") found.textContent = text;
  for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
  return found;
}
