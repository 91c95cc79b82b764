// The boxes of the graph: scopes and operators of a stage, nested, with the values between them.


const MOST_INSIDE = 48; // boxes in a box; more are put into runs, so that any step can be opened
const ROLES = { forward: "forward", backward: "backward", optimize: "optimize", lr_sched: "optimize", rpc: "rpc", dist: "dist" };

// A box: a scope, a run of boxes, or an operator, which has `line`.
class Box {
  constructor(kind, name, line = NONE, hint = "") {
    Object.assign(this, { kind, name, line, hint, items: [], links: new Map(), parent: null, deep: 0, key: "", count: 0, flops: 0, kinds: new Map(), given: [], text: "", ins: [], outs: [] });
  }
  get isOp() { return this.line !== NONE; }
  adopt(parent, key) {
    Object.assign(this, { parent, deep: parent.deep + 1, key });
    return this;
  }
  *around() { for (let box = this.parent; box; box = box.parent) yield box; }
  leaves() { return this.isOp ? [this] : this.items.flatMap((item) => item.leaves()); }
}

// Values that go from one box to another of the same box: by variable, with the placement of each.
class Link {
  constructor(from, to) { Object.assign(this, { from, to, values: new Map() }); }
  get bytes() { return this.size ??= [...this.values.values()].reduce((sum, [size]) => sum + Math.max(0, size), 0); }
  // The placement that most of its bytes have.
  get kind() {
    const sums = new Map();
    for (const [size, kind] of this.values.values()) sums.set(kind, (sums.get(kind) || 0) + Math.max(1, size));
    return [...sums].sort((a, b) => b[1] - a[1])[0][0];
  }
  get label() { return `${count(this.values.size, "value")}, ${bytes(this.bytes)}`; }
}

class Boxes {
  constructor(program, stage, fold) {
    Object.assign(this, { program, stage, byLine: new Map(), byKey: new Map(), all: [] });
    const blocks = blocksOf(program, stage);
    const roles = new Set(program.orders[stage].filter((line) => program.isOp(line)).map((line) => roleOf(program, line, stage)));
    const above = (line) => {
      const block = blocks.get(line);
      return [...(block ? [["block", block]] : []), ...(roles.size > 1 ? [["role", roleOf(program, line, stage)]] : [])];
    };
    this.root = this.boxOf(scopesOf(program, stage, fold, above));
    this.number(this.root);
    this.count();
    this.link();
  }

  boxOf(scope) {
    const box = new Box(scope.kind, scope.name, NONE, scope.hint), inner = new Map();
    for (const child of scope.children.values()) for (const line of child.lines) inner.set(line, child);
    const seen = new Set();
    for (const line of scope.lines) {
      const child = inner.get(line);
      if (!child) box.items.push(this.leaf(line));
      else if (!seen.has(child)) { seen.add(child); box.items.push(this.boxOf(child)); }
    }
    box.items = inRuns(box.items);
    return box;
  }
  leaf(line) {
    const { program, stage } = this, box = new Box("op", program.type(line, stage).replace(/^jax\./, ""), line), [out] = program.outputs(line, stage);
    if (out !== undefined) box.text = `${text(program.variables[out][1])} ${shortName(program.variables[out][0])}`;
    this.byLine.set(line, box);
    return box;
  }
  number(box) {
    const again = new Map();
    for (const item of box.items) {
      const n = (again.get(item.name) || 0) + 1;
      again.set(item.name, n);
      item.number = this.all.push(item) - 1;
      item.adopt(box, `${box.key ? `${box.key}/` : ""}${item.name}${n > 1 ? `~${n}` : ""}`);
      if (!item.isOp) { this.byKey.set(item.key, item); this.number(item); }
    }
  }
  count() {
    const { program } = this;
    for (const [line, leaf] of this.byLine) {
      const flops = Math.max(0, program.flops(line)), label = program.labels(line)[0], kind = label && placement(label).kind;
      for (let box = leaf; box; box = box.parent) {
        box.count++;
        box.flops += flops;
        if (kind) box.kinds.set(kind, (box.kinds.get(kind) || 0) + 1);
      }
    }
  }
  // Links boxes where a value is made in one and read in the other, at the box that has them both.
  link() {
    const { program, stage } = this, makers = new Map();
    for (const line of program.orders[stage]) {
      const leaf = this.byLine.get(line);
      if (!leaf) continue;
      for (const number of program.inputs(line, stage)) {
        const made = makers.get(program.variables[number][0]);
        if (made) this.join(made[0], leaf, number, made[1]);
        else leaf.given.push(number);
      }
      const labels = program.labels(line);
      program.outputs(line, stage).forEach((number, n) => makers.set(program.variables[number][0], [leaf, labels[n] ? placement(labels[n]).kind : "unknown"]));
    }
  }
  join(from, to, number, kind) {
    from.outs.push([to, number]);
    to.ins.push([from, number]);
    let a = from, b = to;
    while (a.deep > b.deep) a = a.parent;
    while (b.deep > a.deep) b = b.parent;
    if (a === b) return;
    while (a.parent !== b.parent) { a = a.parent; b = b.parent; }
    const table = a.parent.links, key = a.number * this.all.length + b.number;
    let link = table.get(key);
    if (!link) table.set(key, link = new Link(a, b));
    link.values.set(number, [this.program.variables[number][3], kind]);
  }
}

// What a box has values from, or gives them to, as they are drawn: by box, the variables.
function neighbours(box, open, way) {
  const inside = new Set(box.leaves()), found = new Map();
  for (const leaf of inside) for (const [other, number] of leaf[way]) {
    if (inside.has(other)) continue;
    let shown = other;
    for (const each of other.around()) if (each.parent && !open.has(each)) shown = each;
    if (!found.has(shown)) found.set(shown, new Set());
    found.get(shown).add(number);
  }
  return found;
}
function roleOf(program, line, stage) {
  const role = program.role(line, stage).split("|")[0];
  return ROLES[role] || role;
}
// The block of each line that is not of block 0: `block 1`.
function blocksOf(program, stage) {
  const found = new Map();
  let block = "";
  for (const line of program.orders[stage]) {
    if (program.lines[line][0] === BLOCK) block = /\b(?!0\b)\d+/.exec(text(program.version(line, stage)[2]).split(":")[0]);
    else if (block && program.isOp(line)) found.set(line, `block ${block[0]}`);
  }
  return found;
}
// Boxes as runs of neighbours, each of about as many as there are runs.
function inRuns(items) {
  if (items.length <= MOST_INSIDE) return items;
  const runs = Math.min(MOST_INSIDE, Math.ceil(Math.sqrt(items.length))), found = [];
  for (let n = 0; n < runs; n++) {
    const inside = items.slice(Math.floor((n * items.length) / runs), Math.floor(((n + 1) * items.length) / runs));
    const run = new Box("run", `${inside[0].name} \u2026 ${inside[inside.length - 1].name}`);
    run.items = inRuns(inside);
    found.push(run);
  }
  return found;
}
