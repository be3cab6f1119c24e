// What plots share: scales, ticks, numbers as text, canvases that fit their place, and dragging.
import { el } from "./dom.js";

export const clamp = (value, least, most) => Math.min(most, Math.max(least, value));

// A number with so many digits behind the point; thousands are separated.
export function format(value, digits = 2) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }).replace("-", "−");
}

// scale(from [a, b], to [c, d])(x), with .invert(y).
export function scale([a, b], [c, d]) {
  const map = (x) => c + ((x - a) / (b - a)) * (d - c);
  map.invert = (y) => a + ((y - c) / (d - c)) * (b - a);
  return map;
}

// About `count` round numbers from `least` to `most`.
export function ticks(least, most, count = 5) {
  const raw = (most - least) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((one) => one * power >= raw) * power;
  const first = Math.ceil(least / step - 1e-9);
  return Array.from({ length: Math.floor(most / step + 1e-9) - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

// Calls `draw(width, height)` at once, and whenever the size of `element` changes. Returns a function that draws again.
export function fitted(element, draw) {
  let width = 0;
  let height = 0;
  const again = () => { if (width > 0) draw(width, height); };
  const measure = () => {
    const box = element.getBoundingClientRect();
    if (Math.abs(box.width - width) < 0.5 && Math.abs(box.height - height) < 0.5) return;
    ({ width, height } = box);
    again();
  };
  new ResizeObserver(measure).observe(element);
  measure();
  return again;
}

// A canvas that fills `element`, sharp on every screen: canvas(element, (context, width, height) => ...) -> draw again.
export function canvas(element, draw, attributes = {}) {
  const node = el("canvas", attributes);
  element.append(node);
  const again = fitted(element, (width, height) => {
    const ratio = window.devicePixelRatio || 1;
    if (node.width !== Math.round(width * ratio) || node.height !== Math.round(height * ratio)) {
      node.width = Math.round(width * ratio);
      node.height = Math.round(height * ratio);
    }
    const context = node.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    draw(context, width, height);
  });
  return { node, draw: again };
}

// At most one call per frame, with the newest arguments. `.times` holds the script time of the last frames, in ms.
export function perFrame(call) {
  let waiting = null;
  const times = [];
  const run = (...given) => {
    if (waiting === null) {
      requestAnimationFrame(() => {
        const now = waiting;
        waiting = null;
        const start = performance.now();
        call(...now);
        times.push(performance.now() - start);
        if (times.length > 600) times.shift();
      });
    }
    waiting = given;
  };
  run.times = times;
  return run;
}

// Dragging with mouse, pen or finger: move(x, y, event) in pixels of the element, from the press to the release.
export function draggable(node, move, end = () => {}) {
  const at = (event) => {
    const box = node.getBoundingClientRect();
    move(event.clientX - box.left, event.clientY - box.top, event);
  };
  node.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    node.setPointerCapture(event.pointerId);
    node.focus?.({ preventScroll: true });
    at(event);
    event.preventDefault();
  });
  node.addEventListener("pointermove", (event) => { if (node.hasPointerCapture(event.pointerId)) at(event); });
  node.addEventListener("lostpointercapture", () => end());
}
