// The page: the conversation that is shown, its composer, and the others.

import { ApiError, getJson } from "./api.js";
import { ChatList } from "./chats.js";
import { Conversation } from "./conversation.js";
import { byId, setText } from "./elements.js";
import { EngineMonitor } from "./engine.js";
import { askForKey } from "./key.js";
import { Settings } from "./settings.js";
import { ConversationStore } from "./store.js";

const NEAR_END = 80; // pixels: a view this near to the end scrolls with a growing answer

class Page {
  #service = { model: null, settings: new Settings(), engine: new EngineMonitor(), askForKey };
  #store = new ConversationStore();
  #live = new Map(); // by id: the conversations that are shown or answered
  #current = null;
  #isAtEnd = true;
  #list = new ChatList({
    open: (id) => this.#open(id),
    rename: (id, title) => this.#rename(id, title),
    remove: (id) => this.#remove(id),
    putBack: (kept) => this.#putBack(kept),
    removeAll: () => this.#store.list().map(({ id }) => this.#remove(id)),
  });

  start() {
    const message = byId("message");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    message.addEventListener("keydown", (event) => {
      // During IME composition Enter selects a candidate.
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#send();
      }
    });
    message.addEventListener("input", () => this.#showComposer());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
        this.#current.stop();
      }
    });
    byId("stop").addEventListener("click", () => this.#current.stop());
    byId("new-chat").addEventListener("click", () => this.#new());
    byId("open-settings").addEventListener("click", () => this.#service.settings.open());
    window.addEventListener("hashchange", () => this.#openNamed());
    window.addEventListener("pagehide", () => this.#saveLive());
    document.addEventListener("visibilitychange", () => document.hidden && this.#saveLive());
    this.#store.onChange(() => this.#drawList());
    this.#keepAtEnd();
    this.#openNamed();
    this.#service.engine.start();
    this.#learn();
  }

  /** Loads the model's name and its defaults, once the service responds and has a key if it requires one. */
  async #learn() {
    const { signal } = new AbortController();
    for (;;) {
      try {
        const { data } = await getJson("v1/models", signal);
        this.#service.settings.showDefaults(await getJson("page/defaults", signal));
        const [{ id: model }] = data;
        this.#service.model = model;
        // Shows the last part of a path; the title has the whole.
        setText(byId("model"), model.split("/").findLast((part) => part) ?? model);
        byId("model").title = model;
        document.title = byId("model").textContent;
        return;
      } catch (error) {
        if (error.wantsKey) {
          await askForKey();
        } else if (error instanceof ApiError) {
          await this.#service.engine.ready(error.retryAfterS, signal);
        } else {
          throw error; // a bug of the page's
        }
      }
    }
  }

  // ------------------------------------------------------------------------------------------------------------
  // Which conversation is shown.

  /** The conversation that the address names, which a reload keeps; else a new one. */
  #openNamed() {
    const id = location.hash.slice(1);
    if (this.#live.has(id) || this.#store.load(id)) {
      this.#open(id);
    } else {
      this.#show(this.#made());
    }
  }

  #new() {
    this.#show(this.#made());
    byId("message").focus();
  }

  #made() {
    return new Conversation(this.#service, (changed) => this.#onChange(changed));
  }

  #open(id) {
    const kept = this.#live.has(id) ? null : this.#store.load(id);
    const restored = kept && Conversation.restored(kept, this.#service, (changed) => this.#onChange(changed));
    const conversation = this.#live.get(id) ?? restored;
    if (conversation && conversation !== this.#current) {
      this.#show(conversation);
      byId("message").focus();
    }
  }

  #show(conversation) {
    const before = this.#current;
    if (before && !before.isAnswering) {
      this.#live.delete(before.id);
    }
    this.#current = conversation;
    this.#live.set(conversation.id, conversation);
    byId("messages").replaceChildren(...conversation.turns.map((turn) => turn.node));
    this.#nameInAddress();
    this.#drawList();
    this.#showComposer();
    this.#scrollToEnd();
  }

  #nameInAddress() {
    const hash = this.#current.turns.length ? `#${this.#current.id}` : "";
    if (location.hash !== hash) {
      history.replaceState(null, "", hash || location.pathname + location.search);
    }
  }

  // ------------------------------------------------------------------------------------------------------------
  // Conversations change.

  #onChange(conversation) {
    if (!this.#live.has(conversation.id)) {
      return; // it was deleted, and its answer has stopped
    }
    const isCurrent = conversation === this.#current;
    if (!isCurrent && !conversation.isAnswering) {
      this.#live.delete(conversation.id);
    }
    this.#service.engine.isBusy = [...this.#live.values()].some((one) => one.isAnswering);
    this.#service.engine.pollNow();
    this.#save(conversation);
    this.#drawList();
    if (!isCurrent) {
      return;
    }
    const focused = document.activeElement;
    const wasInMessages = byId("messages").contains(focused);
    this.#drawTurns();
    this.#nameInAddress();
    this.#showComposer();
    if (wasInMessages && !focused.checkVisibility()) {
      byId(conversation.isAnswering ? "stop" : "message").focus(); // the focused button is gone
    }
    this.#announce();
  }

  #drawTurns() {
    const messages = byId("messages");
    const nodes = this.#current.turns.map((turn) => turn.node);
    [...messages.childNodes].filter((node) => !nodes.includes(node)).forEach((node) => node.remove());
    const added = nodes.slice(messages.childNodes.length);
    messages.append(...added);
    if (added.length) {
      this.#scrollToEnd();
    }
  }

  #announce() {
    const turn = this.#current.turns.at(-1);
    const texts = { stopped: "Stopped.", error: "The answer failed." };
    const text = this.#current.isAnswering ? "Waiting for the answer." : (texts[turn.end] ?? `Answer: ${turn.content}`);
    setText(byId("announcer"), text);
  }

  #save(conversation) {
    if (!this.#store.save(conversation)) {
      this.#list.warn("The browser keeps no more: its storage is full, or forbidden to this page.");
    }
  }

  #saveLive() {
    [...this.#live.values()].filter((one) => one.isAnswering).forEach((one) => this.#save(one));
  }

  #rename(id, title) {
    const live = this.#live.get(id);
    const conversation = live ?? this.#store.load(id);
    if (conversation) {
      conversation.title = title;
      this.#save(conversation);
    }
    this.#drawList();
  }

  /** Returns it as it was kept. */
  #remove(id) {
    const live = this.#live.get(id);
    live?.stop();
    const kept = live ? JSON.parse(JSON.stringify(live)) : this.#store.load(id);
    this.#live.delete(id);
    this.#store.remove(id);
    if (this.#current.id === id) {
      this.#show(this.#made());
    }
    this.#drawList();
    return kept;
  }

  #putBack(kept) {
    if (kept) {
      this.#store.save(kept);
      this.#drawList();
    }
  }

  #drawList() {
    const answering = [...this.#live.values()].filter((one) => one.isAnswering).map(({ id }) => id);
    this.#list.draw(this.#store.list(), this.#current.id, new Set(answering));
  }

  // ------------------------------------------------------------------------------------------------------------
  // The composer and the view.

  #send() {
    const message = byId("message");
    const question = message.value.trim();
    if (!question || this.#current.isAnswering) {
      return;
    }
    message.value = "";
    this.#current.ask(question);
    this.#scrollToEnd();
  }

  #showComposer() {
    const message = byId("message");
    const { isAnswering } = this.#current;
    const hadFocus = [byId("send"), byId("stop")].includes(document.activeElement);
    byId("welcome").hidden = this.#current.turns.length > 0;
    byId("messages").classList.toggle("answering", isAnswering);
    byId("send").hidden = isAnswering;
    byId("stop").hidden = !isAnswering;
    byId("send").disabled = !message.value.trim();
    message.style.height = "auto";
    message.style.height = `${message.scrollHeight}px`;
    if (hadFocus) {
      message.focus(); // the focused button was removed
    }
  }

  /** Scrolls with the growing answer, unless the user has scrolled up. */
  #keepAtEnd() {
    const scroll = byId("scroll");
    const look = () => {
      this.#isAtEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < NEAR_END;
      byId("jump").hidden = this.#isAtEnd;
    };
    scroll.addEventListener("scroll", look);
    byId("jump").addEventListener("click", () => {
      this.#scrollToEnd();
      byId("message").focus();
    });
    const grown = new ResizeObserver(() => (this.#isAtEnd ? this.#scrollToEnd() : look()));
    grown.observe(byId("messages"));
    grown.observe(scroll);
  }

  #scrollToEnd() {
    const scroll = byId("scroll");
    scroll.scrollTop = scroll.scrollHeight;
    this.#isAtEnd = true;
    byId("jump").hidden = true;
  }
}

new Page().start();
