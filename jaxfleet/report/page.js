// The page: moves between states, draws the strip and the views; search and keys.


let follow = () => {}; // moves the view to the current selection

// Changes the state. `keep` leaves the view as it is and only moves its selection.
function go(change, { keep = false, silent = false } = {}) {
  const before = current;
  current = { ...current, ...change };
  if (change.op !== undefined && change.op !== NONE) Object.assign(current, { line: NONE, file: NONE, box: "" });
  if (current.prog !== before.prog && change.pass === undefined) current.pass = NONE;
  if (current.prog !== before.prog) Object.assign(current, { box: "", fold: "" });
  const last = program().last;
  if (current.pass === NONE || current.pass > last) current.pass = last;
  if (!silent) history.pushState(null, "", address());
  const isSame = ["view", "prog", "pass", "fold"].every((part) => before[part] === current[part]);
  if (keep && isSame) follow();
  else drawView();
  drawCard(program());
}
function showAddress() {
  current = fromAddress();
  go({}, { silent: true });
}

function drawView() {
  const it = program(), panel = document.getElementById("panel");
  drawStrip(it);
  for (const tab of document.querySelectorAll("#tabs button")) {
    tab.setAttribute("aria-selected", String(tab.dataset.view === current.view));
    tab.tabIndex = tab.dataset.view === current.view ? 0 : -1;
  }
  panel.setAttribute("aria-labelledby", `tab-${current.view}`);
  document.getElementById("program").value = String(current.prog);
  document.getElementById("title").textContent = it.raw.name;
  follow = () => {};
  const content = VIEWS[current.view][1](it, current);
  panel.replaceChildren(...[content].flat().filter(Boolean));
  panel.scrollTop = 0;
  follow();
}

function drawStrip(it) {
  const strip = document.getElementById("strip"), slowest = Math.max(...it.stages.map((stage) => stage.s), 1e-9);
  strip.replaceChildren(...it.stages.map((stage, number) => {
    const time = make("span", { class: "time" });
    time.style.width = `${stage.s > 0 && number ? Math.max(2, (stage.s / slowest) * 100) : 0}%`;
    const same = number && !stage.counts.slice(0, 5).some(Boolean) && !redeclares(it, number);
    const parts = did(it, number);
    if (seconds(stage.s) && number) parts.append(make("span", {}, seconds(stage.s)));
    return make("button", { type: "button", class: same ? "stage same" : "stage", title: `${stage.options || stage.name}: ${count(stage.counts[COUNTS.all], "operator")}`, "aria-current": current.pass === number ? "true" : undefined,
      on: { click: () => go({ view: ["operators", "modules", "graph"].includes(current.view) ? current.view : "passes", pass: number }) } },
    make("span", { class: "name" }, stage.name), parts, time);
  }));
  const chosen = strip.children[current.pass];
  if (chosen) strip.scrollTop = Math.max(0, chosen.offsetTop - strip.offsetTop - 8);
}

// --- search -------------------------------------------------------------------------------------

const MOST_HITS = 60;
function search(query) {
  const it = program(), wanted = query.trim().toLowerCase().split(/\s+/).filter(Boolean), hits = [];
  if (!wanted.length) return hits;
  const matches = (content) => wanted.every((word) => content.includes(word));
  it.raw.journeys.forEach((journey, number) => {
    const name = it.variables[journey[0]][0];
    if (hits.length < 8 && matches(name.toLowerCase())) hits.push({ what: "parameter", text: name, go: { view: "parameters", param: number, op: NONE } });
  });
  it.stages.forEach((stage, number) => { if (matches(stage.name)) hits.push({ what: "pass", text: `${number}. ${stage.name}`, go: { view: "passes", pass: number } }); });
  it.raw.decisions.forEach((line) => { if (hits.length < 16 && matches(line.toLowerCase())) hits.push({ what: "decision", text: line.trim(), go: { view: "overview" } }); });
  const { index } = it, found = [];
  for (let line = 0; line < index.length && found.length < 1000; line++) if (index[line] && matches(index[line])) found.push(line);
  const exact = (line) => (it.isOp(line) ? (it.type(line, it.end(line)).toLowerCase() === query.trim().toLowerCase() ? 0 : 1) : 2);
  const now = (line) => (it.has(current.pass, line) ? 0 : 1);
  found.sort((a, b) => exact(a) - exact(b) || now(a) - now(b));
  for (const line of found.slice(0, MOST_HITS - hits.length)) {
    const stage = it.nearest(line, current.pass);
    hits.push({ what: it.isOp(line) ? (it.has(current.pass, line) ? "operator" : "gone") : "variable", line, text: it.text(line, stage).slice(0, 200), go: { view: current.view === "passes" ? "passes" : "operators", op: line, pass: stage, param: NONE } });
  }
  return hits;
}

