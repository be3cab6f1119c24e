// Where the time of each step went, as in Figure 5 of Leviathan et al. 2023: blocks by their true begin and end.
const PARTS = [
  ["draft", "draft: the drafter guesses"],
  ["score", "score: one pass of the target"],
  ["judge", "judge: the rule decides"],
  ["commit", "commit: tokens and caches are kept"],
];
const MOST_RUNS = 3; // with a draft, the newest; and the last one without
const ROW = 64;
const TOP = 10;
const AXIS = 26;
const MOST_ZOOM = 400;
const STEP_PIXELS = 48; // that a step gets in the beginning, on average

export function mount(element, lab) {
  const { el, plot, controls } = lab;
  let runs = []; // { name, steps: [{ begin_s, end_s, seconds, kind, tokens, ... }] }
  let own = new Map(); // of the generation that runs: by lane
  let zoom = 1;
  let isOwnZoom = false; // chosen by hand, which stays
  let chosen = null; // [run, step]

  const empty = el("p", { class: "note" }, "No step has run yet: generate something in Live.");
  const zoomer = controls.slider({
    label: "Zoom", min: 0, max: 1, step: 0.005, value: 0, format: (value) => `${plot.format(MOST_ZOOM ** value, 1)}×`,
    onInput: (value) => { isOwnZoom = true; setZoom(MOST_ZOOM ** value); },
  });
  const stage = el("div", { class: "trace-stage" });
  const wide = el("div", { class: "trace-wide" }, stage);
  const scroller = el("div", { class: "scroll trace-scroll", tabindex: 0, role: "slider", "aria-label": "Steps", "data-part": "trace",
    "aria-valuemin": 1, "aria-valuemax": 1, "aria-valuenow": 1 }, wide);
  const readout = el("p", { class: "trace-step", "data-part": "step" });
  const summary = el("ul", { class: "trace-summary", "data-part": "summary" });
  const tables = el("details", { "data-part": "table", onToggle: () => { if (tables.open) fillTables(); } }, el("summary", {}, "The steps as a table"));
  const body = el("div", { class: "card stack", hidden: true },
    el("div", { class: "trace-head" },
      controls.legend([["draft", "draft"], ["target", "score (one pass of the target)"], ["target", "prompt", "hatched"], ["ink", "judge"], ["ink", "commit", "outline"]]),
      zoomer.element),
    scroller, readout, summary, tables);
  element.replaceChildren(empty, body);

  const picture = plot.canvas(stage, draw, { "aria-hidden": "true" });
  const again = plot.perFrame(() => picture.draw());
  lab.onTheme(again);

  // ------------------------------------------------------------------------------------------------------ what comes

  lab.events.addEventListener("live", ({ detail: { name, data } }) => {
    if (name === "begin") begin(data);
    if (name === "prompt" || name === "round") add(name, data);
    if (name === "over") { own = new Map(); show(); }
  });

  function begin(data) {
    const isPlain = data.draft === "none";
    const length = isPlain ? "" : data.spec_length === null ? ", as far as it pays" : `, K = ${data.spec_length}`;
    const run = { name: isPlain ? "plain decoding" : `${data.draft}${length}`, isPlain, steps: [] };
    own.set(data.lane, run);
    const others = runs.filter((one) => !(isPlain && one.isPlain));
    const drafted = [...others.filter((one) => !one.isPlain), ...(isPlain ? [] : [run])].slice(-MOST_RUNS);
    const plain = isPlain ? run : others.find((one) => one.isPlain);
    runs = plain ? [...drafted, plain] : drafted;
    chosen = null;
  }

  function add(kind, data) {
    const run = own.get(data.lane);
    const took = PARTS.reduce((sum, [part]) => sum + data.seconds[part], 0);
    run.steps.push({
      kind, seconds: data.seconds, end_s: data.at_s, begin_s: data.at_s - took, passes: data.draft_depth ?? 0,
      drafted: data.nodes?.length ?? 0, accepted: data.num_accepted ?? 0, tokens: data.tokens?.length ?? 0, prompt: data.num_tokens,
    });
    if (empty.isConnected) empty.remove();
    body.hidden = false;
    again();
  }

  // Behind the end: what need not follow each step.
  function show() {
    if (runs.length === 0) return;
    chosen ??= [runs.length - (runs.at(-1).isPlain && runs.length > 1 ? 2 : 1), 0];
    summary.replaceChildren(...runs.map((run) => el("li", {}, sentence(run))));
    if (tables.open) fillTables();
    if (!isOwnZoom) startZoom();
    choose(chosen);
    again();
  }

  // So that the blocks of a step can be told apart.
  function startZoom() {
    const most = Math.max(...runs.filter((run) => !run.isPlain || runs.length === 1).map((run) => run.steps.length / (run.steps.at(-1)?.end_s ?? 1)));
    zoomer.set(Math.log(plot.clamp((STEP_PIXELS * most * end()) / scroller.clientWidth, 1, MOST_ZOOM)) / Math.log(MOST_ZOOM));
    setZoom(MOST_ZOOM ** zoomer.value);
    scroller.scrollLeft = 0;
  }

  function sentence(run) {
    const whole = run.steps.at(-1)?.end_s ?? 0;
    const shares = PARTS.map(([part]) => [part, run.steps.reduce((sum, step) => sum + step.seconds[part], 0)]);
    const rest = Math.max(0, whole - shares.reduce((sum, [, s]) => sum + s, 0));
    const tokens = run.steps.reduce((sum, step) => sum + step.tokens, 0);
    const percent = (s) => `${plot.format((100 * s) / (whole || 1), 0)} %`;
    return [el("b", {}, run.name), `: ${run.steps.length} steps and ${tokens} tokens in ${plot.format(1000 * whole, 0)} ms: `
      + `${shares.map(([part, s]) => `${part} ${percent(s)}`).join(", ")}, between steps ${percent(rest)}.`];
  }

  function fillTables() {
    tables.replaceChildren(tables.querySelector("summary"), ...runs.map((run) => el("div", { class: "scroll trace-table", tabindex: 0, role: "group", "aria-label": run.name },
      el("table", { "data-run": run.name },
        el("caption", {}, `${run.name}; milliseconds`),
        el("thead", {}, el("tr", {}, ["step", "begin", ...PARTS.map(([part]) => part), "drafted", "accepted", "tokens"].map((text) => el("th", { scope: "col" }, text)))),
        el("tbody", {}, run.steps.map((step, i) => el("tr", {},
          el("th", { scope: "row" }, step.kind === "prompt" ? `${i + 1} (prompt)` : i + 1), el("td", {}, ms(step.begin_s)),
          PARTS.map(([part]) => el("td", {}, ms(step.seconds[part]))),
          [step.drafted, step.accepted, step.tokens].map((num) => el("td", {}, num)))))))));
  }

  const ms = (s) => plot.format(1000 * s, 2);

  // --------------------------------------------------------------------------------------------------------- picture

  const end = () => Math.max(0.001, ...runs.map((run) => run.steps.at(-1)?.end_s ?? 0));

  function setZoom(value) {
    const middle = (scroller.scrollLeft + scroller.clientWidth / 2) / wide.offsetWidth;
    zoom = value;
    wide.style.setProperty("width", `${100 * zoom}%`);
    scroller.scrollLeft = middle * wide.offsetWidth - scroller.clientWidth / 2;
    again();
  }

  function draw(context, width, height) {
    if (runs.length === 0) return;
    const wanted = TOP + runs.length * ROW + AXIS;
    if (Math.abs(height - wanted) > 1) { stage.style.setProperty("height", `${wanted}px`); return; }
    const colour = lab.colours();
    const scale = (width * zoom) / end();
    const x = (s) => s * scale - scroller.scrollLeft;
    const font = getComputedStyle(document.body).fontFamily;
    runs.forEach((run, r) => {
      const top = TOP + r * ROW;
      run.steps.forEach((step, i) => {
        if (x(step.end_s) < 0 || x(step.begin_s) > width) return;
        let at = step.begin_s;
        for (const [part] of PARTS) {
          const to = at + step.seconds[part];
          block(context, part, x(at), Math.max(0.6, x(to) - x(at)), top + 22, 30, colour, step);
          at = to;
        }
        const room = x(step.end_s) - x(step.begin_s);
        if (step.tokens > 0 && room > 26) {
          context.fillStyle = colour.muted;
          context.font = `11px ${font}`;
          context.textAlign = "center";
          context.fillText(room > 60 ? `${step.tokens} token${step.tokens > 1 ? "s" : ""}` : `+${step.tokens}`, (x(step.begin_s) + x(step.end_s)) / 2, top + 61);
        }
        if (chosen && chosen[0] === r && chosen[1] === i) {
          context.strokeStyle = colour.accent;
          context.lineWidth = 2;
          context.strokeRect(x(step.begin_s) - 1.5, top + 19, Math.max(3, room + 3), 36);
        }
      });
      context.fillStyle = colour.ink;
      context.font = `600 12.5px ${font}`;
      context.textAlign = "left";
      context.fillText(run.name, 2, top + 14);
    });
    axis(context, width, height, x, colour, font);
  }

  function block(context, part, left, width, top, height, colour, step) {
    if (part === "draft") {
      context.fillStyle = colour.draft;
      context.fillRect(left, top, width, height);
      const each = width / step.passes;
      if (step.passes > 1 && each > 4) {
        context.fillStyle = colour.raised;
        for (let i = 1; i < step.passes; i += 1) context.fillRect(left + i * each - 0.5, top, 1, height);
      }
    } else if (part === "score" && step.kind === "prompt") {
      context.save();
      context.beginPath();
      context.rect(left, top, width, height);
      context.clip();
      context.strokeStyle = colour.target;
      context.lineWidth = 1.5;
      context.beginPath();
      for (let at = left - height; at < left + width; at += 5) { context.moveTo(at, top + height); context.lineTo(at + height, top); }
      context.stroke();
      context.strokeRect(left + 0.5, top + 0.5, width - 1, height - 1);
      context.restore();
    } else if (part === "commit") {
      context.strokeStyle = colour.ink;
      context.lineWidth = 1;
      if (width > 2) context.strokeRect(left + 0.5, top + 0.5, width - 1, height - 1);
      else { context.fillStyle = colour.muted; context.fillRect(left, top, width, height); }
    } else {
      context.fillStyle = part === "judge" ? colour.ink : colour.target;
      context.fillRect(left, top, width, height);
    }
  }

  function axis(context, width, height, x, colour, font) {
    context.fillStyle = colour.muted;
    context.strokeStyle = colour.line;
    context.font = `11px ${font}`;
    context.textAlign = "center";
    const per = end() / (width * zoom);
    const from = scroller.scrollLeft * per;
    for (const t of plot.ticks(1000 * from, 1000 * (from + width * per), width < 500 ? 4 : 8)) {
      const at = x(t / 1000);
      context.beginPath();
      context.moveTo(at, TOP + 16);
      context.lineTo(at, height - AXIS + 6);
      context.globalAlpha = 0.5;
      context.stroke();
      context.globalAlpha = 1;
      context.fillText(`${t} ms`, plot.clamp(at, 18, width - 22), height - 6);
    }
  }

  // ---------------------------------------------------------------------------------------------------- one of them

  function choose([r, i], { scroll = false } = {}) {
    const run = runs[r];
    if (!run?.steps[i]) return;
    chosen = [r, i];
    const step = run.steps[i];
    const what = step.kind === "prompt" ? `${step.prompt} tokens of the prompt` : step.drafted
      ? `${step.drafted} drafted, ${step.accepted} accepted, ${step.tokens} written` : `${step.tokens} written, none drafted`;
    const times = PARTS.map(([part]) => `${part} ${ms(step.seconds[part])}`).join(", ");
    const told = `${run.name}, step ${i + 1} of ${run.steps.length}: ${what}; ${times} ms, at ${ms(step.begin_s)} ms.`;
    readout.textContent = told;
    scroller.setAttribute("aria-valuemax", run.steps.length);
    scroller.setAttribute("aria-valuenow", i + 1);
    scroller.setAttribute("aria-valuetext", told);
    if (scroll) {
      const scale = wide.offsetWidth / end();
      const left = step.begin_s * scale;
      if (left < scroller.scrollLeft || step.end_s * scale > scroller.scrollLeft + scroller.clientWidth) scroller.scrollLeft = left - scroller.clientWidth / 3;
    }
    again();
  }

  scroller.addEventListener("scroll", () => again());
  scroller.addEventListener("keydown", (event) => {
    if (!chosen) return;
    const [r, i] = chosen;
    const last = runs[r].steps.length - 1;
    const moved = {
      ArrowRight: [r, Math.min(last, i + 1)], ArrowLeft: [r, Math.max(0, i - 1)], Home: [r, 0], End: [r, last],
      PageDown: [r, Math.min(last, i + 10)], PageUp: [r, Math.max(0, i - 10)],
      ArrowDown: [Math.min(runs.length - 1, r + 1), 0], ArrowUp: [Math.max(0, r - 1), 0],
    }[event.key];
    if (moved) { event.preventDefault(); choose(moved, { scroll: true }); }
    if (event.key === "+" || event.key === "-") {
      zoomer.set(plot.clamp(zoomer.value + (event.key === "+" ? 0.05 : -0.05), 0, 1));
      setZoom(MOST_ZOOM ** zoomer.value);
    }
  });
  const point = (event) => {
    const box = stage.getBoundingClientRect();
    const r = Math.floor((event.clientY - box.top - TOP) / ROW);
    const time = ((event.clientX - box.left + scroller.scrollLeft) * end()) / wide.offsetWidth;
    const i = runs[r]?.steps.findIndex((step) => time <= step.end_s) ?? -1;
    if (i >= 0) choose([r, i]);
  };
  stage.addEventListener("pointermove", (event) => { if (event.pointerType === "mouse") point(event); });
  stage.addEventListener("click", point);
}
