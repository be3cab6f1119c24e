// The two distributions that Residual edits and Unbiasedness runs: probabilities of eight words, which sum to 1.
import { settings } from "./settings.js";

export const WORDS = ["mat", "sofa", "rug", "bed", "roof", "lap", "lawn", "sill"];

// What a button sets: [name, target, draft].
export const PRESETS = [
  ["Typical", [0.3, 0.2, 0.15, 0.12, 0.09, 0.07, 0.04, 0.03], [0.14, 0.28, 0.1, 0.2, 0.06, 0.12, 0.06, 0.04]],
  ["Close", [0.3, 0.2, 0.15, 0.12, 0.09, 0.07, 0.04, 0.03], [0.26, 0.22, 0.13, 0.14, 0.08, 0.08, 0.06, 0.03]],
  ["Far apart", [0.34, 0.24, 0.16, 0.1, 0.06, 0.05, 0.03, 0.02], [0.06, 0.09, 0.1, 0.12, 0.2, 0.18, 0.15, 0.1]],
  ["Forbidden word", [0.35, 0.25, 0, 0.15, 0.1, 0.08, 0.05, 0.02], [0.2, 0.15, 0.25, 0.12, 0.1, 0.08, 0.06, 0.04]],
  ["Equal", [0.3, 0.2, 0.15, 0.12, 0.09, 0.07, 0.04, 0.03], [0.3, 0.2, 0.15, 0.12, 0.09, 0.07, 0.04, 0.03]],
];
const LEAST = 1e-4; // of a total, so that something can be scaled
const listeners = new Set();

const normalised = (weights) => {
  const kept = weights.map((one) => Math.max(0, one));
  const sum = kept.reduce((total, one) => total + one, 0);
  return sum > 0 ? kept.map((one) => one / sum) : kept.map(() => 1 / kept.length);
};
const rounded = (weights) => weights.map((one) => Number(one.toFixed(4)));

function read() {
  const [, target, draft] = PRESETS[0];
  return { target: normalised(settings.numbers("pair.target", target)), draft: normalised(settings.numbers("pair.draft", draft)) };
}

let current = read();

function tell() {
  for (const listener of listeners) listener(current);
}

export const pair = {
  get target() { return current.target; },
  get draft() { return current.draft; },
  set(target, draft) {
    current = { target: normalised(target), draft: normalised(draft) };
    settings.set("pair.target", rounded(current.target));
    settings.set("pair.draft", rounded(current.draft));
    tell();
  },
  // Give one word of one distribution a probability; the others keep their proportions.
  move(which, word, prob) {
    const before = current[which];
    const value = Math.min(0.97, Math.max(0, prob));
    const others = 1 - before[word];
    const after = before.map((one, x) =>
      x === word ? value : others > LEAST ? (one * (1 - value)) / others : (1 - value) / (before.length - 1));
    this.set(which === "target" ? after : current.target, which === "draft" ? after : current.draft);
  },
  // Called after every change. Returns a function that ends it.
  onChange(listener) {
    listeners.add(listener);
    return () => listeners.delete(listener);
  },
};
