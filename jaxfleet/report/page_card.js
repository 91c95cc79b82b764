// The card beside the views: an operator, a parameter's journey, or how to begin.


function drawCard(program) {
  const card = document.getElementById("card"), box = current.view === "graph" && lastGraph.boxes && lastGraph.boxes.byKey.get(current.box);
  const content = current.op !== NONE && program.lines[current.op] ? operatorCard(program, current.op)
    : current.param !== NONE && program.raw.journeys[current.param] ? journeyCard(program, program.raw.journeys[current.param])
      : current.line !== NONE ? lineCard(program) : box ? boxCard(program, box, lastGraph.drawing) : welcome(program);
  const nothing = !box && [current.op, current.param, current.line].every((x) => x === NONE);
  document.querySelector("main").classList.toggle("bare", nothing && ["overview", "graph", "modules", "memory", "traffic", "programs"].includes(current.view));
  card.replaceChildren(...content.flat(2).filter((x) => x !== null && x !== undefined));
  card.scrollTop = 0;
}

function welcome(program) {
  const changes = program.stages.map((stage, number) => (number ? stage.counts.slice(0, 5).reduce((a, b) => a + b) : 0));
  const first = changes.indexOf(Math.max(...changes));
  return [make("h2", {}, "Pick something"), make("p", { class: "soft" }, "An operator shows its type, placement and cost, the line of yours that it comes from, and its text after each pass. A parameter shows its way to the servers and back."), make("h3", {}, "Begin with"),
    make("ul", { class: "way" },
      first > 0 ? make("li", {}, link(`what ${program.stages[first].name} changed`, () => go({ view: "passes", pass: first }))) : null,
      make("li", {}, link("your lines and their operators", () => go({ view: "operators" }))),
      make("li", {}, link("the graph of the step", () => go({ view: "graph" }))),
      program.raw.journeys.length ? make("li", {}, link("the way of a parameter", () => go({ view: "parameters", param: 0 }))) : null,
      program.raw.memory.length ? make("li", {}, link("what takes the memory", () => go({ view: "memory" }))) : null,
      make("li", {}, link("what travels", () => go({ view: "traffic" }))))];
}

function operatorCard(program, line) {
  const stage = program.nearest(line, current.pass), kind = program.lines[line][0];
  const text = make("p", { class: "text" }, codeWhole(program.tokens(line, stage)));
  if (kind !== OP) return [make("h2", {}, kind === DECLARATION ? plain(program.variables[program.version(line, stage)[3][0]][0]) : "heading"), badges(program, line, stage), text, ...values(program, line, stage), historyOf(program, line)];
  return [make("h2", {}, program.type(line, stage)), badges(program, line, stage), text, ...origin(program, line), ...source(program, program.file(line), program.row(line)), ...calledFrom(program, line), ...values(program, line, stage), ...parametersOf(program, line, stage), historyOf(program, line)];
}
function codeWhole(tokens, marked) {
  const found = document.createDocumentFragment();
  const most = 20000; // characters: a heading of 10,000 parameters has more
  let length = 0;
  tokens.forEach(([kind, content], place) => {
    if (length > most) return;
    const rest = most - length;
    length += content.length;
    const piece = make("span", { class: kind }, content.length > rest ? `${content.slice(0, rest)}... and ${content.length - rest} characters more` : content);
    found.append(marked && marked(place) ? make("mark", {}, piece) : piece);
  });
  return found;
}

function badges(program, line, stage) {
  const badge = (content) => (content ? make("span", { class: "badge" }, content) : null);
  const [label] = program.labels(line), flops = program.flops(line), moved = program.moves(line), role = program.role(line, stage);
  return make("div", { class: "badges" }, label ? tag(program.labels(line)) : null, badge(role), badge(program.scope(line)), flops === NONE ? null : badge(flopsText(flops)), moved === NONE ? null : badge(`moves ${bytes(moved)}`));
}

