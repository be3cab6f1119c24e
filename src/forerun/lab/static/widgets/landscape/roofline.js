// The knobs of the roofline: which models on which machine, how many requests share a pass, and of a mixture of experts how
// many of them its rows share.
const BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512];
const CONTEXTS = [["0", "none"], ["1000", "1,000"], ["8000", "8,000"], ["32000", "32,000"]];
const OVERLAPS = [0, 0.25, 0.5, 0.75, 1]; // of the experts that rows choose: each row by itself .. all rows the same ones
const USUAL = { target: "llama-3.1-8b", draft: "llama-3.2-1b", machine: "h100", context: "1000" };

// shapes, machines: the names that theory knows; mixtures: the shapes that have experts. onChange({ c, verify_ratios, free_rows }): for the batch that is set.
// Returns { element, batch, load(), setBatch(number) }.
export function makeRoofline(lab, { shapes, mixtures, machines, mostK, onChange }) {
  const { el, controls, settings } = lab;
  let roofs = null; // by overlap and batch; of the first overlap alone where there are no experts
  const named = (list) => list.map((name) => [name, name]);
  const chosen = (name, options) => {
    const value = settings.get(`landscape.${name}`, USUAL[name]);
    return options.some(([one]) => one === value) ? value : options[0][0];
  };
  const choice = (name, label, options) => controls.select({
    label, options, value: chosen(name, options),
    onChange: () => { settings.set(`landscape.${name}`, choices[name].value); load(); },
  });
  const choices = {
    target: choice("target", "target", named(shapes)),
    draft: choice("draft", "draft", named(shapes)),
    machine: choice("machine", "machine", named(machines)),
    context: choice("context", "context, tokens", CONTEXTS),
  };
  const knob = controls.slider({
    label: "requests in a batch", min: 0, max: BATCHES.length - 1, step: 1, format: (i) => String(BATCHES[i]),
    value: Math.max(0, BATCHES.indexOf(settings.number("landscape.batch", 1))),
    onInput: (i) => { settings.set("landscape.batch", BATCHES[i]); tell(); },
  });

  const overlap = controls.slider({
    label: "overlap of experts", min: 0, max: OVERLAPS.length - 1, step: 1, format: (i) => `${100 * OVERLAPS[i]} %`,
    value: Math.max(0, OVERLAPS.indexOf(settings.number("landscape.overlap", 0))),
    onInput: (i) => { settings.set("landscape.overlap", OVERLAPS[i]); tell(); },
  });
  const hasExperts = () => [choices.target, choices.draft].some((one) => mixtures.includes(one.value));

  // All batches and overlaps at once, so that the knobs move with the hand.
  async function load() {
    const { target, draft, machine } = choices;
    const given = { target: target.value, draft: draft.value, machine: machine.value, context: Number(choices.context.value) };
    const overlaps = (hasExperts() ? OVERLAPS : [0]).map((one) => [one]);
    [roofs] = await lab.theory({ function: "roofline", arguments: { ...given, overlap: overlaps, batch: BATCHES, max_gamma: mostK } });
    overlap.element.hidden = roofs.length === 1;
    tell();
  }

  const tell = () => { if (roofs) onChange(roofs[Math.min(overlap.value, roofs.length - 1)][knob.value]); };

  return {
    element: el("div", { class: "stack" }, knob.element, overlap.element, el("div", { class: "pairs" }, Object.values(choices).map((one) => one.element))),
    get batch() { return BATCHES[knob.value]; },
    load,
    setBatch(batch) { knob.set(BATCHES.indexOf(batch)); settings.set("landscape.batch", batch); tell(); },
  };
}
