// Elements of the page. Text is inserted as text nodes only: the page never parses HTML.

export const byId = (id) => document.getElementById(id);

/** A new element with attributes and children; a child is a node or a text. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function button(text, onClick, className = "quiet") {
  const made = element("button", { type: "button", class: className }, text);
  made.addEventListener("click", onClick);
  return made;
}

/** Writes only changed text: equal text would be announced by screen readers, and laid out, again. */
export function setText(node, text) {
  if (node.textContent !== text) {
    node.textContent = text;
  }
}
