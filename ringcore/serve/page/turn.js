// One question and its answer: state and view.

import { button, element, setText } from "./elements.js";
import { MarkdownView } from "./markdown.js";

const ENDS = {
  length: "cut off at the limit of tokens",
  abort: "ended by the engine",
  stopped: "stopped",
};

export class Turn {
  content = "";
  reasoning = "";
  calls = []; // {id, name, arguments}, in the order of their indices
  end = null; // why the answer ended; null while it streams
  #measured = new Measured();
  #view;
  #isDrawing = false;

  constructor(question) {
    this.question = question;
    this.#view = new TurnView(question);
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
    Object.assign(this, { content: "", reasoning: "", calls: [], end: null });
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
      requestAnimationFrame(() => this.#draw());
    }
  }

  #draw() {
    this.#isDrawing = false;
    this.#view.draw(this, this.#measured.figures());
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

/** Timestamps of one answer, on the page's clock, and its token counts from the service. */
class Measured {
  #sentMs;
  #firstMs = null;
  #lastMs = null;
  #numFirst = 0; // tokens of the first chunk, which the rate excludes
  #usage = null;

  constructor(sentMs) {
    this.#sentMs = sentMs;
  }

  record({ usage }, nowMs) {
    const numBefore = this.#usage?.completion_tokens ?? 0;
    this.#usage = usage ?? this.#usage;
    const num = this.#usage?.completion_tokens ?? 0;
    if (this.#firstMs === null && num) {
      this.#firstMs = this.#lastMs = nowMs;
      this.#numFirst = num;
    } else if (num > numBefore) {
      this.#lastMs = nowMs;
    }
  }

  /** The figures known so far: name to text. */
  figures() {
    if (this.#firstMs === null) {
      return {};
    }
    const { completion_tokens: num, prompt_tokens: numPrompt, prompt_tokens_details: details } = this.#usage;
    const seconds = (this.#lastMs - this.#firstMs) / 1000;
    const rate = seconds > 0 ? (num - this.#numFirst) / seconds : null;
    return {
      rate: rate === null ? null : `${rate.toFixed(rate < 100 ? 1 : 0)} tokens/s`,
      ttft: `first token after ${duration(this.#firstMs - this.#sentMs)}`,
      tokens: `${num} ${num === 1 ? "token" : "tokens"}`,
      prompt: `prompt ${numPrompt}, ${details?.cached_tokens ?? 0} cached`,
    };
  }
}

function duration(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}

class TurnView {
  #answer = element("div", { class: "answer" });
  #content = element("div", { class: "content" });
  #markdown = new MarkdownView(this.#content);
  #figures = element("p", { class: "figures", "aria-label": "Figures of this answer" });
  #note = element("p", { class: "note" });
  #thinking = element("span", { class: "thinking", "aria-label": "waiting for the first token" });
  #reasoning = null;
  #calls = [];

  constructor(question) {
    this.#answer.append(this.#thinking, this.#content, this.#note, this.#figures);
    this.node = element(
      "article",
      { class: "turn" },
      element("h2", { class: "unseen" }, "You"),
      element("div", { class: "question" }, question),
      element("h2", { class: "unseen" }, "Answer"),
      this.#answer,
    );
  }

  clear() {
    this.#reasoning?.details.remove();
    this.#calls.forEach((call) => call.node.remove());
    this.#answer.querySelector(".problem")?.remove();
    this.#reasoning = null;
    this.#calls = [];
    this.showNote("");
  }

  draw(turn, figures) {
    this.node.dataset.end = turn.end ?? "";
    this.#thinking.hidden = turn.end !== null || !turn.isEmpty;
    if (turn.reasoning) {
      this.#drawReasoning(turn);
    }
    this.#markdown.update(turn.content);
    turn.calls.forEach((call, i) => this.#drawCall(call, i));
    this.#drawFigures({ ...figures, end: ENDS[turn.end] });
  }

  #drawReasoning(turn) {
    const isGoingOn = turn.end === null && !turn.content && !turn.calls.length;
    if (!this.#reasoning) {
      const summary = element("summary");
      const text = element("div", { class: "reasoning-text" });
      const details = element("details", { class: "reasoning" }, summary, text);
      details.open = isGoingOn;
      // The user's choice of open or closed is kept.
      summary.addEventListener("click", () => (this.#reasoning.isTouched = true));
      this.#reasoning = { details, summary, text, isTouched: false };
      this.#content.before(details);
    }
    const { details, summary, text, isTouched } = this.#reasoning;
    setText(summary, isGoingOn ? "Reasoning…" : "Reasoning");
    setText(text, turn.reasoning.trim());
    if (!isTouched) {
      details.open = isGoingOn;
    }
  }

  #drawCall(call, index) {
    const view = (this.#calls[index] ??= this.#addCall(call));
    setText(view.code, indented(call.arguments));
  }

  #addCall({ name }) {
    const code = element("code");
    const caption = element("figcaption", {}, element("span", {}, "Calls ", element("b", {}, name)));
    const node = element("figure", { class: "code call" }, caption, element("pre", { tabindex: "0" }, code));
    this.#note.before(node);
    return { node, code };
  }

  #drawFigures(figures) {
    for (const [name, text] of Object.entries(figures)) {
      let shown = this.#figures.querySelector(`[data-figure=${name}]`);
      if (!shown) {
        shown = element("span", { "data-figure": name });
        this.#figures.append(shown);
      }
      setText(shown, text ?? "");
    }
  }

  showNote(text) {
    setText(this.#note, text);
  }

  showError(error, actions) {
    this.showNote("");
    const problem = element("div", { class: "problem", role: "alert" }, element("p", {}, error.message));
    const details = [error.param && `field: ${error.param}`, error.status > 0 && `status ${error.status}`, error.code];
    const known = details.filter(Boolean);
    if (known.length) {
      problem.append(element("p", { class: "problem-details" }, known.join(" · ")));
    }
    problem.append(element("p", { class: "actions" }, ...actions.map(([text, act]) => button(text, act))));
    this.#figures.before(problem);
  }
}

/** Complete arguments as formatted JSON; else the text so far. */
function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
