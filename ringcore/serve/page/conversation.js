// A conversation: its turns, and the answer that streams into the last one, also while another one is shown.

import { ApiError, streamChat } from "./api.js";
import { SettingsError } from "./settings.js";
import { Turn } from "./turn.js";

const MAX_TITLE = 60; // characters of the first question

export class Conversation {
  turns = [];
  title = "";
  #service;
  #onChange;
  #abortController = null; // of the answer that streams

  /** service: {model, settings, engine, askForKey}, read for each request. onChange: called with this conversation when
   * a turn was added, or begins or ends. */
  constructor(service, onChange, id = newId()) {
    this.id = id;
    this.updatedMs = Date.now();
    this.#service = service;
    this.#onChange = onChange;
  }

  /** The conversation that `toJSON` made; what cannot be read of it is left out. */
  static restored(kept, service, onChange) {
    const conversation = new Conversation(service, onChange, kept.id);
    Object.assign(conversation, { title: kept.title, updatedMs: kept.updatedMs });
    for (const turn of kept.turns) {
      try {
        conversation.turns.push(Turn.restored(turn, conversation.#acts()));
      } catch (error) {
        if (!(error instanceof TypeError)) {
          throw error;
        }
      }
    }
    return conversation;
  }

  toJSON() {
    const { id, title, updatedMs, turns } = this;
    return { id, title, updatedMs, turns };
  }

  get isAnswering() {
    return this.#abortController !== null;
  }

  ask(question) {
    this.title ||= shortened(question);
    const turn = new Turn(question, this.#acts());
    this.turns.push(turn);
    this.#answer(turn);
  }

  stop() {
    this.#abortController?.abort();
  }

  #acts() {
    return { regenerate: (turn) => this.#again(turn), edit: (turn, question) => this.#askInstead(turn, question) };
  }

  #again(turn) {
    if (!this.isAnswering) {
      this.#answer(turn);
    }
  }

  #askInstead(turn, question) {
    if (this.isAnswering) {
      return;
    }
    if (this.turns[0] === turn && this.title === shortened(turn.question)) {
      this.title = ""; // that of the new question
    }
    this.turns.splice(this.turns.indexOf(turn));
    this.ask(question);
  }

  async #answer(turn) {
    this.#abortController = new AbortController();
    this.#changed();
    try {
      await this.#stream(turn, this.#abortController.signal);
      turn.finished();
    } catch (error) {
      this.#showFailure(turn, error);
    } finally {
      this.#abortController = null;
      this.#changed();
    }
  }

  #changed() {
    this.updatedMs = Date.now();
    this.#onChange(this);
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
          await this.#service.askForKey(signal);
        } else if (error.isTemporary && turn.isEmpty) {
          turn.waits(error.message);
          await this.#service.engine.ready(error.retryAfterS, signal);
        } else {
          throw error;
        }
      }
    }
  }

  #request(turn) {
    const { model, settings } = this.#service;
    const fields = settings.fields();
    const before = this.turns.slice(0, this.turns.indexOf(turn)).flatMap((one) => one.messages);
    const messages = [
      ...(settings.system ? [{ role: "system", content: settings.system }] : []),
      ...before,
      { role: "user", content: turn.question },
    ];
    const usage = { include_usage: true, continuous_usage_stats: true };
    return { ...(model && { model }), messages, stream: true, stream_options: usage, ...fields };
  }

  #showFailure(turn, error) {
    if (error.name === "AbortError") {
      turn.stopped();
      return;
    }
    const { settings } = this.#service;
    const actions = [["Try again", () => this.#again(turn)]];
    if (error.param && settings.has(error.param)) {
      actions.push(["Open settings", () => settings.open(error.param, error.message)]);
    }
    turn.failed(error, actions);
    if (!(error instanceof ApiError || error instanceof SettingsError)) {
      throw error; // a bug of the page's
    }
  }
}

/** crypto.randomUUID exists on localhost and by https only. */
function newId() {
  return [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

function shortened(question) {
  const line = question.trim().replace(/\s+/g, " ");
  return line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE - 1).trimEnd()}…` : line;
}
