// ------------------------------------------------------------------------------------------- tokens in each step, scrubbing

const STACK = ["decode", "prefill", "cached"];
const AXIS_WIDTH = 46, AXIS_HEIGHT = 18, TOP = 8, THUMB = 8;
const LEAD = 0.25; // of the time shown that may pass without a step before the chart stops moving

function stackedTokens(step) { return STACK.reduce((sum, name) => sum + step[name], 0); }

function describeStep(step, { about }) {
  const budget = step.budget || about.budget, used = step.decode + step.prefill, total = step.schedule_us + step.execute_us + step.update_us;
  return [
    `step ${count(step.step)}, ${duration(total)}`,
    `${count(step.decode)} decode + ${count(step.prefill)} prefill tokens, ${count(step.cached)} cached`,
    `${percent(used / budget)} % of the budget of ${count(budget)}`,
    `${count(step.sequences)} sequences; then ${count(step.running)} running, ${count(step.waiting)} waiting`,
    `${count(step.used_blocks)} of ${count(about.num_blocks)} blocks`, ...(step.groups ? [step.groups] : []),
    `schedule ${duration(step.schedule_us)}, execute ${duration(step.execute_us)}, update ${duration(step.update_us)}`,
    ...(step.predicted_us === null ? [] : [`predicted ${duration(step.predicted_us)}`]),
    ...(step.ttfts_us.length ? ["first tokens after " + step.ttfts_us.slice(0, 4).map(duration).join(", ")
                                + (step.ttfts_us.length > 4 ? ` and ${step.ttfts_us.length - 4} more` : "")] : []),
  ].join("\n");
}

/**
 * Chart of tokens per step: bars on an axis of time around the step shown, and below an overview of all steps. Heights are
 * square roots of tokens, so that a single decode is visible beside a step that spends the whole budget.
 */
class StepsChart {
  constructor({ canvas, overview, span, tip, onPick }) {
    Object.assign(this, { canvas, overview, span, tip });
    this.view = null;
    this.window = { start: 0, end: 1 }; // microseconds
    canvas.addEventListener("pointermove", (event) => {
      const step = this.view?.steps[this.indexAt(event.offsetX)];
      placeTip(tip, event, step ? describeStep(step, this.view) : "");
    });
    canvas.addEventListener("pointerleave", (event) => placeTip(tip, event, ""));
    canvas.addEventListener("click", (event) => {
      const index = this.indexAt(event.offsetX);
      if (this.view?.steps[index]) onPick(index);
    });
  }

  /** The time shown: up to now, or around the step shown. */
  windowOf({ steps, index, isLive, newest }) {
    const first = beginOf(steps, 0), last = steps.at(-1).time;
    const length = this.span.value === "all" ? Math.max(1e3, last - first) * 1.01 : 1e6 * Number(this.span.value);
    const end = isLive ? Math.min(Math.max(newest.time, last), last + LEAD * length)
                       : Math.min(last + 0.01 * length, Math.max(steps[index].time + length / 2, first + length));
    return { start: end - length, end };
  }

  toX(time) {
    const { start, end } = this.window;
    return AXIS_WIDTH + (time - start) / (end - start) * (this.canvas.clientWidth - AXIS_WIDTH);
  }

  toTime(x) {
    const { start, end } = this.window;
    return start + (x - AXIS_WIDTH) / (this.canvas.clientWidth - AXIS_WIDTH) * (end - start);
  }

  /** Indices of the steps within the time shown. */
  get range() {
    const { steps } = this.view, { start, end } = this.window, after = steps.findIndex((_, index) => beginOf(steps, index) > end);
    const first = steps.findIndex((step) => step.time >= start);
    return { first: first < 0 ? steps.length : first, end: after < 0 ? steps.length : after };
  }

  /** The step at a place, or the one that ended last within three pixels; -1 without one. */
  indexAt(x) {
    if (x < AXIS_WIDTH || !this.view?.steps.length) return -1;
    const { steps } = this.view, time = this.toTime(x), later = steps.findIndex((step) => step.time >= time);
    if (later >= 0 && this.toX(beginOf(steps, later)) <= x + 3) return later;
    const before = (later < 0 ? steps.length : later) - 1;
    return before >= 0 && this.toX(steps[before].time) >= x - 3 ? before : -1;
  }

  draw(view, colors) {
    this.view = view;
    this.scale = tokenScale(view.about.budget, view.steps.reduce((high, step) => Math.max(high, stackedTokens(step)), 0));
    if (view.steps.length) this.window = this.windowOf(view);
    this.drawBars(colors);
    this.drawOverview(colors);
  }

