// Parts of the page: elements made of text only, a list that draws what is visible, rows of code.


// Makes an element. Children are elements or text; text is never read as markup.
function make(tag, options, ...children) {
  const element = document.createElement(tag);
  const { on, data, ...rest } = options || {};
  for (const [name, value] of Object.entries(rest)) {
    if (value === undefined || value === false) continue;
    if (name === "class") element.className = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const [name, value] of Object.entries(data || {})) element.dataset[name] = value;
  for (const [event, run] of Object.entries(on || {})) element.addEventListener(event, run);
  for (const child of children.flat()) if (child !== null && child !== undefined) element.append(child);
  return element;
}
function draw(tag, options, ...children) {
  const element = document.createElementNS(document.getElementById("svg").namespaceURI, tag);
  for (const [name, value] of Object.entries(options || {})) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
function link(label, run, title) { return make("button", { class: "link", type: "button", title, on: { click: run } }, label); }
function sheet(title, ...children) { return make("section", { class: "sheet" }, make("h2", {}, title), ...children); }
function meter(share) {
  const bar = make("i");
  bar.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return make("div", { class: "meter" }, bar);
}
function table(heads, rows, numeric = []) {
  const side = (n) => (numeric.includes(n) ? "num" : undefined);
  return make("table", {},
    make("thead", {}, make("tr", {}, heads.map((head, n) => make("th", { scope: "col", class: side(n) }, head)))),
    make("tbody", {}, rows.map((row) => (row instanceof Element ? row
      : make("tr", {}, row.map((cell, n) => make("td", { class: side(n) }, cell)))))));
}
function pickable(cells, numeric, run) {
  return make("tr", { class: "pickable", on: { click: run } }, cells.map((cell, n) => make("td", { class: numeric.includes(n) ? "num" : undefined }, cell)));
}
function tag(labels) {
  if (!labels.length) return make("span", { class: "tag unknown" }, "");
  const found = placement(labels[0]);
  return make("span", { class: `tag ${found.kind}`, title: labels.map((x) => placement(x).says).join("; ") }, found.mark);
}

const LONGEST = 260; // characters of a line that a list draws; the card has all of it
// Names and marks of a line are plain text, so that a row has few elements: lists draw sixty a frame.
function code(tokens, marked) {
  const found = document.createDocumentFragment();
  let length = 0, plainText = "";
  const flush = () => { if (plainText) found.append(plainText); plainText = ""; };
  for (let place = 0; place < tokens.length && length <= LONGEST; place++) {
    const [kind, content] = tokens[place], rest = LONGEST - length;
    const shown = content.length > rest ? content.slice(0, rest) + "..." : content;
    const isMarked = marked && marked(place);
    length += content.length;
    if (!isMarked && (kind === "n" || kind === "p")) { plainText += shown; continue; }
    flush();
    const piece = document.createElement("span");
    piece.className = kind;
    piece.textContent = shown;
    found.append(isMarked ? make("mark", {}, piece) : piece);
  }
  flush();
  return found;
}
// Which tokens of a differ from b, besides those that both begin and end with.
function differing(a, b) {
  const same = (i, j) => a[i][1] === b[j][1];
  let head = 0;
  while (head < a.length && head < b.length && same(head, head)) head++;
  let tail = 0;
  while (tail < a.length - head && tail < b.length - head && same(a.length - 1 - tail, b.length - 1 - tail)) tail++;
  return (place) => place >= head && place < a.length - tail;
}

// The tokens of a changed line that a row has room for: what it writes, its type, what differs.
function briefly(tokens, marked) {
  const open = tokens.findIndex((token) => token[0] === "p" && token[1] === "(");
  const found = [], marks = [];
  tokens.forEach((token, place) => {
    if (place <= open || marked(place)) { found.push(token); marks.push(marked(place)); return; }
    if (marks[marks.length - 1] !== undefined && found[found.length - 1][1] !== "\u2026") { found.push(["p", "\u2026"]); marks.push(false); }
  });
  return code(found, (place) => marks[place]);
}

const ROW = 22; // height of a row, as in the style
const BEYOND = 6; // rows drawn above and below what is visible
class List {
  // `fill(row, element)` draws a row; `pick(row)` is called for a click or Enter on it.
  constructor(label, fill, pick) {
    Object.assign(this, { fill, pick, rows: [], drawn: new Map(), current: NONE });
    this.space = make("div", { class: "space", role: "presentation" });
    this.element = make("div", {
      class: "list", role: "listbox", tabindex: "0", "aria-label": label,
      on: {
        scroll: () => this.refresh(),
        click: (event) => {
          const row = event.target.closest(".row");
          if (row) this.choose(Number(row.dataset.row));
        },
        keydown: (event) => this.key(event),
      },
    }, this.space);
    this.id = `list${List.made = (List.made || 0) + 1}`;
    new ResizeObserver(() => this.refresh()).observe(this.element);
  }
  set(rows) {
    this.rows = rows;
    this.current = Math.min(this.current, rows.length - 1);
    this.space.style.height = `${rows.length * ROW}px`;
    this.redraw();
  }
  redraw() {
    for (const element of this.drawn.values()) element.remove();
    this.drawn.clear();
    this.refresh();
  }
  refresh() {
    const top = this.element.scrollTop, height = this.element.clientHeight || 600;
    const from = Math.max(0, Math.floor(top / ROW) - BEYOND);
    const to = Math.min(this.rows.length, Math.ceil((top + height) / ROW) + BEYOND);
    for (const [row, element] of this.drawn) if (row < from || row >= to) { element.remove(); this.drawn.delete(row); }
    const fresh = document.createDocumentFragment();
    for (let row = from; row < to; row++) {
      if (this.drawn.has(row)) continue;
      const element = make("div", { class: "row", role: "option", id: `${this.id}-${row}`, "aria-selected": "false", data: { row } });
      element.style.top = `${row * ROW}px`;
      this.fill(this.rows[row], element);
      if (row === this.current && !this.rows[row].group) element.classList.add("on");
      element.setAttribute("aria-selected", String(element.classList.contains("on")));
      this.drawn.set(row, element);
      fresh.append(element);
    }
    this.space.append(fresh);
    if (this.drawn.has(this.current)) this.element.setAttribute("aria-activedescendant", `${this.id}-${this.current}`);
    else this.element.removeAttribute("aria-activedescendant");
  }
  show(row) {
    if (row < 0) return;
    const top = this.element.scrollTop, height = this.element.clientHeight;
    if (row * ROW < top + ROW || (row + 2) * ROW > top + height) this.element.scrollTop = Math.max(0, row * ROW - height / 3);
    this.refresh();
  }
  choose(row) {
    if (row < 0 || row >= this.rows.length) return;
    this.current = row;
    this.pick(this.rows[row], row);
    this.show(row);
  }
  // Selects the nearest row from one on that is more than a heading; headings are for Enter.
  move(row, way) {
    row = Math.max(0, Math.min(this.rows.length - 1, row));
    while (this.rows[row] && (this.rows[row].group || this.rows[row].fold || this.rows[row].gap)) row += way;
    if (!this.rows[row]) return;
    if (!this.quiet) { this.choose(row); return; }
    this.current = row;
    this.redraw();
    this.show(row);
  }
  // Makes a row the current one without picking it.
  at(row) {
    this.current = row;
    this.redraw();
    this.show(row);
  }
  key(event) {
    const steps = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1, PageDown: 20, PageUp: -20 };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in steps) this.move(this.current + steps[event.key], Math.sign(steps[event.key]));
    else if (event.key === "Home") this.move(0, 1);
    else if (event.key === "End") this.move(this.rows.length - 1, -1);
    else if (event.key === "Enter" || event.key === " ") this.choose(this.current);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

// The module and the leaf of a parameter: nnx adds "/value" to each.
function shortName(name) { return name.replace(/\/value$/, "").split("/").slice(-2).join("/"); }
