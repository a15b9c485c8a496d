// What is shown of one question and its answer.

import { copyButton } from "./clipboard.js";
import { button, element, setText } from "./elements.js";
import { MarkdownView } from "./markdown.js";

const ENDS = {
  length: "cut off at the limit of tokens",
  abort: "ended by the engine",
  stopped: "stopped",
  error: "failed",
};

export class TurnView {
  #turn;
  #acts;
  #asked = element("div", { class: "asked" });
  #answer = element("div", { class: "answer" });
  #content = element("div", { class: "content" });
  #markdown = new MarkdownView(this.#content);
  #figures = element("p", { class: "figures", "aria-label": "Figures of this answer" });
  #actions = element("p", { class: "turn-actions", hidden: "" });
  #note = element("p", { class: "note" });
  #thinking = element("span", { class: "thinking", role: "img", "aria-label": "waiting for the first token" });
  #reasoning = null;
  #calls = [];

  constructor(turn, acts) {
    this.#turn = turn;
    this.#acts = acts;
    this.#showQuestion();
    const regenerate = button("Regenerate", () => acts.regenerate(turn), "quiet small redo only-last");
    const copy = copyButton(() => turn.content, "the answer");
    copy.classList.add("small", "only-text");
    this.#actions.append(copy, regenerate);
    const foot = element("div", { class: "answer-foot" }, this.#figures, this.#actions);
    this.#answer.append(this.#thinking, this.#content, this.#note, foot);
    this.node = element(
      "article",
      { class: "turn" },
      element("h2", { class: "unseen" }, "You"),
      this.#asked,
      element("h2", { class: "unseen" }, "Answer"),
      this.#answer,
    );
  }

  #showQuestion() {
    const edit = button("Edit", () => this.#edit(), "quiet small redo");
    edit.setAttribute("aria-label", "Edit the question");
    this.#asked.replaceChildren(edit, element("div", { class: "question" }, this.#turn.question));
  }

  #edit() {
    const text = element("textarea", { rows: "3", "aria-label": "The question" });
    const end = () => {
      this.#showQuestion();
      this.#asked.querySelector("button").focus();
    };
    const send = () => {
      if (text.value.trim()) {
        this.#acts.edit(this.#turn, text.value.trim());
      }
    };
    text.value = this.#turn.question;
    text.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        end();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
    });
    const hint = element("p", { class: "hint" }, "Is asked instead; what follows it is removed.");
    const buttons = element("p", { class: "actions" }, button("Send", send, "strong"), button("Cancel", end));
    this.#asked.replaceChildren(element("div", { class: "editor" }, text, hint, buttons));
    text.style.height = `${Math.min(text.scrollHeight + 2, window.innerHeight / 2)}px`;
    text.focus();
  }

  clear() {
    this.#reasoning?.details.remove();
    this.#calls.forEach((call) => call.node.remove());
    this.#answer.querySelector(".problem")?.remove();
    this.#reasoning = null;
    this.#calls = [];
    this.showNote("");
  }

  draw() {
    const turn = this.#turn;
    this.node.dataset.end = turn.end ?? "";
    this.#thinking.hidden = turn.end !== null || !turn.isEmpty;
    if (turn.reasoning) {
      this.#drawReasoning(turn);
    }
    this.#markdown.update(turn.content, turn.end !== null);
    turn.calls.forEach((call, i) => this.#drawCall(call, i));
    this.#drawFigures({ ...turn.figures, end: ENDS[turn.end] });
    this.#actions.hidden = turn.end === null;
    this.#actions.querySelector(".only-text").hidden = !turn.content;
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
    const copy = copyButton(() => code.textContent, "the arguments");
    const caption = element("figcaption", {}, element("span", {}, "Calls ", element("b", {}, name)), copy);
    const node = element("figure", { class: "code call" }, caption, element("pre", { tabindex: "0" }, code));
    this.#note.before(node);
    return { node, code };
  }

  #drawFigures(figures) {
    for (const shown of this.#figures.children) {
      setText(shown, figures[shown.dataset.figure] ?? "");
    }
    for (const [name, text] of Object.entries(figures)) {
      if (text && !this.#figures.querySelector(`[data-figure=${name}]`)) {
        this.#figures.append(element("span", { "data-figure": name }, text));
      }
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
    this.#answer.querySelector(".answer-foot").before(problem);
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
