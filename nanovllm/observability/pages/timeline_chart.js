// ------------------------------------------------------------------------------------------------------- chart of a run

const data = JSON.parse($("runs").textContent), { runs, states } = data;
const COLUMN = Object.fromEntries(data.names.map((name, index) => [name, index + 2]));
const [START, END] = [0, 1];
const STACK = ["decode", "prefill", "cached"];
const LABELS = 96, AXIS = 22, GAP = 10, TOKENS = 150, BLOCKS = 84, HEADING = 16, RIGHT = 12;
const PREFILL = states.indexOf("prefill"), DECODE = states.indexOf("decode");

function stackedTokens(step) { return STACK.reduce((sum, name) => sum + step[COLUMN[name]], 0); }

/** Index of the first item whose end, item[at], is not before `time`; items are in order. */
function firstFrom(items, at, time) {
  let low = 0, high = items.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (items[middle][at] < time) low = middle + 1; else high = middle;
  }
  return low;
}

/** Lanes, tokens and blocks of a run; `view` {start, end} in microseconds is shared by all charts of the page. */
class RunChart {
  constructor(run, canvas, view) {
    Object.assign(this, { run, canvas, view });
    this.lanes = run.lanes;
    this.scroll = this.laneHeight = 0; // pixels of lanes above the top
    this.pointer = this.pinned = this.chosen = null; // place; index of a step; lane
    this.marked = new Set(); // lanes that the pinned step computed
    const most = (name) => run.steps.reduce((top, step) => Math.max(top, step[COLUMN[name]]), 1);
    this.budget = most("budget");
    this.numBlocks = most("blocks");
    this.mostTokens = run.steps.reduce((top, step) => Math.max(top, stackedTokens(step)), 0);
    this.scale = null; // of tokens; common to all charts
  }

  toX(time) { return LABELS + (time - this.view.start) / (this.view.end - this.view.start) * (this.width - LABELS - RIGHT); }
  toTime(x) { return this.view.start + (x - LABELS) / (this.width - LABELS - RIGHT) * (this.view.end - this.view.start); }

  draw(colors, isPresentOnly) {
    const { canvas, run } = this, box = canvas.parentElement;
    this.width = box.clientWidth;
    this.height = box.clientHeight;
    this.colors = colors;
    const context = this.context = fitCanvas(canvas, this.width, this.height);
    this.lanesHeight = Math.max(60, this.height - AXIS - TOKENS - BLOCKS - 2 * GAP);
    this.lanes = isPresentOnly ? run.lanes.filter((lane) => this.isPresent(lane)) : run.lanes;
    if (!this.laneHeight) this.laneHeight = Math.min(this.lanesHeight / Math.max(1, this.lanes.length), 22);
    this.scroll = clamp(this.scroll, 0, Math.max(0, this.lanes.length * this.laneHeight - this.lanesHeight));
    context.fillStyle = colors.panel;
    context.fillRect(0, 0, this.width, this.height);
    this.drawAxis();
    this.drawPinned();
    this.drawLanes();
    this.drawTokens(AXIS + this.lanesHeight + GAP);
    this.drawBlocks(AXIS + this.lanesHeight + GAP + TOKENS + GAP);
    if (this.pointer && this.pointer.x > LABELS) {
      context.fillStyle = colors.faint;
      context.fillRect(Math.round(this.pointer.x), AXIS, 1, this.height - AXIS);
    }
  }

  isPresent({ spans }) {
    return spans.length > 0 && spans[0][1] <= this.view.end && spans[spans.length - 1][2] >= this.view.start;
  }

  /** Call paint() clipped to the area right of the labels. */
  within(top, size, paint) {
    const { context } = this;
    context.save();
    context.beginPath();
    context.rect(LABELS, top, this.width - LABELS - RIGHT, size);
    context.clip();
    paint();
    context.restore();
  }

  drawAxis() {
    const { context, colors, view, width, height } = this;
    const distance = tickDistance((view.end - view.start) / ((width - LABELS) / 90));
    context.textAlign = "center";
    for (let tick = Math.ceil(view.start / distance) * distance; tick <= view.end; tick += distance) {
      context.fillStyle = colors.line;
      context.fillRect(Math.round(this.toX(tick)), AXIS, 1, height - AXIS);
      context.fillStyle = colors.faint;
      context.fillText(timeText(tick, distance), clamp(this.toX(tick), LABELS, width - 26), AXIS / 2);
    }
  }

  drawPinned() {
    const step = this.run.steps[this.pinned];
    if (!step) return;
    const left = Math.floor(this.toX(step[START])), right = Math.max(left + 2, Math.ceil(this.toX(step[END])));
    this.within(AXIS - 4, this.height, () => {
      this.context.fillStyle = this.colors.hover;
      this.context.fillRect(left - 2, AXIS - 4, right - left + 4, this.height);
      this.context.fillStyle = this.colors.text;
      this.context.fillRect(left - 1, AXIS - 4, right - left + 2, 3);
    });
  }

