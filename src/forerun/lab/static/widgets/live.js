// A prompt on the running engine: tokens by their origin, every round in full, speed, and plain decoding behind it.
import { makeRace } from "./live/race.js";
import { makeRounds } from "./live/rounds.js";
import { makeSettings } from "./live/settings.js";
import { events } from "./live/stream.js";

export async function mount(element, lab) {
  const { el, plot, controls } = lab;
  const menu = await lab.fetchJson("live");
  const settings = makeSettings(lab, menu, { onRun: run, onStop: () => leaving?.abort() });
  let leaving = null; // of the generation that runs

  const text = el("p", { class: "live-text", "data-part": "text", "aria-label": "The text" });
  const status = el("p", { class: "note", role: "status", "data-part": "status" }, "Nothing has run yet: press Run, or Ctrl and Enter in the prompt.");
  const numbers = controls.readouts([
    ["rate", "tokens per second", "of the whole answer, its prompt included"],
    ["speedup", "times plain decoding"],
    ["per-pass", "tokens per pass", "mean accepted length, correction or bonus included"],
    ["accepted", "accepted of drafted"],
    ["alpha", "α̂: accepted of tested", "what the theory calls alpha: the coins that fell well"],
    ["passes", "passes of the target"],
  ]);
  const positions = el("div", { class: "live-positions", "data-part": "positions" });
  // What comes under a mouse that rests, as a list scrolls or the text grows, is not pointed at.
  const place = (event) => `${event.clientX} ${event.clientY}`;
  let resting = "";
  document.addEventListener("pointermove", (event) => { resting = place(event); }, { capture: true, passive: true });
  const isMoved = (event) => place(event) !== resting;
  const rounds = makeRounds(lab, mark, isMoved);
  const race = makeRace(lab);
  const results = el("div", { hidden: true, class: "stack live-results" },
    el("div", { class: "card split" },
      el("div", { class: "stack" },
        controls.legend([["accepted", "accepted"], ["correction", "correction"], ["bonus", "bonus"], ["ink", "plain"]]), text),
      el("div", { class: "stack" }, numbers.element, positions)),
    el("div", { class: "card live-inside" }, rounds.element, rounds.detail),
    race.element);
  element.replaceChildren(settings.element, status, results);

  // A round is chosen by pointing at one of its tokens, too.
  for (const name of ["pointerover", "click"]) {
    text.addEventListener(name, (event) => {
      const token = event.target.closest?.("[data-round]");
      if (token && (name === "click" || isMoved(event))) rounds.choose(Number(token.dataset.round));
    });
  }
  function mark(number) {
    for (const token of text.querySelectorAll(".chosen")) token.classList.remove("chosen");
    for (const token of text.querySelectorAll(`[data-round="${number}"]`)) token.classList.add("chosen");
  }

  async function run() {
    let body;
    try {
      body = settings.body();
    } catch (error) {
      say(error.message, true);
      return;
    }
    leaving = new AbortController();
    settings.setRunning(true);
    clear();
    say("The engine runs the prompt.");
    if (matchMedia("(max-width: 760px)").matches) status.scrollIntoView({ block: "start" }); // the output is far below
    const ends = {};
    const own = { wasAlone: true };
    try {
      for await (const [name, data] of events(await lab.request("live", body, { signal: leaving.signal }))) {
        lab.events.dispatchEvent(new CustomEvent("live", { detail: { name, data } }));
        hear(name, data, ends, own);
      }
      if (!ends.draft || (body.race && !ends.plain)) throw new Error("The connection ended early: is the server shutting down?");
    } catch (error) {
      say(error.name === "AbortError" ? "Stopped." : error.message, error.name !== "AbortError");
    } finally {
      settings.setRunning(false);
      leaving = null;
      lab.events.dispatchEvent(new CustomEvent("live", { detail: { name: "over", data: {} } }));
    }
  }

  function hear(name, data, ends, own) {
    if (name === "failed") throw new Error(data.message);
    if (name === "begin") {
      results.hidden = false;
      if (data.lane === "plain") say("Now the same plainly, for the race.");
      else own.begin = data;
    }
    if (data.num_others > 0) own.wasAlone = false;
    if (name === "counts" && data.lane === "draft") {
      numbers.set({ rate: plot.format(data.tokens_per_s, 1) });
      showCounts(data.so_far);
    }
    if (name === "round") {
      if (data.lane === "draft") show(data);
      if (own.begin?.draft !== "none") race.add(data);
    }
    if (name === "end") {
      ends[data.lane] = data;
      if (data.lane === "draft") finish(data, own.begin);
      else {
        numbers.set({ speedup: plot.format(ends.draft.tokens_per_s / data.tokens_per_s) });
        race.finish(ends, own.wasAlone);
        say(`${ended(ends.draft, own.begin)} Plainly: ${plot.format(data.tokens_per_s, 1)} tokens per second.`);
      }
    }
  }

  function clear() {
    text.replaceChildren();
    rounds.clear();
    race.clear();
    positions.replaceChildren();
    numbers.set({ rate: "–", speedup: "–", "per-pass": "–", accepted: "–", alpha: "–", passes: "–" });
  }

  function show(round) {
    if (round.number === 1) say("The engine writes.");
    rounds.add(round);
    text.append(...round.tokens.filter((one) => one.text !== "").map((one) =>
      el("span", { class: `tok is-${one.origin}`, "data-round": round.number }, one.text)));
    if (round.number === 1) mark(1);
  }

  function showCounts(counts) {
    const share = counts.acceptance_rate === null ? "–" : `${counts.num_accepted} / ${counts.num_drafted}`;
    numbers.set({ "per-pass": plot.format(counts.mean_accepted_length), accepted: share, alpha: plot.format(counts.alpha_hat), passes: String(counts.num_steps) });
    const drafted = counts.drafted_per_position;
    if (drafted.length === 0) return;
    if (positions.childElementCount !== drafted.length + 1) {
      positions.replaceChildren(el("h3", { class: "small" }, "Accepted, by position in the draft"), ...drafted.map(() => el("div", { class: "position" })));
    }
    drafted.forEach((num, i) => {
      const accepted = counts.accepted_per_position[i];
      const row = positions.children[i + 1];
      row.style.setProperty("--share", accepted / num);
      row.replaceChildren(el("span", {}, i + 1), el("span", { class: "bar-line", "aria-hidden": "true" }), el("span", {}, `${accepted} / ${num}`));
    });
  }

  function finish(end, begin) {
    if (end.rest) text.append(el("span", { class: "tok" }, end.rest));
    numbers.set({ rate: plot.format(end.tokens_per_s, 1) });
    showCounts(end.report);
    say(ended(end, begin));
  }

  function ended(end, begin) {
    const why = { stop: "the model ended it", length: "the limit ended it", abort: "it was stopped" }[end.finish_reason];
    return `${end.token_ids.length} tokens in ${end.report.num_steps} passes and ${plot.format(end.seconds)} s (${why}; ${begin.draft}, ${begin.acceptance}, seed ${begin.seed}).`;
  }

  function say(message, isError = false) {
    status.textContent = message;
    status.className = isError ? "error" : "note";
  }
}
