// --------------------------------------------------------------------------------------------------------- the server

const KEY_PLACE = "nanovllm-api-key"; // in sessionStorage: this tab's alone, gone when it is closed

/** A refusal of the server: its status, and the message of its body. */
class Refusal extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

/** Ask the server, with the key if there is one; a Refusal is thrown for every answer but success. */
async function call(path, options = {}) {
  const headers = { ...options.headers }, key = sessionStorage.getItem(KEY_PLACE);
  if (key) headers.Authorization = "Bearer " + key;
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.ok) return response;
  let message = response.statusText || "status " + response.status;
  try { message = (await response.json()).error.message || message; } catch { /* not in OpenAI's form */ }
  throw new Refusal(response.status, message, response.headers.get("Retry-After"));
}

/** [name, data] of each event that a response streams. EventSource would do it too, but can send no key. */
async function* serverEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text = (text + value).replaceAll("\r\n", "\n");
      for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
        let name = "message";
        const data = [];
        for (const line of text.slice(0, end).split("\n")) {
          if (line.startsWith("event:")) name = line.slice(6).trim();
          if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
        }
        text = text.slice(end + 2);
        yield [name, data.join("\n")]; // without data it was a comment, which keeps the connection open
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

const SILENCE_MS = 15000; // the server says something every few seconds, if only that it is there
const PATIENCE_MS = [1000, 2000, 4000, 8000]; // before one more try

/** Follows the engine, for ever: tells what comes, and in what state the connection is. */
class Feed {
  constructor({ onState, onHello, onLook }) {
    Object.assign(this, { onState, onHello, onLook });
    this.failures = 0;
    this.isDead = false;
    this.wake = () => {};
  }

  async run() {
    for (;;) {
      const wait = await this.follow();
      await new Promise((resolve) => {
        this.wake = resolve;
        if (wait !== Infinity) setTimeout(resolve, wait);
      });
    }
  }

  /** Try again now, since there is another key. */
  retry() { this.failures = 0; this.wake(); }

  /** One connection, to its end; returns how long to wait before the next, in milliseconds. */
  async follow() {
    const abort = new AbortController();
    let timer = setTimeout(() => abort.abort(), SILENCE_MS);
    if (!this.failures) this.onState("connecting");
    try {
      const response = await call("ui/events", { signal: abort.signal });
      for await (const [name, data] of serverEvents(response)) {
        clearTimeout(timer);
        timer = setTimeout(() => abort.abort(), SILENCE_MS);
        if (name === "hello") this.onHello(JSON.parse(data));
        if (name === "look") { this.failures = 0; this.isDead = false; this.onState("live"); this.onLook(JSON.parse(data)); }
        if (name === "end") return this.ended(JSON.parse(data).reason);
      }
      return this.lost();
    } catch (error) {
      if (error instanceof Refusal) return this.refused(error);
      return this.lost();
    } finally {
      clearTimeout(timer);
    }
  }

  pause() { return PATIENCE_MS[Math.min(this.failures++, PATIENCE_MS.length - 1)]; }

  lost() {
    this.onState(...(this.isDead ? ["dead", "The engine has died, and the server with it; trying to reach it again."]
                                 : ["lost", "The server cannot be reached; trying again."]));
    return this.pause();
  }

  ended(reason) {
    this.isDead = reason === "dead";
    if (this.isDead) this.onState("dead", "The engine has died; the server's log says why. No request is answered.");
    else if (reason === "closed") this.onState("unavailable", "The server is shutting down.");
    else this.onState("unavailable", "The server cannot look at the engine any more; its log says why.");
    return this.pause();
  }

  refused(error) {
    if (error.status === 401) {
      this.onState("refused", "The server asks for an API key.");
      return Infinity;
    }
    this.onState(error.status === 503 ? "unavailable" : "lost", `${error.message} Trying again.`);
    return this.pause();
  }
}