function setUpSearch() {
  const input = document.getElementById("search"), box = document.getElementById("found");
  let hits = [], at = 0;
  const close = () => { box.hidden = true; input.setAttribute("aria-expanded", "false"); input.removeAttribute("aria-activedescendant"); };
  const choose = (n) => { const hit = hits[n]; if (!hit) return; close(); input.blur(); go(hit.go); };
  const mark = (n) => {
    at = n;
    [...box.children].forEach((element, place) => element.setAttribute("aria-selected", String(place === at)));
    const element = box.children[at];
    if (element) { input.setAttribute("aria-activedescendant", element.id); element.scrollIntoView({ block: "nearest" }); }
  };
  const run = () => {
    hits = search(input.value);
    box.replaceChildren(...hits.map((hit, n) => make("div", { class: "hit", role: "option", id: `hit-${n}`, "aria-selected": "false", on: { mousedown: (event) => { event.preventDefault(); choose(n); } } }, make("span", { class: "what" }, hit.what), make("span", { class: "text code" }, hit.text))));
    if (!hits.length && input.value.trim()) box.append(make("div", { class: "hit", role: "option", "aria-disabled": "true", "aria-selected": "false" }, "nothing found in this program"));
    box.hidden = !input.value.trim();
    input.setAttribute("aria-expanded", String(!box.hidden));
    if (hits.length) mark(0);
  };
  input.addEventListener("input", run);
  input.addEventListener("focus", () => { if (input.value.trim()) run(); });
  input.addEventListener("blur", close);
  input.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" && hits.length) mark((at + 1) % hits.length);
    else if (event.key === "ArrowUp" && hits.length) mark((at + hits.length - 1) % hits.length);
    else if (event.key === "Enter") choose(at);
    else if (event.key === "Escape") { close(); input.blur(); }
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
}

// --- keys, help -------------------------------------------------------------------------

const KEYS = [["/", "search"], ["[ ]", "the pass before, the pass behind"], ["j k, arrows", "the next or last row of a list"], [`1 to ${Object.keys(VIEWS).length}`, "the views, from the left"], ["arrows, Enter, p", "in the graph: the next box that way, open or close it, the box around it"], ["+ \u2212 0, Shift and arrows", "in the graph: larger, smaller, all of it; move"], ["Esc", "drop the selection"], ["Backspace", "back to what was shown before"], ["?", "this list"]];
const SIGNS = [["+ \u2212 ~ \u203a :", "added, removed, changed, moved, and changed in types alone"], ["R", "replicated: every device has all of it"], ["S0", "sharded: each device has its part of axis 0"], ["P+", "partial: each device has a summand"], ["V", "varying: each device has its own"]];
function setUpHelp() {
  const help = document.getElementById("help");
  const list = (rows, as) => make("dl", { class: "keys" }, rows.flatMap(([name, says]) => [make("dt", {}, make(as, {}, name)), make("dd", {}, says)]));
  help.append(make("h2", { id: "help-title" }, "Keys"), list(KEYS, "kbd"), make("h2", {}, "Marks"), list(SIGNS, "code"),
    make("p", { class: "soft" }, "The address of the page names what is shown; keep or send it. Printing gives decisions, passes, the selected pass's changes, and the graph with the boxes that are open."),
    make("p", {}, make("button", { type: "button", on: { click: () => help.close() } }, "Close")));
  document.getElementById("help-button").addEventListener("click", () => help.showModal());
  document.addEventListener("keydown", (event) => {
    const typing = event.target.matches("input, select, textarea, dialog *");
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const views = Object.keys(VIEWS), step = { "[": -1, "]": 1 }[event.key];
    if (event.key === "/") document.getElementById("search").focus();
    else if (event.key === "?") help.showModal();
    else if (step) go({ pass: Math.max(0, Math.min(program().last, current.pass + step)), view: current.view === "overview" ? "passes" : current.view });
    else if (/^[1-9]$/.test(event.key) && views[event.key - 1]) go({ view: views[event.key - 1] });
    else if (event.key === "Escape") go({ op: NONE, param: NONE, line: NONE, box: "" }, { keep: true });
    else if (event.key === "Backspace") history.back();
    else if (["j", "k", "ArrowDown", "ArrowUp"].includes(event.key)) {
      const list = document.querySelector("#panel .pane:last-child .list, #panel > .list, #panel .canvas");
      if (!list) return;
      list.focus({ preventScroll: true });
      list.dispatchEvent(new KeyboardEvent("keydown", { key: event.key }));
    } else return;
    event.preventDefault();
  });
}

function setUp() {
  const choose = document.getElementById("program");
  choose.append(...PROGRAMS.map(({ raw, number }) => make("option", { value: number }, raw.label && raw.label !== raw.name ? `${raw.name} (${raw.label})` : raw.name)));
  choose.addEventListener("change", () => go({ ...EMPTY, view: current.view, prog: Number(choose.value) }));
  document.getElementById("pick-program").hidden = PROGRAMS.length < 2;
  const tabs = document.getElementById("tabs");
  tabs.append(...Object.entries(VIEWS).map(([view, [name]]) => make("button", { type: "button", role: "tab", id: `tab-${view}`, "aria-controls": "panel", data: { view }, on: { click: () => go({ view }) } }, name)));
  tabs.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const all = [...tabs.children], next = all[(all.findIndex((tab) => tab.dataset.view === current.view) + step + all.length) % all.length];
    go({ view: next.dataset.view });
    next.focus();
    event.stopPropagation();
  });
  setUpSearch();
  setUpHelp();
  window.addEventListener("popstate", showAddress);
  window.addEventListener("beforeprint", preparePrint);
  window.addEventListener("afterprint", () => document.getElementById("print").replaceChildren());
  showAddress();
  performance.mark("drawn");
  const warm = () => program().index.length;
  if (window.requestIdleCallback) window.requestIdleCallback(warm); else setTimeout(warm, 200);
}
setUp();
