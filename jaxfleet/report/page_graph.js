// The view of the graph: boxes drawn where they are visible, moved, opened, and linked to the rest.


const DRAWN = { beyond: 0.3, inside: 0.16, text: 0.34, label: 0.55, least: 0.02, most: 2.5 }; // share of the view; scales
const OPENED_AT_FIRST = 32, MOST_CURVES = 60;
const MOST_OPENED = 1200; // boxes shown that opening a level may lead to; a box by itself always opens
const opened = new Map(); // by program and fold, the keys of open boxes; kept from pass to pass
let lastGraph = { key: "" };

// The drawing of a stage, of the boxes that are open; none of a program without operators.
function drawingOf(program, stage) {
  const fold = foldOf(program), key = `${program.number} ${fold}`;
  if (lastGraph.key !== `${key} ${stage}`) lastGraph = { key: `${key} ${stage}`, boxes: new Boxes(program, stage, fold) };
  const { boxes } = lastGraph;
  if (!boxes.all.length) return null;
  if (!opened.has(key)) opened.set(key, new Set(openAtFirst(boxes.root).map((box) => box.key)));
  return lastGraph.drawing ??= new Drawing(boxes, opened.get(key));
}
function placementSigns() {
  return ["replicated", "sharded(0)", "partial(sum)", "varying"].map((label) => make("span", { class: "sign" }, tag([label]), placement(label).kind));
}
function graph(program, state) {
  const stage = state.pass;
  if (lastGraph.drawing) lastGraph.drawing = null; // a new one has the selection of now
  const drawing = drawingOf(program, stage);
  if (!drawing) return make("p", { class: "empty" }, "This program has no operators.");
  follow = () => drawing.follow();
  const button = (label, run, title) => make("button", { type: "button", title, on: { click: run } }, label);
  return [
    make("div", { class: "tool" }, make("h2", {}, `Graph after ${stage}. ${program.stages[stage].name}`), chooseFold(program),
      button("Open a level", () => drawing.openLevel()), button("Close all", () => drawing.closeAll()),
      make("span", { class: "turn" }, button("\u2212", () => drawing.zoom(0.8), "Smaller (-)"), button("+", () => drawing.zoom(1.25), "Larger (+)"), button("Fit", () => drawing.fit(), "All of it (0)"))),
    make("div", { class: "heads signs" }, placementSigns(), make("span", { class: "sign" }, "a line is as wide as its values have bytes"), make("span", { class: "sign wide" }, "\u25b8, Enter or a double click opens a box; drag or scroll to move, ctrl and scroll to zoom")),
    drawing.element,
  ];
}
function openAtFirst(root) {
  const found = [];
  let shown = root.items.length;
  for (let level = root.items; level.length; level = level.flatMap((box) => (found.includes(box) ? box.items : []))) {
    for (const box of level) if (!box.isOp && shown + box.items.length <= OPENED_AT_FIRST) { found.push(box); shown += box.items.length; }
  }
  return found;
}

class Drawing {
  constructor(boxes, keys) {
    Object.assign(this, { boxes, keys, scale: 1, left: 0, top: 0, selected: null, painted: null, isHome: false });
    this.open = new Set([boxes.root, ...[...keys].map((key) => boxes.byKey.get(key)).filter(Boolean)]);
    this.content = draw("g", {});
    this.svg = draw("svg", { class: "canvas", role: "tree", tabindex: "0", "aria-label": "Graph of the program" }, this.content);
    this.element = make("div", { class: "graph" }, this.svg);
    this.listen();
    const watch = new ResizeObserver(() => { if (this.isHome) this.home(); else this.place(true); });
    watch.observe(this.element);
  }

  // --- what is open, and where the view is ---

