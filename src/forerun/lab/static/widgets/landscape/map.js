// The map of speed-ups on a canvas: colours by value, the ridge of the best K, the break-even line, and points.
import { dot, label, polyline, within } from "../../lib/draw.js";
import { bestOf, breakEvenAlpha, expectedTokens } from "../../lib/formulas.js";
import { scale } from "../../lib/plot.js";

const COLUMNS = 200;
const ROW = 40; // pixels that a K is stretched to
const SHADES = 256;
const LOWEST = 0.25; // the ends of the colours, which do not depend on the knobs
const HIGHEST = 8;
const MARGIN = { left: 44, right: 88, top: 10, bottom: 36 };
const REACH = 9; // pixels at which a point is hit

// Where a value is on the stripe, from 0 (LOWEST) to 1 (HIGHEST), by its logarithm.
export function stripeShare(value) {
  const share = Math.log(Math.max(value, 1e-9) / LOWEST) / Math.log(HIGHEST / LOWEST);
  return Math.min(1, Math.max(0, share));
}

// Places on a map of that size: x(alpha), y(K), the stripe, and which point is at a place.
export function makeMap(width, height, mostK) {
  const right = width - MARGIN.right;
  const bottom = height - MARGIN.bottom;
  const x = scale([0, 1], [MARGIN.left, right]);
  const y = scale([0.5, mostK + 0.5], [bottom, MARGIN.top]);
  return {
    width, height, mostK, x, y, right, bottom, left: MARGIN.left, top: MARGIN.top,
    stripe: { x: right + 22, width: 14, y: scale([0, 1], [bottom, MARGIN.top]) },
    pointAt: (px, py, points) => points.findIndex((one) => Math.hypot(x(one.alpha) - px, y(one.gamma) - py) < REACH),
  };
}

// c, v: the costs; points: the published ones, of which number `published` is chosen; measured: one, or null.
export function drawMap(context, map, { c, v, colours, points, published, measured }) {
  const shades = shadesOf(colours);
  context.drawImage(heat(map, c, v, shades), map.left, map.top, map.right - map.left, map.bottom - map.top);
  drawAxes(context, map, colours);
  within(context, map, () => {
    outlined(context, breakEvenLine(map, c, v), colours, 2, [6, 5]);
    outlined(context, ridge(map, c, v), colours, 2.5);
  });
  drawStripe(context, map, shades, colours);
  points.forEach((point, i) => diamond(context, map.x(point.alpha), map.y(point.gamma), colours, i === published));
  if (measured && measured.k <= map.mostK) dot(context, map.x(measured.alpha), map.y(measured.k), 7, colours.target, colours.raised);
}

// Tokens per round, [COLUMNS][mostK + 1], at the middle of each column: neither c nor v changes them.
const tables = new Map();

function tokensOf(mostK) {
  if (!tables.has(mostK)) {
    tables.set(mostK, Array.from({ length: COLUMNS }, (_, i) =>
      Array.from({ length: mostK + 1 }, (__, k) => expectedTokens((i + 0.5) / COLUMNS, k))));
  }
  return tables.get(mostK);
}

// One pixel for each alpha and K; the canvas stretches it.
function heat(map, c, v, shades) {
  const tokens = tokensOf(map.mostK);
  const small = new OffscreenCanvas(COLUMNS, map.mostK);
  const image = new ImageData(COLUMNS, map.mostK);
  const pixels = new Uint32Array(image.data.buffer);
  for (let k = 1; k <= map.mostK; k += 1) {
    const cost = c * k + v[k];
    const row = (map.mostK - k) * COLUMNS;
    for (let i = 0; i < COLUMNS; i += 1) pixels[row + i] = shades.words[shadeOf(tokens[i][k] / cost)];
  }
  small.getContext("2d").putImageData(image, 0, 0);
  const tall = new OffscreenCanvas(COLUMNS, map.mostK * ROW); // rows stay rows: only columns are smoothed
  const context = tall.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, COLUMNS, map.mostK * ROW);
  return tall;
}

