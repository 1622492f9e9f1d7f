// ------------------------------------------------------------------------------------------------- figures of the steps

const RATE_WINDOW_US = 1e6;

/** Prefix sums of a value over the steps; the sum over a range of steps is a difference of two. */
function prefixSums(steps, valueOf) {
  const sums = new Float64Array(steps.length + 1);
  steps.forEach((step, index) => { sums[index + 1] = sums[index] + valueOf(step); });
  return sums;
}

/** For each step, the index of the first that ended within a second before it. */
function windowStarts(steps) {
  let first = 0;
  return steps.map((step) => {
    while (steps[first].time < step.time - RATE_WINDOW_US) first++;
    return first;
  });
}

/** Tokens per second, over the second before each step. */
function tokenRates(steps, numTokens) {
  const sums = prefixSums(steps, numTokens);
  return windowStarts(steps).map((first, index) => (sums[index + 1] - sums[first]) / (RATE_WINDOW_US / 1e6));
}

/** ITL: time from the previous step to each step with decodes; null for others. */
function stepItls(steps) {
  return steps.map((step, index) => (index && step.decode ? step.time - steps[index - 1].time : null));
}

/** Weighted quantile; undefined without values. */
function percentile(weighted, share) {
  const sorted = weighted.filter(([, weight]) => weight > 0).sort((a, b) => a[0] - b[0]);
  let left = share * sorted.reduce((sum, [, weight]) => sum + weight, 0);
  return sorted.find(([, weight]) => (left -= weight) <= 1e-9)?.[0];
}

function medianAndTail(weighted) {
  const half = percentile(weighted, 0.5), most = percentile(weighted, 0.95);
  return half === undefined ? "none yet" : `p50 ${duration(half)} · p95 ${duration(most)}`;
}

function lastValue(values, end) {
  for (let index = end; index >= 0; index--) if (values[index] !== null) return values[index];
  return null;
}

/** Each tile at step `index` of `view`: value with unit, second line, and a value per step for the sparkline. */
const FIGURES = [
  {
    name: "Output", about: "Decoded tokens per second, over the last second", color: "decode",
    read({ steps, index, isIdle, look }) {
      const decode = tokenRates(steps, (s) => s.decode + s.accepted), prefill = tokenRates(steps, (s) => s.prefill);
      const at = (rates) => (isIdle || index < 0 ? 0 : rates[index]);
      const drafts = Object.entries(look?.drafts ?? {}).map(
        ([source, [drafted, accepted]]) => ` · ${percent(accepted / drafted)} % of ${source} drafts right`);
      return { value: [count(at(decode)), "tok/s"], more: `prefill ${count(at(prefill))} tok/s${drafts.join("")}`,
               values: decode, text: (value) => count(value) + " tok/s" };
    },
  },
  {
    name: "TTFT", about: "Time to the first token, from a request's arrival", color: "prefill",
    read({ steps, index }) {
      const values = steps.map(({ ttfts_us }) => (ttfts_us.length ? Math.max(...ttfts_us) : null));
      const all = steps.slice(0, index + 1).flatMap(({ ttfts_us }) => ttfts_us.map((ttft) => [ttft, 1]));
      return { value: timed(lastValue(values, index)), more: medianAndTail(all), values, text: duration, isSparse: true };
    },
  },
  {
    name: "ITL", about: "Inter-token latency: the time between two tokens of a request", color: "decode",
    read({ steps, index, look }) {
      const values = stepItls(steps), goal = look?.budget?.[2];
      const all = values.slice(0, index + 1).map((value, place) => [value, value === null ? 0 : steps[place].decode]);
      const more = medianAndTail(all) + (goal ? ` · goal ${duration(goal)}` : "");
      return { value: timed(lastValue(values, index)), more, values, text: duration };
    },
  },
  {
    name: "Step time", about: "Schedule, execute and update; the host's share is schedule and update", color: "waiting",
    read({ steps, index, look }) {
      const error = look?.budget?.[1];
      const host = (step) => step.schedule_us + step.update_us, values = steps.map((s) => host(s) + s.execute_us);
      const step = steps[index];
      const share = step && values[index] ? ` (${percent(host(step) / values[index])} %)` : "";
      const predicted = error == null ? "" : ` · predicted ± ${percent(error)} %`;
      return { value: timed(step ? values[index] : null),
               more: step ? `host ${duration(host(step))}${share}${predicted}` : "none yet", values, text: duration };
    },
  },
  {
    name: "Cache hits", about: "Prompt tokens found in the prefix cache instead of computed, in these steps",
    color: "cached",
    read({ steps, index }) {
      const hits = prefixSums(steps, (s) => s.cached), all = prefixSums(steps, (s) => s.cached + s.prefill);
      const values = steps.map((_, at) => (all[at + 1] ? hits[at + 1] / all[at + 1] : null));
      return { value: index >= 0 && values[index] !== null ? [percent(values[index]), "%"] : ["–", ""],
               more: `${count(hits[index + 1])} of ${count(all[index + 1])} tokens`, values, most: 1,
               text: (value) => percent(value) + " %" };
    },
  },
  {
    name: "Blocks in use", about: "KV blocks held by requests", color: "blocks",
    read({ steps, index, about, look, isLive }) {
      const used = isLive && look?.pool ? look.pool.total[2] + look.pool.total[3] : steps[index]?.used_blocks ?? 0;
      return { value: [percent(used / about.num_blocks), "%"], more: `${count(used)} of ${count(about.num_blocks)}`,
               values: steps.map((s) => s.used_blocks), most: about.num_blocks, text: (value) => count(value) + " blocks" };
    },
  },
  {
    name: "Requests", about: "Running and waiting sequences", color: "waiting",
    read({ steps, index, about, look, isLive }) {
      const from = isLive && look ? look : steps[index] ?? { running: 0, waiting: 0 };
      const places = about.max_queue === null ? "" : ` of ${count(about.max_queue)}`;
      return { value: [count(from.running), "running"], more: `${count(from.waiting)}${places} waiting`,
               values: steps.map((s) => s.running + s.waiting), text: (value) => count(value) + " running or waiting" };
    },
  },
  {
    name: "Budget used", about: "Tokens computed in the step, of its budget; an ITL goal may set a smaller one",
    color: "prefill",
    read({ steps, index, about, look }) {
      const step = steps[index], used = step ? step.decode + step.prefill : 0, budget = step?.budget || about.budget;
      const byGoal = look?.budget?.[0], goal = byGoal === undefined ? "" : ` · ${count(byGoal)} by the goal`;
      return { value: [percent(used / budget), "%"], more: `${count(used)} of ${count(budget)} tokens${goal}`,
               values: steps.map((s) => s.decode + s.prefill), most: about.budget, text: (value) => count(value) + " tokens" };
    },
  },
];

