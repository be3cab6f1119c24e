// The same prompt with a draft and plainly: tokens over time, each by its own clock, and both texts once more together.
const SPEEDS = [[1, "real time"], [4, "4× slower"], [16, "16× slower"]];
const LANES = [["draft", "with a draft", "accepted"], ["plain", "plainly", "target"]];

export function makeRace(lab) {
  const { el, svg, controls, plot } = lab;
  let lanes = {};
  let frame = 0;
  let slow = 1;

  const texts = Object.fromEntries(LANES.map(([lane]) => [lane, el("p", { class: "live-lane", "data-lane": lane, tabindex: 0 })]));
  const clocks = Object.fromEntries(LANES.map(([lane]) => [lane, el("span", {})]));
  const chart = el("div", { class: "plot live-race-plot" });
  const replay = controls.button("Race again", () => start(), { disabled: true, "data-part": "replay" });
  const speed = controls.segments({ label: "Clock", options: SPEEDS, value: 1, onChange: (value) => { slow = value; start(); } });
  const said = el("p", { class: "note", "data-part": "race-says" });
  const element = el("div", { class: "card stack", hidden: true, "data-part": "race" },
    el("div", { class: "row wide live-race-head" }, el("h3", {}, "The race"), speed.element, replay),
    el("div", { class: "live-lanes" }, LANES.map(([lane, title, colour]) =>
      el("div", {}, el("h3", { class: "small" }, el("span", { class: "swatch", style: { "--swatch": `var(--${colour})` }, "aria-hidden": "true" }), `${title} `, clocks[lane]), texts[lane]))),
    chart, said);
  for (const [lane, title] of LANES) texts[lane].setAttribute("aria-label", `The text ${title}`);

  const draw = plot.fitted(chart, (width, height) => chart.replaceChildren(picture(width, height)));
  function picture(width, height) {
    const own = LANES.filter(([lane]) => lanes[lane]?.points.length);
    const end = Math.max(0.01, ...own.map(([lane]) => lanes[lane].points.at(-1)[0]));
    const most = Math.max(1, ...own.map(([lane]) => lanes[lane].points.at(-1)[1]));
    const x = plot.scale([0, end], [44, width - 16]);
    const y = plot.scale([0, most], [height - 34, 10]);
    const lines = own.map(([lane, , colour]) => svg("polyline", { class: "race-line", style: { stroke: `var(--${colour})` },
      points: [[0, 0], ...lanes[lane].points].map(([t, n]) => `${x(t).toFixed(1)},${y(n).toFixed(1)}`).join(" ") }));
    const unit = end < 1 ? [1000, "ms"] : [1, "s"];
    const said = own.map(([lane, title]) => `${title} ${lanes[lane].points.at(-1)[1]} tokens in ${plot.format(lanes[lane].points.at(-1)[0])} s`).join(", ");
    return svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Tokens over time: ${said}` },
      plot.ticks(0, most, 4).flatMap((n) => [
        svg("line", { class: "grid", x1: 44, x2: width - 16, y1: y(n), y2: y(n) }),
        svg("text", { class: "tick-text", x: 38, y: y(n) + 4, "text-anchor": "end" }, n)]),
      plot.ticks(0, end * unit[0], width < 500 ? 3 : 6).map((t) => svg("text", { class: "tick-text", x: x(t / unit[0]), y: height - 16, "text-anchor": "middle" }, `${plot.format(t, t % 1 ? 1 : 0)} ${unit[1]}`)),
      svg("text", { class: "tick-text", x: 44, y: height - 2 }, "tokens over time, each lane by its own clock"),
      lines);
  }

  // Both texts by their clocks, from 0 on.
  function start() {
    cancelAnimationFrame(frame);
    const begun = performance.now();
    const at = Object.fromEntries(LANES.map(([lane]) => [lane, 0]));
    for (const [lane] of LANES) texts[lane].textContent = "";
    const step = (now) => {
      const clock = (now - begun) / 1000 / slow;
      let isOver = true;
      for (const [lane] of LANES) {
        const pieces = lanes[lane]?.pieces ?? [];
        let text = "";
        while (at[lane] < pieces.length && pieces[at[lane]][0] <= clock) text += pieces[at[lane]++][1];
        if (text) { texts[lane].append(text); texts[lane].scrollTop = texts[lane].scrollHeight; }
        isOver &&= at[lane] >= pieces.length;
        const last = pieces.at(-1)?.[0] ?? 0;
        clocks[lane].textContent = `${plot.format(Math.min(clock, last), last < 10 ? 2 : 1)} s`;
      }
      if (!isOver) frame = requestAnimationFrame(step);
    };
    frame = requestAnimationFrame(step);
  }

  return {
    element,
    clear() {
      cancelAnimationFrame(frame);
      lanes = {};
      element.hidden = true;
      replay.disabled = true;
      said.textContent = "";
    },
    add({ lane, at_s, tokens }) {
      lanes[lane] ??= { points: [], pieces: [] };
      lanes[lane].points.push([at_s, (lanes[lane].points.at(-1)?.[1] ?? 0) + tokens.length]);
      lanes[lane].pieces.push([at_s, tokens.map((one) => one.text).join("")]);
      if (lane === "plain") { element.hidden = false; draw(); }
    },
    // The race can be seen. ends: by lane, what the server said in the end; wasAlone: whether no other request ran.
    finish(ends, wasAlone) {
      const same = ends.draft.text === ends.plain.text ? "Both texts are the same. " : "The texts differ, as two samples do; their distribution is the same. ";
      const lossy = ends.draft.report.is_lossless ? same : "The rule is lossy: the text with a draft need not have the model's distribution. ";
      const rates = LANES.map(([lane]) => (ends[lane].token_ids.length - lanes[lane].points[0][1]) / (ends[lane].seconds - lanes[lane].points[0][0]));
      const behind = rates.every(Number.isFinite) ? `Behind the first round, and so without the prompt: ${plot.format(rates[0], 1)} against ${plot.format(rates[1], 1)} tokens per second, ${plot.format(rates[0] / rates[1])} times. ` : "";
      said.textContent = `${lossy}${behind}The plain run came second, on the engine that was quiet again, because side by side each pass of the model would be shared by both and `
        + `neither would have a speed of its own; both clocks begin with the request, and both ran the prompt.${wasAlone ? "" : " Another request ran meanwhile: run it again for times that can be compared."}`;
      replay.disabled = false;
      draw();
      if (matchMedia("(prefers-reduced-motion: reduce)").matches) {
        for (const [lane] of LANES) { texts[lane].textContent = ends[lane].text; clocks[lane].textContent = `${plot.format(ends[lane].seconds)} s`; }
      } else start();
    },
  };
}
