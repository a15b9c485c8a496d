// Copies text, also where the page is not served by localhost or https and browsers have no clipboard for it.

import { button, element } from "./elements.js";

const TOLD_MS = 2000;

/** A button that copies what `text()` returns. name: for screen readers, what is copied. */
export function copyButton(text, name) {
  const copy = button("Copy", async () => {
    copy.textContent = (await copied(text())) ? "Copied" : "Not copied";
    setTimeout(() => (copy.textContent = "Copy"), TOLD_MS);
  });
  copy.setAttribute("aria-label", `Copy ${name}`);
  return copy;
}

async function copied(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // Not permitted: the way below may be.
    }
  }
  const held = element("textarea", { class: "unseen", "aria-hidden": "true" });
  const focused = document.activeElement;
  document.body.append(held);
  held.value = text;
  held.select();
  const isCopied = document.execCommand("copy");
  held.remove();
  focused?.focus();
  return isCopied;
}
