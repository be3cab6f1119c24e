// What a link to this page carries: #landscape.alpha=0.7&residual.draft=... A # without = is a place on the page.
const values = new Map();
const anchorOnStart = read();
let timer = 0;

function read() {
  const hash = location.hash.slice(1);
  if (!hash.includes("=")) return hash;
  for (const [name, value] of new URLSearchParams(hash)) values.set(name, value);
  return values.get("at") ?? "";
}

function write() {
  timer = 0;
  const hash = new URLSearchParams([...values].sort()).toString();
  history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
}


export const settings = {
  anchor: () => anchorOnStart,
  // The value as text; `usual` where the link has none.
  get: (name, usual = "") => values.get(name) ?? usual,
  // The value as a number within bounds; `usual` where the link has none, or no number.
  number(name, usual, least = -Infinity, most = Infinity) {
    const found = values.has(name) && values.get(name) !== "" ? Number(values.get(name)) : NaN;
    return Number.isFinite(found) ? Math.min(most, Math.max(least, found)) : usual;
  },
  // A list of numbers, of that length; `usual` where the link has none.
  numbers(name, usual) {
    const found = (values.get(name) ?? "").split("_").map(Number);
    return values.has(name) && found.length === usual.length && found.every(Number.isFinite) ? found : usual;
  },
  set(name, value) {
    if (value === null || value === undefined) values.delete(name);
    else values.set(name, Array.isArray(value) ? value.join("_") : String(value));
    timer ||= setTimeout(write, 200); // a slider moves 60 times a second; browsers slow addresses down
  },
  // A link to this page as it is now, which opens at a section.
  link(at) {
    if (timer) { clearTimeout(timer); write(); }
    const hash = new URLSearchParams([...values].sort());
    if (at) hash.set("at", at);
    return `${location.origin}${location.pathname}#${hash}`;
  },
};
