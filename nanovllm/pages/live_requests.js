// ------------------------------------------------------------------------------------------------------------ requests

/** A row for each of the first requests that run and that wait, and how many more there are. */
class RequestTable {
  constructor({ body, note }) {
    Object.assign(this, { body, note });
    this.own = new Set(); // ids of this page's own requests
    this.rows = [];
  }

  draw({ look, isLive, steps, index }) {
    const requests = look?.requests ?? [];
    this.note.textContent = this.noteOn(look, isLive);
    if (!requests.length) {
      this.empty(look || !steps[index] ? "none" : "not watched at this step");
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
    const fill = document.createElement("i"), number = element("span", "number");
    bar.append(fill);
    progress.append(bar, number);
    cells[1].append(state);
    cells[2].append(progress);
    row.append(...cells);
    this.body.append(row);
    return { row, cells, state, fill, number };
  }

  fill({ row, cells, state, fill, number }, request) {
    const { id, sample, computed, known, prompt, cached, preemptions } = request;
    const isOwn = this.own.has(id);
    row.className = isOwn ? "own" : "";
    row.title = `${id}, sample ${sample}: ${count(prompt)} prompt tokens, ${count(Math.max(0, known - prompt))} generated, `
      + `preempted ${count(preemptions)} times`;
    cells[0].textContent = (isOwn ? "yours" : shortId(id)) + (sample ? `#${sample}` : "");
    state.textContent = request.state;
    row.style.setProperty("--swatch", `var(--${request.state})`);
    fill.style.width = 100 * Math.min(1, computed / known) + "%";
    number.textContent = `${count(computed)} / ${count(known)}`;
    cells[3].textContent = count(cached);
    cells[4].textContent = age(request.age_us);
  }
}

/** The end of a long id tells more than its begin. */
function shortId(id) { return id.length > 12 ? "…" + id.slice(-10) : id; }