  drawLanes() {
    const { context, colors, lanes, scroll, view } = this, size = this.laneHeight, first = Math.floor(scroll / size);
    const last = Math.min(lanes.length, Math.ceil((scroll + this.lanesHeight) / size));
    // Rectangles by state, rare states on top; at most one per pixel of a lane.
    const shapes = states.map(() => []);
    for (let place = first; place < last; place++) {
      const spans = lanes[place].spans, y = Math.round(AXIS + place * size - scroll);
      const drawnTo = states.map(() => -1);
      for (let index = firstFrom(spans, 2, view.start); index < spans.length && spans[index][1] <= view.end; index++) {
        const [state, start, end] = spans[index];
        const left = Math.round(Math.max(this.toX(start), LABELS)), right = Math.max(Math.round(this.toX(end)), left + 1);
        if (right <= drawnTo[state]) continue;
        drawnTo[state] = right;
        shapes[state].push(left, y, right - left);
      }
    }
    const gap = size >= 5 ? 1 : 0;
    this.within(AXIS, this.lanesHeight, () => {
      for (const name of ["waiting", "decode", "prefill", "stalled", "preempted"]) {
        const list = shapes[states.indexOf(name)];
        context.fillStyle = colors[name];
        for (let at = 0; at < list.length; at += 3) {
          const seam = name === "prefill" && list[at + 2] > 4 ? 1 : 0; // separates consecutive chunks
          context.fillRect(list[at], list[at + 1], list[at + 2] - seam, Math.max(1, size - gap));
        }
      }
      context.fillStyle = colors.hover;
      for (const place of [this.laneAt(this.pointer), lanes.indexOf(this.chosen)])
        if (place >= 0) context.fillRect(LABELS, AXIS + place * size - scroll, this.width, size);
    });
    this.drawLaneNames(first, last);
  }

  drawLaneNames(first, last) {
    const { context, lanes, laneHeight, scroll, colors } = this, every = Math.max(1, Math.ceil(13 / laneHeight));
    context.save();
    context.beginPath();
    context.rect(0, AXIS, LABELS, this.lanesHeight);
    context.clip();
    context.textAlign = "right";
    for (let place = Math.ceil(first / every) * every; place < last; place += every) {
      context.fillStyle = lanes[place] === this.chosen ? colors.text : colors.faint;
      context.fillText(short(lanes[place].name), LABELS - 8, AXIS + (place + 0.5) * laneHeight - scroll);
    }
    context.fillStyle = colors.text;
    if (this.marked.size) for (let place = first; place < last; place++)
      if (this.marked.has(lanes[place])) context.fillRect(LABELS - 4, AXIS + place * laneHeight - scroll, 3, Math.max(1, laneHeight - 1));
    context.restore();
  }

  /** Call paint(left, right, step) for the visible steps; the largest of each pixel. */
  eachStep(amount, paint) {
    const { steps } = this.run;
    let left = -1, right = -1, chosen = null;
    for (let index = firstFrom(steps, END, this.view.start); index < steps.length; index++) {
      const step = steps[index];
      if (step[START] > this.view.end) break;
      const x = Math.floor(this.toX(step[START]));
      if (chosen && x === left) {
        if (amount(step) > amount(chosen)) chosen = step;
      } else {
        if (chosen) paint(left, Math.max(Math.ceil(right), left + 1), chosen);
        left = x; chosen = step;
      }
      right = this.toX(step[END]);
    }
    if (chosen) paint(left, Math.max(Math.ceil(right), left + 1), chosen);
  }

  drawTokens(top) {
    const { context, colors, budget, scale } = this, bottom = top + TOKENS, toHeight = scale.pixels(TOKENS - HEADING);
    const ticks = [];
    for (let tick = budget; tick >= 1 && toHeight(tick) > 18; tick /= 4) ticks.push([tick, toHeight(tick)]);
    this.chartFrame(top, TOKENS, "tokens a step", ticks);
    this.within(top, TOKENS, () => {
      this.eachStep(stackedTokens, (left, right, step) => {
        const seam = right - left > 5 ? 1 : 0;
        stackBar(context, left, right - left - seam, bottom, toHeight, STACK.map((name) => [step[COLUMN[name]], colors[name]]));
        if (step[COLUMN.goal_us]) { // the budget that keeps the goal
          context.fillStyle = colors.limit;
          context.fillRect(left, bottom - toHeight(step[COLUMN.budget]), right - left - seam, 1);
        }
        if (stackedTokens(step) > scale.most) {
          context.fillStyle = colors.panel;
          context.fillRect(left, bottom - toHeight(scale.most) + 3, right - left - seam, 2);
        }
      });
      dashedLine(context, LABELS, this.width - RIGHT, bottom - toHeight(budget), colors.limit);
    });
  }

