// The prompt and what a request may choose: from the server's menu, kept in the link to the page.
const AUTO = "";
const MOST_DRAFTED = 16; // of the slider; a request may ask for 64

export function makeSettings(lab, menu, { onRun, onStop }) {
  const { el, settings, controls, plot } = lab;
  const keep = (name) => (value) => settings.set(`live.${name}`, value);
  const kept = (name, usual) => settings.get(`live.${name}`, usual);
  const byName = Object.fromEntries(menu.drafters.map((one) => [one.name, one]));

  // ------------------------------------------------------------------------------------------------------ the prompt

  const isChatUsual = menu.is_chat_usual ? "chat" : "text";
  const known = menu.examples.find((one) => one.title === kept("example", menu.examples[0].title)) ?? menu.examples[0];
  const prompt = el("textarea", { id: "live-prompt", rows: 6, spellcheck: "false", onInput: () => { keep("prompt")(prompt.value); example.set(""); } });
  prompt.value = kept("prompt", known.text);
  const example = controls.select({
    label: "Example",
    options: [["", "your own"], ...menu.examples.map((one) => [one.title, one.title])],
    value: settings.get("live.prompt") ? "" : known.title,
    onChange: (title) => {
      const one = menu.examples.find((each) => each.title === title);
      if (!one) return;
      prompt.value = one.text;
      kind.set(one.is_chat ? "chat" : "text");
      keep("prompt")(null);
      keep("chat")(null);
      keep("example")(title);
    },
  });
  const kind = controls.segments({
    label: "The model gets it as",
    options: [["text", "text to go on"], ["chat", "a message"]],
    value: kept("chat", isChatUsual),
    onChange: keep("chat"),
  });

  // ------------------------------------------------------------------------------------------------------ the method

  const about = el("p", { class: "note" });
  const draft = controls.select({
    label: "Method that drafts",
    options: menu.drafters.map(({ name, shape }) => [name, name === "none" ? "none: plain decoding" : shape === "tree" && name !== "tree" ? `${name}, a tree` : name]),
    value: byName[kept("draft", "")] ? kept("draft") : menu.drafters[0].name,
    onChange: (name) => { keep("draft")(name); showMethod(); },
  });
  const rule = controls.select({
    label: "Acceptance",
    options: [[AUTO, "as the engine chooses"], ...menu.rules.map((one) => [one.name, one.is_lossless ? one.name : `${one.name} (lossy)`])],
    value: kept("rule", AUTO),
    onChange: keep("rule"),
  });
  const length = controls.slider({
    label: "Drafted tokens K", min: 0, max: MOST_DRAFTED, step: 1, value: settings.number("live.k", 6, 0, MOST_DRAFTED),
    format: (k) => (k === 0 ? "as far as it pays" : String(k)), onInput: keep("k"),
  });
  const temperature = controls.slider({
    label: "Temperature", min: 0, max: 1.5, step: 0.05, value: settings.number("live.temperature", 0, 0, 1.5),
    format: (t) => (t === 0 ? "0, greedy" : plot.format(t)), onInput: keep("temperature"),
  });
  const most = Math.min(512, menu.max_seq_len / 2);
  const tokens = controls.slider({
    label: "Tokens at most", min: 16, max: most, step: 16, value: settings.number("live.tokens", 128, 16, most), onInput: keep("tokens"),
  });
  const seed = el("input", { type: "text", inputmode: "numeric", id: "live-seed", placeholder: "a new one each time", autocomplete: "off",
    value: kept("seed"), onInput: () => keep("seed")(seed.value.trim() || null) });
  const goOn = controls.toggle({ label: "Go on past the model's end", value: kept("goon", menu.is_chat_usual ? "0" : "1") === "1",
    onChange: (on) => keep("goon")(on ? "1" : "0") });
  const race = controls.toggle({ label: "Then plainly, for the race", value: kept("race", "1") === "1", onChange: (on) => keep("race")(on ? "1" : "0") });

  function showMethod() {
    const one = byName[draft.value];
    about.textContent = one.about;
    for (const option of rule.select.options) option.disabled = option.value !== AUTO && !one.rules.includes(option.value);
    if (rule.value !== AUTO && !one.rules.includes(rule.value)) { rule.set(AUTO); keep("rule")(null); }
  }
  showMethod();

  // ----------------------------------------------------------------------------------------------------- the buttons

  const run = controls.button("Run", onRun, { primary: true, "data-part": "run" });
  const stop = controls.button("Stop", onStop, { "data-part": "stop", disabled: true });
  const copied = el("span", { class: "note", role: "status" });
  const share = controls.button("Copy a link to these settings", async () => {
    const link = settings.link("live");
    try {
      await navigator.clipboard.writeText(link);
      copied.textContent = "Copied.";
    } catch {
      copied.textContent = "It is in the address bar.";
    }
    setTimeout(() => { copied.textContent = ""; }, 4000);
  }, { "data-part": "share" });
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !run.disabled) { event.preventDefault(); onRun(); }
  });

  const element = el("div", { class: "card split" },
    el("div", { class: "stack live-asks" },
      el("div", { class: "field" }, el("label", { for: "live-prompt" }, `Prompt for ${menu.model} (${menu.precision})`), prompt),
      el("div", { class: "live-kinds" }, example.element, menu.has_chat ? kind.element : null),
      el("div", { class: "row" }, run, stop, share, copied)),
    el("div", { class: "stack" },
      draft.element, about, length.element, temperature.element, rule.element, tokens.element,
      el("div", { class: "field" }, el("label", { for: "live-seed" }, "Seed"), seed),
      el("div", { class: "stack live-switches" }, race.element, goOn.element)));

  return {
    element,
    setRunning(is) { run.disabled = is; stop.disabled = !is; },
    // The body of a request. Throws where the seed is no whole number; whatever else is wrong the server says.
    body() {
      if (!/^\d{0,20}$/.test(seed.value.trim())) throw new Error("The seed must be a whole number, or nothing.");
      const asked = kind.value === "chat" && menu.has_chat ? { messages: [{ role: "user", content: prompt.value }] } : { prompt: prompt.value };
      return {
        ...asked, draft: draft.value, temperature: temperature.value, max_tokens: tokens.value, race: race.value && draft.value !== "none",
        ...(length.value > 0 && draft.value !== "none" ? { spec_length: length.value } : {}),
        ignore_eos: goOn.value,
        ...(rule.value !== AUTO ? { acceptance: rule.value } : {}),
        ...(seed.value.trim() ? { seed: seed.value.trim() } : {}),
      };
    },
  };
}
