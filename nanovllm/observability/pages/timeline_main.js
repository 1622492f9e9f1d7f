// ------------------------------------------------------------------------------------------------------------ the page

const tip = $("tip"), longest = runs.reduce((most, run) => Math.max(most, run.end), 1);
const view = { start: 0, end: longest };
let isDue = false, colors = {};

const charts = runs.map((run) => {
  const box = element("div", "run"), frame = element("div", "box"), canvas = document.createElement("canvas");
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "application");
  canvas.setAttribute("aria-label", `Timeline of ${run.title}. ${run.summary}. The tables below have the figures.`);
  frame.append(canvas);
  box.append(element("h2", "", run.title), element("p", "", run.summary), frame);
  $("charts").append(box);
  return new RunChart(run, canvas, view);
});

const most = (name) => Math.max(...charts.map((chart) => chart[name]));
for (const chart of charts) chart.scale = tokenScale(most("budget"), most("mostTokens"));

function draw() {
  isDue = false;
  colors = themeColors([...states, "cached", "blocks", "limit", "text", "faint", "line", "panel", "hover"]);
  for (const chart of charts) chart.draw(colors, $("present").checked);
}

function redraw() { if (!isDue) { isDue = true; requestAnimationFrame(draw); } }

// ----------------------------------------------------------------------------------------------------------- movement

function zoom(factor, x = (LABELS + charts[0].width) / 2, chart = charts[0]) {
  const at = chart.toTime(clamp(x, LABELS, chart.width)), span = clamp((view.end - view.start) * factor, 50, longest);
  const left = (at - view.start) / (view.end - view.start);
  show(at - left * span, span);
}

function show(start, span) {
  const length = clamp(span, 50, longest);
  view.start = clamp(start, 0, longest - length);
  view.end = view.start + length;
  redraw();
}

function pan(pixels, chart = charts[0]) {
  const span = view.end - view.start;
  show(view.start + pixels * span / (chart.width - LABELS - RIGHT), span);
}

function resetLanes() { for (const chart of charts) chart.laneHeight = chart.scroll = 0; }
function resizeLanes(factor) { for (const chart of charts) chart.resizeLanes(factor); redraw(); }
function scrollLanes(pixels) { for (const chart of charts) chart.scroll += pixels; redraw(); }

const ACTIONS = {
  in: () => zoom(0.5), out: () => zoom(2), all: () => { resetLanes(); show(0, longest); },
  taller: () => resizeLanes(1.5), flatter: () => resizeLanes(1 / 1.5),
  left: () => pan(-100), right: () => pan(100), up: () => scrollLanes(-60), down: () => scrollLanes(60),
  earlier: () => pinned.move(-1), later: () => pinned.move(1), unpin: () => { choose(null, null); pinned.unpin(); },
};

/** Mark a request's lane and show its time; null for none. */
function choose(chart, lane) {
  for (const each of charts) each.chosen = each === chart ? lane : null;
  requestTable.choose(lane);
  if (lane) {
    const start = lane.spans[0][1], end = lane.spans.at(-1)[2];
    if ($("present").checked) chart.lanes = chart.run.lanes.filter((one) => chart.isPresent(one));
    show(start - 0.05 * (end - start), 1.1 * (end - start));
    chart.showLane(lane);
  }
  redraw();
}

const pinned = new PinnedStep({ onChoose: choose, redraw });
const requestTable = new RequestTable({
  table: $("requests"), search: $("search"), found: $("found"),
  onChoose: (place, lane) => { choose(charts[place], lane); $("stage").scrollIntoView({ block: "nearest" }); },
});

for (const chart of charts) {
  new Gestures(chart, {
    zoom: (factor, x) => zoom(factor, x, chart), pan: (pixels) => pan(pixels, chart), show, redraw,
    pick: (point) => pinned.pin(chart, chart.stepAt(point)),
    details: (event, text) => placeTip(tip, event, text), act: (name) => ACTIONS[name](),
  });
  chart.canvas.addEventListener("keydown", (event) => {
    if (!(event.key in KEYS) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    if (KEYS[event.key] === "pin") pinned.pin(chart, chart.middleStep());
    else ACTIONS[KEYS[event.key]]();
  });
}
$("pinned").addEventListener("keydown", (event) => {
  if (!["earlier", "later", "unpin"].includes(KEYS[event.key])) return;
  ACTIONS[KEYS[event.key]]();
  if (event.key === "Escape") charts[0].canvas.focus();
});
for (const button of document.querySelectorAll("button[data-do]")) button.addEventListener("click", ACTIONS[button.dataset.do]);
$("present").addEventListener("change", () => { resetLanes(); redraw(); });
window.addEventListener("resize", () => { resetLanes(); redraw(); });
new ResizeObserver(redraw).observe($("charts"));

// ------------------------------------------------------------------------------------------------------------ heading

document.title = runs.map(({ title }) => title).join(" and ") + " – nanovllm timeline";
const LEGEND = [...states.map((name) => [name, name]), ["cached", "cached tokens"], ["blocks", "blocks in use"],
                ["limit", "budget (√ scale), blocks there are"]];
for (const [name, text] of LEGEND) {
  const item = element("span", "", text);
  item.style.setProperty("--swatch", `var(--${name})`);
  if (name === "limit") item.dataset.dashed = "";
  $("legend").append(item);
}
fillPercentiles($("percentiles"));

let chosenTheme = null; // of this page; nothing is kept
const applyTheme = followTheme(() => chosenTheme, () => {
  const isDark = document.documentElement.dataset.theme === "dark";
  $("theme").textContent = isDark ? "Light" : "Dark";
  $("theme").setAttribute("aria-label", `Change to ${isDark ? "light" : "dark"} colours`);
  draw();
});
$("theme").addEventListener("click", () => {
  chosenTheme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  applyTheme();
});
