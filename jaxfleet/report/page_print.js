// What is printed: decisions, passes, the changes of the selected pass, and the graph as it is open.


const MOST_PRINTED = 400; // changed lines of the selected pass
const PAPER = { width: 700, height: 940, least: 0.5, most: 60 }; // of a page, in pixels; the graph's least scale; pages

function preparePrint() {
  const it = program(), stage = current.pass, { raw } = it;
  document.getElementById("print").replaceChildren(make("h1", {}, `jaxfleet: ${raw.name}`),
    make("h2", {}, "Decisions"), decisions(raw.decisions), ...(raw.notes.length ? [make("h2", {}, "Notes of the capture"), decisions(raw.notes)] : []), make("h2", {}, "Passes"),
    table(["pass", "added", "removed", "changed", "moved", "operators", "time"], it.stages.map((each) => [each.options || each.name, ...[0, 1, 2, 4, 5].map((n) => each.counts[n]), seconds(each.s)]), [1, 2, 3, 4, 5, 6]),
    ...printedChanges(it, stage), ...printedGraph(it, stage));
}
function printedChanges(it, stage) {
  const rows = stage ? pairsOf(it, stage).filter((row) => row.how !== "same") : [];
  const line = (number, mark, at) => make("div", { class: "text" }, `${mark} `, code(it.tokens(number, at)));
  const parts = rows.slice(0, MOST_PRINTED).flatMap((row) => [row.left === NONE ? null : line(row.left, "\u2212", stage - 1), row.right === NONE ? null : line(row.right, "+", stage)]);
  return [make("h2", {}, `What ${it.stages[stage].name} changed`), ...parts.filter(Boolean), rows.length > MOST_PRINTED ? make("p", {}, `and ${rows.length - MOST_PRINTED} more`) : ""];
}

// The graph with the boxes that are open on the screen, or would be: in pieces that a page has room for.
function printedGraph(it, stage) {
  const drawing = drawingOf(it, stage);
  if (!drawing) return [];
  const { root } = drawing.boxes;
  drawing.layOut();
  const scale = Math.max(PAPER.least, Math.min(1, PAPER.width / root.width));
  const pieces = drawing.pieces(PAPER.width / scale, PAPER.height / scale), shown = pieces.slice(0, PAPER.most);
  return [make("h2", { class: "graph-title" }, `Graph after ${stage}. ${it.stages[stage].name}`), make("p", {}, placementSigns()), ...shown,
    pieces.length > shown.length ? make("p", {}, `and ${count(pieces.length - shown.length, "page")} more: close boxes of the graph to print it on fewer`) : ""];
}
