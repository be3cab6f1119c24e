// Things to find: places of the map with what is to be seen there. Each moves the knobs.
import { optimalGamma } from "../../lib/formulas.js";
import { format } from "../../lib/plot.js";

export const EXAMPLE = { alpha: 0.7, k: 5, c: 0.2 };

// right, lesson: tokens per round of the example by equation (1), and as a widespread lesson has it. curve: v(K) = 1.
// Returns [{ name, place, why, table }, ...]; place: what the knobs become.
export function findings(right, lesson, curve) {
  const mostK = curve.length - 1;
  const cost = 1 + EXAMPLE.c * EXAMPLE.k;
  return [
    {
      name: "The worked example",
      place: { ...EXAMPLE, check: "free" },
      why: `α = ${EXAMPLE.alpha}, K = ${EXAMPLE.k}, c = ${EXAMPLE.c}. A widespread lesson adds one token too many: its (1 − αᴷ) / (1 − α) + 1 gives two tokens at α = 0, where a rejected first guess leaves exactly one.`,
      table: [
        ["", "equation (1)", "that lesson"],
        ["tokens / round", format(right, 4), format(lesson, 4)],
        ["speed-up", `${format(right / cost, 4)}×`, `${format(lesson / cost, 4)}×`],
      ],
    },
    {
      name: "A real pair",
      place: { alpha: 0.78, k: 3, c: 0.27, check: "free" },
      why: "Qwen2.5-Coder 1.5B with its 0.5B model as the draft, 4 bits, greedy, on two AVX-512 cores (26 November 2026). A pass over four tokens takes 1.13 times one over one there, which makes it 1.48×, and 1.41× was measured behind the prompt.",
    },
    {
      name: "K beyond the ridge",
      place: { alpha: EXAMPLE.alpha, k: 14, c: EXAMPLE.c, check: "free" },
      why: `Here K = ${optimalGamma(EXAMPLE.alpha, EXAMPLE.c, curve)} is best: each later guess is reached so rarely that it costs more than it brings.`,
    },
    {
      name: "α below c",
      place: { alpha: 0.3, k: 3, c: 0.4, check: "free" },
      why: "No K pays where a guess costs more than it is likely to be worth (Corollary 3.9): left of α = c the map has no ridge.",
    },
    {
      name: "c → 0",
      place: { alpha: 0.8, k: mostK, c: 0, check: "free" },
      why: "Guesses for nothing, as from a search in the text: longer is always better, and the limit is 1 / (1 − α).",
    },
    {
      name: "α → 1",
      place: { alpha: 1, k: 8, c: 0.1, check: "free" },
      why: "Every guess is right: K + 1 tokens per round. Only the draft's own time is left.",
    },
    {
      name: "A batch that computes already",
      place: { alpha: 0.7, k: 5, check: "roofline", batch: 256 },
      why: "With hundreds of requests the pass is bound by arithmetic, and each token to check costs its full price.",
    },
  ];
}
