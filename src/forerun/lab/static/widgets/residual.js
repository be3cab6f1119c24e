// Residual: what is rejected of the draft comes back where the target has more, so that the sum is the target.
import { acceptance, l1Distance, l1Noise, residual } from "../lib/formulas.js";
import { noiseStrip } from "../lib/noise.js";
import { PRESETS, WORDS, pair } from "../lib/pair.js";

const MARGIN = { left: 34, right: 4, top: 14, bottom: 26 };
const LEAST_TOP = 0.4; // of the scale
const MANY = 1000;
const FRAMES = 40; // in which they are shown to arrive

export function mount(element, lab) {
  const { el, svg, controls, plot } = lab;
  const { format } = plot;
  const counts = { accepted: WORDS.map(() => 0), correction: WORDS.map(() => 0) };
  let last = null; // the last round
  let left = 0; // rounds still to be shown
  let top = LEAST_TOP;
  let dragged = null;

  // ------------------------------------------------------------------------------------------------------ the rounds

  const total = () => sum(counts.accepted) + sum(counts.correction);

  function round() {
    const { target, draft } = pair;
    const drawn = draw(draft);
    const coin = Math.random();
    const ratio = target[drawn] / draft[drawn];
    const isAccepted = coin * draft[drawn] < target[drawn];
    const token = isAccepted ? drawn : draw(residual(target, draft));
    counts[isAccepted ? "accepted" : "correction"][token] += 1;
    last = { drawn, coin, ratio, isAccepted, token };
  }

  function reset() {
    for (const kind of Object.values(counts)) kind.fill(0);
    left = 0;
    last = null;
  }

  function run(num) {
    const isCalm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    left += num;
    if (num === 1 || isCalm) return finish();
    const frame = () => {
      for (let i = Math.min(left, MANY / FRAMES); i > 0; i -= 1, left -= 1) round();
      show();
      if (left > 0) requestAnimationFrame(frame);
    };
    return requestAnimationFrame(frame);
  }

  function finish() {
    for (; left > 0; left -= 1) round();
    show();
  }

  // --------------------------------------------------------------------------------------------------------- the bars

  const hatch = svg("pattern", { id: "hatch-rejected", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    svg("rect", { width: 2.2, height: 5, class: "fill-rejected" }));
  const axis = svg("g", { class: "axis", "aria-hidden": "true" });
  const groups = WORDS.map((word, x) => makeGroup(word, x));
  const picture = svg("svg", { role: "group", "aria-label": "Probability of each word: target, draft, and what was emitted" },
    svg("defs", {}, hatch), axis, groups.map((group) => group.node));
  const place = el("div", { class: "plot bars" }, picture);

  function makeGroup(word, x) {
    const rect = (name) => svg("rect", { class: name });
    const parts = {
      target: rect("fill-target"),
      kept: rect("fill-accepted"), rejected: rect("hatched-rejected"), frame: rect("frame-draft"),
      emitted: rect("fill-accepted"), refill: rect("fill-correction"), goal: svg("line", { class: "goal" }),
      label: svg("text", { class: "word", "text-anchor": "middle", "aria-hidden": "true" }, word),
    };
    const handles = { target: makeHandle("target", word, x), draft: makeHandle("draft", word, x) };
    const node = svg("g", { "data-word": word },
      parts.target, parts.kept, parts.rejected, parts.frame, parts.emitted, parts.refill, parts.goal, parts.label,
      handles.target.node, handles.draft.node);
    return { node, parts, handles };
  }

  function makeHandle(which, word, x) {
    const column = svg("rect", { class: "column", fill: "transparent" });
    const grip = svg("rect", { class: `grip grip-${which}`, rx: 2.5 });
    const touch = svg("rect", { class: "touch", fill: "transparent" });
    const node = svg("g", {
      class: "handle", role: "slider", tabindex: 0, "aria-label": `${which} of ${word}`, "aria-orientation": "vertical",
      "aria-valuemin": 0, "aria-valuemax": 0.97,
    }, column, grip, touch);
    node.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      node.setPointerCapture(event.pointerId);
      dragged = node;
      move(event);
    });
    const move = (event) => {
      const box = picture.getBoundingClientRect();
      change(which, x, scaleY(box.height).invert(event.clientY - box.top));
    };
    node.addEventListener("pointermove", (event) => { if (node.hasPointerCapture(event.pointerId)) move(event); });
    node.addEventListener("lostpointercapture", () => { dragged = null; show(); });
    node.addEventListener("keydown", (event) => {
      const value = pair[which][x];
      const steps = { ArrowUp: 0.01, ArrowRight: 0.01, ArrowDown: -0.01, ArrowLeft: -0.01, PageUp: 0.05, PageDown: -0.05, Home: -1, End: 1 };
      if (!(event.key in steps)) return;
      event.preventDefault();
      change(which, x, value + steps[event.key]);
    });
    return { node, column, grip, touch };
  }

  function change(which, x, value) {
    reset(); // rounds of another pair say nothing of this one
    pair.move(which, x, value);
  }

  const scaleY = (height) => plot.scale([0, top], [height - MARGIN.bottom, MARGIN.top]);

  function draw_(width, height) {
    const { target, draft } = pair;
    const num = total();
    const share = (kind, x) => (num ? counts[kind][x] / num : 0);
    const tallest = Math.max(...target, ...draft, ...(num > 200 ? WORDS.map((_, x) => share("accepted", x) + share("correction", x)) : []));
    if (!dragged) top = Math.max(LEAST_TOP, Math.ceil(tallest * 10 + 0.2) / 10);
    const y = scaleY(height);
    const ground = y(0);
    const step = (width - MARGIN.left - MARGIN.right) / WORDS.length;
    const bar = Math.min(30, (step - Math.max(5, step * 0.16)) / 3);
    picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    drawAxis(width, y);
    WORDS.forEach((_, x) => {
      const start = MARGIN.left + step * x + (step - bar * 3) / 2;
      const { parts, handles } = groups[x];
      const set = (part, i, from, to) => box(part, start + bar * i + 1, bar - 2, y(to), y(from));
      const kept = Math.min(target[x], draft[x]);
      set(parts.target, 0, 0, target[x]);
      set(parts.kept, 1, 0, kept);
      set(parts.rejected, 1, kept, draft[x]);
      set(parts.frame, 1, 0, draft[x]);
      const emitted = Math.min(top, share("accepted", x));
      const all = Math.min(top, share("accepted", x) + share("correction", x));
      set(parts.emitted, 2, 0, emitted);
      set(parts.refill, 2, emitted, all);
      line(parts.goal, start + bar * 2 - 1, start + bar * 3 + 1, y(target[x]), num > 0);
      parts.label.setAttribute("x", start + bar * 1.5);
      parts.label.setAttribute("y", height - 8);
      [["target", 0], ["draft", 1]].forEach(([which, i]) => {
        const { node, column, grip, touch } = handles[which];
        const at = y(Math.min(top, pair[which][x]));
        box(column, start + bar * i, bar, MARGIN.top, ground + 4);
        box(grip, start + bar * i, bar, at - 2.5, at + 2.5);
        box(touch, start + bar * i - 3, bar + 6, at - 16, at + 16);
        node.setAttribute("aria-valuenow", pair[which][x].toFixed(3));
      });
    });
  }

  function drawAxis(width, y) {
    axis.replaceChildren(...plot.ticks(0, top, 4).flatMap((value) => [
      svg("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value), class: value ? "grid" : "ground" }),
      svg("text", { x: MARGIN.left - 6, y: y(value) + 4, "text-anchor": "end" }, value ? value.toFixed(1) : "0"),
    ]));
  }

  // ------------------------------------------------------------------------------------------------- beside the bars

  const numbers = controls.readouts([
    ["z", "rejection mass Z", "how often a draw of the draft is rejected: the sum of max(0, draft − target)"],
    ["alpha", "accept rate, by formula", "the sum of min(target, draft) = 1 − Z"],
    ["samples", "rounds run"],
    ["rate", "accept rate, counted"],
  ]);
  numbers.element.classList.add("two");
  const strip = noiseStrip("L1 to the target");
  const story = el("p", { class: "story", "aria-live": "polite" });
  const identity = el("table", {});
  const presets = PRESETS.map(([name, target, draft]) =>
    controls.button(name, () => { reset(); pair.set(target, draft); }));
  const many = controls.button(`Run ${MANY}`, () => run(MANY), { primary: true });

  function tell() {
    if (!last) return story.replaceChildren("The cat sat on the … Press Step for one word.");
    const { drawn, coin, ratio, isAccepted, token } = last;
    const word = (x, kind) => el("b", { class: `is-${kind}` }, WORDS[x]);
    const ratioText = `target / draft = ${format(ratio, 2)}`;
    return story.replaceChildren(
      "The draft says ", word(drawn, "draft"), `: ${ratioText}, coin ${format(coin, 2)}. `,
      ...(isAccepted
        ? [el("b", { class: "is-accepted" }, "Accepted"), "."]
        : [el("b", { class: "is-rejected" }, "Rejected"), "; drawn from the residual: ", word(token, "correction"), "."]));
  }

  function tabulate() {
    const { target, draft } = pair;
    const kept = target.map((p, x) => Math.min(p, draft[x]));
    const back = residual(target, draft);
    const lost = residual(draft, target);
    const cell = (value, kind) => el("td", { class: kind && value > 0.00005 ? `is-${kind}` : null }, format(value, 3));
    const line_ = (name, p, q, a, r, c) => el("tr", {}, el("th", { scope: "row" }, name), cell(p, "target"), cell(q, "draft"),
      cell(a, "accepted"), cell(r, "rejected"), cell(c, "correction"), cell(a + c, "target"));
    identity.replaceChildren(
      el("thead", {}, el("tr", {}, ["word", "p", "q", "min(p, q)", "(q − p)⁺", "(p − q)⁺", "emitted"].map((text) => el("th", { scope: "col" }, text)))),
      el("tbody", {}, WORDS.map((word, x) => line_(word, target[x], draft[x], kept[x], lost[x], back[x])),
        line_("sum", 1, 1, sum(kept), sum(lost), sum(back))));
  }

  const again = plot.fitted(place, draw_);
  function show() {
    const { target, draft } = pair;
    const num = total();
    const alpha = acceptance(target, draft);
    const noise = num ? l1Noise(target, num) : null;
    again();
    numbers.set({
      z: format(1 - alpha, 3),
      alpha: format(alpha, 3),
      samples: format(num, 0),
      rate: num ? format(sum(counts.accepted) / num, 3) : "–",
    });
    strip.set(num ? l1Distance(counts.accepted.map((one, x) => one + counts.correction[x]), target) : null, noise);
    tell();
    if (details.open) tabulate();
  }

  const details = el("details", { onToggle: () => show() },
    el("summary", {}, "Show the identity"),
    el("p", { class: "note" }, "Of each word q, the part min(p, q) is accepted, and (q − p)⁺ is rejected. The rejected mass Z is drawn again ",
      "from (p − q)⁺ / Z, so the word comes out with min(p, q) + (p − q)⁺ = p: the target, whatever the draft is."),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "The identity by word" }, identity));

  element.replaceChildren(
    el("div", { class: "card" }, el("div", { class: "split" },
      el("div", { class: "stack" },
        controls.chips("Pair", presets),
        place,
        controls.legend([["target", "target"], ["draft", "draft", "outline"], ["accepted", "accepted"], ["rejected", "rejected", "hatched"], ["correction", "refilled by the residual"]]),
        el("p", { class: "note" }, "Three bars for each word: target, draft, and what the rounds have emitted; the line on the third is the target. Drag the first two, or focus one and use the arrow keys.")),
      el("div", { class: "stack" },
        el("div", { class: "row" }, controls.button("Step", () => run(1)), many, controls.button("Reset", () => { reset(); show(); })),
        story, numbers.element, strip.element))),
    el("div", { class: "card" }, details));
  pair.onChange(show);
  show();
}

const sum = (values) => values.reduce((total, one) => total + one, 0);

// An index, in proportion to the weights; never one of weight 0.
function draw(weights) {
  let goal = Math.random() * sum(weights);
  let found = 0;
  for (let x = 0; x < weights.length; x += 1) {
    if (weights[x] <= 0) continue;
    found = x;
    goal -= weights[x];
    if (goal < 0) break;
  }
  return found;
}

function box(part, x, width, yTop, yBottom) {
  part.setAttribute("x", x);
  part.setAttribute("width", Math.max(0, width));
  part.setAttribute("y", yTop);
  part.setAttribute("height", Math.max(0, yBottom - yTop));
}

function line(part, x1, x2, y, isShown) {
  Object.entries({ x1, x2, y1: y, y2: y, visibility: isShown ? "visible" : "hidden" }).forEach(([name, value]) => part.setAttribute(name, value));
}
