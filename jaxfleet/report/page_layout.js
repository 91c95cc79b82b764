// The layout of boxes: layers from the top down, the same for the same boxes. Sizes are in pixels.


const SPACE = { across: 22, down: 42, inside: 16, head: 34, between: 40, widest: 1500 };
const SIZES = { letter: 7.3, small: 6.7, least: 128, most: 250, op: 40, closed: 62 };
const SWEEPS = 4;

// Gives a box its size, and what is in it x, y; boxes keep their layout until `stale` says otherwise.
function layOut(box, open) {
  if (box.isOp || !open.has(box)) {
    const more = box.isOp ? [box.text] : linesOf(box), longest = Math.max(...more.map((each) => Math.min(34, each.length)));
    box.width = Math.max(SIZES.least, Math.min(SIZES.most, Math.max((box.name.length + 4) * SIZES.letter, longest * SIZES.small) + 20));
    box.height = box.isOp ? SIZES.op : SIZES.closed;
    return;
  }
  for (const item of box.items) if (!item.laid) layOut(item, open);
  const groups = connected(box).map(([items, links]) => layered(items, links));
  const [width, height] = packed(groups);
  box.routes = groups.flatMap((group) => group.routes);
  box.width = Math.max(width + 2 * SPACE.inside, (box.name.length + 18) * SIZES.letter + 40);
  box.height = height + SPACE.head + SPACE.inside;
  for (const item of box.items) { item.x += SPACE.inside; item.y += SPACE.head; item.laid = true; }
  for (const { points } of box.routes) for (const point of points) { point[0] += SPACE.inside; point[1] += SPACE.head; }
}
// Says that a box changed its size: those around it are laid out anew, and no other.
function stale(box) {
  box.laid = false;
  for (const each of box.around()) each.laid = false;
}

// The boxes in a box that links join, with those links; in order of their first boxes.
function connected(box) {
  const group = new Map(box.items.map((item) => [item, item]));
  const find = (item) => { while (group.get(item) !== item) item = group.get(item); return item; };
  const place = new Map(box.items.map((item, n) => [item, n]));
  for (const { from, to } of box.links.values()) {
    const [a, b] = [find(from), find(to)];
    if (a !== b) group.set(place.get(a) < place.get(b) ? b : a, place.get(a) < place.get(b) ? a : b);
  }
  const found = new Map();
  for (const item of box.items) {
    const first = find(item);
    if (!found.has(first)) found.set(first, [[], []]);
    found.get(first)[0].push(item);
  }
  for (const link of box.links.values()) found.get(find(link.from))[1].push(link);
  return [...found.values()];
}

// Puts groups on shelves, about twice as wide as high, and returns the size of all.
function packed(groups) {
  const area = groups.reduce((sum, { width, height }) => sum + (width + SPACE.between) * (height + SPACE.between), 0);
  const wide = Math.max(...groups.map(({ width }) => width), Math.min(SPACE.widest, Math.sqrt(area * 2)));
  let x = 0, y = 0, high = 0, width = 0;
  for (const group of groups) {
    if (x && x + group.width > wide) { y += high + SPACE.between / 2; x = high = 0; }
    for (const item of group.items) { item.x += x; item.y += y; }
    for (const { points } of group.routes) for (const point of points) { point[0] += x; point[1] += y; }
    width = Math.max(width, x + group.width);
    high = Math.max(high, group.height);
    x += group.width + SPACE.between;
  }
  return [width, y + high];
}

