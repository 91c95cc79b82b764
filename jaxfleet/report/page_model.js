// The data of the report, decoded: programs, the lines of every stage, texts as tokens.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);
const STRINGS = DATA.strings;
const NONE = -1;
const OP = 0, PROGRAM = 1, BLOCK = 2, DECLARATION = 3; // kinds of lines: operators, headings, declarations
const COUNTS = { added: 0, removed: 1, changed: 2, retyped: 3, moved: 4, all: 5 };

class Program {
  constructor(raw, number) {
    Object.assign(this, { raw, number, stages: raw.stages, variables: raw.variables });
    this.lines = raw.lines;
    this.orders = [];
    for (const stage of raw.stages) {
      const before = this.orders[this.orders.length - 1] || [];
      const order = [];
      for (const edit of stage.order) {
        if (typeof edit === "number") order.push(edit);
        else for (let n = 0; n < edit[1]; n++) order.push(before[edit[0] + n]);
      }
      this.orders.push(order);
    }
    this.places = this.orders.map((order) => {
      const places = new Int32Array(this.lines.length).fill(NONE);
      order.forEach((line, place) => { places[line] = place; });
      return places;
    });
    this.moved = raw.stages.map((stage) => new Set(stage.moved));
    this.uses = [];
  }

  get last() { return this.stages.length - 1; }
  isOp(line) { return this.lines[line][0] === OP; }
  has(stage, line) { return this.places[stage][line] !== NONE; }
  column(line, place) { const found = this.lines[line][place]; return found === undefined ? NONE : found; }
  file(line) { return this.column(line, 2); }
  row(line) { return this.column(line, 3); }
  func(line) { return text(this.column(line, 4)); }
  scope(line) { return text(this.column(line, 5)); }
  maker(line) { return text(this.column(line, 6)); }
  // The calls of the user's functions that lead to a line's function, the outermost first.
  callers(line) {
    const found = [];
    for (let at = this.column(line, 7); at !== NONE; at = this.raw.frames[at][3]) found.push(this.raw.frames[at]);
    return found.reverse().map(([file, row, func]) => ({ file, row, func: text(func) }));
  }
  // Whether an operator comes from a line of the user's, by itself or through a call there.
  comesFrom(line, file, row) {
    if (this.file(line) === file && this.row(line) === row) return true;
    for (let at = this.column(line, 7); at !== NONE; at = this.raw.frames[at][3]) if (this.raw.frames[at][0] === file && this.raw.frames[at][1] === row) return true;
    return false;
  }
  flops(line) { return this.column(line, 8); }
  moves(line) { return this.column(line, 9); }
  labels(line) { const found = this.lines[line][10]; return found ? found.map(text) : []; }
  completed(line) { const found = this.lines[line][11]; return found ? found.map(text) : []; }
  versions(line) { return this.lines[line][1]; }

  birth(line) { return this.versions(line)[0][0]; }
  // The last stage that has a line: it may have gone, and come back.
  end(line) {
    for (let stage = this.last; stage > 0; stage--) if (this.has(stage, line)) return stage;
    return 0;
  }
  // A stage that has the line: the wanted one, or the nearest before it, or behind it.
  nearest(line, wanted) {
    for (let stage = wanted; stage >= 0; stage--) if (this.has(stage, line)) return stage;
    for (let stage = wanted; stage <= this.last; stage++) if (this.has(stage, line)) return stage;
    return wanted;
  }
  version(line, stage) {
    const versions = this.versions(line);
    let found = versions[0];
    for (const version of versions) if (version[0] <= stage) found = version;
    return found;
  }
  type(line, stage) { return text(this.version(line, stage)[2]); }
  role(line, stage) { return text(this.version(line, stage)[1]); }
  outputs(line, stage) { return flat(this.version(line, stage)[3]); }
  inputs(line, stage) { return flat(this.version(line, stage)[4]); }
  pairs(line, stage) { return this.version(line, stage)[6] || []; }
  place(line) {
    const file = this.file(line);
    return file === NONE ? "" : `${this.raw.files[file][0]}:${this.row(line)}`;
  }

  // The text of a line of the user's file; empty if the report does not have it.
  sourceText(file, row) {
    if (file === NONE) return "";
    this.sources ??= this.raw.files.map((each) => new Map(each[1]));
    return (this.sources[file].get(row) || "").trim();
  }