  toggle(box) {
    if (box.isOp) return;
    this.keeping(box, () => this.set(box, !this.open.has(box)));
  }
  // Opens and closes boxes, while one of them stays where it is on the screen.
  keeping(box, change) {
    const [x, y] = this.at(box);
    change();
    this.layOut();
    const [newX, newY] = this.at(box);
    this.left += (x - newX) * this.scale;
    this.top += (y - newY) * this.scale;
    this.place(true);
  }
  set(box, isOpen) {
    if (isOpen) { this.open.add(box); this.keys.add(box.key); } else { this.open.delete(box); this.keys.delete(box.key); }
    stale(box);
  }
  openLevel() {
    const shown = this.shown(), middle = -this.top / this.scale;
    const far = new Map(shown.map((box) => [box, Math.abs(this.at(box)[1] - middle)])); // the nearest first
    const nearest = shown.sort((a, b) => far.get(a) - far.get(b));
    this.keeping(nearest[0], () => {
      let room = MOST_OPENED - shown.length;
      for (const box of nearest) {
        if (box.isOp || this.open.has(box)) continue;
        room -= box.items.length;
        if (room >= 0) this.set(box, true);
      }
    });
    this.show(this.highest(nearest[0]));
    this.place(true);
  }
  // The box that stands highest in a box and is closed: what a reader looks for first.
  highest(box) {
    while (this.open.has(box)) box = box.items.reduce((a, b) => (b.y < a.y ? b : a));
    return box;
  }
  closeAll() {
    for (const box of [...this.open]) if (box.parent) this.set(box, false);
    this.layOut();
    this.home();
  }
  // The boxes that are drawn: those in open ones.
  shown(box = this.boxes.root) { return box.items.flatMap((item) => [item, ...(this.open.has(item) ? this.shown(item) : [])]); }
  layOut() {
    if (this.boxes.root.laid) return;
    layOut(this.boxes.root, this.open);
    this.boxes.root.laid = true;
  }
  at(box) {
    let x = box.x || 0, y = box.y || 0;
    for (const each of box.around()) { x += each.x || 0; y += each.y || 0; }
    return [x, y];
  }
  get size() { return [this.element.clientWidth || 900, this.element.clientHeight || 600]; }
  fit() { this.home(DRAWN.least); }
  home(least = 0.8) {
    const [width, height] = this.size, { root } = this.boxes;
    this.scale = Math.max(least, Math.min(1.1, width / (root.width + 20), height / (root.height + 20)));
    this.left = Math.max(10, (width - root.width * this.scale) / 2);
    this.top = 6;
    this.place(true);
    this.isHome = least > DRAWN.least;
  }
  zoom(by, x = this.size[0] / 2, y = this.size[1] / 2) {
    const scale = Math.max(DRAWN.least, Math.min(DRAWN.most, this.scale * by)), ratio = scale / this.scale;
    Object.assign(this, { scale, left: x - (x - this.left) * ratio, top: y - (y - this.top) * ratio });
    this.place();
  }
  move(x, y) { this.left += x; this.top += y; this.place(); }
  // Moves the drawing; what is drawn stays while the view is inside of it.
  place(anew = false) {
    this.isHome = false;
    this.content.setAttribute("transform", this.transform);
    const seen = this.region(0), was = this.painted;
    const inside = was && seen.every((edge, n) => (n < 2 ? edge >= was.region[n] : edge <= was.region[n])) && was.scale / this.scale < 1.3 && this.scale / was.scale < 1.3;
    if (anew || !inside) this.paint();
  }
  get transform() { return `translate(${this.left} ${this.top}) scale(${this.scale})`; }
  region(beyond) {
    const [width, height] = this.size;
    return [(-width * beyond - this.left) / this.scale, (-height * beyond - this.top) / this.scale, (width * (1 + beyond) - this.left) / this.scale, (height * (1 + beyond) - this.top) / this.scale];
  }

  // Shows what is selected: opens what is around it, and brings it into view.
  follow() {
    const wanted = current.op !== NONE ? this.boxes.byLine.get(current.op) : this.boxes.byKey.get(current.box);
    for (const box of wanted ? wanted.around() : []) if (!this.open.has(box)) this.set(box, true);
    this.layOut();
    this.selected = wanted || null;
    if (!this.painted) this.home();
    if (wanted) this.show(wanted);
    this.paint();
    this.content.setAttribute("transform", this.transform);
  }
  show(box) {
    const [x, y] = this.at(box), [x0, y0, x1, y1] = this.region(0), high = Math.min(box.height, 120);
    if (this.scale < DRAWN.text) this.scale = 0.8;
    else if (x >= x0 && y >= y0 && x + Math.min(box.width, 200) <= x1 && y + high <= y1) return;
    const [width, height] = this.size;
    this.isHome = false;
    this.left = width / 2 - (x + box.width / 2) * this.scale;
    this.top = height / 2 - (y + high / 2) * this.scale;
  }
  pick(box) {
    if (box.isOp) go({ op: box.line, line: NONE, param: NONE, box: "" }, { keep: true });
    else go({ box: box.key, op: NONE, line: NONE, param: NONE }, { keep: true });
  }

  // --- drawing ---

