// A distance beside what a perfect sampler shows after as many draws: a strip with the band of its noise, and a dot.
import { el } from "./dom.js";
import { format } from "./plot.js";

// Standard deviations of a band that holds 99.9 % of what a perfect sampler shows: with 2 of them one right rule in
// twenty would be shown to be wrong.
export const WIDE = 3.29;

// Returns { element, set(value, { mean, deviation }) }; a value of null empties it.
export function noiseStrip(label) {
  const band = el("span", { class: "band" });
  const dot = el("span", { class: "dot" });
  const track = el("div", { class: "track", role: "img", "aria-label": label }, band, dot);
  const said = el("p", { class: "note" });
  const element = el("div", { class: "strip" }, track, said);
  return {
    element,
    set(value, noise) {
      element.classList.toggle("empty", value === null);
      if (value === null) {
        said.textContent = `${label}: run some rounds.`;
        track.setAttribute("aria-label", said.textContent);
        return;
      }
      const least = Math.max(0, noise.mean - WIDE * noise.deviation);
      const most = noise.mean + WIDE * noise.deviation;
      const end = Math.max(2 * most, 1.08 * value) || 1;
      band.style.left = `${(least / end) * 100}%`;
      band.style.width = `${((most - least) / end) * 100}%`;
      dot.style.left = `${(value / end) * 100}%`;
      const isOutside = value > most;
      element.classList.toggle("outside", isOutside);
      said.textContent = `${label} ${format(value, 3)}: ${isOutside ? "above" : value < least ? "below" : "within"} the noise of a perfect sampler, ${format(least, 3)} to ${format(most, 3)} (mean ${format(noise.mean, 3)}).`;
      track.setAttribute("aria-label", said.textContent);
    },
  };
}
