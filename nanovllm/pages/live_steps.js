// ------------------------------------------------------------------------------------------- tokens in each step, scrubbing

const STACK = ["decode", "prefill", "cached"];
const AXIS_WIDTH = 46, TOP = 8, BAR = 5, THUMB = 8;

function stackedTokens(step) { return STACK.reduce((sum, name) => sum + step[name], 0); }

function describeStep(step, { about }) {
  const used = step.decode + step.prefill, total = step.schedule_us + step.execute_us + step.update_us;
  return [
    `step ${count(step.step)}, ${duration(total)}`,
    `${count(step.decode)} decode + ${count(step.prefill)} prefill tokens, ${count(step.cached)} cached`,
    `${percent(used / about.budget)} % of the budget of ${count(about.budget)}`,
    `${count(step.sequences)} sequences; then ${count(step.running)} running, ${count(step.waiting)} waiting`,
    `${count(step.used_blocks)} of ${count(about.num_blocks)} blocks`, ...(step.groups ? [step.groups] : []),
    `schedule ${duration(step.schedule_us)}, execute ${duration(step.execute_us)}, update ${duration(step.update_us)}`,
    ...(step.ttfts_us.length ? ["first tokens after " + step.ttfts_us.slice(0, 4).map(duration).join(", ")
                                + (step.ttfts_us.length > 4 ? ` and ${step.ttfts_us.length - 4} more` : "")] : []),
  ].join("\n");
}

/**
 * Chart of tokens per step: bars around the step shown, and below an overview of all steps. Heights are square roots of
 * tokens, so that a single decode is visible beside a step that spends the whole budget.
 */
class StepsChart {
  constructor({ canvas, overview, tip, onPick }) {
    Object.assign(this, { canvas, overview, tip });
    this.view = null;
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

  /** Steps that fit, centred on the one shown, unless there are too few later ones. */
  get range() {
    const { steps, index } = this.view, room = Math.max(1, Math.floor((this.canvas.clientWidth - AXIS_WIDTH) / BAR));
    const first = clamp(Math.round(index - room / 2), 0, Math.max(0, steps.length - room));
    return { first, end: Math.min(steps.length, first + room), room };
  }

  indexAt(x) {
    if (x < AXIS_WIDTH || !this.view) return -1;
    const { first, end } = this.range, index = first + Math.floor((x - AXIS_WIDTH) / BAR);
    return index < end ? index : -1;
  }

  draw(view, colors) {
    this.view = view;
    // Cached tokens do not count against the budget and may be many times as many: higher bars are cut.
    const { budget } = view.about, most = view.steps.reduce((high, step) => Math.max(high, stackedTokens(step)), 0);
    this.most = clamp(1.05 * most, 1.05 * budget, 2 * budget);
    this.drawBars(colors);
    this.drawOverview(colors);
  }

  scale(height) { return (amount) => (amount ? Math.max(1, Math.round(Math.sqrt(amount / this.most) * height)) : 0); }

  drawBars(colors) {
    const { canvas, view } = this, width = canvas.clientWidth, height = canvas.clientHeight;
    const context = fitCanvas(canvas, width, height), toHeight = this.scale(height - TOP - 1), { first, end } = this.range;
    const { budget } = view.about;
    context.textAlign = "right";
    for (let tick = budget; tick >= 1 && toHeight(tick) > 18; tick /= 4) {
      const y = Math.round(height - toHeight(tick));
      context.fillStyle = colors.line;
      if (tick !== budget) context.fillRect(AXIS_WIDTH, y, width, 1);
      context.fillStyle = colors.faint;
      context.fillText(count(tick), AXIS_WIDTH - 7, Math.max(y, 6));
    }
    context.fillText("0", AXIS_WIDTH - 7, height - 6);
    for (let index = first; index < end; index++) {
      const left = AXIS_WIDTH + (index - first) * BAR;
      if (index === view.index && !view.isLive) {
        context.fillStyle = colors.hover;
        context.fillRect(left - 1, 0, BAR + 1, height);
        context.fillStyle = colors.text;
        context.fillRect(left - 1, 0, BAR + 1, 3);
      }
      const step = view.steps[index];
      stackBar(context, left, BAR - 1, height, toHeight, STACK.map((name) => [step[name], colors[name]]));
      if (stackedTokens(step) > this.most) {
        context.fillStyle = colors.panel;
        context.fillRect(left, TOP - 5, BAR - 1, 2);
      }
    }
    dashedLine(context, AXIS_WIDTH, width, height - toHeight(budget), colors.limit);
  }

  drawOverview(colors) {
    const { overview, view } = this, width = overview.clientWidth, height = overview.clientHeight;
    const context = fitCanvas(overview, width, height), toHeight = this.scale(height), { steps } = view;
    const toX = (index) => THUMB / 2 + (steps.length > 1 ? index / (steps.length - 1) : 1) * (width - THUMB);
    context.fillStyle = colors.hover;
    context.fillRect(0, 0, width, height);
    if (!steps.length) return;
    const { first, end } = this.range;
    context.strokeStyle = colors.faint;
    context.strokeRect(toX(first) - 2.5, 0.5, Math.max(4, toX(end - 1) - toX(first) + 5), height - 1);
    const slot = Math.max(1, Math.ceil((width - THUMB) / steps.length));
    const columns = new Map(); // of the steps within one pixel, the one with most tokens
    steps.forEach((step, index) => {
      const x = Math.round(toX(index) - slot / 2), there = columns.get(x);
      if (!there || stackedTokens(step) > stackedTokens(there)) columns.set(x, step);
    });
    for (const [x, step] of columns)
      stackBar(context, x, slot, height, toHeight, STACK.map((name) => [step[name], colors[name]]));
  }
}
