export function mount(element, lab) {
  element.replaceChildren(lab.el("p", { class: "note" }, "Not here yet."));
}