// Lays joined boxes out in layers: every link goes down, but those back to a box before.
function layered(items, links) {
  const order = new Map(items.map((item, n) => [item, n]));
  const isDown = ({ from, to }) => order.get(from) < order.get(to);
  const down = links.filter(isDown), back = links.filter((link) => !isDown(link));
  const rows = rowsOf(layersOf(items, down), down);
  arrange(rows);
  let y = 0;
  for (const row of rows) {
    const high = Math.max(...row.map((slot) => slot.height));
    for (const slot of row) Object.assign(slot, { top: slot.item ? y + (high - slot.height) / 2 : y, bottom: slot.item ? y + (high + slot.height) / 2 : y + high });
    y += high + SPACE.down;
  }
  const left = Math.min(...rows.map((row) => row[0].center - row[0].width / 2));
  const right = Math.max(...rows.map((row) => row[row.length - 1].center + row[row.length - 1].width / 2)) - left;
  for (const slot of rows.flat()) {
    slot.center -= left;
    if (slot.item) Object.assign(slot.item, { x: slot.center - slot.width / 2, y: slot.top });
  }
  const routes = [...down.map((link) => ({ link, points: routeOf(link) })), ...back.map((link) => ({ link, back: true, points: backwards(link, right) }))];
  return { items, routes, width: right + (back.length ? 30 : 0), height: y - SPACE.down };
}
// The layer of each box: below all that it reads; what reads nothing stands just above its reader.
function layersOf(items, down) {
  const layer = new Map(items.map((item) => [item, 0])), reads = new Set(), next = new Map();
  const into = new Map(items.map((item) => [item, []]));
  for (const { from, to } of down) { into.get(to).push(from); reads.add(to); next.set(from, [...(next.get(from) || []), to]); }
  for (const item of items) for (const from of into.get(item)) layer.set(item, Math.max(layer.get(item), layer.get(from) + 1));
  for (const item of items) if (!reads.has(item) && next.has(item)) layer.set(item, Math.min(...next.get(item).map((to) => layer.get(to))) - 1);
  const layers = [];
  for (const item of items) (layers[layer.get(item)] ||= []).push(item);
  return layers.filter(Boolean).flatMap(narrow);
}
// A layer that is too wide, as several.
function narrow(layer) {
  const width = layer.reduce((sum, item) => sum + item.width + SPACE.across, 0), parts = Math.ceil(width / SPACE.widest);
  const each = Math.ceil(layer.length / parts);
  return Array.from({ length: Math.ceil(layer.length / each) }, (_, n) => layer.slice(n * each, (n + 1) * each));
}
// Rows of slots: a box each, and a gap in every row that the links of a box pass.
function rowsOf(layers, down) {
  const rows = layers.map((layer) => layer.map((item) => ({ item, width: item.width, height: item.height, up: [], down: [] })));
  rows.forEach((row, n) => row.forEach((slot) => Object.assign(slot.item, { slot, row: n, way: [slot] })));
  for (const { from, to } of [...down].sort((a, b) => a.to.row - b.to.row)) {
    const { way } = from;
    for (let row = from.row + way.length; row < to.row; row++) {
      const slot = { item: null, width: 12, height: 0, up: [way[way.length - 1]], down: [] };
      slot.up[0].down.push(slot);
      way.push(slot);
      rows[row].push(slot);
    }
    const above = way[to.row - from.row - 1];
    above.down.push(to.slot);
    to.slot.up.push(above);
  }
  return rows;
}
// Orders each row by the middle of its neighbours, and moves slots towards them.
function arrange(rows) {
  const number = () => { for (const row of rows) row.forEach((slot, n) => { slot.at = (n + 0.5) / row.length; }); };
  const mean = (slots, what, otherwise) => (slots.length ? slots.reduce((sum, slot) => sum + slot[what], 0) / slots.length : otherwise);
  number();
  for (let sweep = 0; sweep < SWEEPS; sweep++) {
    const up = sweep % 2 === 1;
    for (const row of up ? [...rows].reverse() : rows) {
      const wanted = new Map(row.map((slot) => [slot, mean(up ? slot.down : slot.up, "at", slot.at)]));
      row.sort((a, b) => wanted.get(a) - wanted.get(b));
      row.forEach((slot, n) => { slot.at = (n + 0.5) / row.length; });
    }
  }
  for (const row of rows) settle(row, (slot) => slot.at * 200 * row.length);
  for (let sweep = 0; sweep < SWEEPS; sweep++) {
    const up = sweep % 2 === 1;
    for (const row of up ? [...rows].reverse() : rows) settle(row, (slot) => mean(up ? slot.down : slot.up, "center", slot.center));
  }
}
// Puts the slots of a row as near as their order lets them to where they want to be.
function settle(row, wanted) {
  const aims = row.map(wanted);
  let edge = -Infinity;
  row.forEach((slot, n) => {
    slot.center = Math.max(aims[n], edge + slot.width / 2);
    edge = slot.center + slot.width / 2 + SPACE.across;
  });
  const off = row.reduce((sum, slot, n) => sum + aims[n] - slot.center, 0) / row.length;
  for (const slot of row) slot.center += off;
}
// The points of a link: out of its box, down the gaps, into the next.
function routeOf({ from, to }) {
  const start = from.slot, end = to.slot, points = [[start.center, start.bottom]];
  for (const slot of from.way.slice(1, to.row - from.row)) points.push([slot.center, slot.top], [slot.center, slot.bottom]);
  return [...points, [end.center, end.top]];
}
function backwards({ from, to }, right) {
  const a = from.slot, b = to.slot;
  return [[a.center + a.width / 2, (a.top + a.bottom) / 2], [right + 22, (a.top + a.bottom) / 2], [right + 22, (b.top + b.bottom) / 2], [b.center + b.width / 2, (b.top + b.bottom) / 2]];
}
