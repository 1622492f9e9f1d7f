// -------------------------------------------------------------------------------------------------- history

/** The last steps, and snapshots of the engine ("looks") after some of them; a copy of both while paused. */
class StepHistory {
  constructor() {
    this.about = null;
    this.live = { steps: [], looks: [] };
    this.paused = null; // a copy of `live`
    this.index = -1; // of the step shown while paused
  }

  /** Begin a connection; keeps the history if it is to the same engine. */
  hello(about) {
    if (this.about?.instance !== about.instance) {
      this.live = { steps: [], looks: [] };
      this.paused = null;
    }
    this.about = about;
  }

  /** Add a snapshot and the steps since the one before, at most `num_steps`. */
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
    entry.pool = look.pool ? { ...look.pool, counts: decodeCells(look.pool.cells) } : last?.pool;
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

  /** The last snapshot not after the step shown; undefined if all are later. */
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

  /** Pause, and show this step until `resume`. */
  show(index) {
    if (!this.paused) this.paused = { steps: [...this.live.steps], looks: [...this.live.looks] };
    this.index = clamp(index, 0, this.paused.steps.length - 1);
  }

  resume() { this.paused = null; }
}

/** Decode a pool's cells from base64: cached, in use and shared blocks of each. */
function decodeCells(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  return new Uint16Array(bytes.buffer); // little-endian, like the hosts of all browsers
}
