// Unbiasedness: rounds of the engine's own verification rules, counted, beside what a perfect sampler would show.
import { chiSquare, l1Distance, l1Noise } from "../lib/formulas.js";
import { noiseStrip } from "../lib/noise.js";
import { PRESETS, WORDS, pair } from "../lib/pair.js";
import { drawCourse, drawDeviations } from "./unbiasedness/plots.js";

const ROUNDS = 5000;
const PART = 250; // rounds of one request
const MOST_SIZE = { chain: 8, independent: 3, distinct: 3 };
const USUAL_SIZE = { chain: 4, independent: 2, distinct: 2 };
const WRONG = 1e-9; // of the exact distance: what is less is rounding
const VISIBLE = 1e-3; // of the same, on a pair that is worth showing

export async function mount(element, lab) {
  const { el, controls, plot, settings } = lab;
  const { format } = plot;
  const { rules, mutants } = await lab.fetchJson("rules");
  const named = Object.fromEntries(rules.map((rule) => [rule.name, rule]));
  const known = (name, usual) => (name in named ? name : usual);

  const state = {
    rule: known(settings.get("unbiased.rule"), "ratio"),
    shape: settings.get("unbiased.shape") in MOST_SIZE ? settings.get("unbiased.shape") : "chain",
    size: Math.round(settings.number("unbiased.size", USUAL_SIZE.chain, 1, MOST_SIZE.chain)),
    mutant: mutants.some((one) => one.name === settings.get("unbiased.mutant")) ? settings.get("unbiased.mutant") : null,
    options: {},
    counted: "first",
  };
  if (!named[state.rule].shapes.includes(state.shape)) state.shape = "chain";
  state.size = Math.min(state.size, MOST_SIZE[state.shape]);
  let seed = Math.round(settings.number("unbiased.seed", Math.floor(Math.random() * 2 ** 31), 0, 2 ** 53));
  let counts = null; // { words [positions][V], accepted [K + 1] }
  let history = []; // [tokens counted, L1]
  let expected = null;
  let tail = null;
  let run = 0; // changes whenever what runs is no longer wanted
  let isRunning = false;

  // -------------------------------------------------------------------------------------------------------- the rounds

  const spec = () => {
    const given = Object.entries(state.options).map(([name, value]) => `${name}=${value}`);
    return given.length ? `${state.rule}:${given.join(",")}` : state.rule;
  };
  const setting = () => ({ target: pair.target, draft: pair.draft, rule: spec(), mutant: state.mutant, shape: state.shape, size: state.size });
  const numRounds = () => (counts ? sum(counts.accepted) : 0);

  // By word: of the first token of each round, or of all that were emitted. Each has the target's distribution.
  function words() {
    if (!counts) return WORDS.map(() => 0);
    return state.counted === "first" ? counts.words[0] : WORDS.map((_, x) => sum(counts.words.map((row) => row[x])));
  }

  function reset() {
    run += 1;
    counts = null;
    history = [];
    tail = null;
    isRunning = false;
    if (!settings.get("unbiased.seed")) seed = Math.floor(Math.random() * 2 ** 31);
  }

  // The probability of so large a chi-square of what is counted now; there is none until it is known.
  async function findTail() {
    const now = words();
    const value = chiSquare(now, pair.target);
    const [probability] = Number.isFinite(value) ? await lab.theory({ function: "chi_square_tail", arguments: { value, num_free: numFree() } }) : [0];
    if (String(now) !== String(words())) return;
    tail = probability;
    show();
  }

  async function play(num) {
    const mine = (run += 1);
    isRunning = true;
    show();
    try {
      for (let left = num; left > 0; left -= PART) {
        const found = await lab.fetchJson("rounds", { ...setting(), first_round: numRounds(), num_rounds: Math.min(PART, left), seed });
        if (mine !== run) return;
        add(found);
        await findTail();
        if (mine !== run) return;
      }
    } catch (error) {
      if (mine === run) problem.textContent = error.message;
    }
    if (mine === run) { isRunning = false; show(); }
  }

  function add(found) {
    counts ??= { words: found.words.map((row) => row.map(() => 0)), accepted: found.accepted.map(() => 0) };
    found.words.forEach((row, i) => row.forEach((one, x) => { counts.words[i][x] += one; }));
    found.accepted.forEach((one, i) => { counts.accepted[i] += one; });
    const now = words();
    history.push([sum(now), l1Distance(now, pair.target)]);
  }

  const numFree = () => Math.max(1, pair.target.filter((one) => one > 0).length - 1);

  // What theory says; asked for again whenever the setting changes, and only the newest answer counts.
  let asked = 0;
  let timer = 0;
  function askTheory(delay_ms = 0) {
    clearTimeout(timer);
    return new Promise((resolve) => { timer = setTimeout(async () => { await theory(); resolve(); }, delay_ms); });
  }
  async function theory() {
    const mine = (asked += 1);
    problem.textContent = "";
    try {
      const found = await lab.fetchJson("expected", setting());
      if (mine !== asked) return;
      expected = found;
      if (state.mutant && found.exact_tv !== null && found.exact_tv < WRONG) await moveToPair(mine);
    } catch (error) {
      if (mine === asked) { expected = null; problem.textContent = error.message; }
    }
    if (mine === asked) show();
  }

  // A wrong rule that is harmless on this pair is shown on the first pair on which it is not.
  async function moveToPair(mine) {
    for (const [name, target, draft] of PRESETS) {
      const found = await lab.fetchJson("expected", { ...setting(), target, draft });
      if (mine !== asked) return;
      if (found.exact_tv > VISIBLE) {
        moved = `On the pair you had, this mistake changes nothing; this is “${name}”, where it does.`;
        pair.set(target, draft);
        return;
      }
    }
  }
  let moved = "";

  // ------------------------------------------------------------------------------------------------------- the controls

  const group = (isLossless) => rules.filter((rule) => rule.is_lossless === isLossless).map((rule) => [rule.name, rule.name]);
  const ruleChoice = controls.select({ label: "Verification rule", options: { exact: group(true), lossy: group(false) }, value: state.rule, onChange: (rule) => change({ rule }) });
  const ruleSaid = el("p", { class: "note" });
  const optionPlace = el("div", { class: "stack" });
  const shapes = controls.segments({ label: "Draft", value: state.shape, onChange: (shape) => change({ shape }),
    options: [["chain", "Chain"], ["independent", "Siblings"], ["distinct", "Distinct"]] });
  const size = controls.slider({ label: "drafted tokens K", min: 1, max: MOST_SIZE.chain, step: 1, value: state.size, onInput: (value) => change({ size: value }) });
  const countedChoice = controls.segments({ label: "Counted", value: state.counted, options: [["first", "First tokens"], ["all", "All tokens"]],
    onChange: (counted) => {
      state.counted = counted;
      history = [];
      tail = null;
      show();
      if (sum(words())) findTail().catch((error) => { problem.textContent = error.message; });
    } });
  const wrong = controls.toggle({ label: "Use a wrong rule", value: state.mutant !== null, onChange: (isOn) => change({ mutant: isOn ? mutantChoice.value : null }) });
  const mutantChoice = controls.select({ label: "What is wrong with it", options: mutants.map((one) => [one.name, one.name.replace(/^m\d+ /, "")]), value: state.mutant ?? mutants[0].name,
    onChange: (mutant) => change({ mutant }) });
  const play5000 = controls.button(`Run ${ROUNDS}`, () => play(ROUNDS), { primary: true });
  const problem = el("p", { class: "error", role: "alert" });
  const verdict = el("p", { class: "verdict", role: "status" });
  const strip = noiseStrip("L1 to the target");
  const numbers = controls.readouts([
    ["rounds", "rounds run"], ["tokens", "tokens counted"],
    ["accepted", "mean accepted, counted"], ["theory", "by theory"],
    ["chi", "chi-square"], ["tail", "p-value", "the probability that a perfect sampler is as far off"],
    ["exact", "TV distance, exact", "total variation between the target and what one short round emits, by taking all outcomes of its coins"],
  ]);
  numbers.element.classList.add("two");

  function change(next) {
    moved = "";
    Object.assign(state, next);
    if ("rule" in next) state.options = {};
    const mutant = mutants.find((one) => one.name === state.mutant);
    if (mutant && ("mutant" in next)) { // each mistake is made with its own kind of draft, or rule
      if (mutant.needs in named) Object.assign(state, { rule: mutant.needs, shape: "chain", options: {} });
      else if (mutant.needs !== state.shape || !named[state.rule].shapes.includes(mutant.needs)) Object.assign(state, { shape: mutant.needs, rule: "ratio", options: {} });
      state.counted = "all";
    } else if (mutant && !(state.rule === mutant.needs || state.shape === mutant.needs)) {
      state.mutant = null;
    }
    if (!named[state.rule].shapes.includes(state.shape)) {
      if ("shape" in next) Object.assign(state, { rule: "ratio", options: {} });
      else state.shape = "chain";
    }
    if (next.mutant === null) state.counted = "first";
    if (state.size > MOST_SIZE[state.shape] || ("shape" in next)) state.size = USUAL_SIZE[state.shape];
    for (const name of ["rule", "shape", "size", "mutant"]) settings.set(`unbiased.${name}`, state[name]);
    reset();
    follow();
    show();
    askTheory("size" in next ? 100 : 0);
  }

  function follow() {
    ruleChoice.set(state.rule);
    shapes.set(state.shape);
    size.input.max = MOST_SIZE[state.shape];
    size.element.querySelector("label").textContent = state.shape === "chain" ? "drafted tokens K" : "draws side by side";
    size.set(state.size);
    countedChoice.set(state.counted);
    wrong.set(state.mutant !== null);
    mutantChoice.element.hidden = state.mutant === null;
    if (state.mutant) mutantChoice.set(state.mutant);
    ruleSaid.textContent = named[state.rule].about;
    const options = named[state.rule].options;
    optionPlace.hidden = options.length === 0;
    optionPlace.replaceChildren(...options.map((option) => {
      const least = option.min ?? 0;
      const most = option.max ?? 1;
      const step = option.is_integer ? 1 : (most - least) / 100;
      return controls.slider({ label: option.name, help: option.help, min: option.is_integer ? least : least + step, max: most, step, value: state.options[option.name] ?? option.default,
        format: (x) => format(x, option.is_integer ? 0 : 2), onInput: (value) => changeOption(option.name, value) }).element;
    }));
  }

  function changeOption(name, value) {
    state.options = { ...state.options, [name]: value };
    reset();
    show();
    askTheory(100);
  }

  // ---------------------------------------------------------------------------------------------------------- the plots

  const deviationPlace = el("div", { class: "plot deviations" });
  const deviations = plot.canvas(deviationPlace, (context, width, height) =>
    drawDeviations(context, width, height, { words: WORDS, probs: pair.target, counts: words(), usual: ROUNDS, colours: lab.colours() }),
  { role: "img", "aria-label": "Share minus probability of each word, with the band of a perfect sampler" });
  const coursePlace = el("div", { class: "plot course" });
  const course = plot.canvas(coursePlace, (context, width, height) =>
    drawCourse(context, width, height, { probs: pair.target, history, first: PART, usual: ROUNDS, colours: lab.colours() }),
  { role: "img", "aria-label": "L1 distance by tokens counted, with the band of a perfect sampler" });

  // ------------------------------------------------------------------------------------------------------------ in words

  function say() {
    const num = sum(words());
    const rule = named[state.rule];
    const b = (text, kind) => el("b", { class: `is-${kind}` }, text);
    if (!num) return [moved || (rule.is_lossless ? "" : "This rule is lossy on purpose: expect it to leave the band.")];
    const isFar = tail !== null && tail < 1e-3;
    if (state.mutant && isFar) return [moved, " ", b("Caught.", "rejected"), ` A perfect sampler is as far off with probability ${chance(tail)}.`];
    if (state.mutant) return [moved, " Not caught so far: ", expected?.exact_tv > WRONG ? "the mistake is small on this pair, and needs more rounds." : "on this pair the mistake changes nothing."];
    if (!rule.is_lossless && isFar) return [b("Lossy, and it shows.", "rejected"), " More tokens are accepted, and the distribution is another one."];
    if (isFar) return [b("Outside the noise.", "rejected"), ` A perfect sampler is as far off with probability ${chance(tail)}: run it again.`];
    return [b("Within the noise.", "accepted"), rule.is_lossless ? " Nothing tells this rule from sampling the target itself." : ""];
  }

  const chance = (value) => (value === null ? "–" : value < 1e-4 ? (value < 1e-15 ? "below 10⁻¹⁵" : value.toExponential(0).replace("e-", " · 10^−")) : format(value, 4));

  function show() {
    const now = words();
    const num = sum(now);
    const rounds = numRounds();
    const mean = rounds ? sum(counts.accepted.map((one, i) => one * i)) / rounds : null;
    const spread = rounds ? Math.sqrt(sum(counts.accepted.map((one, i) => one * (i - mean) ** 2)) / rounds / rounds) : null;
    numbers.set({
      rounds: format(rounds, 0),
      tokens: format(num, 0),
      accepted: rounds ? `${format(mean, 3)} ± ${format(2 * spread, 3)}` : "–",
      theory: expected?.mean_accepted === undefined || expected.mean_accepted === null ? "–" : format(expected.mean_accepted, 3),
      chi: num ? format(chiSquare(now, pair.target), 1) : "–",
      tail: num ? chance(tail) : "–",
      exact: expected === null || expected.exact_tv === null ? "–" : expected.exact_tv < WRONG ? "0" : format(expected.exact_tv, 4),
    });
    strip.set(num ? l1Distance(now, pair.target) : null, num ? l1Noise(pair.target, num) : null);
    verdict.replaceChildren(...say());
    play5000.disabled = isRunning;
    play5000.textContent = isRunning ? "Running …" : rounds ? `Run ${ROUNDS} more` : `Run ${ROUNDS}`;
    deviations.draw();
    course.draw();
  }

  element.replaceChildren(
    el("div", { class: "card stack" },
      el("div", { class: "row wide" },
        el("div", { class: "row" }, play5000, controls.button("Reset", () => { reset(); show(); })),
        wrong.element, mutantChoice.element),
      verdict, problem,
      el("div", { class: "split" },
        el("div", { class: "stack" },
          el("h3", {}, "Share minus probability, by word"), deviationPlace,
          el("h3", {}, "L1 to the target, as it goes on"), coursePlace,
          controls.legend([["accepted", "99.9 % of the noise of a perfect sampler", "band"], ["ink", "counted"], ["rejected", "outside"]]),
          el("p", { class: "note" }, "The pair is the one in Residual. Behind each drafted token its words move on by one, so that every position accepts as often as the first; they are counted as if they had not moved.")),
        el("div", { class: "stack" },
          ruleChoice.element, ruleSaid, optionPlace, shapes.element, size.element, countedChoice.element,
          el("hr", { class: "rule" }), numbers.element, strip.element))));
  pair.onChange(() => { reset(); show(); askTheory(150); });
  lab.onTheme(() => { deviations.draw(); course.draw(); });
  follow();
  show();
  await theory();
}

const sum = (values) => values.reduce((total, one) => total + one, 0);
