// Polls the engine's state and load: /health and /metrics.

import { byId, setText } from "./elements.js";

const BUSY_MS = 1000;
const IDLE_MS = 3000;
const MAX_POLL_MS = 15000; // between polls of an engine that does not respond
const POLL_TIMEOUT_MS = 10000;
const TOLD = {
  starting: "starting",
  ready: "ready",
  sleeping: "asleep",
  stalled: "stalled",
  dead: "dead",
  unreachable: "not reachable",
};
const SAMPLE = /^vllm:(\w+)(?:\{.*\})? ([^ ]+)$/gm;

export class EngineMonitor {
  #failures = 0;
  #waiting = []; // resolvers that wait for a ready engine
  #wake = () => {};
  isBusy = false; // while an answer streams, polls are more frequent

  start() {
    document.addEventListener("visibilitychange", () => this.pollNow());
    this.#run();
  }

  pollNow() {
    this.#wake();
  }

  /** Resolves when a later poll finds the engine ready, at the earliest after so many seconds; raises the signal's
   * reason. */
  async ready(afterS, signal) {
    await paused(afterS * 1000, signal);
    signal.throwIfAborted();
    await new Promise((resolve, reject) => {
      this.#waiting.push(resolve);
      signal.addEventListener("abort", () => reject(signal.reason), { once: true });
      this.#failures = 0;
      this.pollNow();
    });
  }

  async #run() {
    for (;;) {
      if (!document.hidden) {
        const waiting = this.#waiting; // waiters that arrive during a poll wait for the next one
        this.#waiting = [];
        const state = await this.#poll();
        this.#failures = state === "ready" ? 0 : this.#failures + 1;
        if (state === "ready") {
          waiting.forEach((resolve) => resolve());
        } else {
          this.#waiting.push(...waiting);
        }
      }
      await this.#pause();
    }
  }

  #pause() {
    const often = this.isBusy || this.#waiting.length ? BUSY_MS : IDLE_MS;
    const pauseMs = Math.min(often * 1.5 ** this.#failures, MAX_POLL_MS);
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, pauseMs);
      this.#wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }

  async #poll() {
    const [health, metrics] = await Promise.all([fetched("health"), fetched("metrics")]);
    const state = stateOf(health);
    byId("state").dataset.state = state;
    setText(byId("state-text"), TOLD[state]);
    showFigures(state === "unreachable" || !metrics ? null : samplesOf(metrics));
    return state;
  }
}

function paused(ms, signal) {
  signal.throwIfAborted();
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener(
      "abort",
      () => {
        clearTimeout(timer);
        reject(signal.reason);
      },
      { once: true },
    );
  });
}

async function fetched(path) {
  try {
    const answer = await fetch(path, { signal: AbortSignal.timeout(POLL_TIMEOUT_MS), cache: "no-store" });
    return await answer.text(); // /health has a body with status 503 too
  } catch {
    return null;
  }
}

function stateOf(health) {
  try {
    const { state } = JSON.parse(health);
    return state in TOLD ? state : "unreachable";
  } catch {
    return "unreachable";
  }
}

/** Metric names to values, added up over the label sets of a name: the page reads those with one for each engine. */
function samplesOf(text) {
  const samples = new Map();
  for (const [, name, value] of text.matchAll(SAMPLE)) {
    samples.set(name, (samples.get(name) ?? 0) + Number(value));
    samples.set(`${name} count`, (samples.get(`${name} count`) ?? 0) + 1);
  }
  return samples;
}

function showFigures(samples) {
  const hits = samples?.get("prefix_cache_hits_total");
  const queries = samples?.get("prefix_cache_queries_total");
  const shown = {
    running: samples?.get("num_requests_running"),
    waiting: samples?.get("num_requests_waiting"),
    cache: percent(samples?.get("kv_cache_usage_perc") / samples?.get("kv_cache_usage_perc count")),
    hits: percent(hits / queries),
  };
  for (const [name, value] of Object.entries(shown)) {
    setText(byId("engine").querySelector(`[data-figure=${name}]`), value === undefined ? "–" : String(value));
  }
}

function percent(share) {
  if (!Number.isFinite(share)) {
    return undefined;
  }
  return share > 0 && share < 0.01 ? "<1%" : `${Math.round(share * 100)}%`;
}
