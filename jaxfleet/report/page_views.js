// The views of a program; here those of the whole: overview, passes, programs.


const VIEWS = {
  overview: ["Overview", overview], passes: ["Passes", passes], operators: ["Operators", operators],
  graph: ["Graph", graph], modules: ["Modules", modules], parameters: ["Parameters", parameters], memory: ["Memory", memory],
  traffic: ["Traffic", traffic], programs: ["Programs", programs],
};

const CONCERNS = /captured for each batch size|computes the whole batch|does all of the work|gathers at|whole on every device|not divided/;
function decisions(lines) {
  return make("ul", { class: "decisions" }, lines.map((line) => make("li", {
    class: CONCERNS.test(line) ? "warn" : /^ {4}/.test(line) ? "deep" : undefined,
  }, line.replace(/^ {2}/, ""))));
}

function overview(program) {
  const { raw } = program, last = program.stages[program.last];
  const spent = program.stages.reduce((sum, stage) => sum + Math.max(0, stage.s), 0);
  const made = program.stages.map((stage) => stage.counts[COUNTS.added]).reduce((a, b) => a + b, 0) - program.stages[0].counts[COUNTS.all];
  const moving = program.orders[program.last].filter((line) => program.moves(line) !== NONE);
  const tile = (value, label) => make("div", { class: "tile" }, make("b", {}, value), make("span", {}, label));
  const curve = raw.memory[raw.memory.length - 1];
  const tiles = [
    tile(`${program.stages[0].counts[COUNTS.all]} \u2192 ${last.counts[COUNTS.all]}`, "operators"),
    tile(String(raw.journeys.length), "parameters"),
    tile(String(Math.max(0, made)), "operators made by passes"),
    tile(bytes(moving.reduce((sum, line) => sum + program.moves(line), 0)), `sent or reduced by ${moving.length} operators`),
    curve && tile(bytes(Math.max(...curve.bytes)), "memory at the peak, beside state and batch"),
    raw.measured && raw.measured.step_s !== null && tile(seconds(raw.measured.step_s), `${raw.measured.of ? "a step's compiled blocks" : "a step"}, measured; ${seconds(predicted(raw))} predicted`),
    spent > 0 && tile(seconds(spent), "in passes"),
  ].filter(Boolean);
  const sizes = Object.entries(raw.sizes);
  const facts = sheet("Facts", table(["", ""], [
    ...raw.facts,
    ...(sizes.length ? [["bytes and flops with", sizes.map(([name, size]) => `${name} = ${size}`).join(", ") + (raw.assumed ? " (assumed: the text does not say)" : " rows of one device")]] : []),
  ]));
  const said = raw.decisions.length
    ? decisions(raw.decisions)
    : make("p", { class: "soft" }, "This target records no decisions: they are those of a step, in a script or a process.");
  const slowest = Math.max(...program.stages.map((stage) => stage.s), 1e-9);
  const ran = table(["pass", "added", "removed", "changed", "moved", "time", ""], program.stages.map((stage, number) => pickable([
    link(stage.name, () => go({ view: "passes", pass: number })),
    ...[0, 1, 2, 4].map((n) => (number ? stage.counts[n] || "" : "")), seconds(stage.s), stage.s > 0 ? meter(stage.s / slowest) : "",
  ], [1, 2, 3, 4, 5], () => go({ view: "passes", pass: number }))), [1, 2, 3, 4, 5]);
  const notes = raw.notes.length ? [sheet("Notes of the capture", decisions(raw.notes))] : [];
  return make("div", { class: "page" }, make("div", { class: "tiles" }, tiles), make("div", { class: "columns" },
    sheet("Decisions, and why", said), make("div", { class: "lined" }, sheet("Passes", ran), ...[times(program)].filter(Boolean).map(spaced), ...notes.map(spaced), spaced(facts))));
}
function spaced(element) { element.style.marginTop = "14px"; return element; }

// --- passes: before and after, side by side ---------------------------------------------------