  paint() {
    const region = this.region(DRAWN.beyond), parts = this.parts(region);
    if (this.selected) parts.push(...this.curves(this.selected));
    this.content.replaceChildren(...parts);
    this.painted = { region, scale: this.scale };
    const chosen = this.selected && document.getElementById(`box-${this.selected.number}`);
    if (chosen) this.svg.setAttribute("aria-activedescendant", chosen.id); else this.svg.removeAttribute("aria-activedescendant");
  }
  // All of the drawing at its full size, in pieces row by row; empty ones are left out.
  pieces(width, height) {
    const { root } = this.boxes, { scale } = this, found = [];
    this.scale = 1;
    for (let y = 0; y < root.height; y += height) for (let x = 0; x < root.width; x += width) {
      const [wide, high] = [Math.min(width, root.width - x), Math.min(height, root.height - y)], parts = this.parts([x, y, x + wide, y + high]);
      for (const part of parts) part.removeAttribute("id");
      if (parts.length) found.push(draw("svg", { class: "piece", viewBox: `${x} ${y} ${width} ${high}` }, ...parts));
    }
    this.scale = scale;
    return found;
  }
  // The lines and boxes that are seen in a region.
  parts(region) {
    const parts = [], { root } = this.boxes;
    const seen = (x, y, width, height) => x + width >= region[0] && y + height >= region[1] && x <= region[2] && y <= region[3];
    const inside = (box, x, y) => {
      if (box.routes.length < 3000) for (const route of box.routes) {
        const { points } = route, xs = points.map((point) => point[0] + x), ys = points.map((point) => point[1] + y);
        const [left, top] = [Math.min(...xs), Math.min(...ys)];
        if (seen(left, top, Math.max(...xs) - left, Math.max(...ys) - top)) parts.push(this.line(route, xs, ys, box));
      }
      for (const item of box.items) {
        const itsX = x + item.x, itsY = y + item.y;
        if (!seen(itsX, itsY, item.width, item.height)) continue;
        const isOpen = this.open.has(item);
        parts.push(this.box(item, itsX, itsY, isOpen));
        if (isOpen && this.scale >= DRAWN.inside) inside(item, itsX, itsY);
      }
    };
    inside(root, 0, 0);
    return parts;
  }
  box(box, x, y, isOpen) {
    const [kind] = box.isOp && box.kinds.size ? box.kinds.keys() : [""];
    const isOn = box === this.selected, isNear = box.isOp && near(this.boxes.program, box.line);
    const group = draw("g", { class: `box ${box.isOp ? "op" : isOpen ? "open" : "closed"} ${kind} ${isOn ? "on" : isNear ? "near" : ""}`, transform: `translate(${x} ${y})`, role: "treeitem", id: `box-${box.number}`, "data-box": box.number, "aria-level": box.deep, "aria-selected": String(isOn), "aria-label": this.spoken(box), ...(box.isOp ? {} : { "aria-expanded": String(isOpen) }) },
      draw("rect", { class: "frame", width: box.width, height: box.height, rx: box.isOp ? 4 : 8 }));
    if (kind) group.append(draw("rect", { class: "stripe", width: 5, height: box.height, rx: 2 }));
    if (this.scale < DRAWN.text) return group;
    const letters = Math.floor((box.width - 20) / SIZES.letter), small = Math.floor((box.width - 20) / SIZES.small), write = (style, at, line, content) => group.append(draw("text", { class: style, x: at, y: line }, content));
    if (box.isOp) {
      const mark = placement(this.boxes.program.labels(box.line)[0] || "").mark;
      write("name", 12, 17, short(box.name, letters - 4));
      write("more", 12, 32, short(box.text, small));
      if (mark) group.append(draw("text", { class: "mark", x: box.width - 6, y: 17 }, mark));
      return group;
    }
    group.append(draw("g", { class: "toggle" }, draw("rect", { width: 26, height: 26, x: 2, y: 2, rx: 5 }), draw("path", { d: isOpen ? "M10 12h10l-5 7z" : "M12 10l7 5l-7 5z" })));
    write(`name ${box.kind}`, 30, 19, short(box.name, letters - 2 - (isOpen ? 14 : 0)));
    if (isOpen) { group.append(draw("text", { class: "aside", x: box.width - 12, y: 19 }, count(box.count, "operator"))); return group; }
    const [first, second] = linesOf(box);
    write("more", 12, 36, short(first, small));
    write("more", 12, 50, short(second, small));
    group.append(...this.mix(box));
    return group;
  }
  // A bar of placements, in their colours; the words above it say the same.
  mix(box) {
    const all = [...box.kinds.values()].reduce((a, b) => a + b, 0), wide = box.width - 2;
    let x = 1;
    return [...box.kinds].map(([kind, n]) => {
      const part = draw("rect", { class: `part ${kind}`, x, y: box.height - 6, width: (n / all) * wide, height: 5 });
      x += (n / all) * wide;
      return part;
    });
  }
  spoken(box) {
    if (box.isOp) return `${box.name}, ${box.text}${box.kinds.size ? `, ${[...box.kinds.keys()][0]}` : ""}`;
    return `${box.kind} ${box.name}, ${count(box.count, "operator")}${box.kinds.size ? `, ${[...box.kinds].map(([kind, n]) => `${n} ${kind}`).join(", ")}` : ""}`;
  }
  line({ link, back }, xs, ys, around) {
    const wide = Math.max(1, Math.min(9, 1 + 1.6 * Math.log10(Math.max(1, link.bytes / 1e3)))), end = xs.length - 1;
    const group = draw("g", { class: `link ${link.kind} ${back ? "back" : ""}`, "aria-hidden": "true" }, draw("title", {}, `${link.from.name} to ${link.to.name}: ${link.label}, most of it ${link.kind}`));
    const tip = 5 + wide;
    let path = `M${xs[0]} ${ys[0]}`;
    for (let n = 1; n <= end; n++) {
      const y = n === end && !back ? ys[n] - tip : ys[n], bend = (y - ys[n - 1]) / 2;
      path += back || xs[n] === xs[n - 1] ? `L${xs[n]} ${y}` : `C${xs[n - 1]} ${ys[n - 1] + bend} ${xs[n]} ${y - bend} ${xs[n]} ${y}`;
    }
    group.append(draw("path", { class: "way", d: path, "stroke-width": wide }));
    group.append(draw("path", { class: "tip", d: back ? `M${xs[end]} ${ys[end]}l${tip} ${-tip / 2}v${tip}z` : `M${xs[end]} ${ys[end]}l${-tip / 2} ${-tip}h${tip}z` }));
    const isSaid = this.scale >= DRAWN.label && around.links.size <= 60 && (!link.from.isOp || !link.to.isOp || link.values.size > 1);
    if (isSaid && !back) {
      const x = (xs[end] + xs[end - 1]) / 2, y = (ys[end] + ys[end - 1]) / 2;
      group.append(draw("text", { class: "label", x: x + wide / 2 + 4, y: y + 3 }, link.values.size > 1 ? `${link.values.size}: ${bytes(link.bytes)}` : bytes(link.bytes)));
    }
    return group;
  }
  // From what is selected, straight to what it has values from and gives values to.
  curves(box) {
    const place = (each, side) => { const [x, y] = this.at(each); return [x + each.width / 2, y + (side === "top" ? 0 : each.height)]; };
    return ["ins", "outs"].flatMap((way) => [...neighbours(box, this.open, way).keys()].slice(0, MOST_CURVES).map((other) => {
      const [from, to] = way === "ins" ? [other, box] : [box, other];
      const [x, y] = place(from, "bottom"), [x2, y2] = place(to, "top"), bend = Math.max(30, Math.abs(y2 - y) / 3);
      return draw("path", { class: `curve ${way}`, "aria-hidden": "true", d: `M${x} ${y}C${x} ${y + bend} ${x2} ${y2 - bend} ${x2} ${y2}` });
    }));
  }