  drawBlocks(top) {
    const { context, colors, numBlocks } = this, bottom = top + BLOCKS, scale = (BLOCKS - HEADING) / numBlocks;
    this.chartFrame(top, BLOCKS, "blocks in use", [[numBlocks, numBlocks * scale]]);
    this.within(top, BLOCKS, () => {
      context.fillStyle = colors.blocks;
      this.eachStep((step) => step[COLUMN.used_blocks], (left, right, step) => {
        const size = step[COLUMN.used_blocks] * scale;
        context.fillRect(left, bottom - size, right - left, size);
      });
      dashedLine(context, LABELS, this.width - RIGHT, bottom - numBlocks * scale, colors.limit);
    });
  }

  chartFrame(top, size, title, ticks) {
    const { context, colors } = this;
    context.fillStyle = colors.line;
    context.fillRect(0, top - GAP / 2, this.width, 1);
    for (const [, height] of ticks.slice(1)) context.fillRect(LABELS, Math.round(top + size - height), this.width - LABELS - RIGHT, 1);
    context.textAlign = "right";
    context.fillStyle = colors.text;
    context.fillText(title, LABELS - 8, top + 3);
    context.fillStyle = colors.faint;
    for (const [amount, height] of [...ticks, [0, 6]]) context.fillText(number(Math.round(amount)), LABELS - 8, top + size - height);
  }

  // -------------------------------------------------------------------------------------------------------- at a place

  laneAt(point) {
    if (!point || point.y < AXIS || point.y >= AXIS + this.lanesHeight || point.x < 0) return -1;
    const place = Math.floor((point.y - AXIS + this.scroll) / this.laneHeight);
    return place < this.lanes.length ? place : -1;
  }

  /** Index of the step in the middle of the view; the last one of a run that ends before it. */
  middleStep() {
    return Math.min(firstFrom(this.run.steps, END, (this.view.start + this.view.end) / 2), this.run.steps.length - 1);
  }

  /** Index of the step drawn at a position, the one with the most tokens of its pixel; -1 without one. */
  stepAt(point) {
    if (!point || point.x < LABELS) return -1;
    const { steps } = this.run, time = this.toTime(point.x), pixel = Math.floor(point.x);
    let found = firstFrom(steps, END, time);
    if (!steps[found] || (steps[found][START] > time && Math.floor(this.toX(steps[found][START])) > pixel)) return -1;
    for (let index = found; index < steps.length && Math.floor(this.toX(steps[index][START])) <= pixel; index++)
      if (stackedTokens(steps[index]) > stackedTokens(steps[found])) found = index;
    return found;
  }

  describe(point) {
    const time = this.toTime(point.x), place = this.laneAt(point);
    if (point.x < LABELS && place < 0) return "";
    if (place >= 0) {
      const lane = this.lanes[place], span = lane.spans[firstFrom(lane.spans, 2, time)];
      if (point.x < LABELS || !span || span[1] > time) return `request ${lane.name}`;
      return describeSpan(lane, span);
    }
    if (point.y < AXIS + this.lanesHeight) return "";
    const step = this.run.steps[this.stepAt(point)];
    return step ? describeStep(step, this.run) : "";
  }

  resizeLanes(factor) {
    const middle = (this.scroll + this.lanesHeight / 2) / this.laneHeight;
    this.laneHeight = clamp(this.laneHeight * factor, 0.2, 60);
    this.scroll = middle * this.laneHeight - this.lanesHeight / 2;
  }

  /** Scroll a lane into the middle. */
  showLane(lane) {
    const place = this.lanes.indexOf(lane);
    if (place >= 0) this.scroll = (place + 0.5) * this.laneHeight - this.lanesHeight / 2;
  }
}

function describeSpan(lane, [state, start, end, details]) {
  const said = Object.entries(details).map(([name, value]) => `${name.replaceAll("_", " ")}: ${value}`);
  return [`request ${lane.name}`, `${states[state]}, ${milliseconds(end - start)}`, `from ${milliseconds(start)}`, ...said].join("\n");
}

function describeStep(step, run) {
  const value = (name) => number(step[COLUMN[name]]);
  const used = step[COLUMN.decode] + step[COLUMN.prefill];
  return [
    `step ${step[COLUMN.step]}, ${milliseconds(step[END] - step[START])}`,
    `from ${milliseconds(step[START])}`,
    `${value("decode")} decode + ${value("prefill")} prefill tokens, ${value("cached")} cached`,
    `${(100 * used / step[COLUMN.budget]).toFixed(1)} % of the budget of ${value("budget")}`,
    `${value("sequences")} sequences; then ${value("running")} running, ${value("waiting")} waiting`,
    `${value("used_blocks")} of ${value("blocks")} blocks`, ...(run.groups?.[step[COLUMN.step]] ? [run.groups[step[COLUMN.step]]] : []),
    `schedule ${value("schedule_us")} µs, execute ${value("execute_us")} µs, update ${value("update_us")} µs`,
    ...(step[COLUMN.goal_us] ? [`predicted ${milliseconds(step[COLUMN.predicted_us])}, ITL goal ${milliseconds(step[COLUMN.goal_us])}`] : []),
  ].join("\n");
}
