// Views of parameters, memory and traffic.

// --- parameters ---------------------------------------------------------------------------------

function parameters(program) {
  const rows = program.raw.journeys.map((journey, number) => ({ journey, number }));
  if (!rows.length) return make("p", { class: "empty" }, "This program trains no parameters.");
  const list = new List("Parameters", ({ journey, number }, element) => {
    const [name, type, , size] = program.variables[journey[0]];
    const held = [...new Set(journey[3].filter((step) => step[0] === "slice").map((step) => step[2].split("held by ").pop()))];
    if (number === current.param) element.classList.add("on");
    element.append(make("span", { class: "line" }, make("span", { class: "mark" }, ""), make("span", { class: "n" }, plain(name)), make("span", { class: "p" }, ": "), make("span", { class: "t" }, text(type))),
      make("span", { class: "aside" }, held.join(", ")), make("span", { class: "aside" }, `${size === NONE ? "" : bytes(size)} + ${bytes(journey[1])} state`));
  }, ({ number }) => go({ param: number, op: NONE }, { keep: true }));
  list.set(rows);
  follow = () => list.at(rows.findIndex((row) => row.number === current.param));
  return [make("div", { class: "tool" }, make("h2", {}, count(rows.length, "parameter")), make("span", { class: "soft" }, "pick one: its gradient, slices, servers, update and way back")), list.element];
}

// --- memory -------------------------------------------------------------------------------------

function memory(program) {
  const curves = program.raw.memory;
  if (!curves.length) return make("p", { class: "empty" }, "The memory of this program is not known: its values take none, or a size is unknown.");
  const curve = curves[curves.length - 1], peak = curve.bytes.indexOf(Math.max(...curve.bytes));
  const top = Math.max(...curves.map((each) => Math.max(...each.bytes)), program.raw.budget) * 1.05;
  const width = 1000, height = 240, x = (n, of) => (n / Math.max(1, of.bytes.length)) * width, y = (size) => height - (size / top) * height;
  const path = (of) => of.bytes.map((size, n) => `${n ? "L" : "M"}${x(n, of).toFixed(1)} ${y(size).toFixed(1)}H${x(n + 1, of).toFixed(1)}`).join("");
  const line = draw("line", { class: "at", y1: 0, y2: height });
  const limit = program.raw.budget === NONE ? [] : [draw("line", { class: "limit", x1: 0, x2: width, y1: y(program.raw.budget), y2: y(program.raw.budget) })];
  const chart = draw("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": `memory over ${curve.bytes.length} operators; the peak is ${bytes(curve.bytes[peak])}` },
    draw("path", { class: "area", d: `${path(curve)}V${height}H0Z` }), ...curves.slice(0, -1).map((each) => draw("path", { class: "other", d: path(each) })), ...limit, line);
  const found = make("div");
  const at = (place) => {
    line.setAttribute("x1", x(place + 0.5, curve));
    line.setAttribute("x2", x(place + 0.5, curve));
    const alive = curve.values.filter((value) => value[2] <= place && place < value[3]).sort((a, b) => b[1] - a[1]);
    const op = curve.ops[place], stage = program.nearest(op, program.last);
    const where = place === peak ? "At the peak" : "At this operator";
    found.replaceChildren(
      make("p", {}, `${where}, ${bytes(curve.bytes[place])} while `, link(program.type(op, stage), () => go({ op }, { keep: true })), ` runs, operator ${place + 1} of ${curve.bytes.length} `, make("span", { class: "soft" }, program.place(op))),
      table(["alive then", "type", "bytes", "", "made by"], alive.slice(0, 40).map((value) => {
        const [name, type] = program.variables[value[0]], maker = curve.ops[Math.max(0, value[4])];
        return pickable([plain(name), make("code", { class: "t" }, text(type)), bytes(value[1]), meter(value[1] / alive[0][1]), link(`${program.type(maker, program.nearest(maker, program.last))} ${program.place(maker)}`, () => go({ op: maker }, { keep: true }))], [2], () => go({ op: maker }, { keep: true }));
      }), [2]),
      alive.length > 40 ? make("p", { class: "soft" }, `and ${alive.length - 40} smaller values`) : "");
  };
  const box = make("div", { tabindex: "0", role: "slider", "aria-label": "Operator in the chart", "aria-valuemin": "0", "aria-valuemax": String(curve.bytes.length - 1), "aria-valuenow": String(peak), on: {
    click: (event) => { const edge = chart.getBoundingClientRect(); move(Math.floor(((event.clientX - edge.left) / edge.width) * curve.bytes.length)); },
    keydown: (event) => { const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key]; if (by) { move(chosen + by); event.preventDefault(); } },
  } }, chart);
  let chosen = peak;
  const move = (place) => { chosen = Math.max(0, Math.min(curve.bytes.length - 1, place)); box.setAttribute("aria-valuenow", String(chosen)); at(chosen); };
  at(peak);
  follow = () => { const place = curve.ops.indexOf(current.op); if (place !== NONE && document.activeElement !== box) move(place); };
  return make("div", { class: "page" }, sheet(`Memory over the operators of the step: ${bytes(curve.bytes[peak])} at the peak`, box,
    make("div", { class: "legend" }, make("span", {}, `\u2501 ${curve.title}`), ...curves.slice(0, -1).map((each) => make("span", {}, `\u2505 ${each.title}: ${bytes(Math.max(...each.bytes))} at the peak`)),
      ...curves.map((each) => make("span", {}, each.xla === NONE ? `XLA's own figure ${each.title}: not known, ${program.raw.measured ? "it was not asked for" : program.raw.unmeasured ? "a dump or a text has none unless its step was measured" : "it has not compiled here"}` : `XLA's own figure ${each.title}: ${bytes(each.xla)}`)),
      program.raw.budget === NONE ? null : make("span", {}, `\u2508 budget: ${bytes(program.raw.budget)}`), make("span", {}, "temporaries of one device, before XLA merges operators; click the chart to move"))), sheet("What takes it", found));
}

