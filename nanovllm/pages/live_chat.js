// ---------------------------------------------------------------------------------------------------------------- chat

/** Conversation with the model. Answers are inserted as text, never as HTML. */
class Chat {
  constructor({ parts, onRefused, onOwnRequest }) {
    Object.assign(this, { parts, onRefused, onOwnRequest });
    this.model = null;
    this.messages = []; // in the format of /v1/chat/completions
    this.abort = null; // aborts the answer that streams
    parts.form.addEventListener("submit", (event) => { event.preventDefault(); this.ask(); });
    parts.question.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.ask(); }
    });
    parts.stop.addEventListener("click", () => this.abort?.abort());
    parts.fresh.addEventListener("click", () => this.startAnew());
  }

  startAnew() {
    this.abort?.abort();
    this.messages = [];
    this.parts.conversation.replaceChildren(this.parts.welcome);
    this.parts.question.focus();
  }

  add(role) {
    const message = element("div", "message " + role), said = element("span", "said");
    message.append(said);
    this.parts.welcome.remove();
    this.parts.conversation.append(message);
    this.scroll(true);
    return { message, said };
  }

  /** Scroll to the end, unless the reader has scrolled up. */
  scroll(always = false) {
    const box = this.parts.conversation;
    if (always || box.scrollHeight - box.scrollTop - box.clientHeight < 60) box.scrollTop = box.scrollHeight;
  }

  async ask() {
    const { question, send, stop } = this.parts, content = question.value.trim();
    if (!content || this.abort || !this.parts.form.reportValidity()) return;
    const messages = [...this.messages, { role: "user", content }], abort = this.abort = new AbortController();
    this.messages = messages;
    const asked = this.add("user");
    asked.said.textContent = content;
    question.value = "";
    const { message, said } = this.add("assistant"), answer = new Answer();
    send.hidden = true;
    stop.hidden = false;
    try {
      await this.stream(messages, abort.signal, answer, said);
    } catch (error) {
      answer.failure = abort.signal.aborted ? "" : this.explain(error);
      answer.reason = abort.signal.aborted ? "stopped" : "failed";
    } finally {
      this.abort = null;
      send.hidden = false;
      stop.hidden = true;
    }
    if (answer.failure) message.append(element("span", "failure", answer.failure));
    if (answer.failure && !answer.text) { // no text: the question returns to the input
      message.querySelector(".said").remove();
      if (this.messages === messages) this.messages = messages.slice(0, -1);
      if (!question.value) question.value = content;
    } else if (this.messages === messages) {
      this.messages = [...messages, { role: "assistant", content: answer.text }];
    }
    if (answer.text || !answer.failure) message.append(element("span", "facts", answer.facts()));
    this.scroll();
  }

  async stream(messages, signal, answer, said) {
    const body = {
      model: this.model, messages, stream: true, stream_options: { include_usage: true },
      max_completion_tokens: Number(this.parts.maxTokens.value), temperature: Number(this.parts.temperature.value),
    };
    const response = await call("v1/chat/completions", {
      method: "POST", signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
    });
    const text = document.createTextNode("");
    for await (const [, data] of serverEvents(response)) {
      if (data === "[DONE]") break;
      if (!data) continue;
      const delta = answer.take(JSON.parse(data));
      if (answer.id) this.onOwnRequest(answer.id);
      if (!delta) continue;
      if (!text.isConnected) said.append(text);
      text.appendData(delta);
      this.scroll();
    }
    if (answer.reason === null) throw new Error("The answer broke off.");
  }

  explain(error) {
    if (!(error instanceof Refusal)) return error.message.startsWith("The answer") ? error.message : "The server cannot be reached.";
    if (error.status === 401) this.onRefused();
    if (error.status === 429)
      return `The queue is full: the server takes no more requests now. Try again in ${error.retryAfter || "some"} s.`;
    return error.message;
  }
}

/** A streamed answer and its figures. */
class Answer {
  constructor() {
    this.began = performance.now();
    this.first = this.last = null;
    this.text = "";
    this.id = this.reason = this.usage = null;
    this.failure = "";
  }

  /** Add a chunk; returns its text. */
  take(chunk) {
    if (chunk.error) throw new Error("The answer broke off: " + chunk.error.message);
    this.id = this.id || chunk.id;
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0], delta = choice?.delta?.content || "";
    if (choice?.finish_reason) this.reason = choice.finish_reason;
    if (delta) {
      this.last = performance.now();
      this.first = this.first ?? this.last;
      this.text += delta;
    }
    return delta;
  }

  facts() {
    const facts = [], tokens = this.usage?.completion_tokens;
    if (this.first !== null) facts.push("first token after " + duration(1e3 * (this.first - this.began)));
    if (tokens > 1 && this.last > this.first) facts.push(figure((tokens - 1) / (this.last - this.first) * 1e3) + " tok/s");
    if (this.usage) {
      const cached = this.usage.prompt_tokens_details?.cached_tokens ?? 0;
      facts.push(`${count(tokens)} tokens`, `prompt ${count(this.usage.prompt_tokens)}, of them ${count(cached)} cached`);
    }
    if (this.reason && this.reason !== "stop") facts.push({ length: "ended by max tokens" }[this.reason] ?? this.reason);
    return facts.join(" · ");
  }
}
