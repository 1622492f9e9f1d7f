// -------------------------------------------------------------------------------------------------- what is remembered

/** The last steps, and what the engine looked like after some of them; all of it, or as it was when it was paused. */
class StepHistory {
  constructor() {
    this.about = null;
    this.live = { steps: [], looks: [] };
    this.paused = null; // the same, once it is paused
    this.index = -1; // of the step shown while it is paused
  }

  /** A connection begins; what is known stays if it leads to the same engine. */
  hello(about) {
    if (this.about?.instance !== about.instance) {
      this.live = { steps: [], looks: [] };
      this.paused = null;
    }
    this.about = about;
  }

  /** Take what came: it tells all steps since the look before, or those of the last thousand. */
  add(look) {
    const { steps, looks } = this.live, known = steps.length ? steps[steps.length - 1].step : -1;
    for (const row of look.steps) {
      const step = Object.fromEntries(this.about.step_values.map((name, place) => [name, row[place]]));
      if (step.step > known) steps.push(step);
    }
    steps.splice(0, steps.length - this.about.num_steps);
    const last = looks[looks.length - 1];
    const entry = { ...look, step: steps.length ? steps[steps.length - 1].step : -1 };
    delete entry.steps;
    entry.pool = look.pool ? { ...look.pool, counts: countsOf(look.pool.cells) } : last?.pool;
    entry.requests = look.requests.map(
      (row) => Object.fromEntries(this.about.request_values.map((name, place) => [name, row[place]])));
    if (last && last.step === entry.step) looks.pop();
    looks.push(entry);
    while (looks.length > 1 && looks[0].step < steps[0]?.step) looks.shift();
  }

  get view() { return this.paused || this.live; }
  get isPaused() { return this.paused !== null; }
  get shownIndex() { return this.paused ? this.index : this.live.steps.length - 1; }
  get step() { return this.view.steps[this.shownIndex]; }
  get newest() { return this.live.looks[this.live.looks.length - 1]; }

  /** The look nearest to the step shown, not after it; the first if it is older than all. */
  get look() {
    const { looks } = this.view, step = this.step?.step ?? -1;
    if (!this.paused) return this.newest;
    let low = 0, high = looks.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (looks[middle].step <= step) low = middle; else high = middle - 1;
    }
    return looks[low]?.step <= step ? looks[low] : undefined;
  }

  /** Show this step, and nothing that comes, until `resume`. */
  show(index) {
    if (!this.paused) this.paused = { steps: [...this.live.steps], looks: [...this.live.looks] };
    this.index = clamp(index, 0, this.paused.steps.length - 1);
  }

  resume() { this.paused = null; }
}

/** The counts of a pool's cells from base64: cached, in use, shared, of each cell in turn. */
function countsOf(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  return new Uint16Array(bytes.buffer); // little-endian, as every machine with a browser is
}
