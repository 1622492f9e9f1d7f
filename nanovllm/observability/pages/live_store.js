// ------------------------------------------------------------------------------------- conversations kept in the browser

const CHAT_PLACE = "nanovllm-chat-"; // prefix of keys in localStorage: an entry per conversation, so that tabs do not overwrite each other's
const OPEN_PLACE = "nanovllm-open"; // the id of the tab's conversation, in sessionStorage
const MAX_TITLE = 60;

function newId() { return Array.from(crypto.getRandomValues(new Uint32Array(2)), (part) => part.toString(36)).join(""); }

function newConversation() { return { id: newId(), updated: 0, system: "", messages: [] }; }

function titleOf({ messages }) {
  const first = messages[0]?.content.trim().replace(/\s+/g, " ") || "Empty conversation";
  return first.length > MAX_TITLE ? first.slice(0, MAX_TITLE - 1) + "…" : first;
}

/** Whether a value from storage is a conversation: another version, or a person, may have written something else. */
function isConversation(value) {
  return typeof value?.id === "string" && typeof value.system === "string" && Number.isFinite(value.updated)
    && Array.isArray(value.messages)
    && value.messages.every((message) => ["user", "assistant"].includes(message?.role) && typeof message.content === "string"
      && (message.pictures ?? []).every((url) => typeof url === "string" && url.startsWith("data:image/")));
}

/** Conversations in localStorage; they leave the browser only as requests and exports. */
class ConversationStore {
  read(id) {
    try {
      const value = JSON.parse(localStorage.getItem(CHAT_PLACE + id));
      return isConversation(value) ? value : null;
    } catch { return null; }
  }

  /** All, the latest first. */
  all() {
    const ids = Object.keys(localStorage).filter((key) => key.startsWith(CHAT_PLACE)).map((key) => key.slice(CHAT_PLACE.length));
    return ids.map((id) => this.read(id)).filter(Boolean).sort((one, other) => other.updated - one.updated);
  }

  /** Keep a conversation, or remove one without messages; returns whether the browser had room. */
  keep(conversation) {
    try {
      if (conversation.messages.length) localStorage.setItem(CHAT_PLACE + conversation.id, JSON.stringify(conversation));
      else this.remove(conversation.id);
      return true;
    } catch { return false; }
  }

  remove(id) { localStorage.removeItem(CHAT_PLACE + id); }

  removeAll() { for (const { id } of this.all()) this.remove(id); }
}

/** Messages in the format of /v1/chat/completions. */
function asMessages({ system, messages }) {
  const head = system.trim() ? [{ role: "system", content: system }] : [];
  return [...head, ...messages.map((message) => ({ role: message.role, content: contentOf(message) }))];
}

function exported(conversations) {
  return JSON.stringify(conversations.map((conversation) => ({
    title: titleOf(conversation), updated: new Date(conversation.updated).toISOString(), messages: asMessages(conversation),
  })), null, 2) + "\n";
}

function download(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/** Dialog with all conversations: open, export, delete. */
class ConversationList {
  constructor({ dialog, list, store, onOpen, onRemoved }) {
    Object.assign(this, { dialog, list, store, onOpen, onRemoved });
    $("export_all").addEventListener("click", () => download("conversations.json", exported(store.all())));
    $("delete_all").addEventListener("click", (event) => this.sure(event.currentTarget, () => {
      const ids = store.all().map(({ id }) => id);
      store.removeAll();
      ids.forEach(onRemoved);
      this.fill();
    }));
    $("close_list").addEventListener("click", () => dialog.close());
  }

  show() {
    this.fill();
    this.dialog.showModal();
  }

  fill() {
    const all = this.store.all();
    this.list.replaceChildren(...all.map((conversation) => this.row(conversation)));
    if (!all.length) this.list.append(element("li", "faint", "None yet."));
    $("export_all").disabled = $("delete_all").disabled = !all.length;
  }

  row(conversation) {
    const row = document.createElement("li"), title = titleOf(conversation), open = element("button", "title", title);
    const when = new Date(conversation.updated).toLocaleString(), number = conversation.messages.length;
    const take = element("button", "", "Export"), remove = element("button", "", "Delete");
    for (const button of [open, take, remove]) button.type = "button";
    open.title = title;
    take.setAttribute("aria-label", `Export: ${title}`);
    remove.setAttribute("aria-label", `Delete: ${title}`);
    open.addEventListener("click", () => { this.dialog.close(); this.onOpen(conversation.id); });
    take.addEventListener("click", () => download("conversation.json", exported([conversation])));
    remove.addEventListener("click", () => this.sure(remove, () => {
      this.store.remove(conversation.id);
      this.onRemoved(conversation.id);
      this.fill();
      $("close_list").focus();
    }));
    row.append(open, element("span", "faint", `${when} · ${count(number)} messages`), take, remove);
    return row;
  }

  /** Act on the second click within some seconds. */
  sure(button, act) {
    if (button.dataset.sure) {
      act();
      return;
    }
    const text = button.textContent, label = button.getAttribute("aria-label");
    button.dataset.sure = "yes";
    button.textContent = "Sure?";
    button.setAttribute("aria-label", `Sure? ${label ?? text}`);
    setTimeout(() => {
      delete button.dataset.sure;
      button.textContent = text;
      if (label) button.setAttribute("aria-label", label); else button.removeAttribute("aria-label");
    }, 4000);
  }
}
