// What the browser keeps: settings and conversations, in its local storage. Nothing of it is sent anywhere.

const PREFIX = "ringcore.chat.";
const MAX_CONVERSATIONS = 200; // the least recently used ones make room

/** null where nothing is kept, or the browser keeps nothing. */
export function readKept(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null; // forbidden by the user
  }
}

/** Whether it is kept: the storage may be full, or forbidden. */
export function writeKept(name, text) {
  try {
    localStorage.setItem(name, text);
    return true;
  } catch {
    return false;
  }
}

function removeKept(name) {
  try {
    localStorage.removeItem(name);
  } catch {
    // Nothing is kept.
  }
}

/** Conversations as plain data: {id, title, updatedMs, turns}. */
export class ConversationStore {
  #summaries = null; // by id: {id, title, updatedMs}; null where they must be read again, which takes long for many

  /** {id, title, updatedMs} of each, the most recent first; what cannot be read is left out. */
  list() {
    if (this.#summaries === null) {
      const read = kept().map((name) => parsed(readKept(name)));
      this.#summaries = new Map(read.filter((one) => one !== null).map((one) => [one.id, summary(one)]));
    }
    return [...this.#summaries.values()].sort((a, b) => b.updatedMs - a.updatedMs);
  }

  /** null for one that is not kept. */
  load(id) {
    return parsed(readKept(PREFIX + id));
  }

  /** Whether it is kept. Others, the oldest first, are removed while there is no room for it. */
  save(conversation) {
    const text = JSON.stringify(conversation);
    const others = this.list().filter(({ id }) => id !== conversation.id);
    others.splice(MAX_CONVERSATIONS - 1).forEach(({ id }) => this.remove(id));
    while (!writeKept(PREFIX + conversation.id, text)) {
      const oldest = others.pop();
      if (!oldest) {
        return false;
      }
      this.remove(oldest.id);
    }
    this.#summaries.set(conversation.id, summary(conversation));
    return true;
  }

  remove(id) {
    removeKept(PREFIX + id);
    this.#summaries?.delete(id);
  }

  /** Calls back when another tab has changed them. */
  onChange(callback) {
    window.addEventListener("storage", ({ key }) => {
      if (key === null || key.startsWith(PREFIX)) {
        this.#summaries = null;
        callback();
      }
    });
  }
}

function summary({ id, title, updatedMs }) {
  return { id, title, updatedMs };
}

function kept() {
  try {
    return Object.keys(localStorage).filter((name) => name.startsWith(PREFIX));
  } catch {
    return [];
  }
}

function parsed(text) {
  try {
    const { id, title, updatedMs, turns } = JSON.parse(text);
    const isValid = typeof id === "string" && typeof title === "string" && Number.isFinite(updatedMs) && Array.isArray(turns);
    return isValid ? { id, title, updatedMs, turns } : null;
  } catch {
    return null;
  }
}