  // --- pointer and keys ---

  listen() {
    let held = null, dragged = false;
    const boxAt = (event) => { const found = event.target.closest(".box"); return found && this.boxes.all[Number(found.dataset.box)]; };
    const on = (name, run, options) => this.svg.addEventListener(name, run, options);
    on("pointerdown", (event) => { if (event.button === 0) { held = [event.clientX, event.clientY]; dragged = false; } });
    on("pointermove", (event) => {
      if (!held || !(event.buttons & 1)) { held = null; return; }
      const [x, y] = [event.clientX - held[0], event.clientY - held[1]];
      if (!dragged && Math.hypot(x, y) < 4) return;
      if (!dragged) this.svg.setPointerCapture(event.pointerId);
      dragged = true;
      held = [event.clientX, event.clientY];
      this.move(x, y);
    });
    on("pointerup", () => { held = null; });
    on("click", (event) => {
      const box = boxAt(event);
      if (dragged || !box) { dragged = false; return; }
      if (event.target.closest(".toggle")) this.toggle(box); else this.pick(box);
    });
    on("dblclick", (event) => { const box = boxAt(event); if (box && !event.target.closest(".toggle")) this.toggle(box); });
    on("wheel", (event) => {
      event.preventDefault();
      const edge = this.svg.getBoundingClientRect();
      if (event.ctrlKey || event.metaKey) this.zoom(Math.exp(-event.deltaY / 300), event.clientX - edge.left, event.clientY - edge.top);
      else this.move(-event.deltaX, -event.deltaY);
    }, { passive: false });
    on("keydown", (event) => this.key(event));
  }
  key(event) {
    const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], j: [0, 1], k: [0, -1] }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (way && event.shiftKey) this.move(-way[0] * 90, -way[1] * 90);
    else if (way) this.step(...way);
    else if ((event.key === "Enter" || event.key === " ") && this.selected) this.toggle(this.selected);
    else if (event.key === "p" && this.selected && this.selected.parent.parent) this.pick(this.selected.parent);
    else if (event.key === "+" || event.key === "=") this.zoom(1.25);
    else if (event.key === "-") this.zoom(0.8);
    else if (event.key === "0") this.fit();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
  // Picks the nearest visible box in a direction: what lies across counts twice.
  step(x, y) {
    const middle = (box) => { const [left, top] = this.at(box); return [left + box.width / 2, top + (this.open.has(box) ? 15 : box.height / 2)]; };
    const shown = this.shown();
    if (!this.selected) { this.pick(shown[0]); return; }
    const [fromX, fromY] = middle(this.selected);
    let best = null, least = Infinity;
    for (const box of shown) {
      if (box === this.selected) continue;
      const [toX, toY] = middle(box), along = (toX - fromX) * x + (toY - fromY) * y, aside = Math.abs((toX - fromX) * y) + Math.abs((toY - fromY) * x);
      if (along > 2 && along + 2 * aside < least) { least = along + 2 * aside; best = box; }
    }
    if (best) this.pick(best);
  }
}
// The two lines of text in a closed box: of a line of yours its text, of others their operators.
function linesOf(box) {
  const work = [count(box.count, "operator"), box.flops ? flopsText(box.flops) : ""].filter(Boolean).join(", "), mix = mixText(box.kinds);
  return box.hint ? [box.hint, [work, mix].filter(Boolean).join(" \u00b7 ")] : [work, mix];
}
function short(content, letters) { return content.length <= letters ? content : `${content.slice(0, Math.max(1, letters - 1))}\u2026`; }

