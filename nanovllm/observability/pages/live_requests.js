// ------------------------------------------------------------------------------------------------------------ requests

const PROGRESS = ["cached", "computed", "generated"]; // parts of a bar that ends at prompt + max_tokens

/** Table of requests: a row for each one in the snapshot, and the number of those not listed. */
class RequestTable {
  constructor({ body, note }) {
    Object.assign(this, { body, note });
    this.own = new Set(); // ids of this page's requests
    this.rows = [];
  }

  draw({ look, isLive, steps, index }) {
    const requests = look?.requests ?? [];
    setText(this.note, this.noteOn(look, isLive));
    if (!requests.length) {
      this.empty(look || !steps[index] ? "none" : NOT_OPEN);
      return;
    }
    if (this.rows.length === 0) this.body.replaceChildren();
    while (this.rows.length > requests.length) this.rows.pop().row.remove();
    while (this.rows.length < requests.length) this.rows.push(this.newRow());
    requests.forEach((request, place) => this.fill(this.rows[place], request));
  }

  noteOn(look, isLive) {
    if (!look) return "";
    const hidden = look.running + look.waiting - look.requests.length;
    const counts = `${count(look.running)} running, ${count(look.waiting)} waiting`;
    return counts + (hidden > 0 ? `; ${count(hidden)} not listed` : "") + (isLive ? "" : `; after step ${count(look.step)}`);
  }

  empty(text) {
    const row = element("tr", "empty"), cell = element("td", "", text);
    cell.colSpan = 5;
    row.append(cell);
    this.rows = [];
    this.body.replaceChildren(row);
  }

  newRow() {
    const row = document.createElement("tr"), cells = Array.from({ length: 5 }, () => document.createElement("td"));
    const state = element("span", "state"), progress = element("div", "progress"), bar = element("div", "bar");
    const parts = PROGRESS.map((name) => element("i", name)), number = element("span", "number");
    bar.append(...parts);
    progress.append(bar, number);
    cells[1].append(state);
    cells[2].append(progress);
    row.append(...cells);
    this.body.append(row);
    return { row, cells, state, parts, number };
  }

  fill({ row, cells, state, parts, number }, request) {
    const { id, sample, computed, known, prompt, cached, limit, preemptions, client } = request;
    const isOwn = this.own.has(id);
    row.className = isOwn ? "own" : "";
    const title = `${id}, sample ${sample}${client ? ` of ${client}` : ""}: ${count(prompt)} prompt tokens, ${count(Math.max(0, known - prompt))} of at most `
      + `${count(limit - prompt)} generated, ${count(computed)} tokens computed, preempted ${count(preemptions)} times`;
    if (row.title !== title) row.title = title;
    setText(cells[0], (isOwn ? "yours" : shortId(id)) + (sample ? `#${sample}` : ""));
    if (state.textContent !== request.state) row.style.setProperty("--swatch", `var(--${request.state})`);
    setText(state, request.state);
    const found = Math.min(cached, computed, prompt), generated = Math.max(0, known - prompt);
    const sizes = [found, Math.max(0, Math.min(computed, prompt) - found), generated];
    parts.forEach((part, place) => { part.style.width = (100 * Math.min(1, sizes[place] / limit)).toFixed(1) + "%"; });
    setText(number, `${count(known)} / ${count(limit)}`);
    setText(cells[3], count(cached));
    setText(cells[4], age(request.age_us));
  }
}

/** Shorten a long id to its end, which differs more than its beginning. */
function shortId(id) { return id.length > 12 ? "…" + id.slice(-10) : id; }
