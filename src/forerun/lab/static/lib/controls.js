// Sliders, choices, buttons, readouts and legends, the same for every widget.
import { el } from "./dom.js";

let count = 0;
const newId = (what) => `${what}-${(count += 1)}`;

// A slider with its value beside its label. Returns { element, input, value, set(value) }; set does not call onInput.
export function slider({ label, min, max, step, value, format = String, onInput, help }) {
  const id = newId("slider");
  const output = el("output", { for: id });
  const input = el("input", { type: "range", id, min, max, step });
  const show = () => {
    output.textContent = format(Number(input.value));
    input.setAttribute("aria-valuetext", output.textContent);
    input.style.setProperty("--share", (Number(input.value) - min) / (max - min || 1));
  };
  input.value = value;
  input.addEventListener("input", () => { show(); onInput(Number(input.value)); });
  show();
  const element = el("div", { class: "slider", title: help }, el("label", { for: id }, label), output, input);
  return { element, input, get value() { return Number(input.value); }, set(next) { input.value = next; show(); } };
}

// options: [[value, text], ...] or { group: [[value, text], ...] }. Returns { element, select, value, set(value) }.
export function select({ label, options, value, onChange }) {
  const id = newId("select");
  const all = (list) => list.map(([one, text]) => el("option", { value: one, selected: one === value }, text));
  const list = Array.isArray(options)
    ? all(options)
    : Object.entries(options).map(([group, some]) => el("optgroup", { label: group }, all(some)));
  const field = el("select", { id, onChange: () => onChange(field.value) }, list);
  const element = el("div", { class: "field" }, el("label", { for: id }, label), field);
  return { element, select: field, get value() { return field.value; }, set(next) { field.value = next; } };
}

// One of a few, side by side. options: [[value, text], ...]. Returns { element, value, set(value) }.
export function segments({ label, options, value, onChange }) {
  const name = newId("segments");
  const inputs = options.map(([one]) =>
    el("input", { type: "radio", name, value: one, checked: String(one) === String(value), onChange: () => onChange(one) }));
  const element = el("fieldset", { class: "segments" },
    el("legend", {}, label),
    el("div", {}, options.map(([, text], i) => el("label", {}, inputs[i], el("span", {}, text)))));
  return {
    element,
    get value() { return options[inputs.findIndex((input) => input.checked)]?.[0]; },
    set(next) { inputs.forEach((input) => { input.checked = input.value === String(next); }); },
  };
}

export function toggle({ label, value, onChange }) {
  const input = el("input", { type: "checkbox", role: "switch", checked: value, onChange: () => onChange(input.checked) });
  return { element: el("label", { class: "switch" }, input, el("span", {}, label)), input,
    get value() { return input.checked; }, set(next) { input.checked = next; } };
}

export function button(text, onClick, { primary = false, ...attributes } = {}) {
  return el("button", { type: "button", class: primary ? "primary" : "", ...attributes, onClick }, text);
}

// Numbers with their names: readouts([["speedup", "speed-up"], ...]) -> { element, set({ speedup: "1.47" }) }.
export function readouts(names) {
  const cells = {};
  const element = el("dl", { class: "readouts" }, names.map(([key, text, help]) => {
    cells[key] = el("dd", { "data-readout": key }, "–");
    return el("div", { title: help }, el("dt", {}, text), cells[key]);
  }));
  return {
    element,
    set(values) {
      for (const [key, value] of Object.entries(values)) {
        if (cells[key].textContent !== value) cells[key].textContent = value;
      }
    },
  };
}

// legend([["target", "target"], ["rejected", "rejected mass", "hatched"], ...]): meanings of colours.
export function legend(entries) {
  return el("ul", { class: "legend" }, entries.map(([colour, text, kind = "fill"]) =>
    el("li", {}, el("span", { class: `swatch ${kind}`, style: { "--swatch": `var(--${colour})` }, "aria-hidden": "true" }), text)));
}

// A row of small buttons behind a word: chips("Pair", [button, ...]).
export function chips(label, buttons) {
  return el("div", { class: "chips", role: "group", "aria-label": label }, el("span", { "aria-hidden": "true" }, label), buttons);
}
