// Landscape: the speed-up over alpha and K, with what a draft token costs and what checking costs.
import { breakEvenAlpha, expectedTokens, optimalGamma, speedup } from "../lib/formulas.js";
import { drawMap, makeMap, stripeShare } from "../lib/speedmap.js";

export const MOST_K = 16;
const EXAMPLE = { alpha: 0.7, k: 5, c: 0.2 };
const BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512];
const CONTEXTS = [[0, "none"], [1000, "1,000"], [8000, "8,000"], [32000, "32,000"]];
const FREE = Array(MOST_K + 1).fill(1);

export async function mount(element, lab) {
  const { el, controls, plot, settings } = lab;
  const { format, clamp } = plot;
  const [machine, [tokensRight, tokensLesson]] = await Promise.all([
    lab.fetchJson("machine"),
    lab.theory(
      { function: "expected_tokens", arguments: { alpha: EXAMPLE.alpha, gamma: EXAMPLE.k } },
      { function: "double_counted_tokens", arguments: { alpha: EXAMPLE.alpha, gamma: EXAMPLE.k } }),
  ]);

  const state = {
    alpha: settings.number("landscape.alpha", EXAMPLE.alpha, 0, 1),
    k: Math.round(settings.number("landscape.k", EXAMPLE.k, 1, MOST_K)),
    c: settings.number("landscape.c", EXAMPLE.c, 0, 1),
    check: settings.get("landscape.check", "free"),
    batch: Math.round(settings.number("landscape.batch", 0, 0, BATCHES.length - 1)), // its index
    measured: null,
    published: null,
  };
  const curves = { free: FREE, machine: machineCurve(machine.passes), roofline: FREE };
  let roofs = null; // by batch: { c, verify_ratios, free_rows }
  const v = () => curves[state.check] ?? FREE;

  // ---------------------------------------------------------------------------------------------------------- the map

  const place = el("div", { class: "plot map" });
  const marker = el("div", { class: "marker", role: "slider", tabindex: 0, "aria-label": "Marker on the map: left and right move alpha, up and down K",
    "aria-valuemin": 0, "aria-valuemax": 1 });
  const pointer = el("div", { class: "pointer", "aria-hidden": "true" }, el("span", {}));
  let geometry = null;
  const surface = plot.canvas(place, (context, width, height) => {
    geometry = makeMap(width, height, MOST_K);
    drawMap(context, geometry, { c: state.c, v: v(), colours: lab.colours(), published: machine.published, chosen: state.published, measured: state.measured });
    follow();
  }, { role: "img", "aria-label": "Map of the speed-up: acceptance alpha to the right, drafted tokens K upwards" });
  place.append(marker, pointer);

  function move(x, y) {
    const near = geometry.pointAt(x, y, machine.published);
    if (near >= 0) return choosePublished(near);
    return set({ alpha: clamp(geometry.x.invert(x), 0, 1), k: clamp(Math.round(geometry.y.invert(y)), 1, MOST_K) });
  }
  plot.draggable(surface.node, move);
  plot.draggable(marker, (x, y, event) => {
    const box = surface.node.getBoundingClientRect();
    set({ alpha: clamp(geometry.x.invert(event.clientX - box.left), 0, 1), k: clamp(Math.round(geometry.y.invert(event.clientY - box.top)), 1, MOST_K) });
  });
  marker.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [-0.01, 0], ArrowRight: [0.01, 0], ArrowUp: [0, 1], ArrowDown: [0, -1], Home: [-1, 0], End: [1, 0] };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const [alpha, k] = moves[event.key];
    set({ alpha: clamp(Math.round((state.alpha + alpha) * 100) / 100, 0, 1), k: clamp(state.k + k, 1, MOST_K) });
  });

  function follow() {
    if (!geometry) return;
    const value = speedup(state.alpha, state.k, state.c, v()[state.k]);
    marker.style.transform = `translate(${geometry.x(state.alpha)}px, ${geometry.y(state.k)}px)`;
    marker.setAttribute("aria-valuenow", state.alpha.toFixed(2));
    marker.setAttribute("aria-valuetext", `alpha ${format(state.alpha, 2)}, K ${state.k}: ${format(value, 2)} times`);
    pointer.style.transform = `translate(${geometry.stripe.x + geometry.stripe.width}px, ${geometry.stripe.y(stripeShare(value))}px)`;
    pointer.firstChild.textContent = `${format(value, 2)}×`;
  }

  // --------------------------------------------------------------------------------------------------------- the knobs

  const alphaKnob = controls.slider({ label: "acceptance α", min: 0, max: 1, step: 0.01, value: state.alpha, format: (x) => format(x, 2), onInput: (alpha) => set({ alpha }) });
  const kKnob = controls.slider({ label: "drafted tokens K", min: 1, max: MOST_K, step: 1, value: state.k, onInput: (k) => set({ k }) });
  const cKnob = controls.slider({ label: "cost of a draft token c", min: 0, max: 1, step: 0.01, value: state.c, format: (x) => format(x, 2), onInput: (c) => set({ c }),
    help: "seconds of one draft token / seconds of one target token" });
  const numbers = controls.readouts([
    ["tokens", "tokens / round"], ["cost", "cost / round", "in passes of the target over one token: K c + v"],
    ["speedup", "speed-up"], ["best", "best K here"],
  ]);
  numbers.element.classList.add("two");
  const verdict = el("p", { class: "verdict", role: "status" });

  const measureButton = controls.button("Measure it here", measure);
  const measureSaid = el("p", { class: "note", role: "status" }, `Generates with ${machine.model} on this machine, plainly and with K drafted tokens.`);
  const publishedChoice = controls.select({
    label: "Published points (Leviathan et al. 2023, table 4)", value: "",
    options: [["", "none"], ...machine.published.map((point, i) => [String(i), `${point.task}, ${point.draft}, T = ${point.temperature}`])],
    onChange: (i) => (i === "" ? set({ published: null }) : choosePublished(Number(i))),
  });
  const publishedSaid = el("p", { class: "note", role: "status" });

  function choosePublished(i) {
    const point = machine.published[i];
    set({ alpha: point.alpha, k: point.gamma, c: point.c, check: "free", published: i });
  }

  async function measure() {
    measureButton.disabled = true;
    measureSaid.textContent = "Generating, plainly and with drafts …";
    try {
      const found = await lab.fetchJson("measure", { spec_length: state.k });
      if (found.alpha === null) {
        measureSaid.textContent = `The drafter ${found.draft} drafted nothing for this text.`;
        return;
      }
      set({ measured: found, alpha: found.alpha, k: found.k, check: "machine", ...(found.c === null ? {} : { c: clamp(found.c, 0, 1) }) });
      const promised = speedup(found.alpha, found.k, state.c, v()[found.k]);
      measureSaid.textContent = `Measured with the drafter ${found.draft}: α̂ = ${format(found.alpha, 2)}, ${format(found.tokens_per_round, 2)} tokens per round, `
        + `${format(found.plain_tokens_per_s, 0)} → ${format(found.tokens_per_s, 0)} tokens/s: ${format(found.speedup, 2)}×. The formula, with this machine's costs, says ${format(promised, 2)}×. `
        + (found.is_same ? "Both texts are the same." : "The texts differ: see docs/exactness.md.");
      lab.events.dispatchEvent(new CustomEvent("measured", { detail: found }));
    } catch (error) {
      measureSaid.textContent = error.message;
    } finally {
      measureButton.disabled = false;
    }
  }

  // --------------------------------------------------------------------------------------------- what checking costs

  const checks = controls.segments({
    label: "Checking K tokens is", value: state.check, onChange: (check) => set({ check }),
    options: [["free", "Free"], ["machine", "Measured"], ["roofline", "Roofline"]],
  });
  const choices = (list) => list.map((name) => [name, name]);
  const roofKnobs = {
    target: controls.select({ label: "target", options: choices(machine.shapes), value: settings.get("landscape.target", "llama-3.1-8b"), onChange: loadRoofs }),
    draft: controls.select({ label: "draft", options: choices(machine.shapes), value: settings.get("landscape.draft", "llama-3.2-1b"), onChange: loadRoofs }),
    machine: controls.select({ label: "machine", options: choices(machine.machines), value: settings.get("landscape.machine", machine.machines[0]), onChange: loadRoofs }),
    context: controls.select({ label: "context, tokens", options: CONTEXTS.map(([num, text]) => [String(num), text]), value: settings.get("landscape.context", "1000"), onChange: loadRoofs }),
  };
  const batchKnob = controls.slider({ label: "requests in a batch", min: 0, max: BATCHES.length - 1, step: 1, value: state.batch, format: (i) => String(BATCHES[i]),
    onInput: (batch) => { set({ batch }); useRoof(); } });
  const roofPanel = el("div", { class: "stack" }, batchKnob.element,
    el("div", { class: "pairs" }, Object.values(roofKnobs).map((knob) => knob.element)));
  const curveSaid = el("p", { class: "note" });
  const curvePlace = el("div", { class: "plot curve" });
  const curve = plot.canvas(curvePlace, drawCurve, { role: "img", "aria-label": "Time of a pass over M tokens in passes over one" });

  async function loadRoofs() {
    const given = Object.fromEntries(Object.entries(roofKnobs).map(([name, knob]) => [name, name === "context" ? Number(knob.value) : knob.value]));
    const isUsual = Object.entries(given).every(([name, value]) => !settings.get(`landscape.${name}`) && value === usual[name]);
    if (!isUsual) for (const [name, value] of Object.entries(given)) settings.set(`landscape.${name}`, value);
    [roofs] = await lab.theory({ function: "roofline", arguments: { ...given, batch: BATCHES, max_gamma: MOST_K } });
    useRoof();
  }
  const usual = { target: "llama-3.1-8b", draft: "llama-3.2-1b", machine: machine.machines[0], context: 1000 };

  function useRoof() {
    const roof = roofs[state.batch];
    curves.roofline = roof.verify_ratios;
    if (state.check === "roofline") set({ c: clamp(roof.c, 0, 1) });
    else redraw();
  }

  function drawCurve(context, width, height) {
    const colours = lab.colours();
    const x = plot.scale([1, MOST_K + 1], [34, width - 12]);
    const highest = Math.max(2.5, Math.min(6, Math.max(...v(), ...curves.machine)), v()[state.k]);
    const y = plot.scale([0, highest * 1.05], [height - 38, 10]);
    context.font = "12px system-ui, sans-serif";
    context.lineWidth = 1;
    for (const value of plot.ticks(0, highest, 4)) {
      rule(context, [[34, y(value)], [width - 12, y(value)]], value ? colours.line : colours.muted);
      text(context, format(value, value % 1 ? 1 : 0), 28, y(value) + 4, colours.muted, "right");
    }
    for (const m of [1, 5, 9, 13, 17]) text(context, String(m), x(m), height - 21, colours.muted, "center");
    text(context, "tokens M in one pass", (34 + width - 12) / 2, height - 4, colours.muted, "center");
    context.save();
    context.beginPath();
    context.rect(30, 4, width - 36, height - 38);
    context.clip();
    for (const [name, values] of Object.entries(curves)) {
      if (name === "roofline" && !roofs) continue;
      const isChosen = name === state.check;
      context.lineWidth = isChosen ? 3 : 1.5;
      context.setLineDash(name === "free" ? [2, 4] : name === "roofline" ? [7, 4] : []);
      rule(context, values.map((value, k) => [x(k + 1), y(value)]), isChosen ? colours.target : colours.muted);
      context.setLineDash([]);
    }
    context.restore();
    context.fillStyle = colours.target;
    context.beginPath();
    context.arc(x(state.k + 1), y(v()[state.k]), 5, 0, 7);
    context.fill();
  }

  // ------------------------------------------------------------------------------------------ what there is to find

  const go = (next) => () => set({ published: null, ...next });
  const better = optimalGamma(EXAMPLE.alpha, EXAMPLE.c, FREE);
  const rounds = EXAMPLE.c * EXAMPLE.k + 1;
  const example = el("table", {},
    el("thead", {}, el("tr", {}, el("td", {}), ["equation (1)", "that lesson"].map((text) => el("th", { scope: "col" }, text)))),
    el("tbody", {},
      el("tr", {}, el("th", { scope: "row" }, "tokens / round"), [tokensRight, tokensLesson].map((one) => el("td", {}, format(one, 4)))),
      el("tr", {}, el("th", { scope: "row" }, "speed-up"), [tokensRight, tokensLesson].map((one) => el("td", {}, `${format(one / rounds, 4)}×`)))));
  const findings = el("ol", { class: "findings" }, [
    ["The worked example", { ...EXAMPLE, check: "free" },
      `α = ${EXAMPLE.alpha}, K = ${EXAMPLE.k}, c = ${EXAMPLE.c}. A widespread lesson adds one token too many: its (1 − αᴷ) / (1 − α) + 1 gives two tokens at α = 0, where a rejected first guess leaves exactly one.`, example],
    ["K beyond the ridge", { alpha: 0.7, k: 14, c: 0.2, check: "free" }, `Here K = ${better} is best: each later guess is reached so rarely that it costs more than it brings.`],
    ["α below c", { alpha: 0.3, k: 3, c: 0.4, check: "free" }, "No K pays where a guess costs more than it is likely to be worth (Corollary 3.9): left of α = c the map has no ridge."],
    ["c → 0", { alpha: 0.8, k: MOST_K, c: 0, check: "free" }, "Guesses for nothing, as from a search in the text: longer is always better, and the limit is 1 / (1 − α)."],
    ["α → 1", { alpha: 1, k: 8, c: 0.1, check: "free" }, "Every guess is right: K + 1 tokens per round. Only the draft's own time is left."],
    ["A batch that computes already", { alpha: 0.7, k: 5, check: "roofline", batch: 8 }, "With hundreds of requests the pass is bound by arithmetic, and each token to check costs its full price."],
  ].map(([name, next, why, more]) => el("li", {}, controls.button(name, async () => {
    if (next.check === "roofline" && !roofs) await loadRoofs();
    go(next)();
    if (next.check === "roofline") useRoof();
  }), el("div", { class: "stack" }, el("p", { class: "note" }, why), more))));

  const regimes = ["slow", "unlikely", "busy"].map(() => ({ said: el("p", { class: "note" }), item: el("li", {}) }));
  regimes[0].item.append(el("h4", {}, "The draft is too slow"), regimes[0].said);
  regimes[1].item.append(el("h4", {}, "Too little is accepted"), regimes[1].said);
  regimes[2].item.append(el("h4", {}, "The pass is busy already"), regimes[2].said);

  function explain() {
    const { alpha, k, c } = state;
    const ratio = v()[k];
    const needed = breakEvenAlpha(k, c, ratio);
    const best = optimalGamma(alpha, c, v());
    const value = speedup(alpha, k, c, ratio);
    const isSlow = alpha <= c;
    const isUnlikely = !isSlow && (needed === null || alpha < needed);
    const isBusy = ratio >= 1.25;
    [isSlow, isUnlikely, isBusy].forEach((isHere, i) => regimes[i].item.classList.toggle("here", isHere));
    regimes[0].said.textContent = isSlow
      ? `c = ${format(c, 2)} is not below α = ${format(alpha, 2)}: a guess takes longer than it saves, for every K.`
      : `c = ${format(c, 2)} is below α = ${format(alpha, 2)}: one guess alone pays, ${format((1 + alpha) / (1 + c), 2)}× if checking is free.`;
    regimes[1].said.textContent = needed === null
      ? `K = ${k} does not pay even at α = 1.`
      : `K = ${k} pays from α = ${format(needed, 2)} on; it is ${format(alpha, 2)}.`;
    regimes[2].said.textContent = `A pass over ${k + 1} tokens takes ${format(ratio, 2)} times one over a single token`
      + (state.check === "roofline" && roofs ? `, with ${BATCHES[state.batch]} requests in the batch: ${format(BATCHES[state.batch] * (k + 1), 0)} rows, of which about ${format(roofs[state.batch].free_rows, 0)} are free.` : ".");
    verdict.replaceChildren(...(value >= 1
      ? [el("b", { class: "is-accepted" }, `${format(value, 2)}×`), k === best ? ": the best K for this α and c." : `. K = ${best} would give ${format(speedup(alpha, best, c, v()[best]), 2)}×.`]
      : [el("b", { class: "is-rejected" }, `${format(value, 2)}×: slower than plain decoding.`), best ? ` K = ${best} would still pay, ${format(speedup(alpha, best, c, v()[best]), 2)}×.` : " No K pays here."]));
  }

  // -------------------------------------------------------------------------------------------------------- one state

  const KEYS = ["alpha", "k", "c", "check", "batch"];
  let drawn = "";

  function set(next) {
    if (!("published" in next) && ("alpha" in next || "k" in next)) next = { ...next, published: null };
    Object.assign(state, next);
    for (const key of KEYS) if (key in next) settings.set(`landscape.${key}`, typeof state[key] === "number" ? Number(state[key].toFixed(4)) : state[key]);
    if (next.check === "roofline" && !roofs) loadRoofs();
    redraw();
  }

  // Only what has changed is drawn: while the marker moves, the map behind it stays.
  const redraw = plot.perFrame(() => {
    const map = JSON.stringify([state.c, state.check, state.published, state.measured, v()]);
    if (map !== drawn) { drawn = map; surface.draw(); } else follow();
    curve.draw();
    for (const [knob, value] of [[alphaKnob, state.alpha], [kKnob, state.k], [cKnob, state.c], [batchKnob, state.batch]]) if (knob.value !== value) knob.set(value);
    checks.set(state.check);
    roofPanel.hidden = state.check !== "roofline";
    publishedChoice.set(state.published === null ? "" : String(state.published));
    const tokens = expectedTokens(state.alpha, state.k);
    const cost = state.c * state.k + v()[state.k];
    const best = optimalGamma(state.alpha, state.c, v());
    numbers.set({ tokens: format(tokens, 4), cost: format(cost, 3), speedup: `${format(tokens / cost, 4)}×`, best: best ? String(best) : "none pays" });
    const point = machine.published[state.published];
    publishedSaid.textContent = point ? `Published: ${format(point.measured, 1)}×. Theorem 3.8 says ${format(tokens / cost, 2)}× for its α = ${point.alpha}, γ = ${point.gamma}, c = ${point.c}.` : "Diamonds on the map; each has a c of its own, which choosing it sets.";
    curveSaid.textContent = {
      free: "Dotted: checking K tokens takes as long as making one, as the paper assumes. It is nearly so while the weights are what a pass waits for.",
      machine: machine.passes.one_row_s === null
        ? "Nothing has been measured on this machine yet: this is a usual curve. Drafting with the pacing “auto” measures it."
        : `Solid: measured on this machine with ${machine.model} (${machine.precision}); a pass over one token takes ${format(machine.passes.one_row_s * 1000, 1)} ms.`,
      roofline: "Dashed: the longer of bytes / bandwidth and operations / peak, in bfloat16. c is that of this draft and this batch.",
    }[state.check];
    explain();
  });
  lab.perf = { ...lab.perf, landscape: redraw.times };

  element.replaceChildren(
    el("div", { class: "card" }, el("div", { class: "split" },
      el("div", { class: "stack" }, place,
        controls.legend([["ink", "best K (ridge)", "line"], ["ink", "break-even, 1×", "dashed"], ["ink", "published", "diamond"], ["target", "measured here", "dot"]]),
        verdict),
      el("div", { class: "stack" }, alphaKnob.element, kKnob.element, cKnob.element, numbers.element,
        el("hr", { class: "rule" }), el("div", { class: "row" }, measureButton), measureSaid, publishedChoice.element, publishedSaid))),
    el("div", { class: "card" }, el("div", { class: "split" },
      el("div", { class: "stack" }, el("h3", {}, "What checking costs: the time of a pass over M tokens / over one"), curvePlace),
      el("div", { class: "stack" }, checks.element, curveSaid, roofPanel))),
    el("div", { class: "halves" },
      el("div", { class: "card" }, el("h3", {}, "Things to find"), findings),
      el("div", { class: "card" }, el("h3", {}, "Where it does not pay"), el("ul", { class: "regimes" }, regimes.map((regime) => regime.item)))));
  lab.onTheme(() => { surface.draw(); curve.draw(); });
  lab.events.addEventListener("measured", (event) => { if (event.detail !== state.measured) set({ measured: event.detail }); });
  if (state.check === "roofline") await loadRoofs();
  redraw();
}

// t(M) / t(1) at M = K + 1 rows, linear between what was measured, and beyond.
function machineCurve({ rows, ratios }) {
  return Array.from({ length: MOST_K + 1 }, (_, k) => {
    const m = k + 1;
    const i = Math.min(rows.length - 2, Math.max(0, rows.findIndex((row) => row >= m) - 1));
    const share = (m - rows[i]) / (rows[i + 1] - rows[i]);
    return ratios[i] + share * (ratios[i + 1] - ratios[i]);
  });
}

function rule(context, points, colour) {
  context.strokeStyle = colour;
  context.beginPath();
  points.forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
  context.stroke();
}

function text(context, said, x, y, colour, align) {
  context.fillStyle = colour;
  context.textAlign = align;
  context.fillText(said, x, y);
}
