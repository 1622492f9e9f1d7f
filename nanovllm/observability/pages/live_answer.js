// -------------------------------------------------------------------------------------------- an answer, and messages

/** A streamed answer and its figures. */
class Answer {
  constructor() {
    this.began = performance.now();
    this.first = this.last = null;
    this.text = this.reasoning = "";
    this.id = this.reason = this.usage = null;
    this.failure = "";
  }

  /** Add a chunk; returns whether it has text. */
  take(chunk) {
    if (chunk.error) throw new Error("The answer broke off: " + chunk.error.message);
    this.id = this.id || chunk.id;
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0], text = choice?.delta?.content || "", reasoning = choice?.delta?.reasoning_content || "";
    if (choice?.finish_reason) this.reason = choice.finish_reason;
    if (!text && !reasoning) return false;
    this.last = performance.now();
    this.first = this.first ?? this.last;
    this.text += text;
    this.reasoning += reasoning;
    return true;
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

  /** The message to keep. */
  get message() {
    const optional = Object.entries({ reasoning: this.reasoning, failure: this.failure }).filter(([, text]) => text);
    return { role: "assistant", content: this.text, facts: this.facts(), ...Object.fromEntries(optional) };
  }
}

/** Message on the page: text, cost and buttons. */
class MessageView {
  constructor(role, tools) {
    this.role = role;
    this.box = element("article", "message " + role);
    this.said = element("div", "said");
    this.facts = element("span", "facts");
    this.tools = element("div", "tools");
    this.thought = null;
    this.markdown = role === "assistant" ? new MarkdownView(this.said) : null;
    this.box.setAttribute("aria-label", role === "user" ? "You" : "The model");
    this.box.append(this.said, this.tools);
    this.tools.append(...tools);
    this.drawn = { due: 0, timer: null };
  }

  show({ content, reasoning = "", facts = "", failure = "", pictures = [] }) {
    if (this.markdown) this.markdown.show(content); else setText(this.said, content);
    this.said.append(...pictures.map(thumbnail));
    if (reasoning) this.showReasoning(reasoning);
    if (failure && !this.box.querySelector(".failure")) this.tools.before(element("span", "failure", failure));
    if (facts) {
      this.facts.textContent = facts;
      this.tools.before(this.facts);
    }
  }

  /** Show the question's place in the queue before any text; "" once it is computed. */
  showPlace(text) {
    if (text) this.said.dataset.place = text; else delete this.said.dataset.place;
  }

  /** Show a growing answer; slow drawings are repeated less often. */
  showSoon(read) {
    if (this.drawn.timer !== null) return;
    this.drawn.timer = setTimeout(() => {
      const began = performance.now();
      this.drawn.timer = null;
      this.show(read());
      this.drawn.due = performance.now() + 8 * (performance.now() - began);
    }, Math.max(30, this.drawn.due - performance.now()));
  }

  cancelDrawing() {
    clearTimeout(this.drawn.timer);
    this.drawn.timer = null;
  }

  showReasoning(text) {
    if (!this.thought) {
      const box = element("details", "thought"), summary = element("summary", "", "Reasoning");
      this.thought = element("div", "plain");
      box.append(summary, this.thought);
      this.said.before(box);
    }
    setText(this.thought, text);
  }
}