function origin(program, line) {
  const birth = program.birth(line), maker = program.maker(line), end = program.end(line);
  const pass = program.stages.findIndex((stage) => stage.name === maker);
  const at = pass > 0 ? pass : birth;
  const made = maker || birth > 0
    ? make("p", {}, "Put here by the pass ", link(maker || program.stages[birth].name, () => go({ view: "passes", pass: at, op: line }), "Show this pass"), at > 0 ? `, number ${at}.` : ", before these passes.")
    : make("p", {}, "Captured from your step.");
  const gone = end < program.last ? make("p", { class: "soft" }, "Taken away by ", link(program.stages[end + 1].name, () => go({ view: "passes", pass: end + 1, op: line })), ".") : null;
  const labels = program.labels(line), how = program.completed(line);
  const lies = labels.length ? make("p", { class: "soft" }, `${placement(labels[0]).says}${how.length ? `; completed by a reduction (${how.join(", ")}) right behind it` : ""}.`) : null;
  return [make("h3", {}, "Made by"), made, gone, lies];
}

function source(program, file, number) {
  if (file === NONE) return [make("h3", {}, "Your line"), make("p", { class: "soft" }, "No line is recorded for it.")];
  const [path, rows] = program.raw.files[file], known = new Map(rows), quote = make("div", { class: "quote", tabindex: "0", role: "region", "aria-label": `${path}, line ${number}` });
  for (let at = number - 5; at <= number + 5; at++) if (known.has(at)) quote.append(make("div", { class: at === number ? "here" : undefined }, make("span", { class: "no" }, String(at)), known.get(at) || " "));
  return [make("h3", {}, "Your line"), make("p", {}, link(`${path}:${number}`, () => go({ view: "operators", op: current.op, line: current.op === NONE ? number : NONE, file }), "Show it with all of its operators")), quote.childNodes.length ? quote : make("p", { class: "soft" }, "This report does not have the line's text.")];
}

// The calls that lead to the operator's function, the innermost first; a recursion has many.
function calledFrom(program, line) {
  const callers = program.callers(line).reverse();
  if (!callers.length) return [];
  return [make("h3", {}, "Called from"), make("ol", { class: "way" }, callers.map(({ file, row, func }) => make("li", {}, link(placeOf(program, file, row), () => go({ view: "operators", op: NONE, line: row, file }), "Show all operators of this call"), ` in ${functionName(func)} `, make("code", { class: "soft" }, program.sourceText(file, row)))))];
}

function lineCard(program) {
  const stage = current.pass, all = program.orders[stage].filter((line) => program.isOp(line) && near(program, line));
  return [make("h2", {}, `${program.raw.files[current.file][0]}:${current.line}`), ...source(program, current.file, current.line).slice(2), make("h3", {}, count(all.length, "operator")),
    make("table", {}, make("tbody", {}, all.slice(0, 80).map((line) => pickable([make("code", {}, code(program.tokens(line, stage)))], [], () => go({ op: line, line: NONE }, { keep: true }))))), all.length > 80 ? make("p", { class: "soft" }, `and ${all.length - 80} more`) : null];
}

function values(program, line, stage) {
  const uses = program.usesIn(stage);
  const row = (number, way) => {
    const [name, type, kind, size] = program.variables[number];
    const made = way === "in" ? program.producer(name, line, stage) : undefined;
    const label = way === "out" ? program.labels(line) : made !== undefined ? program.labels(made) : [];
    const after = program.places[stage][line];
    const readers = way === "out" ? (uses.reads.get(name) || []).filter((reader) => program.places[stage][reader] > after) : [];
    const linked = way === "in" ? (made === undefined ? [text(kind)] : [link(`from ${program.type(made, stage)}`, () => go({ op: made }, { keep: true }))])
      : readers.length ? [...readers.slice(0, 3).map((reader) => [link(program.type(reader, stage), () => go({ op: reader }, { keep: true })), " "]).flat(), readers.length > 3 ? `and ${readers.length - 3} more` : ""] : [text(kind) === "temp" ? "no reader" : text(kind)];
    return make("div", { class: "value" }, make("div", { class: "text" }, make("span", { class: "n" }, plain(name)), ": ", make("span", { class: "t" }, text(type))), make("div", { class: "badges" }, label.length ? tag(label) : null, size === NONE ? null : make("span", { class: "soft" }, bytes(size)), linked));
  };
  const part = (title, numbers, way) => {
    if (!numbers.length) return [];
    const unique = [...new Set(numbers)], shown = unique.slice(0, 60);
    return [make("h3", {}, title), shown.map((number) => row(number, way)), unique.length > 60 ? make("p", { class: "soft" }, `and ${unique.length - 60} more`) : null];
  };
  if (!program.has(stage, line)) return [];
  return [...part("Writes", program.outputs(line, stage), "out"), ...part("Reads", program.inputs(line, stage), "in")];
}

