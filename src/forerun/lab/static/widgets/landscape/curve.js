// The time of a pass over M tokens / of one over a single token: free, as measured here, and by the roofline.
import { dot, label, polyline, within } from "../../lib/draw.js";
import { format, scale, ticks } from "../../lib/plot.js";

const MOST = 6; // of the scale, where the chosen point is not above it
const DASHES = { free: [2, 4], machine: [], roofline: [7, 4] };

// curves: { free, machine, roofline }, each v(K) by K, or null; chosen: the name of one; k: where the dot is.
export function drawCurve(context, width, height, { curves, chosen, k, colours }) {
  const box = { left: 34, right: width - 12, top: 8, bottom: height - 38 };
  const used = Object.values(curves).filter(Boolean);
  const mostK = used[0].length - 1;
  const highest = 1.05 * Math.max(2.5, Math.min(MOST, Math.max(...used.flat())), curves[chosen][k]);
  const x = scale([1, mostK + 1], [box.left, box.right]);
  const y = scale([0, highest], [box.bottom, box.top]);
  for (const value of ticks(0, highest, 4)) {
    polyline(context, [[box.left, y(value)], [box.right, y(value)]], value ? colours.line : colours.muted);
    label(context, format(value, value % 1 ? 1 : 0), box.left - 6, y(value) + 4, colours.muted, "right");
  }
  for (let m = 1; m <= mostK + 1; m += 4) label(context, String(m), x(m), box.bottom + 17, colours.muted);
  label(context, "tokens M in one pass", (box.left + box.right) / 2, height - 4, colours.muted);
  within(context, { ...box, left: box.left - 3, right: box.right + 3 }, () => {
    for (const [name, values] of Object.entries(curves)) {
      const isChosen = name === chosen;
      if (!values) continue;
      polyline(context, values.map((value, i) => [x(i + 1), y(value)]), isChosen ? colours.target : colours.muted,
        { width: isChosen ? 3 : 1.5, dash: DASHES[name] });
    }
  });
  dot(context, x(k + 1), y(curves[chosen][k]), 5, colours.target);
}

// t(M) / t(1) at M = K + 1 tokens, linear between what was measured, and beyond.
export function measuredCurve({ rows, ratios }, mostK) {
  return Array.from({ length: mostK + 1 }, (_, k) => {
    const above = rows.findIndex((row) => row >= k + 1);
    const i = Math.min(rows.length - 2, Math.max(0, (above < 0 ? rows.length : above) - 1));
    const share = (k + 1 - rows[i]) / (rows[i + 1] - rows[i]);
    return ratios[i] + share * (ratios[i + 1] - ratios[i]);
  });
}
