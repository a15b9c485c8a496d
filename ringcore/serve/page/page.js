// The page: a conversation with the model, and what it costs.

import { ApiError, getJson, hasKey, keepKey, streamChat } from "./api.js";
import { byId, setText } from "./elements.js";
import { EngineWatch } from "./engine.js";
import { Settings, SettingsError } from "./settings.js";
import { Turn } from "./turn.js";

const NEAR_END = 80; // pixels: who is so near to the end is kept there while an answer grows

class Page {
  #settings = new Settings();
  #engine = new EngineWatch();
  #turns = [];
  #stopper = null; // of the answer under way
  #model = null;

  start() {
    const message = byId("message");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    message.addEventListener("keydown", (event) => {
      // While characters are composed, Enter chooses one of them.
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#send();
      }
    });
    message.addEventListener("input", () => this.#showComposer());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
        this.#stop();
      }
    });
    byId("stop").addEventListener("click", () => this.#stop());
    byId("new-chat").addEventListener("click", () => this.#newChat());
    byId("open-settings").addEventListener("click", () => this.#settings.open());
    this.#keepAtEnd();
    this.#showComposer();
    this.#engine.start();
    this.#nameModel();
  }

  /** The model's name, as soon as there is a service, and a key where it wants one. */
  async #nameModel() {
    const { signal } = new AbortController();
    for (;;) {
      try {
        const { data } = await getJson("v1/models", signal);
        this.#model = data[0].id;
        // A folder's last part says enough; the whole is in the title.
        setText(byId("model"), this.#model.split("/").findLast((part) => part) ?? this.#model);
        byId("model").title = this.#model;
        document.title = byId("model").textContent;
        return;
      } catch (error) {
        if (error.wantsKey) {
          await askForKey();
        } else if (error instanceof ApiError) {
          await this.#engine.ready(error.retryAfterS, signal);
        } else {
          throw error; // a bug of the page's
        }
      }
    }
  }

  #send() {
    const message = byId("message");
    const question = message.value.trim();
    if (!question || this.#stopper) {
      return;
    }
    message.value = "";
    const turn = new Turn(question);
    this.#turns.push(turn);
    byId("messages").append(turn.node);
    this.#answer(turn);
    scrollToEnd();
  }

  async #answer(turn) {
    this.#stopper = new AbortController();
    this.#engine.isBusy = true;
    this.#engine.lookNow();
    this.#showComposer();
    announce("Waiting for the answer.");
    try {
      await this.#stream(turn, this.#stopper.signal);
      turn.finished();
      announce(`Answer: ${turn.content}`);
    } catch (error) {
      this.#showFailure(turn, error);
    } finally {
      this.#stopper = null;
      this.#engine.isBusy = false;
      this.#engine.lookNow();
      this.#showComposer();
    }
  }

  /** Takes the whole answer. A request that came to nothing is sent again, where that may help. */
  async #stream(turn, signal) {
    for (;;) {
      turn.begin();
      try {
        for await (const chunk of streamChat(this.#request(turn), signal)) {
          turn.take(chunk);
        }
        return;
      } catch (error) {
        if (error.wantsKey && turn.isEmpty) {
          await askForKey(signal);
        } else if (error.isTemporary && turn.isEmpty) {
          turn.waits(error.message);
          await this.#engine.ready(error.retryAfterS, signal);
        } else {
          throw error;
        }
      }
    }
  }

  #request(turn) {
    const fields = this.#settings.fields();
    const before = this.#turns.slice(0, this.#turns.indexOf(turn)).flatMap((one) => one.messages);
    const { system } = this.#settings;
    const messages = [
      ...(system ? [{ role: "system", content: system }] : []),
      ...before,
      { role: "user", content: turn.question },
    ];
    const usage = { include_usage: true, continuous_usage_stats: true };
    return { ...(this.#model && { model: this.#model }), messages, stream: true, stream_options: usage, ...fields };
  }

  #showFailure(turn, error) {
    if (error.name === "AbortError") {
      turn.stopped();
      announce("Stopped.");
      return;
    }
    const actions = [["Try again", () => this.#again(turn)]];
    if (error.param && this.#settings.has(error.param)) {
      actions.push(["Open settings", () => this.#settings.open(error.param, error.message)]);
    }
    turn.failed(error, actions);
    if (!(error instanceof ApiError || error instanceof SettingsError)) {
      throw error; // a bug of the page's
    }
  }

  #again(turn) {
    if (!this.#stopper) {
      this.#answer(turn);
    }
  }

  #stop() {
    this.#stopper?.abort();
  }

  #newChat() {
    this.#stop();
    this.#turns = [];
    byId("messages").replaceChildren();
    this.#showComposer();
    byId("message").focus();
  }

  #showComposer() {
    const message = byId("message");
    const isAnswering = this.#stopper !== null;
    const hadFocus = [byId("send"), byId("stop")].includes(document.activeElement);
    byId("welcome").hidden = this.#turns.length > 0;
    byId("send").hidden = isAnswering;
    byId("stop").hidden = !isAnswering;
    byId("send").disabled = !message.value.trim();
    message.style.height = "auto";
    message.style.height = `${message.scrollHeight}px`;
    if (hadFocus) {
      message.focus(); // the button that had it is gone
    }
  }

  /** Follows what grows, unless the person has scrolled up to read. */
  #keepAtEnd() {
    const scroll = byId("scroll");
    let isAtEnd = true;
    scroll.addEventListener("scroll", () => {
      isAtEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < NEAR_END;
    });
    new ResizeObserver(() => isAtEnd && scrollToEnd()).observe(byId("messages"));
  }
}

function scrollToEnd() {
  const scroll = byId("scroll");
  scroll.scrollTop = scroll.scrollHeight;
}

function announce(text) {
  setText(byId("announcer"), text);
}

/** Until a key was given, which may be another wrong one. */
async function askForKey(signal) {
  const dialog = byId("key");
  setText(
    byId("key-problem"),
    hasKey() ? "The service does not know this key. Give another one." : "This service asks for a key. It is kept until this tab is closed.",
  );
  byId("key-value").value = "";
  if (!dialog.open) {
    dialog.showModal();
  }
  const over = new AbortController(); // takes the listeners away
  const { promise, resolve, reject } = Promise.withResolvers();
  const given = () => {
    keepKey(byId("key-value").value.trim());
    resolve();
  };
  byId("key-form").addEventListener("submit", given, { signal: over.signal });
  // Without a key there is nothing to do here: closed by Escape, it comes again.
  dialog.addEventListener("close", () => dialog.showModal(), { signal: over.signal });
  signal?.addEventListener("abort", () => reject(signal.reason), { signal: over.signal });
  try {
    await promise;
  } finally {
    over.abort();
  }
}

new Page().start();