const AROUND = 2; // unchanged lines shown around a change
function pairsOf(program, stage) {
  const after = program.orders[stage];
  if (!stage) return after.map((line) => ({ left: line, right: line, how: "same" }));
  const before = program.orders[stage - 1], moved = program.moved[stage], found = [];
  let i = 0, j = 0;
  const leaves = (line) => !program.has(stage, line) || moved.has(line);
  const comes = (line) => !program.has(stage - 1, line) || moved.has(line);
  while (i < before.length || j < after.length) {
    if (i < before.length && leaves(before[i])) {
      const line = before[i++];
      found.push({ left: line, right: NONE, how: moved.has(line) ? "moved" : "removed" });
    } else if (j < after.length && comes(after[j])) {
      const line = after[j++];
      found.push({ left: NONE, right: line, how: moved.has(line) ? "moved" : "added" });
    } else {
      const line = after[j++];
      i++;
      found.push({ left: line, right: line, how: program.version(line, stage)[0] === stage ? "changed" : "same" });
    }
  }
  return beside(found);
}
// Puts removed and added lines of one place on the same rows.
function beside(rows) {
  const found = [];
  for (let at = 0; at < rows.length;) {
    if (rows[at].left !== NONE && rows[at].right !== NONE) { found.push(rows[at++]); continue; }
    const left = [], right = [];
    for (; at < rows.length && (rows[at].left === NONE || rows[at].right === NONE); at++) (rows[at].left === NONE ? right : left).push(rows[at]);
    for (let n = 0; n < Math.max(left.length, right.length); n++) {
      found.push({ left: n < left.length ? left[n].left : NONE, right: n < right.length ? right[n].right : NONE, how: "replaced", lefts: left[n], rights: right[n] });
    }
  }
  return found;
}
function folded(rows, opened, chosen) {
  const shown = new Uint8Array(rows.length);
  rows.forEach((row, at) => {
    if (row.how === "same" && !(chosen !== NONE && row.right === chosen)) return;
    shown.fill(1, Math.max(0, at - AROUND), at + AROUND + 1);
  });
  const found = [];
  for (let at = 0; at < rows.length;) {
    if (shown[at]) { found.push(rows[at++]); continue; }
    const from = at;
    while (at < rows.length && !shown[at]) at++;
    if (opened.has(from) || at - from < 3) found.push(...rows.slice(from, at));
    else found.push({ fold: at - from, from });
  }
  return found;
}
const MARKS = { added: "+", removed: "\u2212", changed: "~", moved: "\u203a", same: "" };