// --- time -------------------------------------------------------------------------------------

// What a step would take if products ran at the rate of a product and values moved at that of a copy.
function predicted({ work, measured }) {
  if (!work || !measured) return NONE;
  return work[0] / measured.flops_per_s + work[1] / measured.bytes_per_s;
}
function times({ raw }) {
  const { work, measured } = raw;
  if (!work) return null;
  const rate = (per, text_) => (measured ? `at ${text_(per)}/s` : "no rate measured"), takes = (amount, per) => (measured ? seconds(amount / per) : "");
  const guess = predicted(raw), real = measured ? measured.step_s : null;
  const rows = [
    ["products", flopsText(work[0]), rate(measured && measured.flops_per_s, flopsText), takes(work[0], measured && measured.flops_per_s)],
    ["values read and written", bytes(work[1]), rate(measured && measured.bytes_per_s, bytes), takes(work[1], measured && measured.bytes_per_s)],
    ["predicted: their sum", "", "", guess === NONE ? "unknown" : make("b", {}, seconds(guess))],
    [`measured${measured && measured.of ? `: ${measured.of}` : ""}`, "", real === null ? "" : `median of ${count(measured.calls, "call")}`, real === null ? make("b", {}, "not measured") : make("b", {}, seconds(real))],
  ];
  const trained = measured ? measured.parts.map((part, n) => [`${n ? "\u2003" : ""}${part.what}`, "", n ? "" : `median of ${count(measured.steps, "step")} of training`, seconds(part.seconds)]) : [];
  const why = real !== null ? `Measured is ${Number((real / guess).toPrecision(2))} times what is predicted, on ${measured.device}. Messages between devices, and the time to start each operator, are not predicted.${measured.note ? ` ${measured.note}` : ""}`
    : measured ? `It could not be measured: ${measured.why_not}.` : raw.unmeasured || "step.view(path, measure=10) of a running step times it, and the rates of its devices.";
  return sheet("Time of a step on one device: predicted and measured", table(["", "amount", "", "time"], [...rows, ...trained], [1, 2, 3]), make("p", { class: "soft" }, why));
}

// --- traffic ------------------------------------------------------------------------------------

