// The scopes of a program, nested: Flax modules, or the user's functions and lines; and their tree.


// How operators are folded. Modules are what jax names; where it names none, functions and lines.
const FOLDS = {
  modules: (program, line) => {
    const scope = program.scope(line);
    return scope ? scope.split("/").map((name) => ["module", name]) : [functionOf(program, line)];
  },
  functions: (program, line) => {
    const file = program.file(line), row = program.row(line), path = [];
    let called = "";
    for (const caller of program.callers(line)) {
      path.push(["function", functionName(caller.func), called]);
      called = [program.sourceText(caller.file, caller.row), placeOf(program, caller.file, caller.row)].filter(Boolean).join("  ");
    }
    const [kind, name] = functionOf(program, line);
    path.push([kind, name, called]);
    return file === NONE ? path : [...path, ["line", program.place(line), program.sourceText(file, row)]];
  },
};
const USUAL_FOLD = "modules";

function functionOf(program, line) {
  const name = program.func(line), maker = program.maker(line);
  if (name) return ["function", functionName(name)];
  return maker ? ["pass", `by ${maker}`] : ["outside", "no module or function"];
}
// A function by its own name: what it is nested in is around it.
function functionName(name) { return name === "<module>" ? name : `${name.split("<locals>.").pop()}()`; }
function placeOf(program, file, row) { return file === NONE ? "" : `${program.raw.files[file][0]}:${row}`; }
function hasModules(program) { return program.lines.some((_, line) => program.isOp(line) && program.column(line, 5) !== NONE); }
function foldOf(program) { return current.fold in FOLDS ? current.fold : hasModules(program) ? USUAL_FOLD : "functions"; }

class Scope {
  constructor(kind, name, parent, hint = "") {
    Object.assign(this, { kind, name, parent, hint, children: new Map(), lines: [] });
    this.deep = parent ? parent.deep + 1 : 0;
    this.key = parent && parent.key ? `${parent.key}/${name}` : parent ? name : "";
  }
  // A function that is called on several lines is a scope for each of them.
  child([kind, name, hint]) {
    const key = kind === "function" && hint ? `${name} ${hint}` : name;
    if (!this.children.has(key)) this.children.set(key, new Scope(kind, name, this, hint));
    return this.children.get(key);
  }
}

// The tree of scopes of a stage; `above` gives the steps of a line that stand over its scopes.
function scopesOf(program, stage, fold, above = () => []) {
  const root = new Scope("program", program.raw.name);
  for (const line of program.orders[stage]) {
    if (!program.isOp(line)) continue;
    let scope = root;
    scope.lines.push(line);
    for (const step of [...above(line), ...FOLDS[fold](program, line)]) {
      scope = scope.child(step);
      scope.lines.push(line);
    }
  }
  return root;
}

function chooseFold(program) {
  const now = foldOf(program);
  const choose = make("select", { on: { change: () => go({ fold: choose.value, box: "" }) } },
    make("option", { value: "modules", selected: now === "modules" }, "modules"), make("option", { value: "functions", selected: now === "functions" }, "functions and lines"));
  return make("label", { class: "chooser" }, "fold by", choose);
}

// --- the view of the tree -----------------------------------------------------------------------

function modules(program, state) {
  const stage = state.pass, fold = foldOf(program), root = scopesOf(program, stage, fold);
  const opened = new Set([root]);
  for (const child of root.children.values()) if (child.children.size < 60) opened.add(child);
  const list = new List("Modules", (scope, element) => {
    element.classList.add("group");
    const arrow = scope.children.size ? (opened.has(scope) ? "\u25be" : "\u25b8") : " ";
    const name = make("span", { class: "line" }, `${arrow} ${scope.name}`, scope.hint ? make("code", { class: "soft" }, `  ${scope.hint}`) : null);
    name.style.paddingLeft = `${scope.deep * 20}px`;
    element.append(name, ...share(program, scope.lines), make("span", { class: "soft fixed" }, `${count(scope.lines.length, "operator")}${flopsOf(program, scope.lines)}`), make("span", { class: "soft fixed narrow" }, reached(program, scope.lines, stage)));
  }, (scope) => {
    if (scope.children.size) { if (!opened.delete(scope)) opened.add(scope); fill(); }
    else go({ view: "operators", op: scope.lines[0], line: NONE });
  });
  list.quiet = true; // picking a scope folds it
  const fill = () => {
    const rows = [];
    const add = (scope) => { rows.push(scope); if (opened.has(scope)) scope.children.forEach(add); };
    add(root);
    list.set(rows);
  };
  fill();
  return [
    make("div", { class: "tool" }, make("h2", {}, fold === "modules" ? "Modules, from jax's scopes" : "Your functions and lines"), chooseFold(program),
      make("span", { class: "soft" }, "outputs that are Replicated, Sharded, Partial or Varying; operators; values that come in and go out")),
    list.element,
  ];
}
function kindsOf(program, lines) {
  const found = new Map();
  for (const line of lines) {
    const [label] = program.labels(line);
    if (label) { const { kind } = placement(label); found.set(kind, (found.get(kind) || 0) + 1); }
  }
  return found;
}
function mixText(kinds) { return [...kinds].map(([kind, n]) => `${kind[0].toUpperCase()} ${n}`).join(" "); }
function share(program, lines) {
  const found = kindsOf(program, lines);
  const bar = make("span", { class: "share", "aria-hidden": "true" }, [...found].map(([kind, n]) => {
    const part = make("i", { class: kind });
    part.style.flexGrow = n;
    return part;
  }));
  return [bar, make("span", { class: "soft fixed mix", title: [...found].map(([kind, n]) => `${n} ${kind}`).join(", ") }, mixText(found))];
}
function reached(program, lines, stage) {
  const made = new Set(), read = new Set();
  for (const line of lines) {
    for (const number of program.inputs(line, stage)) if (!made.has(number)) read.add(number);
    for (const number of program.outputs(line, stage)) made.add(number);
  }
  const inside = new Set(lines), { reads } = program.usesIn(stage);
  let out = 0;
  for (const number of made) if ((reads.get(program.variables[number][0]) || []).some((line) => !inside.has(line))) out++;
  return `${read.size} in, ${out} out`;
}
