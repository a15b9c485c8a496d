// Requests to the service, and their errors as readable text.

const KEY = "ringcore.key";

export class ApiError extends Error {
  /** status: of HTTP, 0 without a response; param: the invalid field, or null. */
  constructor(message, { status = 0, param = null, code = null, retryAfterS = 1 } = {}) {
    super(message);
    Object.assign(this, { status, param, code, retryAfterS });
  }

  get wantsKey() {
    return this.status === 401;
  }

  /** Whether the same request may succeed later. */
  get isTemporary() {
    return [0, 429, 503].includes(this.status);
  }
}

export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

export async function getJson(path, signal) {
  return (await ask(path, { signal })).json();
}

export async function postJson(path, body) {
  return (await ask(path, posted(body))).json();
}

function posted(body) {
  return { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
}

/** The chunks of one streamed response. Leaving the loop, or `signal`, aborts the request. */
export async function* streamChat(body, signal) {
  const answer = await ask("v1/chat/completions", { ...posted(body), signal });
  for await (const data of eventsOf(answer.body, signal)) {
    if (data === "[DONE]") {
      return;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) {
      throw new ApiError(chunk.error.message, { ...chunk.error, status: 500 });
    }
    yield chunk;
  }
  throw unreachable("The connection broke off before the end of the answer.");
}

async function ask(path, options) {
  const headers = { ...options.headers };
  if (hasKey()) {
    headers.Authorization = `Bearer ${sessionStorage.getItem(KEY)}`;
  }
  // Relative: the page may be behind a proxy that serves it under another path.
  const answer = await connected(fetch(path, { ...options, headers, cache: "no-store" }), options.signal);
  if (!answer.ok) {
    throw await errorOf(answer);
  }
  return answer;
}

/** A network failure as an `ApiError`; an abort is returned unchanged. */
async function connected(promise, signal) {
  try {
    return await promise;
  } catch (error) {
    if (signal?.aborted) {
      throw signal.reason;
    }
    throw unreachable("The service cannot be reached. Is it running?", error);
  }
}

function unreachable(message, cause) {
  const error = new ApiError(message, { code: "unreachable" });
  error.cause = cause;
  return error;
}

async function errorOf(answer) {
  const retryAfterS = Number(answer.headers.get("Retry-After")) || 1;
  let error = {};
  try {
    error = (await answer.json()).error ?? {};
  } catch {
    // Not JSON, for example a proxy's error page: use the status only.
  }
  const message = error.message ?? `The service answered ${answer.status} ${answer.statusText}.`;
  return new ApiError(message, { status: answer.status, param: error.param, code: error.code, retryAfterS });
}

/** The data of server-sent events. */
async function* eventsOf(stream, signal) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await connected(reader.read(), signal);
      if (done) {
        return;
      }
      const events = (held + value).split("\n\n");
      held = events.pop();
      for (const event of events) {
        if (event.startsWith("data: ")) {
          yield event.slice("data: ".length);
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // a failed stream cannot be cancelled
  }
}
