// ---------------------------------------------------------------------------------------------------------------- chat

const PAGE_ID = "live-"; // prefix of a question's X-Request-Id: the feed has its place in the queue

function announce(text) { setText($("announce"), text); }

/** Conversation with the model; kept after each message. */
class Chat {
  constructor({ parts, store, onRefused, onOwnRequest }) {
    Object.assign(this, { parts, store, onRefused, onOwnRequest });
    this.model = null;
    this.abort = null; // aborts the answer that streams
    this.waiting = null; // the id of the question that streams, and the view of its answer
    this.editing = null; // index of the message that the next question replaces
    this.sampling = new SamplingForm();
    this.tray = new PictureTray({ ...parts.pictures, question: parts.question });
    const { form, question, stop, system } = parts;
    form.addEventListener("submit", (event) => { event.preventDefault(); this.ask(); });
    question.addEventListener("keydown", (event) => this.onKey(event));
    stop.addEventListener("click", () => this.abort?.abort());
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
      if (this.editing !== null) this.edit(null); else this.abort?.abort();
    });
    system.addEventListener("input", () => { this.conversation.system = system.value; });
    system.addEventListener("change", () => this.keep(this.conversation));
    $("cancel_edit").addEventListener("click", () => this.edit(null));
    this.open(this.store.read(sessionStorage.getItem(OPEN_PLACE) ?? "") ?? newConversation());
  }

  get messages() { return this.conversation.messages; }

  onKey(event) {
    const { question } = this.parts;
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.ask(); }
    if (event.key === "ArrowUp" && !question.value) {
      const last = this.messages.findLastIndex(({ role }) => role === "user");
      if (last >= 0 && !this.abort) { event.preventDefault(); this.edit(last); }
    }
  }

  open(conversation) {
    this.abort?.abort();
    this.setAbort(null);
    this.conversation = conversation;
    sessionStorage.setItem(OPEN_PLACE, conversation.id);
    this.parts.system.value = conversation.system;
    if (conversation.system) $("settings").open = true;
    this.edit(null);
    this.redraw();
  }

  startAnew() {
    this.open({ ...newConversation(), system: this.conversation.system });
    this.parts.question.focus();
  }

  /** The conversation was deleted: go on with an empty one. */
  forget(id) { if (id === this.conversation.id) this.open(newConversation()); }

  redraw() {
    const { conversation: box, welcome } = this.parts;
    box.replaceChildren(...(this.messages.length ? [] : [welcome]));
    this.messages.forEach((message, index) => this.add(message, index));
    this.scroll(true);
  }

  /** Show a message at its place in the conversation. */
  add(message, index) {
    const copy = copyButton("Copy message", () => message.content), tools = [copy];
    const button = (text, act) => {
      const made = element("button", "quiet " + text.toLowerCase(), text);
      made.type = "button";
      made.addEventListener("click", act);
      tools.push(made);
    };
    if (message.role === "user") button("Edit", () => { if (!this.abort) this.edit(index); });
    else button("Retry", () => this.retry());
    const view = new MessageView(message.role, tools);
    view.show(message);
    this.parts.welcome.remove();
    this.parts.conversation.append(view.box);
    this.scroll(true);
    return view;
  }

  /** Scroll to the end, unless the reader has scrolled up. */
  scroll(always = false) {
    const box = this.parts.conversation;
    if (always || box.scrollHeight - box.scrollTop - box.clientHeight < 80) box.scrollTop = box.scrollHeight;
  }

  /** Put a question back into the input for editing; null ends editing. */
  edit(index) {
    const { question } = this.parts, was = this.editing;
    this.editing = index;
    $("editing").hidden = index === null;
    if (index !== null) {
      question.value = this.messages[index].content;
      question.focus();
      this.tray.put(this.messages[index].pictures);
    } else if (was !== null) {
      question.value = "";
      this.tray.put();
    }
  }

  keep(conversation) {
    conversation.updated = Date.now();
    $("storage").hidden = this.store.keep(conversation);
  }

  ask() {
    const { question, form } = this.parts, content = question.value.trim(), pictures = this.tray.urls;
    if (!content || this.abort || !form.reportValidity()) return;
    if (this.editing !== null) {
      this.messages.splice(this.editing);
      this.edit(null);
      this.redraw();
    }
    this.messages.push({ role: "user", content, ...(pictures.length && { pictures }) });
    this.tray.put();
    this.add(this.messages.at(-1), this.messages.length - 1);
    question.value = "";
    this.keep(this.conversation);
    this.respond();
  }

  /** Answer the last question once more. */
  retry() {
    if (this.abort || this.messages.at(-1)?.role !== "assistant" || !this.parts.form.reportValidity()) return;
    const before = this.messages.pop();
    this.redraw(); // without the button that has the focus
    if (window.matchMedia("(pointer: fine)").matches) this.parts.question.focus();
    this.respond(before);
  }

  /** Stream the answer to the last question. Without any text the question returns to the input, or `before` to its place. */
  async respond(before = null) {
    const { conversation } = this, { messages } = conversation, abort = new AbortController(), answer = new Answer();
    const view = this.add({ role: "assistant", content: "" }, messages.length);
    const waiting = { id: PAGE_ID + newId(), view };
    this.setAbort(abort);
    this.waiting = waiting;
    try {
      await this.stream(abort.signal, answer, waiting);
    } catch (error) {
      answer.failure = abort.signal.aborted ? "" : this.explain(error);
      answer.reason = abort.signal.aborted ? "stopped" : "failed";
    }
    view.cancelDrawing();
    if (this.waiting === waiting) this.waiting = null;
    if (this.abort === abort) this.setAbort(null);
    const isShown = this.conversation === conversation, isEmpty = Boolean(answer.failure) && !answer.text && !answer.reasoning;
    if (!isEmpty) messages.push(answer.message);
    else if (before) messages.push(before);
    else if (isShown) this.takeBack(messages.pop());
    this.keep(conversation);
    if (!isShown) return;
    announce(answer.failure || "The answer is complete.");
    view.box.remove();
    if (isEmpty) {
      this.redraw();
      this.parts.conversation.append(this.failed(answer));
    } else this.add(messages.at(-1), messages.length - 1); // again, with buttons for the message that is kept
    this.scroll();
  }

  failed({ failure }) {
    const box = element("div", "message assistant");
    box.append(element("span", "failure", failure));
    return box;
  }

  takeBack({ content, pictures = [] }) {
    const { question } = this.parts;
    this.tray.put([...pictures, ...this.tray.urls]);
    question.value = question.value.trim() ? `${content}\n\n${question.value}` : content;
  }

  setAbort(abort) {
    this.abort = abort;
    this.parts.send.hidden = abort !== null;
    this.parts.stop.hidden = abort === null;
  }

  get body() {
    return { model: this.model, messages: asMessages(this.conversation), ...this.sampling.values };
  }

  /** The next request as a command. */
  get command() {
    const body = this.body, content = this.parts.question.value.trim();
    if (content) body.messages.push({ role: "user", content: contentOf({ content, pictures: this.tray.urls }) });
    if (!content && body.messages.at(-1)?.role === "assistant") body.messages.pop(); // the last question again
    return curlCommand(body);
  }

  /** Handle a snapshot of the engine. */
  look({ places, waiting }) {
    const place = places[this.waiting?.id];
    this.waiting?.view.showPlace(place ? `Place ${count(place)} of ${count(waiting)} in the queue` : "");
  }

  async stream(signal, answer, { id, view }) {
    const response = await call("v1/chat/completions", {
      method: "POST", signal, headers: { "Content-Type": "application/json", "X-Request-Id": id },
      body: JSON.stringify({ ...this.body, stream: true, stream_options: { include_usage: true } }),
    });
    for await (const [, data] of serverEvents(response)) {
      if (data === "[DONE]") break;
      if (!data) continue;
      const hasText = answer.take(JSON.parse(data));
      if (answer.id) this.onOwnRequest(answer.id);
      if (!hasText) continue;
      view.showSoon(() => ({ content: answer.text, reasoning: answer.reasoning }));
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