  // Tokens [class, text] of a line as it prints; a type stands where a temporary is written.
  tokens(line, stage) {
    const version = this.version(line, stage);
    const kind = this.lines[line][0];
    const found = [];
    const variable = (number, typed) => {
      const [name, type, what] = this.variables[number];
      found.push(["n", plain(name)]);
      if (typed && STRINGS[what] === "temp") found.push(["p", ": "], ["t", STRINGS[type]]);
    };
    const operand = (item, typed) => {
      if (item >= 0) variable(item, typed);
      else found.push(["l", STRINGS[~item]]);
    };
    const operands = (items, typed) => items.forEach((item, place) => {
      if (place) found.push(["p", ", "]);
      if (typeof item === "number") return operand(item, typed);
      const [slot, ...inside] = item;
      found.push(["a", STRINGS[slot]], ["p", inside.length === 1 ? "=" : "=["]);
      inside.forEach((each, n) => { if (n) found.push(["p", ", "]); operand(each, typed); });
      if (inside.length !== 1) found.push(["p", "]"]);
    });
    if (kind === DECLARATION) {
      const [name, type] = this.variables[version[3][0]];
      found.push(["o", STRINGS[version[2]].padEnd(6)], ["n", plain(name)], ["p", ": "], ["t", STRINGS[type]]);
      if (version.length > 5 && version[5] !== NONE) found.push(["p", " = "], ["l", STRINGS[version[5]]]);
      return found;
    }
    if (kind !== OP) return [["p", STRINGS[version[2]]]];
    if (version[3].length) { operands(version[3], true); found.push(["p", " = "]); }
    found.push(["o", STRINGS[version[2]]], ["p", "("]);
    operands(version[4], false);
    found.push(["p", ")"]);
    if (version.length > 5 && version[5] !== NONE) found.push(["a", " " + STRINGS[version[5]]]);
    if (version[6]) {
      for (let n = 0; n < version[6].length; n += 2) {
        found.push(["p", n ? ", (" : " for ("]);
        variable(version[6][n], false);
        found.push(["p", ", "]);
        variable(version[6][n + 1], false);
        found.push(["p", ")"]);
      }
    }
    return found;
  }
  text(line, stage) { return this.tokens(line, stage).map((token) => token[1]).join(""); }

  // By name: the operators that write and read a variable in a stage, in order.
  usesIn(stage) {
    if (!this.uses[stage]) {
      const writes = new Map(), reads = new Map();
      const add = (table, number, line) => {
        const name = this.variables[number][0];
        const lines = table.get(name);
        if (!lines) table.set(name, [line]);
        else if (lines[lines.length - 1] !== line) lines.push(line);
      };
      for (const line of this.orders[stage]) {
        if (!this.isOp(line)) continue;
        for (const number of this.outputs(line, stage)) add(writes, number, line);
        for (const number of this.inputs(line, stage)) add(reads, number, line);
      }
      this.uses[stage] = { writes, reads };
    }
    return this.uses[stage];
  }
  // The operator that an operator has the value of a variable from; undefined if it is given.
  producer(name, line, stage) {
    const places = this.places[stage];
    const before = (this.usesIn(stage).writes.get(name) || []).filter((x) => places[x] < places[line]);
    return before[before.length - 1];
  }

  // What is searched, lower case, made once.
  get index() {
    if (!this.searched) {
      const source = this.raw.files;
      this.searched = this.lines.map((columns, line) => {
        if (columns[0] === PROGRAM) return "";
        const stage = this.end(line);
        const file = this.file(line) === NONE ? "" : source[this.file(line)][0] + ":" + this.row(line);
        const functions = [this.func(line), ...this.callers(line).map((caller) => caller.func)].join(" ");
        return `${this.text(line, stage)} ${this.scope(line)} ${file} ${functions} ${this.maker(line)}`.toLowerCase();
      });
    }
    return this.searched;
  }
}

function text(number) { return number === NONE ? "" : STRINGS[number]; }

function flat(operands) {
  const found = [];
  for (const item of operands) {
    if (typeof item !== "number") found.push(...item.slice(1).filter((x) => x >= 0));
    else if (item >= 0) found.push(item);
  }
  return found;
}

// A name as it prints: quoted unless it is plain.
function plain(name) {
  return /^[A-Za-z_][\w./@$~+-]*$/.test(name) ? name : JSON.stringify(name);
}

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];
function bytes(size) {
  let unit = 0;
  while (size >= 999.5 && unit < UNITS.length - 1) { size /= 1000; unit++; }
  return `${Number(size.toPrecision(3))} ${UNITS[unit]}`;
}
function flopsText(count) {
  const units = ["flops", "kflops", "Mflops", "Gflops", "Tflops"];
  let unit = 0;
  while (count >= 999.5 && unit < units.length - 1) { count /= 1000; unit++; }
  return `${Number(count.toPrecision(3))} ${units[unit]}`;
}
function seconds(s) {
  if (s < 0) return "";
  if (s && s < 9.5e-5) return `${Number((s * 1e6).toPrecision(2))} \u00b5s`;
  return s < 0.9995 ? `${Number((s * 1000).toPrecision(2))} ms` : `${Number(s.toPrecision(3))} s`;
}
function count(number, one, several) { return `${number.toLocaleString("en")} ${number === 1 ? one : several || one + "s"}`; }

// The placement of a value: its kind, a short mark that needs no colour, and a sentence.
function placement(label) {
  const [, kind, detail] = /^(\w+)(?:\((.*)\))?$/.exec(label) || [];
  if (kind === "replicated") return { kind, mark: "R", says: "replicated: every device has all of it" };
  if (kind === "sharded") return { kind, mark: `S${detail}`, says: `sharded: each device has its part of axis ${detail}` };
  if (kind === "partial") return { kind, mark: detail === "sum" ? "P+" : `P${detail}`, says: `partial: each device has a part of a ${detail}` };
  if (kind === "varying") return { kind, mark: "V", says: "varying: each device has a value of its own" };
  return { kind: "unknown", mark: "", says: "placement unknown" };
}

const PROGRAMS = DATA.programs.map((raw, number) => new Program(raw, number));