function parametersOf(program, line, stage) {
  const names = new Set(program.pairs(line, stage).filter((_, n) => n % 2 === 0).map((number) => program.variables[number][0]));
  if (!names.size) return [];
  const found = program.raw.journeys.map((journey, number) => [program.variables[journey[0]][0], number]).filter(([name]) => names.has(name));
  return found.length ? [make("h3", {}, "For the parameter"), make("p", {}, found.slice(0, 12).map(([name, number]) => [link(plain(name), () => go({ view: "parameters", param: number, op: NONE })), " "]).flat())] : [];
}

// Its text after each pass that changed it.
function historyOf(program, line) {
  const versions = program.versions(line), box = make("div", { class: "history" });
  versions.forEach((version, n) => {
    const tokens = program.tokens(line, version[0]);
    const marked = n ? differing(tokens, program.tokens(line, versions[n - 1][0])) : undefined;
    const here = program.version(line, current.pass) === version && program.has(current.pass, line);
    box.append(make("div", { class: here ? "here" : undefined }, link(version[0] ? `after ${program.stages[version[0]].name}` : "as captured", () => go({ pass: version[0], op: line }, { keep: false })), make("div", { class: "text" }, codeWhole(tokens, marked))));
  });
  const end = program.end(line);
  if (end < program.last) box.append(make("div", { class: "gone" }, "after ", link(program.stages[end + 1].name, () => go({ view: "passes", pass: end + 1, op: line })), ": gone"));
  return [make("h3", {}, versions.length > 1 ? "Its text after each pass that changed it" : "Its text, the same after every pass"), box];
}

const STATIONS = { use: "used", gradient: "gradient", reduce: "reduced", slice: "slice", send: "sent", update: "updated", receive: "back", join: "joined" };
function stationText(what, program, line, said) {
  if (line === NONE) return said;
  const stage = program.nearest(line, program.last), type = program.type(line, stage), [out] = program.outputs(line, stage);
  const written = out === undefined ? "" : plain(program.variables[out][0]);
  const does = { use: "reads it in forward", gradient: `makes ${written}`, reduce: `completes the gradient${program.maker(line) ? `, by ${program.maker(line)}` : ""}`, update: `writes ${written}`, receive: "brings it back", join: "joins the slices" }[what];
  return [type, does, said].filter(Boolean).join(" ");
}
function journeyCard(program, [variable, stateBytes, state, steps]) {
  const [name, type, , size] = program.variables[variable];
  const station = ([what, line, said = "", other]) => {
    const there = other === undefined ? program : PROGRAMS[other];
    const open = () => go({ prog: there.number, view: other === undefined ? current.view : "operators", pass: there.nearest(line, there.last), op: line });
    const server = other !== undefined && line === NONE ? [" ", link("its program", () => go({ prog: other, view: "overview", pass: there.last, op: NONE }))] : [];
    return make("li", { class: what }, make("b", {}, STATIONS[what] || what), make("span", { class: "rest" }, line === NONE ? said : link(stationText(what, there, line, said), open, there.place(line)), server, line === NONE ? null : make("span", { class: "soft" }, ` ${there.place(line)}`)));
  };
  const updates = steps.filter((step) => step[0] === "update"), first = updates.slice(0, -4);
  const shown = steps.filter((step) => !first.includes(step));
  const at = shown.findIndex((step) => step[0] === "update");
  const items = shown.map(station);
  if (first.length) items.splice(at, 0, make("li", {}, make("b", {}, STATIONS.update), make("span", { class: "rest" }, link(`${count(first.length, "operator")} of the optimizer before these`, () => go({ view: "operators", pass: 0, op: first[0][1] })))));
  return [make("h2", {}, plain(name)), make("div", { class: "badges" }, make("span", { class: "badge" }, make("span", { class: "t" }, text(type))), size === NONE ? null : make("span", { class: "badge" }, bytes(size)), make("span", { class: "badge" }, `${bytes(stateBytes)} of optimizer state`)),
    make("h3", {}, "Its way through a step"), make("ol", { class: "way" }, items),
    state.length ? [make("h3", {}, "Its optimizer state"), make("p", { class: "text" }, state.join("\n"))] : null];
}
