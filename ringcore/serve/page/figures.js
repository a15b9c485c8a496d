// The figures of one answer: times on the page's clock, and token counts from the service.

const MIN_RATE_TOKENS = 16; // fewer, or in a shorter time, say nothing of a rate
const MIN_RATE_S = 0.2;

export class Measured {
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
    const numCached = details?.cached_tokens ?? 0;
    return {
      rate: rateText(num - this.#numFirst, (this.#lastMs - this.#firstMs) / 1000),
      tokens: `${num} ${num === 1 ? "token" : "tokens"} in ${duration(this.#lastMs - this.#sentMs)}`,
      ttft: `first after ${duration(this.#firstMs - this.#sentMs)}`,
      prompt: `prompt ${numPrompt} tokens${numCached ? `, ${numCached} cached` : ""}`,
    };
  }
}

/** num: tokens after the first ones; empty where they are too few for a rate. */
export function rateText(num, seconds) {
  if (num < MIN_RATE_TOKENS || seconds < MIN_RATE_S) {
    return "";
  }
  const rate = num / seconds;
  return `${rate.toFixed(rate < 100 ? 1 : 0)} tokens/s`;
}

export function duration(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}
