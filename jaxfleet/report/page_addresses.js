// The state of the page, and its address: `#prog=..&view=..&pass=..&op=..`, all by name.


const EMPTY = { prog: 0, view: "overview", pass: NONE, op: NONE, param: NONE, line: NONE, file: NONE, box: "", fold: "" };
let current = { ...EMPTY };

function program() { return PROGRAMS[current.prog]; }

function address() {
  const names = namesOf(program()), shown = { ...current, prog: PROGRAM_NAMES[current.prog] };
  for (const part of ["pass", "op", "param", "file"]) shown[part] = names[part][current[part]];
  const parts = Object.keys(EMPTY).filter((part) => part === "view" || current[part] !== EMPTY[part]);
  return `#${parts.map((part) => `${part}=${encoded(shown[part], current[part])}`).join("&")}`;
}
function encoded(name, number) {
  try {
    return encodeURIComponent(name).replace(/%(2F|3A|40|2C)/g, decodeURIComponent);
  } catch { // half a character
    return String(number);
  }
}
function fromAddress() {
  const given = new URLSearchParams(location.hash.slice(1)), found = { ...EMPTY };
  const numbered = (part, names) => {
    const value = given.get(part), named = names.indexOf(value);
    return named !== NONE ? named : /^\d+$/.test(value) && Number(value) < names.length ? Number(value) : EMPTY[part];
  };
  found.prog = numbered("prog", PROGRAM_NAMES);
  const names = namesOf(PROGRAMS[found.prog]);
  for (const part of ["pass", "op", "param", "file"]) found[part] = numbered(part, names[part]);
  if (/^\d+$/.test(given.get("line")) && found.file !== NONE) found.line = Number(given.get("line"));
  if (found.line === NONE) found.file = NONE;
  if (given.get("fold") in FOLDS) found.fold = given.get("fold");
  found.box = given.get("box") || "";
  const likely = given.has("box") ? "graph" : found.pass !== NONE ? "passes" : found.op !== NONE ? "operators" : found.param !== NONE ? "parameters" : EMPTY.view;
  found.view = given.get("view") in VIEWS ? given.get("view") : likely;
  return found;
}

// The names of what an address may contain, each once: a second `dce` is `dce~2`.
const PROGRAM_NAMES = apart(PROGRAMS.map((each) => each.raw.name));
function namesOf(program) {
  return program.names ??= {
    pass: apart(program.stages.map((stage) => stage.name)), op: lineNames(program),
    param: apart(program.raw.journeys.map((journey) => program.variables[journey[0]][0])), file: program.raw.files.map((file) => file[0]),
  };
}
function apart(names) {
  const times = new Map();
  return names.map((name) => {
    const n = (times.get(name) || 0) + 1;
    times.set(name, n);
    return n > 1 ? `${name}~${n}` : name;
  });
}
// An operator is called after the value that it makes, which the first to make it has for itself;
// the others add their types: `kernel@GRAD:c_allreduce_sum`. A pass behind renames none before it.
function lineNames(program) {
  const taken = new Set(), names = [];
  const numbered = (name) => { let n = 2; while (taken.has(`${name}~${n}`)) n++; return `${name}~${n}`; };
  program.orders.forEach((order, stage) => order.forEach((line) => {
    if (names[line] !== undefined) return;
    const isOp = program.isOp(line), [out] = program.outputs(line, stage), kind = program.lines[line][0];
    const first = out === undefined ? (isOp ? program.type(line, stage) : "heading") : program.variables[out][0];
    const full = kind === DECLARATION ? `${first}:declared` : out === undefined ? first : `${first}:${program.type(line, stage)}`;
    const name = isOp && !taken.has(first) ? first : taken.has(full) ? numbered(full) : full;
    taken.add(name);
    names[line] = name;
  }));
  return names;
}
