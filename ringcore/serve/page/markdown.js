// A subset of Markdown as DOM nodes. Model output is untrusted: it becomes text nodes only.

import { button, element } from "./elements.js";

const MAX_INLINE = 20000; // characters of a block that are parsed for inline markup: bounds the time
const MAX_DEPTH = 5; // of emphasis within emphasis
const FENCE = /^ *(`{3,}|~{3,}) *([^\s`]*)/;
const HEADING = /^(#{1,6}) +(.*?)(?: +#+)?$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)]) +(.*)$/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_RULE = /^ *\|?(?: *:?-+:? *\|)+(?: *:?-+:? *)?$/;
const INLINE = new RegExp(
  [
    /\\([!-/:-@[-`{-~])/, // 1: escaped
    /(?<tick>`{1,3})(?!`)(?<code>[^]{1,500}?)(?<!`)\k<tick>(?!`)/,
    /\*\*(?=\S)(?<strong>[^]{0,499}?\S)\*\*(?!\*)/,
    /__(?=\S)(?<strong2>[^]{0,499}?\S)__(?!\w)/,
    /~~(?=\S)(?<gone>[^]{0,499}?\S)~~/,
    /\*(?=[^\s*])(?<em>[^*]{0,499}?[^\s*])\*/,
    /(?<!\w)_(?=[^\s_])(?<em2>[^_]{0,499}?[^\s_])_(?!\w)/,
    /(?<!!)\[(?<label>[^\]\n]{1,500})\]\((?<url>[^()\s]{1,2000})\)/,
  ]
    .map((pattern) => pattern.source)
    .join("|"),
  "g",
);
const EMPHASIS = { strong: "strong", strong2: "strong", gone: "del", em: "em", em2: "em" };

/** Renders a growing text in `root`: unchanged blocks keep their nodes, and so the user's selection. */
export class MarkdownView {
  #root;
  #sources = [];

  constructor(root) {
    this.#root = root;
  }

  update(text) {
    const blocks = blocksOf(text);
    blocks.forEach((lines, i) => {
      const source = lines.join("\n");
      if (this.#sources[i] === source) {
        return;
      }
      this.#sources[i] = source;
      const node = blockNode(lines);
      const old = this.#root.childNodes[i];
      if (old) {
        old.replaceWith(node);
      } else {
        this.#root.append(node);
      }
    });
    this.#sources.length = blocks.length;
    while (this.#root.childNodes.length > blocks.length) {
      this.#root.lastChild.remove();
    }
  }
}

/** The lines of each block. */
function blocksOf(text) {
  const lines = text.split("\n");
  const blocks = [];
  for (let i = 0; i < lines.length; ) {
    if (!lines[i].trim()) {
      i += 1;
      continue;
    }
    const end = blockEnd(lines, i);
    blocks.push(lines.slice(i, end));
    i = end;
  }
  return blocks;
}

function blockEnd(lines, start) {
  const line = lines[start];
  const fence = FENCE.exec(line);
  if (fence) {
    return fenceEnd(lines, start, fence[1]);
  }
  if (HEADING.test(line) || RULE.test(line)) {
    return start + 1;
  }
  if (QUOTE.test(line)) {
    return endWhere(lines, start, (one) => !QUOTE.test(one));
  }
  if (ITEM.test(line)) {
    // Indented lines continue an item; a code block is a block of its own.
    return endWhere(lines, start, (one) => FENCE.test(one) || !(ITEM.test(one) || /^ +\S/.test(one)));
  }
  if (isTable(lines, start)) {
    return endWhere(lines, start, (one) => !one.includes("|"));
  }
  return endWhere(lines, start, (one, i) => !one.trim() || begins(one) || isTable(lines, i));
}

function endWhere(lines, start, isOver) {
  let i = start + 1;
  while (i < lines.length && !isOver(lines[i], i)) {
    i += 1;
  }
  return i;
}

function fenceEnd(lines, start, fence) {
  const end = endWhere(lines, start, (one) => {
    const bare = one.trim();
    return bare.startsWith(fence) && bare === fence[0].repeat(bare.length);
  });
  return Math.min(end + 1, lines.length); // not closed yet: extends to the end
}

function begins(line) {
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(line));
}

function isTable(lines, i) {
  return lines[i].includes("|") && TABLE_RULE.test(lines[i + 1] ?? "");
}

function blockNode(lines) {
  const [first] = lines;
  const fence = FENCE.exec(first);
  if (fence) {
    return codeNode(lines, fence);
  }
  const heading = HEADING.exec(first);
  if (heading) {
    return element(`h${Math.min(heading[1].length + 2, 6)}`, {}, ...inlineNodes(heading[2]));
  }
  if (RULE.test(first)) {
    return element("hr");
  }
  if (QUOTE.test(first)) {
    return element("blockquote", {}, ...inlineNodes(lines.map((line) => line.replace(QUOTE, "")).join("\n")));
  }
  if (ITEM.test(first)) {
    return listNode(lines);
  }
  if (isTable(lines, 0)) {
    return tableNode(lines);
  }
  return element("p", {}, ...inlineNodes(lines.join("\n")));
}

function codeNode(lines, [, fence, language]) {
  const last = lines.at(-1).trim();
  const isClosed = lines.length > 1 && last.startsWith(fence) && last === fence[0].repeat(last.length);
  const indent = /^ */.exec(lines[0])[0].length;
  const code = lines
    .slice(1, isClosed ? -1 : undefined)
    .map((line) => line.slice(Math.min(indent, /^ */.exec(line)[0].length)))
    .join("\n");
  const head = element("figcaption", {}, element("span", {}, language || "text"));
  if (navigator.clipboard) {
    // The clipboard exists only in secure contexts: localhost or https.
    const copy = button("Copy", async () => {
      await navigator.clipboard.writeText(code);
      copy.textContent = "Copied";
    });
    head.append(copy);
  }
  return element("figure", { class: "code" }, head, element("pre", { tabindex: "0" }, element("code", {}, code)));
}

/** Nested lists by indentation. */
function listNode(lines) {
  const root = element("div", { class: "list" });
  let open = []; // {indent, list}
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (!item) {
      open.at(-1).list.lastChild.append("\n", ...inlineNodes(line.trim()));
      continue;
    }
    const [, { length: indent }, mark, text] = item;
    open = open.filter((one, i) => i === 0 || one.indent <= indent);
    const isOrdered = /\d/.test(mark);
    const top = open.at(-1);
    if (!top || (indent > top.indent + 1 && open.length < MAX_DEPTH)) {
      const list = element(isOrdered ? "ol" : "ul", isOrdered ? { start: String(parseInt(mark, 10)) } : {});
      (top ? top.list.lastChild : root).append(list);
      open.push({ indent, list });
    }
    open.at(-1).list.append(element("li", {}, ...inlineNodes(text)));
  }
  return root;
}

function tableNode(lines) {
  const row = (line, tag) =>
    element("tr", {}, ...cells(line).map((cell) => element(tag, {}, ...inlineNodes(cell))));
  const body = lines.slice(2).map((line) => row(line, "td"));
  const table = element("table", {}, element("thead", {}, row(lines[0], "th")), element("tbody", {}, ...body));
  return element("div", { class: "table", tabindex: "0" }, table);
}

function cells(line) {
  return line
    .trim()
    .replace(/^\||\|$/g, "")
    .split("|")
    .map((cell) => cell.trim());
}

function inlineNodes(text, depth = 0) {
  if (text.length > MAX_INLINE || depth >= MAX_DEPTH) {
    return [text];
  }
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    nodes.push(text.slice(end, match.index), inlineNode(match, depth + 1));
    end = match.index + match[0].length;
  }
  nodes.push(text.slice(end));
  return nodes.filter((node) => node !== "");
}

function inlineNode(match, depth) {
  const { code, label, url, ...emphases } = match.groups;
  if (match[1] !== undefined) {
    return match[1];
  }
  if (code !== undefined) {
    return element("code", {}, code);
  }
  if (label !== undefined) {
    return linkNode(match[0], label, url, depth);
  }
  const name = Object.keys(EMPHASIS).find((one) => emphases[one] !== undefined);
  return element(EMPHASIS[name], {}, ...inlineNodes(emphases[name], depth));
}

/** A link for http(s) only, in a new tab without opener and referrer; else the source text. */
function linkNode(source, label, url, depth) {
  if (!/^https?:\/\//i.test(url) || !URL.canParse(url)) {
    return source;
  }
  const attributes = { href: url, title: url, target: "_blank", rel: "noopener noreferrer nofollow" };
  return element("a", attributes, ...inlineNodes(label, depth));
}