  drawBars(colors) {
    const { canvas, view, scale } = this, width = canvas.clientWidth, height = canvas.clientHeight, bottom = height - AXIS_HEIGHT;
    const context = fitCanvas(canvas, width, height), toHeight = scale.pixels(bottom - TOP), { budget } = view.about;
    context.textAlign = "right";
    for (let tick = budget; tick >= 1 && toHeight(tick) > 18; tick /= 4) {
      const y = Math.round(bottom - toHeight(tick));
      context.fillStyle = colors.line;
      if (tick !== budget) context.fillRect(AXIS_WIDTH, y, width, 1);
      context.fillStyle = colors.faint;
      context.fillText(count(tick), AXIS_WIDTH - 7, Math.max(y, 6));
    }
    context.fillText("0", AXIS_WIDTH - 7, bottom - 6);
    if (view.steps.length) {
      this.drawTimes(context, bottom, colors);
      context.save();
      context.beginPath();
      context.rect(AXIS_WIDTH, 0, width - AXIS_WIDTH, bottom);
      context.clip();
      for (const [left, right, index] of this.bars()) this.drawBar(context, left, right, index, bottom, toHeight, colors);
      context.restore();
    }
    dashedLine(context, AXIS_WIDTH, width, bottom - toHeight(budget), colors.limit);
  }

  /** [left, right, index] of the visible steps; the one with the most tokens of each pixel. */
  bars() {
    const { steps } = this.view, { first, end } = this.range, bars = [];
    for (let index = first; index < end; index++) {
      const left = Math.floor(this.toX(beginOf(steps, index))), right = Math.max(left + 1, Math.floor(this.toX(steps[index].time)));
      const last = bars.at(-1);
      if (last?.[0] !== left) bars.push([left, right, index]);
      else if (stackedTokens(steps[index]) > stackedTokens(steps[last[2]])) bars[bars.length - 1] = [left, Math.max(right, last[1]), index];
    }
    return bars;
  }

  drawBar(context, left, right, index, bottom, toHeight, colors) {
    const { view, scale } = this, step = view.steps[index], size = right - left - (right - left > 5 ? 1 : 0);
    if (index === view.index && !view.isLive) {
      context.fillStyle = colors.hover;
      context.fillRect(left - 1, 0, size + 2, bottom);
      context.fillStyle = colors.text;
      context.fillRect(left - 1, 0, Math.max(4, size + 2), 3);
    }
    stackBar(context, left, size, bottom, toHeight, STACK.map((name) => [step[name], colors[name]]));
    if (step.predicted_us !== null) { // the budget that keeps the goal
      context.fillStyle = colors.limit;
      context.fillRect(left, bottom - toHeight(step.budget), size, 1);
    }
    if (stackedTokens(step) > scale.most) {
      context.fillStyle = colors.panel;
      context.fillRect(left, bottom - toHeight(scale.most) + 3, size, 2);
    }
  }

  /** Ticks in seconds before the last step; the idle time while nothing runs. */
  drawTimes(context, bottom, colors) {
    const { view } = this, width = this.canvas.clientWidth, { start, end } = this.window, zero = view.steps.at(-1).time;
    const distance = tickDistance((end - start) / (width / 90));
    context.textAlign = "center";
    for (let tick = Math.ceil((start - zero) / distance) * distance; tick <= end - zero; tick += distance) {
      const x = Math.round(this.toX(zero + tick));
      context.fillStyle = colors.line;
      context.fillRect(x, bottom, 1, 4);
      context.fillStyle = colors.faint;
      const text = tick ? signedSeconds(tick, distance) : "last step";
      if (tick <= 0) context.fillText(text, clamp(x, AXIS_WIDTH + 12, width - 26), bottom + 11);
    }
    const idle = view.newest.time - zero;
    if (!view.isLive || idle < RATE_WINDOW_US || width - this.toX(zero) < 70) return;
    context.textAlign = "right";
    context.fillText(`idle for ${age(idle)}`, width - 6, bottom / 2);
  }

  drawOverview(colors) {
    const { overview, view } = this, width = overview.clientWidth, height = overview.clientHeight;
    const context = fitCanvas(overview, width, height), toHeight = this.scale.pixels(height), { steps } = view;
    const toX = (index) => THUMB / 2 + (steps.length > 1 ? index / (steps.length - 1) : 1) * (width - THUMB);
    context.fillStyle = colors.hover;
    context.fillRect(0, 0, width, height);
    if (!steps.length) return;
    const { first, end } = this.range;
    context.strokeStyle = colors.faint;
    if (end > first) context.strokeRect(toX(first) - 2.5, 0.5, Math.max(4, toX(end - 1) - toX(first) + 5), height - 1);
    const slot = Math.max(1, Math.ceil((width - THUMB) / steps.length));
    const columns = new Map(); // the step with the most tokens of each pixel
    steps.forEach((step, index) => {
      const x = Math.round(toX(index) - slot / 2), there = columns.get(x);
      if (!there || stackedTokens(step) > stackedTokens(there)) columns.set(x, step);
    });
    for (const [x, step] of columns)
      stackBar(context, x, slot, height, toHeight, STACK.map((name) => [step[name], colors[name]]));
  }
}

/** Start of a step on the device: with overlap it is launched during the step before. */
function beginOf(steps, index) {
  return Math.max(steps[index].start, steps[index - 1]?.time ?? -Infinity);
}

function signedSeconds(us, precision) {
  const seconds = Math.abs(us) / 1e6, digits = precision < 1e5 ? 2 : precision < 1e6 ? 1 : 0;
  return (us < 0 ? "−" : "") + decimals(seconds, digits) + " s";
}