// --- the card of a box --------------------------------------------------------------------------

function boxCard(program, box, drawing) {
  const { open } = drawing, KINDS = { module: "module", function: "function", line: "line", role: "part of the step", run: "run of neighbours", block: "block", pass: "made by a pass", outside: "no source" };
  const badge = (content) => make("span", { class: "badge" }, content);
  const size = (numbers) => [...numbers].reduce((sum, number) => sum + Math.max(0, program.variables[number][3]), 0);
  const table_ = (title, way) => {
    const found = [...neighbours(box, open, way)].map(([other, numbers]) => [other, numbers.size, size(numbers)]).sort((a, b) => b[2] - a[2]);
    if (!found.length) return [];
    return [make("h3", {}, title), table(["box", "values", "bytes"], found.slice(0, 20).map(([other, n, held]) => pickable([link(other.isOp ? `${other.name} ${other.text}` : other.key, () => drawing.pick(other)), n, bytes(held)], [1, 2], () => {})), [1, 2]), found.length > 20 ? make("p", { class: "soft" }, `and ${found.length - 20} more`) : null];
  };
  const leaves = box.leaves(), given = [...new Set(leaves.flatMap((leaf) => leaf.given))].filter((number) => text(program.variables[number][2]) === "param");
  const moved = leaves.reduce((sum, leaf) => sum + Math.max(0, program.moves(leaf.line)), 0);
  return [make("h2", {}, box.name), make("div", { class: "badges" }, badge(KINDS[box.kind]), badge(count(box.count, "operator")), box.flops ? badge(flopsText(box.flops)) : null, moved ? badge(`moves ${bytes(moved)}`) : null, given.length ? badge(`reads ${count(given.length, "parameter")}, ${bytes(size(given))}`) : null),
    box.hint ? make("p", { class: "text" }, box.hint) : null,
    make("p", {}, make("button", { type: "button", class: "link", on: { click: () => { drawing.toggle(box); drawCard(program); } } }, open.has(box) ? "Close it" : "Open it")),
    box.kinds.size ? [make("h3", {}, "Placements of what it makes"), table(["", "operators"], [...box.kinds].map(([kind, n]) => [[tag([{ sharded: "sharded(\u00b7)", partial: "partial(sum)" }[kind] || kind]), kind], n]), [1])] : null,
    ...table_("Has values from", "ins"), ...table_("Gives values to", "outs"),
    make("h3", {}, "Operators"), make("table", {}, make("tbody", {}, leaves.slice(0, 40).map((leaf) => pickable([make("code", {}, code(program.tokens(leaf.line, drawing.boxes.stage)))], [], () => drawing.pick(leaf))))), leaves.length > 40 ? make("p", { class: "soft" }, `and ${leaves.length - 40} more`) : null];
}