function traffic(program) {
  const { placed, imagined } = program.raw, parts = [];
  if (placed) parts.push(wide(serverMap(program, placed)), links(placed));
  if (program.raw.links) parts.push(deviceLinks(program.raw.links));
  if (imagined.length) parts.push(imagine(imagined, placed));
  const moving = program.orders[program.last].filter((line) => program.isOp(line) && program.moves(line) !== NONE);
  const most = Math.max(...moving.map((line) => program.moves(line)), 1);
  const order = [...moving].sort((a, b) => program.moves(b) - program.moves(a)).slice(0, 300);
  parts.push(wide(sheet(`${count(moving.length, "operator")} that communicate, of one ${placed ? "trainer" : "device"}`,
    moving.length ? table(["operator", "of", "bytes", "", "put here by", "line"], order.map((line) => pickable([
      make("code", { class: "o" }, program.type(line, program.last)), subject(program, line), bytes(program.moves(line)), meter(program.moves(line) / most), program.maker(line) || "the user", program.place(line),
    ], [2], () => go({ op: line }, { keep: true }))), [2]) : make("p", { class: "soft" }, "Nothing is sent or reduced."),
    moving.length > order.length ? make("p", { class: "soft" }, `and ${moving.length - order.length} smaller ones`) : "")));
  if (program.raw.no_traffic) parts.push(make("p", { class: "soft" }, `No plan for servers: ${program.raw.no_traffic}.`));
  return make("div", { class: "page" }, make("div", { class: "columns" }, parts));
}
function wide(element) { element.classList.add("wide"); return element; }
function subject(program, line) {
  const pairs = program.pairs(line, program.last);
  const names = pairs.length ? pairs.filter((_, n) => n % 2 === 0) : [...program.outputs(line, program.last), ...program.inputs(line, program.last)].slice(0, 1);
  const shown = names.slice(0, 3).map((number) => plain(program.variables[number][0])).join(", ");
  return names.length > 3 ? `${shown} and ${names.length - 3} more` : shown;
}
function serverMap(program, plan) {
  const held = plan.servers.map((server) => server.param_bytes + server.state_bytes), most = Math.max(...held, 1);
  return sheet(`Servers by what they hold: the fullest has ${plan.balance.toFixed(2)} times the mean`, ...plan.servers.map((server, n) => {
    const largest = [...server.blocks].sort((a, b) => size(b) - size(a)), shown = largest.slice(0, 40), rest = largest.slice(40);
    const bar = make("div", { class: "blocks" }, shown.map((block) => {
      const part = make("button", { type: "button", title: `${block.name}: ${bytes(size(block))}`, on: { click: () => pickParam(program, block.param) } }, shortName(block.name));
      part.style.flex = `${Math.max(size(block), 1)} 1 0`;
      return part;
    }), rest.length ? make("span", { class: "soft" }, ` +${rest.length}`) : "");
    bar.style.width = `${(held[n] / most) * 100}%`;
    return make("div", { class: "server" }, make("code", {}, server.endpoint), bar, make("span", { class: "num" }, bytes(held[n])));
  }), ...plan.whole.slice(0, 8).map((each) => make("p", { class: "soft" }, `whole: ${each.params.slice(0, 4).join(", ")}${each.params.length > 4 ? ` and ${each.params.length - 4} more` : ""}: ${each.why}`)));
}
function size(block) { return block.param_bytes + block.state_bytes; }
function pickParam(program, name) {
  const number = program.raw.journeys.findIndex((journey) => program.variables[journey[0]][0] === name);
  if (number !== NONE) go({ param: number, op: NONE }, { keep: true });
}
function links(plan) {
  const rows = plan.servers.flatMap((server) => [
    ["each trainer", server.endpoint, server.from_trainers / plan.trainers], [server.endpoint, "each trainer", server.to_trainers / plan.trainers],
    ...(server.to_servers ? [[server.endpoint, "other servers", server.to_servers]] : []),
  ]);
  const most = Math.max(...rows.map((row) => row[2]), 1);
  return sheet(`Bytes on every link in a step, ${plan.trainers} trainers`, table(["from", "to", "bytes", ""], rows.map(([from, to, sent]) => [from, to, bytes(sent), meter(sent / most)]), [2]));
}
function deviceLinks({ devices, kinds, links: each, unknown }) {
  const most = Math.max(...kinds.map((kind) => kind.bytes), ...each.map((link_) => link_[2]), 1);
  return sheet(`Bytes on every link in a step, ${devices} devices`,
    table(["links", "number", "bytes on each", "", "of"], kinds.map((kind) => [kind.says, kind.links, bytes(kind.bytes), meter(kind.bytes / most), count(kind.operators, "collective")]), [1, 2]),
    each.length ? table(["from", "to", "bytes", ""], each.map(([from, to, sent]) => [`device ${from}`, `device ${to}`, bytes(sent), meter(sent / most)]), [2]) : null,
    unknown ? make("p", { class: "soft" }, `${count(unknown, "collective")} of an unknown size not counted.`) : null,
    make("p", { class: "soft" }, "As the collectives send in rings: loops in every turn, branches as if each ran. XLA may choose another algorithm, and devices of one host may share memory."));
}
function imagine(plans, placed) {
  const detail = make("div");
  const show = (plan) => {
    for (const row of rows) row.classList.toggle("on", row.plan === plan);
    detail.replaceChildren(table(["server", "holds", "receives", "sends"], plan.servers.map((server, n) => [`server ${n}`, bytes(server.param_bytes + server.state_bytes), bytes(server.from_trainers), bytes(server.to_trainers)]), [1, 2, 3]));
  };
  const rows = plans.map((plan) => {
    const fullest = Math.max(...plan.servers.map((server) => server.param_bytes + server.state_bytes));
    const row = pickable([link(count(plan.servers.length, "server"), () => show(plan)), bytes(fullest), bytes(plan.trainer.push_bytes), bytes(plan.trainer.pull_bytes), plan.balance.toFixed(2), plan.best_balance.toFixed(2)], [1, 2, 3, 4, 5], () => show(plan));
    row.plan = plan;
    return row;
  });
  const box = sheet(placed ? "With other numbers of servers" : "With parameter servers instead", table(["", "the fullest holds", "a trainer sends", "a trainer gets", "fullest / mean", "balanced"], rows, [1, 2, 3, 4, 5]), detail,
    make("p", { class: "soft" }, `In a step of ${plans[0].trainers} trainers, dispatched round robin, with the options that jaxfleet plan starts from; metrics and statistics are not counted.`));
  show(plans.find((plan) => plan.servers.length === 4) || plans[0]);
  return box;
}
