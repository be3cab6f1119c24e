// Landscape: the speed-up over alpha and K, with what a draft token costs and what checking costs.
import { expectedTokens, optimalGamma, speedup } from "../lib/formulas.js";
import { drawCurve, measuredCurve } from "./landscape/curve.js";
import { EXAMPLE, findings } from "./landscape/findings.js";
import { drawMap, makeMap, stripeShare } from "./landscape/map.js";
import { regimesOf } from "./landscape/regimes.js";
import { makeRoofline } from "./landscape/roofline.js";

const MOST_K = 16;
const FREE = Array(MOST_K + 1).fill(1);
const CHECKS = ["free", "machine", "roofline"];

export async function mount(element, lab) {
  const { el, controls, plot, settings } = lab;
  const { format, clamp } = plot;
  const example = { alpha: EXAMPLE.alpha, gamma: EXAMPLE.k };
  const [machine, [right, lesson]] = await Promise.all([
    lab.fetchJson("machine"),
    lab.theory({ function: "expected_tokens", arguments: example }, { function: "double_counted_tokens", arguments: example }),
  ]);

  const given = settings.get("landscape.check", "free");
  const state = {
    alpha: settings.number("landscape.alpha", EXAMPLE.alpha, 0, 1),
    k: Math.round(settings.number("landscape.k", EXAMPLE.k, 1, MOST_K)),
    c: settings.number("landscape.c", EXAMPLE.c, 0, 1),
    check: CHECKS.includes(given) ? given : "free",
    measured: null, // a point that was measured here
    published: null, // the number of a published one that is shown
  };
  const curves = { free: FREE, machine: measuredCurve(machine.passes, MOST_K), roofline: null }; // v(K) by K
  let freeRows = null;
  const v = () => curves[state.check] ?? FREE;
  const gain = (k) => speedup(state.alpha, k, state.c, v()[k]);

  // ---------------------------------------------------------------------------------------------------------- the map

  const place = el("div", { class: "plot map" });
  const marker = el("div", { class: "marker", role: "slider", tabindex: 0, "aria-valuemin": 0, "aria-valuemax": 1,
    "aria-label": "Marker on the map: left and right move alpha, up and down K" });
  const pointer = el("div", { class: "pointer", "aria-hidden": "true" }, el("span", {}));
  let map = null;
  const surface = plot.canvas(place, (context, width, height) => {
    map = makeMap(width, height, MOST_K);
    drawMap(context, map, { ...state, v: v(), colours: lab.colours(), points: machine.published });
    follow();
  }, { role: "img", "aria-label": "Map of the speed-up: acceptance alpha to the right, drafted tokens K upwards" });
  place.append(marker, pointer);

  const moveTo = (x, y) => set({ alpha: clamp(map.x.invert(x), 0, 1), k: clamp(Math.round(map.y.invert(y)), 1, MOST_K) });
  plot.draggable(surface.node, (x, y, event) => {
    const near = event.type === "pointerdown" ? map.pointAt(x, y, machine.published) : -1;
    if (near >= 0) showPublished(near);
    else moveTo(x, y);
  });
  plot.draggable(marker, (_x, _y, event) => {
    const box = surface.node.getBoundingClientRect();
    moveTo(event.clientX - box.left, event.clientY - box.top);
  });
  marker.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [-0.01, 0], ArrowRight: [0.01, 0], ArrowUp: [0, 1], ArrowDown: [0, -1], Home: [-1, 0], End: [1, 0] };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const [alpha, k] = moves[event.key];
    set({ alpha: clamp(Math.round((state.alpha + alpha) * 100) / 100, 0, 1), k: clamp(state.k + k, 1, MOST_K) });
  });

  // The marker, and the arrow at the stripe: all that moves while the marker is dragged.
  function follow() {
    if (!map) return;
    const value = gain(state.k);
    marker.style.transform = `translate(${map.x(state.alpha)}px, ${map.y(state.k)}px)`;
    marker.setAttribute("aria-valuenow", state.alpha.toFixed(2));
    marker.setAttribute("aria-valuetext", `alpha ${format(state.alpha, 2)}, K ${state.k}: ${format(value, 2)} times`);
    pointer.style.transform = `translate(${map.stripe.x + map.stripe.width}px, ${map.stripe.y(stripeShare(value))}px)`;
    pointer.firstChild.textContent = `${format(value, 2)}×`;
  }

  // --------------------------------------------------------------------------------------------------------- the knobs

  const knobs = {
    alpha: controls.slider({ label: "acceptance α", min: 0, max: 1, step: 0.01, value: state.alpha, format: (x) => format(x, 2), onInput: (alpha) => set({ alpha }) }),
    k: controls.slider({ label: "drafted tokens K", min: 1, max: MOST_K, step: 1, value: state.k, onInput: (k) => set({ k }) }),
    c: controls.slider({ label: "cost of a draft token c", min: 0, max: 1, step: 0.01, value: state.c, format: (x) => format(x, 2), onInput: (c) => set({ c }),
      help: "seconds of one draft token / seconds of one target token" }),
  };
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
    onChange: (i) => (i === "" ? set({ published: null }) : showPublished(Number(i))),
  });
  const publishedSaid = el("p", { class: "note", role: "status" });

  function showPublished(i) {
    const { alpha, gamma, c } = machine.published[i];
    set({ alpha, k: gamma, c, check: "free", published: i });
  }

  async function measure() {
    measureButton.disabled = true;
    measureSaid.textContent = "Generating, plainly and with drafts …";
    try {
      const found = await lab.fetchJson("measure", { spec_length: state.k });
      if (found.alpha === null) measureSaid.textContent = `The drafter ${found.draft} drafted nothing for this text.`;
      else showMeasured(found);
    } catch (error) {
      measureSaid.textContent = error.message;
    } finally {
      measureButton.disabled = false;
    }
  }

  function showMeasured(found) {
    set({ measured: found, alpha: found.alpha, k: found.k, check: "machine", ...(found.c === null ? {} : { c: clamp(found.c, 0, 1) }) });
    measureSaid.textContent = `Measured with the drafter ${found.draft}: α̂ = ${format(found.alpha, 2)}, ${format(found.tokens_per_round, 2)} tokens per round, `
      + `${format(found.plain_tokens_per_s, 0)} → ${format(found.tokens_per_s, 0)} tokens/s: ${format(found.speedup, 2)}×. The formula, with the passes that were measured here and nothing beside them, says ${format(gain(found.k), 2)}×. `
      + (found.is_same ? "Both texts are the same." : "The texts differ, which rounding between nearly tied tokens can explain.");
  }

  // --------------------------------------------------------------------------------------------- what checking costs

  const checks = controls.segments({ label: "Checking K tokens is", value: state.check, onChange: (check) => set({ check }),
    options: [["free", "Free"], ["machine", "Measured"], ["roofline", "Roofline"]] });
  const roofline = makeRoofline(lab, {
    shapes: machine.shapes, mixtures: machine.mixtures, machines: machine.machines, mostK: MOST_K,
    onChange: (roof) => {
      curves.roofline = roof.verify_ratios;
      freeRows = roof.free_rows;
      set(state.check === "roofline" ? { c: clamp(roof.c, 0, 1) } : {});
    },
  });
  const curveSaid = el("p", { class: "note" });
  const curvePlace = el("div", { class: "plot curve" });
  const curve = plot.canvas(curvePlace, (context, width, height) =>
    drawCurve(context, width, height, { curves, chosen: curves[state.check] ? state.check : "free", k: state.k, colours: lab.colours() }),
  { role: "img", "aria-label": "Time of a pass over M tokens in passes over one" });

  const curveTexts = {
    free: "Dotted: checking K tokens takes as long as making one, as the paper assumes. It is nearly so while the weights are what a pass waits for.",
    machine: machine.passes.one_row_s === null
      ? "Nothing has been measured on this machine yet: this is a usual curve. Drafting with the pacing “auto” measures it."
      : `Solid: measured on this machine with ${machine.model} (${machine.precision}); a pass over one token takes ${format(machine.passes.one_row_s * 1000, 1)} ms.`,
    roofline: "Dashed: the longer of bytes / bandwidth and operations / peak, in bfloat16. c is that of this draft and this batch. Of a mixture of experts a pass reads those that some row chooses.",
  };

  // ------------------------------------------------------------------------------- what there is to find, and why not

  const table = ([head, ...rows]) => el("table", {},
    el("thead", {}, el("tr", {}, head.map((text) => (text ? el("th", { scope: "col" }, text) : el("td", {}))))),
    el("tbody", {}, rows.map(([name, ...cells]) => el("tr", {}, el("th", { scope: "row" }, name), cells.map((cell) => el("td", {}, cell))))));
  const list = el("ol", { class: "findings" }, findings(right, lesson, FREE).map((one) => el("li", {},
    controls.button(one.name, () => go(one.place)),
    el("div", { class: "stack" }, el("p", { class: "note" }, one.why), one.table ? table(one.table) : null))));
  const regimes = el("ul", { class: "regimes" });

  async function go({ batch, ...place_ }) {
    set(place_);
    if (batch) { await roofline.load(); roofline.setBatch(batch); }
  }

  function explain() {
    const value = gain(state.k);
    const best = optimalGamma(state.alpha, state.c, v());
    const found = regimesOf({ ...state, ratio: v()[state.k], batch: state.check === "roofline" ? roofline.batch : null, freeRows });
    regimes.replaceChildren(...found.map(({ name, isHere, why }) =>
      el("li", { class: isHere ? "here" : "" }, el("h4", {}, name), el("p", { class: "note" }, why))));
    const better = best ? `K = ${best} would give ${format(gain(best), 2)}×.` : "No K pays here.";
    if (value >= 1) {
      verdict.replaceChildren(el("b", { class: "is-accepted" }, `${format(value, 2)}×`), state.k === best ? ": the best K for this α and c." : `. ${better}`);
    } else {
      const why = found.filter((one) => one.isHere).map((one) => one.why);
      verdict.replaceChildren(el("b", { class: "is-rejected" }, `${format(value, 2)}×: slower than plain decoding.`), ` ${better} `, el("span", { class: "why" }, why.join(" ")));
    }
  }

  // -------------------------------------------------------------------------------------------------------- one state

  let drawn = "";

  function set(next) {
    if (!("published" in next) && ("alpha" in next || "k" in next)) next = { ...next, published: null };
    Object.assign(state, next);
    for (const key of ["alpha", "k", "c"]) if (key in next) settings.set(`landscape.${key}`, Number(state[key].toFixed(4)));
    if ("check" in next) settings.set("landscape.check", state.check);
    if (state.check === "roofline" && !curves.roofline && "check" in next) roofline.load();
    redraw();
  }

  // Only what has changed is drawn: while the marker moves, the map behind it stays.
  const redraw = plot.perFrame(() => {
    const behind = JSON.stringify([state.c, state.check, state.published, state.measured, v()]);
    if (behind === drawn) follow();
    else { drawn = behind; surface.draw(); }
    curve.draw();
    for (const [name, knob] of Object.entries(knobs)) if (knob.value !== state[name]) knob.set(state[name]);
    checks.set(state.check);
    roofline.element.hidden = state.check !== "roofline";
    const tokens = expectedTokens(state.alpha, state.k);
    const best = optimalGamma(state.alpha, state.c, v());
    numbers.set({
      tokens: format(tokens, 4), cost: format(state.c * state.k + v()[state.k], 3),
      speedup: `${format(gain(state.k), 4)}×`, best: best ? String(best) : "none pays",
    });
    const point = machine.published[state.published];
    publishedChoice.set(state.published === null ? "" : String(state.published));
    publishedSaid.textContent = point
      ? `Published: ${format(point.measured, 1)}×. Theorem 3.8 says ${format(gain(state.k), 2)}× for its α = ${point.alpha}, γ = ${point.gamma}, c = ${point.c}.`
      : "Diamonds on the map; each has a c of its own, which choosing it sets.";
    curveSaid.textContent = curveTexts[state.check];
    explain();
  });
  lab.perf = { ...lab.perf, landscape: redraw.times };

  element.replaceChildren(
    el("div", { class: "card" }, el("div", { class: "split" },
      el("div", { class: "stack" }, place,
        controls.legend([["ink", "best K (ridge)", "line"], ["ink", "break-even, 1×", "dashed"], ["ink", "published", "diamond"], ["target", "measured here", "dot"]]),
        el("p", { class: "note" }, "speed-up = (1 − α", el("sup", {}, "K + 1"), ") / ((1 − α) (K c + v)): tokens of a round over what it costs, "
          + "with v the passes of the target over one token that checking K tokens takes (Leviathan et al. 2023, theorem 3.8, where v = 1)"),
        verdict),
      el("div", { class: "stack" }, knobs.alpha.element, knobs.k.element, knobs.c.element, numbers.element,
        el("hr", { class: "rule" }), el("div", { class: "row" }, measureButton), measureSaid, publishedChoice.element, publishedSaid))),
    el("div", { class: "card" }, el("div", { class: "split" },
      el("div", { class: "stack" }, el("h3", {}, "What checking costs: the time of a pass over M tokens / over one"), curvePlace),
      el("div", { class: "stack" }, checks.element, curveSaid, roofline.element))),
    el("div", { class: "halves" },
      el("div", { class: "card" }, el("h3", {}, "Things to find"), list),
      el("div", { class: "card" }, el("h3", {}, "Where it does not pay"), regimes)));
  lab.onTheme(() => { surface.draw(); curve.draw(); });
  if (state.check === "roofline") await roofline.load();
  redraw();
}
