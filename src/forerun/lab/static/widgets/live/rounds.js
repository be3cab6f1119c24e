// The rounds of a generation: a row for each, and the one that is chosen in full.
import { drawTree, isChain } from "./tree.js";

const shown = (text) => (text === "" ? "␀" : text.replaceAll(" ", "·")); // a space is seen

// { element, detail, clear(), add(round), choose(number), onChoose }; isMoved(event): whether the pointer came by itself
export function makeRounds(lab, onChoose, isMoved) {
  const { el } = lab;
  const list = el("div", { class: "live-rounds", role: "listbox", tabindex: 0, "aria-label": "Rounds", "data-part": "rounds" });
  const detail = el("div", { class: "live-detail", "data-part": "round" });
  let rounds = [];
  let rows = [];
  let chosen = 0;

  list.addEventListener("keydown", (event) => {
    const steps = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity };
    if (!(event.key in steps) || rounds.length === 0) return;
    event.preventDefault();
    choose(lab.plot.clamp(chosen + steps[event.key], 1, rounds.length), { scroll: true });
  });

  const chip = (text, kind) => el("span", { class: `live-chip ${kind}` }, shown(text));

  function add(round) {
    rounds.push(round);
    const path = round.nodes.filter((node) => node.verdict === "accepted");
    const rejected = round.nodes.filter((node) => node.verdict === "rejected");
    const untested = round.nodes.filter((node) => node.verdict === "untested");
    const row = el("div", { role: "option", id: `live-round-${round.number}`, "aria-selected": "false",
      onClick: () => choose(round.number), onPointerenter: (event) => { if (event.pointerType === "mouse" && isMoved(event)) choose(round.number); } },
      el("span", { class: "number" }, round.number),
      el("span", { class: "share", title: "accepted of drafted" }, `${round.num_accepted}/${round.nodes.length}`),
      el("span", { class: "live-chips" },
        path.map((node) => chip(node.text, "is-accepted")),
        isChain(round.nodes) ? rejected.map((node) => chip(node.text, "is-rejected")) : null,
        chip(round.next, `is-${round.next_origin}`),
        isChain(round.nodes) ? untested.map((node) => chip(node.text, "is-untested")) : null));
    rows.push(row);
    list.append(row);
    if (chosen === 0) choose(1);
  }

  function choose(number, { scroll = false } = {}) {
    if (!rounds[number - 1] || number === chosen) return;
    rows[chosen - 1]?.setAttribute("aria-selected", "false");
    chosen = number;
    const row = rows[number - 1];
    row.setAttribute("aria-selected", "true");
    list.setAttribute("aria-activedescendant", row.id);
    if (scroll) {
      const top = row.offsetTop - list.offsetTop;
      if (top < list.scrollTop) list.scrollTop = top;
      else if (top + row.offsetHeight > list.scrollTop + list.clientHeight) list.scrollTop = top + row.offsetHeight - list.clientHeight;
    }
    detail.replaceChildren(...describe(lab, rounds[number - 1]));
    onChoose(number);
  }

  return {
    element: list,
    detail,
    clear() {
      rounds = [];
      rows = [];
      chosen = 0;
      list.replaceChildren();
      list.removeAttribute("aria-activedescendant");
      detail.replaceChildren();
    },
    add,
    choose: (number) => choose(number, { scroll: true }),
    get all() { return rounds; },
  };
}

function describe(lab, round) {
  const { el } = lab;
  const kind = `is-${round.next_origin}`;
  const token = el("code", { class: kind }, shown(round.next));
  if (round.nodes.length === 0) {
    return [el("h3", {}, `Round ${round.number}`), el("p", {}, "Nothing was drafted: the target wrote ", token, " itself, as plain decoding does.")];
  }
  const end = round.next_origin === "bonus"
    ? ["Nothing on the path was rejected, so the target adds ", token, ", a bonus."]
    : ["What was rejected is replaced by ", token, ", the correction."];
  const granted = round.granted > round.nodes.length ? ` of ${round.granted} that were granted` : "";
  return [
    el("h3", {}, `Round ${round.number}`),
    el("p", {}, `${round.nodes.length} drafted${granted}, ${round.num_accepted} accepted. `, ...end),
    isChain(round.nodes) ? null : el("div", { class: "scroll live-tree", tabindex: 0, role: "group", "aria-label": "The draft as a tree" }, drawTree(lab, round, kind)),
    el("div", { class: "scroll live-nodes", tabindex: 0, role: "group", "aria-label": "The drafted tokens" }, table(lab, round)),
  ].filter(Boolean);
}

function table(lab, round) {
  const { el } = lab;
  const head = ["token", "verdict", "draft q", "target p", "coin"];
  return el("table", {},
    el("thead", {}, el("tr", {}, head.map((text) => el("th", { scope: "col" }, text)))),
    el("tbody", {}, round.nodes.map((node) => el("tr", { class: `is-${node.verdict}` },
      el("th", { scope: "row" }, el("code", {}, shown(node.text))),
      el("td", { class: "verdict" }, node.verdict),
      probability(lab, node.draft_prob, "draft"),
      probability(lab, node.target_prob, "target"),
      coin(lab, node)))));
}

const probability = (lab, value, colour) => lab.el("td", { class: "prob" },
  lab.el("span", { class: "meter", "aria-hidden": "true", style: { "--share": value ?? 0, "--meter": `var(--${colour})` } }),
  lab.el("span", {}, Number.isInteger(value) ? value : value < 0.0005 && value !== null ? "<0.001" : lab.plot.format(value, 3)));

// The part of the line below the chance accepts; the tick is the coin.
function coin(lab, node) {
  const { el, plot } = lab;
  if (node.verdict === "untested") return el("td", {}, "–");
  if (node.chance === null) return el("td", {}, node.verdict === "accepted" ? "drawn by the target, too" : "not what the target drew");
  const text = node.coin === null
    ? (node.chance >= 1 ? "accepted for sure" : "rejected for sure")
    : `${plot.format(node.coin, 2)} ${node.coin < node.chance ? "<" : "≥"} ${node.chance < 0.005 ? Number(node.chance.toPrecision(1)) : plot.format(node.chance, 2)}`;
  return el("td", { class: "prob" },
    el("span", { class: `coin is-${node.verdict}`, "aria-hidden": "true", style: { "--share": node.chance } },
      node.coin === null ? null : el("span", { class: "tick", style: { left: `${100 * node.coin}%` } })),
    el("span", {}, text));
}
