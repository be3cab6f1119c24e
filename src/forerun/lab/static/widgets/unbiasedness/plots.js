// Two plots of counted tokens: how far each word is from its probability, and how L1 falls as the counts grow.
import { band, dot, label, polyline, within } from "../../lib/draw.js";
import { l1Noise } from "../../lib/formulas.js";
import { WIDE } from "../../lib/noise.js";
import { format, scale, ticks } from "../../lib/plot.js";

const FAR = 1.25; // bands, from which a word is shown to be outside: there are several words
const DISTANCES = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1];
const NUMBERS = [200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000];
const POINTS = 40; // of the edge of a band

// counts: by word; usual: tokens for which the band is shown while nothing was counted.
export function drawDeviations(context, width, height, { words, probs, counts, usual, colours }) {
  const box = { left: 54, right: width - 6, top: 8, bottom: height - 26 };
  const total = counts.reduce((sum, one) => sum + one, 0);
  const found = probs.map((p, x) => (total ? counts[x] / total - p : 0));
  const bands = probs.map((p) => WIDE * Math.sqrt((p * (1 - p)) / (total || usual)));
  const most = Math.max(0.004, 1.6 * Math.max(...bands), 1.1 * Math.max(...found.map(Math.abs)));
  const y = scale([-most, most], [box.bottom, box.top]);
  const step = (box.right - box.left) / words.length;
  const wide = Math.min(46, step * 0.66);
  const digits = Math.max(2, Math.ceil(-Math.log10(most / 2)));
  for (const value of ticks(-most, most, 4)) {
    polyline(context, [[box.left, y(value)], [box.right, y(value)]], value ? colours.line : colours.muted);
    label(context, `${value > 0 ? "+" : ""}${format(value, digits)}`, box.left - 6, y(value) + 4, colours.muted, "right");
  }
  words.forEach((word, x) => {
    const middle = box.left + step * (x + 0.5);
    const [left, right] = [middle - wide / 2, middle + wide / 2];
    band(context, [[left, y(bands[x])], [right, y(bands[x])]], [[left, y(-bands[x])], [right, y(-bands[x])]], colours.accepted);
    if (total) {
      const isOutside = Math.abs(found[x]) > FAR * bands[x];
      context.fillStyle = isOutside ? colours.rejected : colours.ink;
      context.fillRect(middle - wide * 0.22, Math.min(y(0), y(found[x])), wide * 0.44, Math.max(1.5, Math.abs(y(found[x]) - y(0))));
    }
    label(context, word, middle, height - 8, colours.ink);
  });
}

// history: [tokens counted, L1] of each part that was run; first, usual: tokens of the first part, and of a usual run.
export function drawCourse(context, width, height, { probs, history, first, usual, colours }) {
  const box = { left: 54, right: width - 6, top: 8, bottom: height - 36 };
  const log = Math.log10;
  const [begin, end] = [first * 0.8, 1.1 * Math.max(usual, history.at(-1)?.[0] ?? 0)];
  const shown = history.filter(([, value]) => value > 0);
  const values = shown.map(([, value]) => value);
  const lowest = Math.max(1e-5, Math.min(l1Noise(probs, end).mean / 2.5, ...values.map((value) => value * 0.8)));
  const highest = Math.max(1e-3, l1Noise(probs, first).mean * 1.8, ...values.map((value) => value * 1.2));
  const x = scale([log(begin), log(end)], [box.left, box.right]);
  const y = scale([log(lowest), log(highest)], [box.bottom, box.top]);
  const at = (n, value) => [x(log(n)), y(log(Math.max(value, 1e-7)))];
  for (const value of DISTANCES.filter((one) => one >= lowest && one <= highest)) {
    polyline(context, [[box.left, at(1, value)[1]], [box.right, at(1, value)[1]]], colours.line);
    label(context, String(value), box.left - 6, at(1, value)[1] + 4, colours.muted, "right");
  }
  let last = -Infinity;
  for (const n of NUMBERS.filter((one) => one >= begin && one <= end)) {
    const place = x(log(n));
    if (place - last < 48) continue;
    last = place;
    label(context, format(n, 0), place, box.bottom + 16, colours.muted, place > box.right - 20 ? "right" : place < box.left + 16 ? "left" : "center");
  }
  label(context, "tokens counted", (box.left + box.right) / 2, height - 4, colours.muted);
  within(context, box, () => {
    const edge = Array.from({ length: POINTS }, (_, i) => 10 ** (log(begin) + ((log(end) - log(begin)) * i) / (POINTS - 1)))
      .map((n) => ({ n, ...l1Noise(probs, n) }));
    band(context, edge.map(({ n, mean, deviation }) => at(n, mean + WIDE * deviation)),
      edge.map(({ n, mean, deviation }) => at(n, mean - WIDE * deviation)), colours.accepted);
    if (shown.length === 0) return;
    const [n, value] = shown.at(-1);
    const noise = l1Noise(probs, n);
    const colour = value > noise.mean + WIDE * noise.deviation ? colours.rejected : colours.ink;
    polyline(context, shown.map(([num, one]) => at(num, one)), colour, { width: 2 });
    dot(context, ...at(n, value), 4.5, colour);
  });
}
