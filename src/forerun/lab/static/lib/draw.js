// What canvases are drawn with: lines, words, dots and bands.
const FONT = "12px system-ui, sans-serif";

export function polyline(context, points, colour, { width = 1, dash = [] } = {}) {
  context.save();
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.lineJoin = "round";
  context.setLineDash(dash);
  context.beginPath();
  points.forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
  context.stroke();
  context.restore();
}

export function label(context, text, x, y, colour, align = "center") {
  context.font = FONT;
  context.fillStyle = colour;
  context.textAlign = align;
  context.fillText(text, x, y);
}

export function dot(context, x, y, radius, colour, border = null) {
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  context.fillStyle = colour;
  context.fill();
  if (border) {
    context.strokeStyle = border;
    context.lineWidth = 2.5;
    context.stroke();
  }
}

// Fills between two lines, each from left to right, see-through.
export function band(context, above, below, colour) {
  context.save();
  context.globalAlpha = 0.3;
  context.fillStyle = colour;
  context.beginPath();
  [...above, ...[...below].reverse()].forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
  context.fill();
  context.restore();
}

// Calls `draw` with everything outside of the box cut off.
export function within(context, { left, top, right, bottom }, draw) {
  context.save();
  context.beginPath();
  context.rect(left, top, right - left, bottom - top);
  context.clip();
  draw();
  context.restore();
}
