// The map of speed-ups on a canvas: colours by value, the ridge of the best K, the break-even line, and points.
import { breakEvenAlpha, optimalGamma, speedup } from "./formulas.js";
import { scale } from "./plot.js";

const COLUMNS = 200;
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

export function drawMap(context, map, { c, v, colours, published, chosen, measured }) {
  const palette = [colours.cold, colours.flat, colours.warm, colours.hot].map(rgb);
  context.font = "12px system-ui, sans-serif";
  context.drawImage(heat(map, c, v, palette), map.left, map.top, map.right - map.left, map.bottom - map.top);
  drawAxes(context, map, colours);
  context.save();
  context.beginPath();
  context.rect(map.left, map.top, map.right - map.left, map.bottom - map.top);
  context.clip();
  drawBreakEven(context, map, c, v, colours);
  drawRidge(context, map, c, v, colours);
  context.restore();
  drawStripe(context, map, palette, colours);
  published.forEach((point, i) => diamond(context, map.x(point.alpha), map.y(point.gamma), i === chosen ? 7 : 4.5, colours, i === chosen));
  if (measured && measured.k <= map.mostK) dot(context, map.x(measured.alpha), map.y(measured.k), colours);
}

// One pixel for each alpha and K; the canvas stretches it.
function heat(map, c, v, palette) {
  const image = new ImageData(COLUMNS, map.mostK);
  for (let k = 1; k <= map.mostK; k += 1) {
    for (let i = 0; i < COLUMNS; i += 1) {
      const colour = mixed(palette, speedup((i + 0.5) / COLUMNS, k, c, v[k]));
      image.data.set(colour, ((map.mostK - k) * COLUMNS + i) * 4);
    }
  }
  const small = new OffscreenCanvas(COLUMNS, map.mostK);
  small.getContext("2d").putImageData(image, 0, 0);
  const tall = new OffscreenCanvas(COLUMNS, map.mostK * 40); // rows stay rows: only columns are smoothed
  const context = tall.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, COLUMNS, map.mostK * 40);
  return tall;
}

function drawAxes(context, map, colours) {
  context.fillStyle = colours.muted;
  context.textAlign = "right";
  for (let k = 2; k <= map.mostK; k += 2) context.fillText(String(k), map.left - 7, map.y(k) + 4);
  context.textAlign = "center";
  for (const alpha of [0, 0.2, 0.4, 0.6, 0.8, 1]) context.fillText(alpha ? alpha.toFixed(1) : "0", map.x(alpha), map.bottom + 16);
  context.fillText("acceptance α", (map.left + map.right) / 2, map.bottom + 32);
  context.save();
  context.translate(11, (map.top + map.bottom) / 2);
  context.rotate(-Math.PI / 2);
  context.fillText("drafted tokens K", 0, 0);
  context.restore();
}

function drawBreakEven(context, map, c, v, colours) {
  const points = [];
  for (let k = 1; k <= map.mostK; k += 1) {
    const alpha = breakEvenAlpha(k, c, v[k]);
    if (alpha !== null) points.push([map.x(alpha), map.y(k - 0.5)], [map.x(alpha), map.y(k + 0.5)]);
  }
  context.setLineDash([6, 5]);
  outlined(context, points, colours, 2);
  context.setLineDash([]);
}

function drawRidge(context, map, c, v, colours) {
  const points = [];
  for (let i = 0; i <= COLUMNS; i += 1) {
    const best = optimalGamma(i / COLUMNS, c, v);
    if (best > 0) points.push([map.x(i / COLUMNS), map.y(best)]);
  }
  outlined(context, points, colours, 2.5);
}

function outlined(context, points, colours, width) {
  if (points.length === 0) return;
  context.lineJoin = "round";
  for (const [colour, extra] of [[colours.raised, 2.5], [colours.ink, 0]]) {
    context.strokeStyle = colour;
    context.lineWidth = width + extra;
    context.beginPath();
    points.forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
    context.stroke();
  }
}

function drawStripe(context, map, palette, colours) {
  const { stripe } = map;
  const height = map.bottom - map.top;
  for (let i = 0; i < height; i += 1) {
    const value = LOWEST * (HIGHEST / LOWEST) ** (1 - i / height);
    const [r, g, b] = mixed(palette, value);
    context.fillStyle = `rgb(${r} ${g} ${b})`;
    context.fillRect(stripe.x, map.top + i, stripe.width, 1.5);
  }
  context.fillStyle = colours.muted;
  context.textAlign = "right";
  for (const [value, name] of [[0.25, "¼"], [0.5, "½"], [1, "1"], [2, "2"], [4, "4"], [8, "8"]]) {
    context.fillText(name, stripe.x - 4, stripe.y(stripeShare(value)) + (value === 8 ? 10 : value === 0.25 ? 0 : 4));
  }
}

function diamond(context, x, y, size, colours, isChosen) {
  context.beginPath();
  context.moveTo(x, y - size);
  context.lineTo(x + size, y);
  context.lineTo(x, y + size);
  context.lineTo(x - size, y);
  context.closePath();
  context.lineWidth = 1.5;
  context.fillStyle = isChosen ? colours.ink : colours.raised;
  context.strokeStyle = isChosen ? colours.raised : colours.ink;
  context.fill();
  context.stroke();
}

function dot(context, x, y, colours) {
  context.beginPath();
  context.arc(x, y, 7, 0, 7);
  context.fillStyle = colours.target;
  context.strokeStyle = colours.raised;
  context.lineWidth = 2.5;
  context.fill();
  context.stroke();
}

// cold -> flat (1) -> warm (at the third root of the end) -> hot, by the logarithm of the value.
function mixed([cold, flat, warm, hot], value) {
  const height = value < 1 ? Math.log(value) / Math.log(LOWEST) : Math.log(value) / Math.log(HIGHEST);
  const t = Math.min(1, Math.max(0, height));
  if (value < 1) return mix(flat, cold, t);
  return t < 0.5 ? mix(flat, warm, t * 2) : mix(warm, hot, t * 2 - 1);
}

const mix = (a, b, t) => [0, 1, 2].map((i) => Math.round(a[i] + (b[i] - a[i]) * t)).concat(255);
const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
