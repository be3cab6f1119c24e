// The page: makes `lab`, which every widget gets, and mounts the widgets.
import { fetchJson, request, theory } from "./lib/api.js";
import * as controls from "./lib/controls.js";
import { el, svg } from "./lib/dom.js";
import * as plot from "./lib/plot.js";
import { settings } from "./lib/settings.js";
import { colours, onTheme, startToggle } from "./lib/theme.js";

const WIDGETS = ["residual", "landscape", "unbiasedness", "live", "trace"];

// request(path, body) -> Response, fetchJson(path, body) -> parsed answer, theory({function, arguments}, ...) -> results;
// colours() -> the current colours by their meaning; settings: what a link to this page carries; events: what widgets
// tell each other.
export const lab = { request, fetchJson, theory, colours, onTheme, settings, plot, controls, el, svg, events: new EventTarget() };

async function mount(name) {
  const element = document.querySelector(`#${name} .widget`);
  try {
    const widget = await import(`./widgets/${name}.js`);
    await widget.mount(element, lab);
    element.dataset.ready = "true";
  } catch (error) {
    element.replaceChildren(el("p", { class: "error", role: "alert" }, `This widget could not start: ${error.message}`));
    console.error(error);
  }
}

function startNavigation() {
  const links = [...document.querySelectorAll("nav a, a.skip")];
  for (const link of links) {
    link.addEventListener("click", (event) => {
      event.preventDefault(); // the address behind # holds the settings
      go(link.getAttribute("href").slice(1));
    });
  }
  const watch = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const link = links.find((one) => one.getAttribute("href") === `#${entry.target.id}`);
      if (entry.isIntersecting) {
        for (const one of links) one.removeAttribute("aria-current");
        link?.setAttribute("aria-current", "true");
      }
    }
  }, { rootMargin: "-30% 0px -60% 0px" });
  for (const name of WIDGETS) watch.observe(document.getElementById(name));
}

function go(id) {
  const place = document.getElementById(id);
  if (!place) return;
  place.setAttribute("tabindex", "-1");
  place.focus({ preventScroll: true });
  place.scrollIntoView({ block: "start" });
}

// An address that was changed by hand: other settings begin anew, a place is gone to.
window.addEventListener("hashchange", () => {
  if (location.hash.includes("=")) location.reload();
  else go(location.hash.slice(1));
});

startToggle(document.getElementById("theme"));
startNavigation();
const anchor = settings.anchor();
await Promise.all(WIDGETS.map(mount));
if (anchor) go(anchor);
document.documentElement.dataset.ready = "true";
