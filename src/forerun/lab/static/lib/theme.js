// The colours by their meaning, in the theme that is shown; style.css has them.
const NAMES = [
  "target", "draft", "accepted", "rejected", "correction", "bonus",
  "ink", "muted", "line", "surface", "raised", "accent", "cold", "flat", "warm", "hot",
];
const listeners = new Set();
const dark = matchMedia("(prefers-color-scheme: dark)");
let cached = null;

export function colours() {
  if (!cached) {
    const style = getComputedStyle(document.documentElement);
    cached = Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  }
  return cached;
}

// Calls `listener` whenever the theme changes. Returns a function that ends it.
export function onTheme(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function changed() {
  cached = null;
  for (const listener of listeners) listener();
}

const isDark = () => (document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";

export function startToggle(button) {
  const say = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Change to the ${isDark() ? "light" : "dark"} theme`);
  };
  button.addEventListener("click", () => {
    const theme = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    try { sessionStorage.setItem("theme", theme); } catch { /* kept as long as the page */ }
    say();
    changed();
  });
  dark.addEventListener("change", () => { say(); changed(); });
  say();
}
