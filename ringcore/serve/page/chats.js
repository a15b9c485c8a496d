// The list of conversations beside the one that is shown; above it on a narrow screen.

import { button, byId, element, setText } from "./elements.js";
import { readKept, writeKept } from "./store.js";

const SHOWN = "ringcore.chats"; // "hidden" where the user has closed the list
const NARROW = window.matchMedia("(max-width: 60rem)");

export class ChatList {
  #acts;
  #currentId = null;

  /** acts: {open(id), rename(id, title), remove(id), putBack(kept), removeAll()}; `remove` returns what `putBack` takes. */
  constructor(acts) {
    this.#acts = acts;
    byId("toggle-chats").addEventListener("click", () => this.#toggle());
    byId("chats-backdrop").addEventListener("click", () => this.#show(false));
    byId("remove-all-chats").addEventListener("click", () => this.#removeAll());
    byId("chats").addEventListener("keydown", (event) => {
      if (event.key === "Escape" && NARROW.matches) {
        event.stopPropagation();
        this.#show(false);
        byId("toggle-chats").focus();
      }
    });
    NARROW.addEventListener("change", () => this.#showAtFirst());
    this.#showAtFirst();
  }

  /** conversations: {id, title}, in order; answering: the ids of those whose answer streams. */
  draw(conversations, currentId, answering) {
    this.#currentId = currentId;
    const items = conversations.map((one) => this.#item(one, answering.has(one.id)));
    if (!byId("chat-list").querySelector("input")) {
      const focused = document.activeElement?.dataset.id;
      byId("chat-list").replaceChildren(...items);
      byId("chat-list").querySelector(`[data-id="${CSS.escape(focused ?? "")}"]`)?.focus();
    }
    byId("no-chats").hidden = items.length > 0;
    byId("remove-all-chats").hidden = items.length === 0;
  }

  #item({ id, title }, isAnswering) {
    const open = button(title, () => this.#open(id), "chat-title");
    open.dataset.id = id;
    open.title = title;
    if (id === this.#currentId) {
      open.setAttribute("aria-current", "true");
    }
    if (isAnswering) {
      open.append(element("span", { class: "dot answering", role: "img", "aria-label": "answering" }));
    }
    const rename = button("✎", () => this.#rename(item, id, title), "quiet icon");
    rename.setAttribute("aria-label", `Rename ${title}`);
    const remove = button("✕", () => this.#remove(id, title), "quiet icon");
    remove.setAttribute("aria-label", `Delete ${title}`);
    const item = element("li", {}, open, rename, remove);
    return item;
  }

  #open(id) {
    this.#acts.open(id);
    if (NARROW.matches) {
      this.#show(false);
    }
  }

  #rename(item, id, title) {
    const input = element("input", { "aria-label": "Title", maxlength: "120" });
    let isOver = false;
    const end = (newTitle) => {
      if (!isOver) {
        isOver = true;
        item.remove();
        this.#acts.rename(id, newTitle.trim() || title);
      }
    };
    input.value = title;
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.isComposing) {
        end(input.value);
      } else if (event.key === "Escape") {
        event.stopPropagation();
        end(title);
      }
    });
    input.addEventListener("blur", () => end(input.value));
    item.replaceChildren(input);
    input.select();
    input.focus();
  }

  #remove(id, title) {
    const kept = this.#acts.remove(id);
    this.#say(`Deleted “${title}”.`, () => this.#acts.putBack(kept));
  }

  #removeAll() {
    const kept = this.#acts.removeAll();
    this.#say("Deleted all.", () => kept.forEach((one) => this.#acts.putBack(one)));
  }

  /** The last removal can be taken back until the next one. */
  #say(text, putBack) {
    const told = byId("chats-note");
    const undo = button("Undo", () => {
      putBack();
      told.replaceChildren();
    });
    told.replaceChildren(element("span", {}, text), undo);
    undo.focus();
  }

  warn(text) {
    setText(byId("chats-note"), text);
  }

  #showAtFirst() {
    this.#show(!NARROW.matches && readKept(SHOWN) !== "hidden");
  }

  #toggle() {
    const isShown = byId("chats").hidden;
    this.#show(isShown);
    if (!NARROW.matches) {
      writeKept(SHOWN, isShown ? "shown" : "hidden");
    } else if (isShown) {
      byId("chats").querySelector("button")?.focus();
    }
  }

  #show(isShown) {
    byId("chats").hidden = !isShown;
    byId("chats-backdrop").hidden = !isShown || !NARROW.matches;
    byId("toggle-chats").setAttribute("aria-expanded", String(isShown));
  }
}
