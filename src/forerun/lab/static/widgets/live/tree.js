// A draft drawn as a tree, from the last committed token on the left to the deepest guesses on the right.
const ROW = 26; // pixels
const COLUMN = 104;
const PAD = 10;
const BOX = 84;
const MOST_CHARACTERS = 9;

export const isChain = (nodes) => nodes.every((node, i) => node.parent === i - 1);

// Every node's column and row: a leaf takes a row of its own, a parent stands beside its first child.
export function layout(nodes) {
  const children = new Map();
  nodes.forEach((node, i) => children.set(node.parent, [...(children.get(node.parent) ?? []), i]));
  const places = [];
  let rows = 0;
  const place = (node, column) => {
    const own = children.get(node) ?? [];
    const first = rows;
    own.forEach((child) => place(child, column + 1));
    if (own.length === 0) rows += 1;
    places[node + 1] = { column, row: own.length === 0 ? rows - 1 : first };
  };
  place(-1, 0);
  return { places, rows, columns: 1 + Math.max(...places.map((one) => one.column)) };
}

export function drawTree(lab, round, kindOfNext) {
  const { svg } = lab;
  const { places, rows, columns } = layout(round.nodes);
  const width = 2 * PAD + 24 + columns * COLUMN;
  const height = 2 * PAD + rows * ROW;
  const x = (one) => PAD + (one.column === 0 ? 0 : 24 + (one.column - 1) * COLUMN);
  const y = (one) => PAD + one.row * ROW + ROW / 2;
  const right = (one) => x(one) + (one.column === 0 ? 10 : BOX);
  const root = places[0];
  const edges = round.nodes.map((node, i) => {
    const from = places[node.parent + 1];
    const to = places[i + 1];
    const middle = (right(from) + x(to)) / 2;
    return svg("path", { class: `edge is-${node.verdict}`, d: `M${right(from)},${y(from)} C${middle},${y(from)} ${middle},${y(to)} ${x(to)},${y(to)}` });
  });
  const boxes = round.nodes.map((node, i) => {
    const at = places[i + 1];
    const text = node.text.length > MOST_CHARACTERS ? `${node.text.slice(0, MOST_CHARACTERS - 1)}…` : node.text;
    return svg("g", { class: `node is-${node.verdict}` },
      svg("title", {}, `${node.text}: draft ${lab.plot.format(node.draft_prob, 3)}, target ${lab.plot.format(node.target_prob, 3)}, ${node.verdict}`),
      svg("rect", { x: x(at), y: y(at) - 10, width: BOX, height: 20, rx: 5 }),
      svg("text", { x: x(at) + BOX / 2, y: y(at) + 4.5, "text-anchor": "middle" }, text.replaceAll(" ", "·")));
  });
  const accepted = round.nodes.filter((node) => node.verdict === "accepted").length;
  return svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `A tree of ${round.nodes.length} nodes, ${columns - 1} deep; a path of ${accepted} was accepted. The table below lists them.` },
    edges, svg("circle", { class: `root ${kindOfNext}`, cx: x(root) + 5, cy: y(root), r: 5 }), boxes);
}
