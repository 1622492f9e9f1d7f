// --------------------------------------------------------------------------------------------------------- the server

const KEY_PLACE = "nanovllm-api-key"; // in sessionStorage, which lasts as long as the tab

/** Error response of the server: its status, and the message of its body. */
class Refusal extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

/** Fetch a path with the API key, if set; throws a Refusal unless the answer is a success. */
async function call(path, options = {}) {
  const headers = { ...options.headers }, key = sessionStorage.getItem(KEY_PLACE);
  if (key) headers.Authorization = "Bearer " + key;
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.ok) return response;
  let message = response.statusText || "status " + response.status;
  try { message = (await response.json()).error.message || message; } catch { /* not OpenAI's error format */ }
  throw new Refusal(response.status, message, response.headers.get("Retry-After"));
}

/** Yield [name, data] of each server-sent event. EventSource cannot send an API key. */
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
        yield [name, data.join("\n")]; // data is empty for a keep-alive comment
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

const SILENCE_MS = 15000; // reconnect after this; the server sends an event or a comment every few seconds
const PATIENCE_MS = [1000, 2000, 4000, 8000]; // before each reconnection

/** Feed of the engine: passes on its events and the state of the connection, and reconnects. */
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

  /** Reconnect at once, with a new key. */
  retry() { this.failures = 0; this.wake(); }

  /** Read one connection to its end; returns the milliseconds before the next. */
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
    this.onState(...(this.isDead ? ["dead", "The engine has died, and the server with it; reconnecting."]
                                 : ["lost", "The server cannot be reached; reconnecting."]));
    return this.pause();
  }

  ended(reason) {
    this.isDead = reason === "dead";
    if (this.isDead) this.onState("dead", "The engine has died and answers no more requests; see the server's log.");
    else if (reason === "closed") this.onState("unavailable", "The server is shutting down.");
    else this.onState("unavailable", "The server's feed has failed; see its log.");
    return this.pause();
  }

  refused(error) {
    if (error.status === 401) {
      this.onState("refused", "The server asks for an API key.");
      return Infinity;
    }
    this.onState(error.status === 503 ? "unavailable" : "lost", `${error.message} Reconnecting.`);
    return this.pause();
  }
}
