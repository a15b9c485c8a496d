// One question and its answer: what was said, and how the answer ended.

import { Measured } from "./figures.js";
import { TurnView } from "./turn_view.js";

const isText = (value) => typeof value === "string";
// What is kept of a turn, and how a kept value is checked.
const KEPT = {
  question: isText,
  content: isText,
  reasoning: isText,
  calls: (value) => value.every((call) => isText(call.name) && isText(call.arguments)),
  end: (value) => value === null || isText(value),
  figures: (value) => Object.values(value).every(isText),
};

export class Turn {
  content = "";
  reasoning = "";
  calls = []; // {id, name, arguments}, in the order of their indices
  end = null; // why the answer ended; null while it streams
  figures = {};
  #measured = null;
  #view;
  #isDrawing = false;

  /** acts: {regenerate, edit}, called with this turn, and with the new question. */
  constructor(question, acts) {
    this.question = question;
    this.#view = new TurnView(this, acts);
  }

  /** A turn as `toJSON` made it. Raises `TypeError` for anything else. */
  static restored(kept, acts) {
    const turn = new Turn(kept.question, acts);
    for (const [name, isValid] of Object.entries(KEPT)) {
      if (!isValid(kept[name])) {
        throw new TypeError(`${name} is no ${name} of a turn`);
      }
      turn[name] = kept[name];
    }
    turn.end ??= "stopped"; // the page was closed while the answer streamed
    turn.#draw();
    return turn;
  }

  toJSON() {
    return Object.fromEntries(Object.keys(KEPT).map((name) => [name, this[name]]));
  }

  get node() {
    return this.#view.node;
  }

  /** The messages for the next request; none for a question without an answer. Incomplete calls are left out. */
  get messages() {
    const calls = this.calls.filter((call) => isJson(call.arguments));
    if (!this.content && !calls.length) {
      return [];
    }
    const answer = { role: "assistant", content: this.content };
    if (calls.length) {
      answer.tool_calls = calls.map(({ id, name, arguments: text }) => ({
        id,
        type: "function",
        function: { name, arguments: text },
      }));
    }
    return [{ role: "user", content: this.question }, answer];
  }

  get isEmpty() {
    return !this.content && !this.reasoning && !this.calls.length;
  }

  /** The request is sent, the first time or again. */
  begin() {
    Object.assign(this, { content: "", reasoning: "", calls: [], end: null, figures: {} });
    this.#measured = new Measured(performance.now());
    this.#view.clear();
    this.#draw();
  }

  take(chunk) {
    this.#measured.record(chunk, performance.now());
    for (const choice of chunk.choices) {
      const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
      this.content += content ?? "";
      this.reasoning += reasoning ?? "";
      (calls ?? []).forEach((call) => this.#takeCall(call));
      this.end = choice.finish_reason ?? this.end;
    }
    this.#drawSoon();
  }

  #takeCall({ index, id, function: delta }) {
    const call = (this.calls[index] ??= { id, name: delta.name, arguments: "" });
    call.arguments += delta.arguments;
  }

  waits(message) {
    this.#view.showNote(`${message} The question is sent again when the engine is ready.`);
  }

  stopped() {
    this.end = "stopped";
    this.#draw();
  }

  /** actions: [label, callback] of the buttons below the error. */
  failed(error, actions) {
    this.end = "error";
    this.#draw();
    this.#view.showError(error, actions);
  }

  /** Renders the rest at once: browsers draw no frames for a hidden page. */
  finished() {
    this.#draw();
  }

  #drawSoon() {
    if (!this.#isDrawing) {
      this.#isDrawing = true;
      requestAnimationFrame(() => this.#isDrawing && this.#draw());
    }
  }

  #draw() {
    this.#isDrawing = false;
    this.figures = this.#measured?.figures() ?? this.figures;
    this.#view.draw();
  }
}

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}
