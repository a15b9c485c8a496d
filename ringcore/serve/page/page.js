// The page: a conversation with the model, and its timings.

import { ApiError, getJson, hasKey, keepKey, streamChat } from "./api.js";
import { byId, setText } from "./elements.js";
import { EngineMonitor } from "./engine.js";
import { Settings, SettingsError } from "./settings.js";
import { Turn } from "./turn.js";

const NEAR_END = 80; // pixels: a view this near to the end scrolls with a growing answer

class Page {
  #settings = new Settings();
  #engine = new EngineMonitor();
  #turns = [];
  #abortController = null; // the AbortController of the streaming answer
  #model = null;

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

  /** Loads the model's name, once the service responds and has a key if it requires one. */
  async #nameModel() {
    const { signal } = new AbortController();
    for (;;) {
      try {
        const { data } = await getJson("v1/models", signal);
        this.#model = data[0].id;
        // Shows the last part of a path; the title has the whole.
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
    if (!question || this.#abortController) {
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
    this.#abortController = new AbortController();
    this.#engine.isBusy = true;
    this.#engine.pollNow();
    this.#showComposer();
    announce("Waiting for the answer.");
    try {
      await this.#stream(turn, this.#abortController.signal);
      turn.finished();
      announce(`Answer: ${turn.content}`);
    } catch (error) {
      this.#showFailure(turn, error);
    } finally {
      this.#abortController = null;
      this.#engine.isBusy = false;
      this.#engine.pollNow();
      this.#showComposer();
    }
  }

  /** Streams the whole answer. A request that failed before its first chunk is retried if that may help. */
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
    if (!this.#abortController) {
      this.#answer(turn);
    }
  }

  #stop() {
    this.#abortController?.abort();
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
    const isAnswering = this.#abortController !== null;
    const hadFocus = [byId("send"), byId("stop")].includes(document.activeElement);
    byId("welcome").hidden = this.#turns.length > 0;
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

/** Waits until the user has entered a key, which may be wrong again. */
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
  const over = new AbortController(); // removes the listeners
  const { promise, resolve, reject } = Promise.withResolvers();
  const given = () => {
    keepKey(byId("key-value").value.trim());
    resolve();
  };
  byId("key-form").addEventListener("submit", given, { signal: over.signal });
  // The page needs a key: closed by Escape, the dialog opens again.
  dialog.addEventListener("close", () => dialog.showModal(), { signal: over.signal });
  signal?.addEventListener("abort", () => reject(signal.reason), { signal: over.signal });
  try {
    await promise;
  } finally {
    over.abort();
  }
}

new Page().start();
