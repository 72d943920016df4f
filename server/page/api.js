/** Sends the page's requests to the server's API, with its key. */

const KEY = "outrider-api-key";
export const GONE = "The server does not answer. Is `outrider serve` still running?";

/** A request that the server refused, or that could not be sent; `message` is a sentence. */
export class Refused extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** Keeps the key until the tab is closed; an empty key removes it. */
export function keepKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** Returns the JSON at `path`. Raises Refused. */
export async function fetchJson(path) {
  const response = await send(path, {});
  if (!response.ok && path !== "ready") throw await toRefused(response); // a 503 of /ready has the state in its body
  return response.json();
}

/** Yields the events of a streamed answer to `body`: `{progress}` of the prompt, then chunks. Raises Refused. */
export async function* chat(body, signal) {
  const response = await send("v1/chat/completions", {
    method: "POST",
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  if (!response.ok) throw await toRefused(response);
  for await (const line of lines(response.body)) {
    const [, done, total] = /^: prompt (\d+)\/(\d+)$/.exec(line) ?? [];
    if (total) yield { progress: { done, total } };
    if (!line.startsWith("data: ")) continue;
    if (line === "data: [DONE]") return;
    const event = JSON.parse(line.slice(6));
    if (event.error) throw new Refused(event.error.message);
    yield event;
  }
  throw new Refused("The answer is incomplete; the server's log may say why.");
}

async function send(path, options) {
  const key = sessionStorage.getItem(KEY);
  if (/[^\x21-\x7e]/.test(key)) throw new Refused("The API key contains an invalid character; copy the key again.", 401);
  const headers = { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
  try {
    return await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(GONE);
  }
}

async function toRefused(response) {
  const body = await response.json().catch(() => null);
  const words = body?.error?.message ?? `The server answered with status ${response.status} and no reason.`;
  return new Refused(words, response.status);
}

async function* lines(bytes) {
  const reader = bytes.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    while (true) {
      const { done, value } = await reader.read();
      if (done) return;
      const found = (held + value).split("\n");
      held = found.pop();
      yield* found;
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The answer is incomplete; the connection to the server was lost.");
  } finally {
    reader.releaseLock();
  }
}