function drawAxes(context, map, colours) {
  for (let k = 2; k <= map.mostK; k += 2) label(context, String(k), map.left - 7, map.y(k) + 4, colours.muted, "right");
  for (const alpha of [0, 0.2, 0.4, 0.6, 0.8, 1]) label(context, alpha ? alpha.toFixed(1) : "0", map.x(alpha), map.bottom + 16, colours.muted);
  label(context, "acceptance α", (map.left + map.right) / 2, map.bottom + 32, colours.muted);
  context.save();
  context.translate(11, (map.top + map.bottom) / 2);
  context.rotate(-Math.PI / 2);
  label(context, "drafted tokens K", 0, 0, colours.muted);
  context.restore();
}

// Through the alphas at which each K breaks even, with a step at each.
function breakEvenLine(map, c, v) {
  const points = [];
  for (let k = 1; k <= map.mostK; k += 1) {
    const alpha = breakEvenAlpha(k, c, v[k]);
    if (alpha !== null) points.push([map.x(alpha), map.y(k - 0.5)], [map.x(alpha), map.y(k + 0.5)]);
  }
  return points;
}

// Through the best K of each alpha, where one pays.
function ridge(map, c, v) {
  const costs = v.map((ratio, k) => c * k + ratio);
  return tokensOf(map.mostK).flatMap((tokens, i) => {
    const best = bestOf(tokens, costs);
    return best > 0 ? [[map.x((i + 0.5) / COLUMNS), map.y(best)]] : [];
  });
}

function outlined(context, points, colours, width, dash = []) {
  polyline(context, points, colours.raised, { width: width + 2.5, dash });
  polyline(context, points, colours.ink, { width, dash });
}

function drawStripe(context, map, shades, colours) {
  const { stripe } = map;
  const height = map.bottom - map.top;
  for (let i = 0; i < height; i += 1) {
    context.fillStyle = shades.names[shadeOf(LOWEST * (HIGHEST / LOWEST) ** (1 - i / height))];
    context.fillRect(stripe.x, map.top + i, stripe.width, 1.5);
  }
  for (const [value, name] of [[0.25, "¼"], [0.5, "½"], [1, "1"], [2, "2"], [4, "4"], [8, "8"]]) {
    const shift = value === HIGHEST ? 10 : value === LOWEST ? 0 : 4; // the ends stay beside the stripe
    label(context, name, stripe.x - 4, stripe.y(stripeShare(value)) + shift, colours.muted, "right");
  }
}

function diamond(context, x, y, colours, isChosen) {
  const size = isChosen ? 7 : 4.5;
  context.beginPath();
  [[0, -size], [size, 0], [0, size], [-size, 0]].forEach(([dx, dy], i) => (i ? context.lineTo(x + dx, y + dy) : context.moveTo(x + dx, y + dy)));
  context.closePath();
  context.lineWidth = 1.5;
  context.fillStyle = isChosen ? colours.ink : colours.raised;
  context.strokeStyle = isChosen ? colours.raised : colours.ink;
  context.fill();
  context.stroke();
}

// Which of the shades a value has, by its logarithm.
const shadeOf = (value) => Math.round(stripeShare(value) * (SHADES - 1));

// The shades from LOWEST to HIGHEST: cold, flat at 1, warm at the middle of what is above, hot. As colours of a canvas,
// and as words of its pixels.
function shadesOf(colours) {
  const [cold, flat, warm, hot] = [colours.cold, colours.flat, colours.warm, colours.hot].map(rgb);
  const one = stripeShare(1);
  const shade = (share) => {
    if (share < one) return mix(cold, flat, share / one);
    const height = (share - one) / (1 - one);
    return height < 0.5 ? mix(flat, warm, height * 2) : mix(warm, hot, height * 2 - 1);
  };
  const all = Array.from({ length: SHADES }, (_, i) => shade(i / (SHADES - 1)));
  return {
    names: all.map(([r, g, b]) => `rgb(${r} ${g} ${b})`),
    words: Uint32Array.from(all, ([r, g, b]) => new Uint32Array(Uint8Array.of(r, g, b, 255).buffer)[0]),
  };
}

const mix = (a, b, t) => [0, 1, 2].map((i) => Math.round(a[i] + (b[i] - a[i]) * t));
const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