function timed(value) { return value === null ? ["–", ""] : durationParts(value); }

/** Tiles with the figures, each with a sparkline over the history. */
class Tiles {
  constructor(place, tip) {
    this.tip = tip;
    this.tiles = FIGURES.map((figureOf) => {
      const tile = element("div", "tile"), value = element("div", "value"), canvas = document.createElement("canvas");
      const parts = { number: element("span"), unit: element("span", "unit"), more: element("div", "more") };
      const name = element("div", "name", figureOf.name);
      name.title = figureOf.about;
      canvas.setAttribute("aria-hidden", "true");
      value.append(parts.number, parts.unit);
      tile.append(name, value, parts.more, canvas);
      place.append(tile);
      const made = { ...parts, figureOf, canvas, shown: null };
      canvas.addEventListener("pointermove", (event) => placeTip(tip, event, this.describe(made, event.offsetX)));
      canvas.addEventListener("pointerleave", (event) => placeTip(tip, event, ""));
      return made;
    });
  }

  draw(view, colors) {
    for (const tile of this.tiles) {
      const { value, more, ...rest } = tile.figureOf.read(view);
      setText(tile.number, value[0]);
      setText(tile.unit, value[1]);
      setText(tile.more, more);
      if (tile.more.title !== more) tile.more.title = more; // narrow tiles cut it
      tile.shown = { ...rest, steps: view.steps };
      drawSparkline(tile.canvas, rest, view, colors[tile.figureOf.color], colors);
    }
  }

  describe({ shown, canvas, figureOf }, x) {
    if (!shown?.steps.length) return "";
    const index = clamp(Math.round(x / canvas.clientWidth * (shown.steps.length - 1)), 0, shown.steps.length - 1);
    const at = shown.isSparse ? nearest(shown.values, index) : index, value = shown.values[at];
    return value === null || value === undefined ? "" : `${figureOf.name}: ${shown.text(value)}\nstep ${count(shown.steps[at].step)}`;
  }
}

/** Index of the value nearest to `index`. */
function nearest(values, index) {
  for (let away = 0; away < values.length; away++)
    for (const at of [index - away, index + away]) if (values[at] !== null && values[at] !== undefined) return at;
  return index;
}

/** Draw all values from left to right, the largest of each pixel. */
function drawSparkline(canvas, { values, most, isSparse }, { index, steps }, color, colors) {
  const width = canvas.clientWidth, height = canvas.clientHeight, context = fitCanvas(canvas, width, height);
  if (!width || steps.length < 1) return;
  const top = most ?? values.reduce((high, value) => Math.max(high, value ?? 0), 0);
  const toX = (place) => (steps.length > 1 ? place / (steps.length - 1) : 1) * width;
  const toY = (value) => height - 2 - (top ? value / top : 0) * (height - 5);
  const columns = new Map();
  values.forEach((value, place) => {
    const x = Math.round(toX(place));
    if (value !== null) columns.set(x, Math.max(columns.get(x) ?? 0, value));
  });
  context.fillStyle = context.strokeStyle = color;
  if (isSparse) {
    for (const [x, value] of columns) context.fillRect(clamp(x - 1, 0, width - 2), toY(value), 2, height - toY(value));
  } else {
    context.beginPath();
    for (const [x, value] of columns) context.lineTo(x, toY(value));
    context.lineWidth = 1.5;
    context.stroke();
    const [first] = columns.keys(), last = [...columns.keys()].pop();
    context.lineTo(last, height);
    context.lineTo(first, height);
    context.globalAlpha = 0.15;
    context.fill();
    context.globalAlpha = 1;
  }
  if (index >= 0 && index < steps.length - 1) {
    context.fillStyle = colors.text;
    context.fillRect(Math.round(toX(index)), 0, 1, height);
  }
}
