// -------------------------------------------------------------------------------------------------------- a pinned step

const MOST_LISTED = 200; // requests of one kind

/** Chunks of a step as [lane, details], and the lanes with decodes. */
function workOf(run, index) {
  const step = run.steps[index], id = step[COLUMN.step], middle = (step[START] + step[END]) / 2;
  const work = { chunks: [], decodes: [] };
  for (const lane of run.lanes) {
    // Span of a step from its start; steps without length may share one.
    for (let at = firstFrom(lane.spans, 2, step[START]); at < lane.spans.length && lane.spans[at][1] <= middle; at++) {
      const [state, , , details] = lane.spans[at];
      if (state === PREFILL && details.step === id) work.chunks.push([lane, details]);
      if (state === DECODE && isWithin(run, details, index)) work.decodes.push(lane);
    }
  }
  return work;
}

/** Whether a run of decodes includes a step: one token per step from its first on; without an end, every later step. */
function isWithin(run, { step, tokens = Infinity }, index) {
  const first = index - (run.steps[index][COLUMN.step] - step); // ids count failed steps too
  for (let at = Math.max(0, first); at <= index; at++)
    if (run.steps[at][COLUMN.step] >= step) return index < at + tokens;
  return false;
}

/** Panel of a pinned step: figures and requests. */
class PinnedStep {
  constructor({ onChoose, redraw }) {
    Object.assign(this, { onChoose, redraw });
    this.chart = null;
    $("unpin").addEventListener("click", () => this.unpin());
    $("earlier").addEventListener("click", () => this.move(-1));
    $("later").addEventListener("click", () => this.move(1));
  }

  pin(chart, index) {
    if (!chart.run.steps[index]) return;
    this.unpin();
    const { run } = chart, step = run.steps[index], work = workOf(run, index);
    this.chart = chart;
    chart.pointer = null; // the chart gets narrower
    tip.style.display = "none";
    chart.pinned = index;
    chart.marked = new Set([...work.chunks.map(([lane]) => lane), ...work.decodes]);
    $("pinned").hidden = false;
    $("pinned_title").textContent = `Step ${step[COLUMN.step]}` + (runs.length > 1 ? ` of ${run.title}` : "");
    $("earlier").disabled = index === 0;
    $("later").disabled = index === run.steps.length - 1;
    $("pinned_body").replaceChildren(
      element("p", "", describeStep(step, run).replace(/^.*, /, "took ")),
      ...this.list(counted(work.chunks.length, "chunk"), work.chunks, (lane, details) => chunkText(details)),
      ...this.list(counted(work.decodes.length, "decode"), work.decodes.map((lane) => [lane]), () => ""));
    this.redraw();
  }

  list(title, entries, textOf) {
    if (!entries.length) return [];
    const list = document.createElement("ul");
    for (const [lane, details] of entries.slice(0, MOST_LISTED)) {
      const item = document.createElement("li"), text = textOf(lane, details), { chart } = this;
      item.append(plainButton(lane.name, () => this.onChoose(chart, lane), `Show request ${lane.name}`));
      if (text) item.append(element("div", "faint", text));
      list.append(item);
    }
    if (entries.length > MOST_LISTED) list.append(element("li", "faint", `and ${number(entries.length - MOST_LISTED)} more`));
    return [element("h3", "", title), list];
  }

  move(by) { if (this.chart) this.pin(this.chart, this.chart.pinned + by); }

  unpin() {
    if (!this.chart) return;
    this.chart.pinned = null;
    this.chart.marked = new Set();
    this.chart = null;
    $("pinned").hidden = true;
    this.redraw();
  }
}

function counted(amount, name) { return `${number(amount)} ${name}${amount === 1 ? "" : "s"}`; }

function chunkText({ start, tokens, cached }) {
  return `${number(tokens)} tokens from ${number(start)}` + (cached ? `, ${number(cached)} cached before` : "");
}
