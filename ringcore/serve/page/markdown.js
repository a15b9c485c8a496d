// Markdown as elements. The service parses it (`page/markdown`); its nodes, and the text that it has not parsed yet, become
// elements and text nodes here. Model output is untrusted, and the page never parses HTML.

import { postJson } from "./api.js";
import { copyButton } from "./clipboard.js";
import { element } from "./elements.js";

const MIN_PAUSE_MS = 330; // between two requests for a growing text
const RETRY_MS = 2000;
const MAX_RETRIES = 5;
const MAX_TEXTS = 64; // of one request, and the characters of it
const MAX_CHARS = 400000;
const TAGS = new Set(
  "p h3 h4 h5 h6 blockquote ul ol li hr table thead tbody tr th td em strong del code span a".split(" "),
);
const ATTRIBUTES = new Set(["class", "start"]);
const CLOSED_FENCE = /\n *(`{3,}|~{3,}) *\n*$/;

/** Renders a growing text in `root`: unchanged blocks keep their nodes, and so the user's selection.
 *
 * A block before the last one no longer changes, so a growing text is sent from its last block on, and once more as a
 * whole when it is complete. What is not parsed yet is shown behind it as it is.
 */
export class MarkdownView {
  #root;
  #text = "";
  #isWhole = false;
  #rendered = { text: "", isWhole: true };
  #sources = []; // the node of each block, as JSON
  #settled = { numBlocks: 0, numChars: 0 };
  #tail = null;
  #isRunning = false;
  #wake = () => {};

  constructor(root) {
    this.#root = root;
  }

  update(text, isWhole) {
    this.#text = text.replace(/\r\n?/g, "\n");
    this.#isWhole = isWhole;
    if (!this.#text.startsWith(this.#rendered.text)) {
      this.#show([], "", false);
    }
    this.#showTail();
    if (!this.#isRunning) {
      this.#run();
    } else if (isWhole) {
      this.#wake();
    }
  }

  async #run() {
    this.#isRunning = true;
    this.#root.ariaBusy = "true";
    let numFailures = 0;
    while (numFailures <= MAX_RETRIES && !this.#isCurrent()) {
      const beganMs = performance.now();
      const [text, isWhole] = [this.#text, this.#isWhole];
      const numSkipped = isWhole ? 0 : this.#settled.numChars;
      try {
        const blocks = text ? await rendering.render(text.slice(numSkipped)) : [];
        if (this.#text.startsWith(text)) {
          this.#show(blocks, text, isWhole);
        }
        numFailures = 0;
      } catch (error) {
        numFailures = error.isTemporary ? numFailures + 1 : Infinity; // it stays as it is
      }
      // A service that is slow at it is asked less often.
      const pauseMs = numFailures ? RETRY_MS : Math.max(MIN_PAUSE_MS, 5 * (performance.now() - beganMs));
      if (numFailures || !this.#isWhole) {
        await this.#pause(pauseMs);
      }
    }
    this.#isRunning = false;
    this.#root.ariaBusy = "false";
  }

  #isCurrent() {
    return this.#rendered.text === this.#text && (this.#rendered.isWhole || !this.#isWhole);
  }

  #pause(ms) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, ms);
      this.#wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }

  #show(blocks, text, isWhole) {
    this.#tail?.remove();
    this.#tail = null;
    const [skipped, first] = isWhole || !text ? [0, 0] : [this.#settled.numChars, this.#settled.numBlocks];
    blocks.forEach(({ node }, i) => this.#showBlock(first + i, node));
    const num = first + blocks.length;
    this.#sources.length = num;
    while (this.#root.childNodes.length > num) {
      this.#root.lastChild.remove();
    }
    if (blocks.length) {
      const lines = text.slice(skipped).split("\n").slice(0, blocks.at(-1).line);
      const numChars = skipped + lines.reduce((sum, line) => sum + line.length + 1, 0);
      this.#settled = { numBlocks: num - 1, numChars };
    } else {
      this.#settled = { numBlocks: first, numChars: skipped };
    }
    this.#rendered = { text, isWhole };
    this.#showTail();
  }

  #showBlock(i, node) {
    const source = JSON.stringify(node);
    if (this.#sources[i] === source) {
      return;
    }
    this.#sources[i] = source;
    const made = elementOf(node);
    const old = this.#root.childNodes[i];
    if (old) {
      old.replaceWith(made);
    } else {
      this.#root.append(made);
    }
  }

  /** The text that is not parsed yet, where it probably belongs. */
  #showTail() {
    const text = this.#text.slice(this.#rendered.text.length);
    if (!text) {
      this.#tail?.remove();
      this.#tail = null;
      return;
    }
    this.#tail ??= this.#addTail(text);
    this.#tail.textContent = text;
  }

  #addTail(text) {
    const last = this.#root.lastElementChild;
    const code = last?.matches("figure") && !CLOSED_FENCE.test(this.#rendered.text) && last.querySelector("code");
    const isNew = !last || /\n$/.test(this.#rendered.text) || text.startsWith("\n") || last.matches("hr, figure, .table");
    const tail = element(code || !isNew ? "span" : "p", { class: "tail" });
    (code || (isNew ? this.#root : innermost(last))).append(tail);
    return tail;
  }
}

/** Sends texts that are asked for together in one request, one request at a time. */
class Rendering {
  #waiting = []; // {text, resolve, reject}
  #isRunning = false;

  /** The blocks of a text; raises `ApiError`. */
  render(text) {
    return new Promise((resolve, reject) => {
      this.#waiting.push({ text, resolve, reject });
      if (!this.#isRunning) {
        this.#run();
      }
    });
  }

  async #run() {
    this.#isRunning = true;
    await null; // for those of the same turn of the event loop
    while (this.#waiting.length) {
      await this.#send(this.#next());
    }
    this.#isRunning = false;
  }

  #next() {
    let num = 0;
    let numChars = 0;
    while (num < Math.min(MAX_TEXTS, this.#waiting.length)) {
      numChars += this.#waiting[num].text.length;
      if (num > 0 && numChars > MAX_CHARS) {
        break;
      }
      num += 1;
    }
    return this.#waiting.splice(0, num);
  }

  async #send(jobs) {
    try {
      const answers = await postJson("page/markdown", { texts: jobs.map((job) => job.text) });
      jobs.forEach((job, i) => job.resolve(answers[i]));
    } catch (error) {
      if (jobs.length === 1 || error.isTemporary) {
        jobs.forEach((job) => job.reject(error));
        return;
      }
      for (const job of jobs) {
        await this.#send([job]); // one of them is refused, the others need not be
      }
    }
  }
}

const rendering = new Rendering();

function innermost(node) {
  const last = node.lastChild;
  return last instanceof Element && last.matches("ul, ol, li, p, blockquote") ? innermost(last) : node;
}

/** The element, or text, of a node: a text, or [tag, attributes, ...children]. */
function elementOf(node) {
  if (typeof node === "string") {
    return node;
  }
  const [tag, given, ...children] = node;
  if (!TAGS.has(tag)) {
    throw new Error(`<${tag}> is not of Markdown`);
  }
  const inner = children.map(elementOf);
  if (tag === "code" && given.language !== undefined) {
    return codeBlock(given.language, inner);
  }
  if (tag === "a") {
    return link(given.href, inner);
  }
  const attributes = Object.fromEntries(Object.entries(given).filter(([name]) => ATTRIBUTES.has(name)));
  const made = element(tag, attributes, ...inner);
  return tag === "table" ? element("div", { class: "table", tabindex: "0" }, made) : made;
}

function codeBlock(language, inner) {
  const code = element("code", {}, ...inner);
  const copy = copyButton(() => code.textContent, "the code");
  const head = element("figcaption", {}, element("span", {}, language || "text"), copy);
  return element("figure", { class: "code" }, head, element("pre", { tabindex: "0" }, code));
}

/** In a new tab, without opener and referrer. */
function link(href, inner) {
  if (!/^(https?|mailto):/i.test(href)) {
    throw new Error("a link of another scheme");
  }
  const attributes = { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" };
  return element("a", attributes, ...inner);
}
