"use strict";
// Tables of processes, tables and events.

// Fills a table. Heads are [text, is a number]; a cell is text, or [text, class].
function fill(id, caption, heads, rows) {
  const table = document.getElementById(id), head = make("tr");
  for (const [text, isNumber] of heads) head.append(make("th", text, { scope: "col", class: isNumber ? "num" : "" }));
  const body = make("tbody"), top = make("thead");
  top.append(head);
  for (const row of rows) {
    const line = make("tr");
    row.forEach((cell, at) => {
      const [text, kind] = Array.isArray(cell) ? cell : [cell, ""];
      const shown = make("td", String(text), { class: `${(heads[at] ?? [])[1] ? "num " : ""}${kind}` });
      if (String(text).length > 40) shown.title = text;
      line.append(shown);
    });
    body.append(line);
  }
  table.replaceChildren(make("caption", caption), top, body);
}

const more = (name, shown) => {
  const left = model.latest.counts[name] - shown;
  return left > 0 ? `, and ${left.toLocaleString("en")} more` : "";
};

function fillServers() {
  if (model.latest.kind === "rank") { fillRanks(); return; }
  const rows = model.latest.servers.map((one) => {
    const name = `${one.number} ${one.address}`;
    if (one.step === undefined) return [name, ["✕ " + (one.error || "not looked at yet"), "bad"]];
    return [name, "answers", one.step.toLocaleString("en"), number(one.steps), perSecond(one.received), perSecond(one.sent),
      share(one.busy), bytes(one.queued), number(one.rows), bytes(one.memory || null), one.checkpoint ?? "–"];
  });
  const heads = [["Server"], ["State"], ["Step", 1], ["Steps/s", 1], ["In", 1], ["Out", 1], ["Busy", 1], ["Queued", 1],
    ["Rows", 1], ["Memory", 1], ["Checkpoint", 1]];
  fill("servers", `Servers${more("servers", rows.length)}`, heads, rows);
}

function fillRanks() {
  const rows = model.latest.servers.map((one) => {
    const name = `${one.number} ${one.address}`;
    if (one.step === undefined) return [name, ["✕ " + (one.error || "not looked at yet"), "bad"]];
    return [name, "answers", one.step.toLocaleString("en"), number(one.steps), seconds(one.step_time), share(one.joint),
      bytes(one.memory || null), String(one.saves)];
  });
  const heads = [["Rank"], ["State"], ["Step", 1], ["Steps/s", 1], ["Step time", 1], ["In joint steps", 1], ["Memory", 1],
    ["Saves", 1]];
  fill("servers", `Ranks${more("servers", rows.length)}`, heads, rows);
}

function fillTrainers() {
  if (model.latest.kind === "rank") {
    const rows = model.latest.trainers.map((one) => [String(one.number), share(one.late), one.doing]);
    fill("trainers", "Lateness of ranks", [["Rank"], ["Others waited", 1], ["Doing"]], rows);
    return;
  }
  const rows = model.latest.trainers.map((one) => [
    String(one.number), one.step.toLocaleString("en"), String(one.behind), share(one.late),
    one.left ? "said bye" : `${one.silent_s.toFixed(1)} s ago`, bytes(one.memory || null), one.doing]);
  const heads = [["Trainer"], ["Step", 1], ["Behind", 1], ["Others waited", 1], ["Last heard", 1], ["Memory", 1], ["Doing"]];
  fill("trainers", `Trainers${more("trainers", rows.length)}`, heads, rows);
}

function fillTables() {
  const rows = model.latest.tables.map(([name, count, size]) => [name, number(count), bytes(size)]);
  fill("tables", "Tables", [["Table"], ["Rows", 1], ["Bytes", 1]], rows);
  const all = model.latest.counts.tables;
  document.getElementById("table-count").textContent = all === 0 ? "This job has no tables."
    : rows.length < all ? `The largest ${rows.length} of ${all.toLocaleString("en")} tables, over all servers.`
    : "Over all servers, the largest first.";
}

function showEvents(fresh) {
  const list = document.getElementById("events");
  for (const [time, kind, text] of fresh) {
    const [mark, word] = KINDS[kind] ?? ["•", kind], line = make("li");
    line.append(make("span", clock(time), { class: "soft" }));
    line.append(make("span", `${mark} ${word}`, { class: BAD.has(kind) ? "kind bad" : "kind" }));
    line.append(make("span", text));
    list.prepend(line);
  }
  while (list.childElementCount > KEPT_EVENTS) list.lastElementChild.remove();
  if (model.events.length === 0) list.replaceChildren(make("li", "none so far", { class: "soft" }));
  else list.querySelector("li.soft")?.remove();
}

// Draws the events of a window on a line of time.
function drawStrip(window_s) {
  const last = model.times[model.times.length - 1], strip = document.getElementById("strip");
  const begin = Math.max(last - window_s, model.times[0]), length = Math.max(last - begin, 1);
  const shown = model.events.filter(([time]) => time >= begin).slice(-200);
  strip.replaceChildren(...shown.map(([time, kind]) => {
    const mark = make("span", (KINDS[kind] ?? ["•"])[0], { class: BAD.has(kind) ? "bad" : "" });
    mark.style.left = `${Math.min(98, Math.max(2, (100 * (time - begin)) / length))}%`;
    return mark;
  }));
}
