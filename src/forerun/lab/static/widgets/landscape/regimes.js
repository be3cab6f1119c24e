// Where it does not pay, with the numbers of the marker: the draft too slow, too little accepted, the pass busy already.
import { breakEvenAlpha } from "../../lib/formulas.js";
import { format } from "../../lib/plot.js";

const BUSY = 1.25; // times a pass over one token, from which checking is not nearly free

// batch, freeRows: of the roofline, null elsewhere. Returns [{ name, isHere, why }, ...].
export function regimesOf({ alpha, k, c, ratio, batch, freeRows }) {
  const needed = breakEvenAlpha(k, c, ratio);
  const isSlow = alpha <= c;
  const isLow = needed === null || alpha < needed;
  const isBusy = ratio >= BUSY;
  const rows = batch === null ? "" : `, with ${batch} requests in the batch: ${format(batch * (k + 1), 0)} rows, of which about ${format(freeRows, 0)} are free`;
  return [
    {
      name: isSlow ? "The draft is too slow" : "The draft is fast enough",
      isHere: isSlow,
      why: isSlow
        ? `c = ${format(c, 2)} is not below α = ${format(alpha, 2)}: a guess takes longer than it saves, for every K.`
        : `c = ${format(c, 2)} is below α = ${format(alpha, 2)}: one guess alone pays, ${format((1 + alpha) / (1 + c), 2)}× if checking is free.`,
    },
    {
      name: isLow ? "Too little is accepted" : "Enough is accepted",
      isHere: !isSlow && isLow,
      why: needed === null
        ? `K = ${k} does not pay even at α = 1.`
        : `K = ${k} pays from α = ${format(needed, 2)} on; it is ${format(alpha, 2)}.`,
    },
    {
      name: isBusy ? "The pass is busy already" : "The pass has room",
      isHere: isBusy,
      why: `A pass over ${k + 1} tokens takes ${format(ratio, 2)} times one over a single token${rows}.`,
    },
  ];
}
