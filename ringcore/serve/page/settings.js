// The user's settings for all answers, in the browser's local storage.

import { byId, setText } from "./elements.js";
import { readKept, writeKept } from "./store.js";

const STORED = "ringcore.settings";

export class SettingsError extends Error {
  constructor(message, param) {
    super(message);
    this.param = param;
  }
}

export class Settings {
  #dialog = byId("settings");
  #form = byId("settings-form");

  constructor() {
    const stored = parsedSettings(readKept(STORED));
    for (const input of this.#inputs()) {
      input.value = stored[input.name] ?? "";
    }
    this.#form.addEventListener("input", () => this.#changed());
    byId("reset-settings").addEventListener("click", () => this.#reset());
  }

  get system() {
    return this.#form.elements.system.value.trim();
  }

  /** The fields of a request. Raises `SettingsError` for an invalid number or JSON text. */
  fields() {
    const fields = {};
    for (const input of this.#inputs()) {
      if (input.validity.badInput) {
        throw new SettingsError(`${input.name}: this is no number; write one, or leave it empty`, input.name);
      }
      if (input.type === "number" && input.value !== "") {
        fields[input.name] = Number(input.value);
      }
    }
    const stop = this.#form.elements.stop.value.split("\n").filter((line) => line !== "");
    const tools = this.#form.elements.tools.value.trim();
    return { ...fields, ...(stop.length && { stop }), ...(tools && { tools: parsedTools(tools) }) };
  }

  /** defaults: what an answer has by field, and max_model_len, the most tokens of a question and its answer. */
  showDefaults({ max_model_len: maxModelLen, max_tokens: maxTokens, ...defaults }) {
    for (const [name, value] of Object.entries(defaults)) {
      this.#input(name).placeholder = `default ${value}`;
    }
    this.#input("max_tokens").placeholder = maxTokens === null ? "what fits" : `default ${maxTokens}`;
    this.#input("seed").placeholder = "random";
    setText(byId("context-hint"), `The model takes ${maxModelLen} tokens: the conversation, and its next answer.`);
  }

  has(param) {
    return this.#input(param) !== undefined;
  }

  /** Opens the settings at the field that an error names, with its message. */
  open(param = null, problem = "") {
    const error = byId("settings-error");
    setText(error, problem);
    error.hidden = !problem;
    const wrong = this.#input(param);
    for (const input of this.#inputs()) {
      input.setAttribute("aria-invalid", String(input === wrong));
    }
    this.#dialog.showModal();
    wrong?.focus();
  }

  /** `tools[0].function` belongs to the field `tools`. */
  #input(param) {
    const name = /^\w+/.exec(param ?? "")?.[0];
    return this.#inputs().find((input) => input.name === name);
  }

  #inputs() {
    return [...this.#form.elements].filter((one) => one.name);
  }

  #changed() {
    const kept = this.#inputs().filter((input) => input.value !== "");
    writeKept(STORED, JSON.stringify(Object.fromEntries(kept.map((one) => [one.name, one.value]))));
  }

  #reset() {
    this.#form.reset();
    this.#changed();
  }
}

/** None where nothing is kept, or nothing that can be read. */
function parsedSettings(text) {
  try {
    return JSON.parse(text) ?? {};
  } catch {
    return {};
  }
}

function parsedTools(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new SettingsError(`tools: this is no JSON (${error.message}); write a list of tools, or leave it empty`, "tools");
  }
}