function passes(program, state) {
  const stage = state.pass, it = program.stages[stage], rows = pairsOf(program, stage);
  const opened = new Set();
  let whole = stage === 0;
  const cell = (line, how, at, other) => {
    if (line === NONE) return make("span", { class: "cell none" });
    const tokens = program.tokens(line, at);
    const marked = how === "changed" && other !== NONE ? differing(tokens, program.tokens(line, other)) : undefined;
    return make("span", { class: `cell ${how}` }, make("span", { class: "mark" }, MARKS[how]), marked ? briefly(tokens, marked) : code(tokens));
  };
  const list = new List(`Program before and after ${it.name}`, (row, element) => {
    if (row.fold) {
      element.classList.add("fold");
      element.append(`\u00b7\u00b7\u00b7 ${count(row.fold, "unchanged line")}: show`);
      return;
    }
    if (at(row) === current.op) element.classList.add("on");
    if (stage) element.append(cell(row.left, row.lefts ? row.lefts.how : row.how === "replaced" ? "removed" : row.how, stage - 1, row.left === row.right ? stage : NONE));
    element.append(cell(row.right, row.rights ? row.rights.how : row.how === "replaced" ? "added" : row.how, stage, row.left === row.right && stage ? stage - 1 : NONE));
  }, (row) => {
    if (row.fold) { opened.add(row.from); fill(); return; }
    go({ op: at(row) }, { keep: true });
  });
  const at = (row) => (row.right !== undefined && row.right !== NONE ? row.right : row.left);
  const fill = () => list.set(whole ? rows : folded(rows, opened, current.op));
  const toggle = make("button", { type: "button", "aria-pressed": "false", on: { click: () => {
    whole = !whole;
    toggle.setAttribute("aria-pressed", String(whole));
    fill();
  } } }, "All lines");
  fill();
  follow = () => {
    if (current.op !== NONE && !list.rows.some((row) => at(row) === current.op)) fill();
    list.at(list.rows.findIndex((row) => !row.fold && at(row) === current.op));
  };
  const facts = [it.options && it.options !== it.name ? it.options : "", seconds(it.s), it.verify_s > 0 ? `verified in ${seconds(it.verify_s)}` : ""].filter(Boolean).join(", ");
  const nothing = stage && rows.every((row) => row.how === "same");
  return [
    make("div", { class: "tool" },
      make("h2", {}, `${stage}. ${it.name} `, make("span", { class: "soft plain" }, facts)), did(program, stage),
      stage ? toggle : null,
      make("span", { class: "turn" }, make("button", { type: "button", on: { click: () => go({ pass: Math.max(0, stage - 1) }) }, title: "Previous pass ([)" }, "\u2190"),
        make("button", { type: "button", on: { click: () => go({ pass: Math.min(program.last, stage + 1) }) }, title: "Next pass (])" }, "\u2192"))),
    nothing ? make("p", { class: "empty" }, "This pass changed nothing.") : null,
    make("div", { class: "heads" }, stage ? make("span", {}, `before: ${program.stages[stage - 1].name}`) : null, make("span", {}, stage ? `after ${it.name}` : "the program before all passes")),
    list.element,
  ];
}
// Whether a pass changed the program's attributes or declarations.
function redeclares(program, number) {
  return number > 0 && program.orders[number].some((line) => !program.isOp(line) && program.versions(line).some((version) => version[0] === number && version !== program.versions(line)[0]));
}
function did(program, number) {
  const stage = program.stages[number];
  const parts = number === 0 ? [make("span", {}, count(stage.counts[COUNTS.all], "operator"))] : [
    ["plus", "+", COUNTS.added], ["minus", "\u2212", COUNTS.removed], ["tilde", "~", COUNTS.changed], ["tilde", ":", COUNTS.retyped], ["arrow", "\u203a", COUNTS.moved],
  ].filter((part) => stage.counts[part[2]]).map(([style, mark, at]) => make("span", { class: style }, `${mark}${stage.counts[at]}`));
  if (redeclares(program, number)) parts.push(make("span", { class: "tilde" }, "attributes"));
  return make("span", { class: "did" }, parts.length ? parts : make("span", {}, "unchanged"));
}

// --- programs: the captures of a script -----------------------------------------------------------

function programs() {
  const again = new Map();
  for (const { raw } of PROGRAMS) again.set(raw.name, (again.get(raw.name) || 0) + 1);
  return make("div", { class: "page" }, PROGRAMS.map((program) => {
    const { raw } = program;
    const captured = raw.facts.find((fact) => fact[0] === "captured for");
    const said = [
      captured && `captured for ${captured[1]}`,
      again.get(raw.name) > 1 && `one of ${again.get(raw.name)} compilations of ${raw.name}: a new batch size, or a memory budget, or another process compiles again`,
      !raw.notes.length && raw.decisions.length && "nothing fell back",
    ].filter(Boolean);
    return make("section", { class: "sheet" }, make("h2", {}, link(raw.name, () => go({ prog: program.number, view: "overview", pass: program.last, op: NONE, param: NONE })), " ", make("span", { class: "soft" }, [raw.role, raw.label !== raw.name ? raw.label : ""].filter(Boolean).join(", "))),
      make("p", { class: "soft" }, `${program.stages[0].counts[COUNTS.all]} \u2192 ${program.stages[program.last].counts[COUNTS.all]} operators: ${program.stages.slice(1).map((stage) => stage.name).join(", ") || "no passes"}`),
      decisions([...raw.notes, ...raw.decisions.filter((line) => CONCERNS.test(line) && !raw.notes.includes(line.trim())), ...said]));
  }));
}
