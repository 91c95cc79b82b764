// The view of operators: your source, and the operators that come from each line.

// --- operators: source, list, card ------------------------------------------------------------

const GROUPS = {
  module: (program, line) => program.scope(line) || "outside of modules",
  function: (program, line) => program.func(line) || "no function",
  role: (program, line, stage) => program.role(line, stage),
  pass: (program, line) => program.maker(line) || "the user's step",
  none: null,
};
const FOLDED_FROM = 1500; // operators from which groups start closed
const remembered = { group: "module", stage: NONE, file: NONE };

function operators(program, state) {
  const stage = state.pass, all = program.orders[stage].filter((line) => program.isOp(line));
  const closed = new Set();
  let groups = [];
  const regroup = () => {
    const key = GROUPS[remembered.group];
    groups = [];
    closed.clear();
    if (!key) return;
    for (const line of all) {
      const name = key(program, line, stage);
      const group = groups[groups.length - 1];
      if (group && group.name === name) group.lines.push(line);
      else groups.push({ name, lines: [line], number: groups.length });
    }
    if (all.length >= FOLDED_FROM) groups.forEach((group) => closed.add(group.number));
  };
  const list = new List("Operators", (row, element) => {
    if (row.group) {
      element.classList.add("group");
      element.append(make("span", {}, `${closed.has(row.group.number) ? "\u25b8" : "\u25be"} ${row.group.name}`), make("span", { class: "soft" }, `${count(row.group.lines.length, "operator")}${flopsOf(program, row.group.lines)}`));
      return;
    }
    const { line } = row;
    if (line === current.op) element.classList.add("on");
    else if (near(program, line)) element.classList.add("near");
    element.append(tag(program.labels(line)), make("span", { class: "line" }, code(program.tokens(line, stage))));
    const cost = program.moves(line) !== NONE ? bytes(program.moves(line)) : program.flops(line) !== NONE ? flopsText(program.flops(line)) : "";
    element.append(make("span", { class: "aside" }, cost));
  }, (row) => {
    if (!row.group) return go({ op: row.line, line: NONE }, { keep: true });
    if (!closed.delete(row.group.number)) closed.add(row.group.number);
    fill();
  });
  const fill = () => list.set(groups.length ? groups.flatMap((group) => [{ group }, ...(closed.has(group.number) ? [] : group.lines.map((line) => ({ line })))]) : all.map((line) => ({ line })));
  const open = (line) => {
    const group = groups.find((each) => closed.has(each.number) && each.lines.includes(line));
    if (group) { closed.delete(group.number); fill(); }
  };
  const source = sourcePane(program, all);
  const choose = make("select", { on: { change: () => { remembered.group = choose.value; regroup(); fill(); follow(); } } },
    Object.keys(GROUPS).map((name) => make("option", { value: name, selected: name === remembered.group }, name)));
  const everything = (shut) => () => { closed.clear(); if (shut) groups.forEach((group) => closed.add(group.number)); fill(); };
  regroup();
  fill();
  follow = () => {
    const line = current.op !== NONE && program.has(stage, current.op) ? current.op : all.find((each) => near(program, each));
    if (line !== undefined) open(line);
    list.at(line === undefined || current.op === NONE ? NONE : list.rows.findIndex((row) => row.line === line));
    if (line !== undefined) list.show(list.rows.findIndex((row) => row.line === line));
    source.follow();
  };
  return [
    make("div", { class: "tool" },
      make("h2", {}, `${count(all.length, "operator")} after ${stage}. ${program.stages[stage].name}`),
      make("label", { class: "chooser" }, "group by", choose),
      make("button", { type: "button", on: { click: everything(true) } }, "Fold all"),
      make("button", { type: "button", on: { click: everything(false) } }, "Unfold all")),
    make("div", { class: "panes" }, source.element, make("div", { class: "pane" }, list.element)),
  ];
}
function flopsOf(program, lines) {
  const sum = lines.reduce((total, line) => total + Math.max(0, program.flops(line)), 0);
  return sum ? `, ${flopsText(sum)}` : "";
}
function near(program, line) {
  if (current.line !== NONE) return program.isOp(line) && program.comesFrom(line, current.file, current.line);
  if (current.op === NONE || !program.isOp(current.op) || program.file(current.op) === NONE) return false;
  return program.row(line) === program.row(current.op) && program.file(line) === program.file(current.op);
}

// The user's lines, with the number of operators that come from each, or from what it calls.
function sourcePane(program, lines) {
  const counts = program.raw.files.map(() => new Map());
  for (const line of lines) {
    const places = new Map();
    for (const { file, row } of [...program.callers(line), { file: program.file(line), row: program.row(line) }]) if (file !== NONE) places.set(`${file}:${row}`, [file, row]);
    for (const [file, row] of places.values()) counts[file].set(row, (counts[file].get(row) || 0) + 1);
  }
  const total = (file) => lines.filter((line) => program.file(line) === file).length;
  const files = counts.map((_, file) => file).sort((a, b) => total(b) - total(a));
  let shown = files.length ? files[0] : NONE;
  const list = new List("Your source", (row, element) => {
    if (row.gap) { element.classList.add("fold", "blank"); element.append("\u22ee"); return; }
    const here = counts[shown].get(row.number) || 0;
    if (!here) element.classList.add("quiet");
    const chosen = current.line !== NONE ? current.line === row.number && current.file === shown
      : current.op !== NONE && program.file(current.op) === shown && program.row(current.op) === row.number;
    if (chosen) element.classList.add("on");
    element.append(make("span", { class: "no" }, String(row.number)), make("span", { class: "line" }, row.text), make("span", { class: "uses", title: count(here, "operator") }, here ? `\u00d7${here}` : ""));
  }, (row) => {
    if (!row.gap && counts[shown].get(row.number)) go({ op: NONE, line: row.number, file: shown }, { keep: true });
  });
  const choose = make("select", { "aria-label": "File", on: { change: () => { shown = Number(choose.value); fill(); } } },
    files.map((file) => make("option", { value: file }, `${program.raw.files[file][0]} (${total(file)})`)));
  const fill = () => {
    if (shown === NONE) return;
    const known = new Map(program.raw.files[shown][1]);
    const numbers = [...new Set([...known.keys(), ...counts[shown].keys()])].sort((a, b) => a - b);
    const rows = [];
    numbers.forEach((number, at) => {
      if (at && numbers[at - 1] !== number - 1) rows.push({ gap: true });
      rows.push({ number, text: known.has(number) ? known.get(number) : "(this report does not have the line's text)" });
    });
    choose.value = String(shown);
    list.set(rows);
  };
  fill();
  return {
    element: make("div", { class: "pane" }, files.length
      ? [make("div", { class: "heads chooser" }, choose), list.element]
      : make("p", { class: "empty" }, "No operator here names a line of a program.")),
    follow() {
      const file = current.line !== NONE ? current.file : current.op !== NONE ? program.file(current.op) : NONE;
      if (file !== NONE && file !== shown) { shown = file; fill(); }
      const number = current.line !== NONE ? current.line : current.op !== NONE ? program.row(current.op) : NONE;
      list.at(list.rows.findIndex((row) => row.number === number));
    },
  };
}
