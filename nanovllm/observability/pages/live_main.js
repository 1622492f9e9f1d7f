// ------------------------------------------------------------------------------------------------------------ the page

const COLORS = ["decode", "prefill", "cached", "blocks", "shared", "waiting", "limit", "text", "faint", "line", "hover", "panel"];
const THEME_PLACE = "nanovllm-theme";
const tip = $("tip"), stepHistory = new StepHistory(), state = { connection: "connecting" };
let isDue = false;

const chart = new StepsChart({ canvas: $("steps"), overview: $("overview"), span: $("span"), tip, onPick: show });
const tiles = new Tiles($("tiles"), tip);
const poolMap = new PoolMap({
  canvas: $("pool"), legend: $("pool_legend"), groups: $("pool_groups"), tiers: $("pool_tiers"), note: $("pool_note"), tip,
});
const requestTable = new RequestTable({ body: $("requests"), note: $("requests_note") });
const store = new ConversationStore();
const chat = new Chat({
  parts: {
    form: $("ask"), question: $("question"), send: $("send"), stop: $("stop"), system: $("system"),
    conversation: $("conversation"), welcome: $("welcome"),
    pictures: { box: $("pictures"), input: $("picture_files"), button: $("add_pictures") },
  },
  store,
  onRefused: askForKey,
  onOwnRequest: (id) => requestTable.own.add(id),
});
const conversationList = new ConversationList({
  dialog: $("list_dialog"), list: $("list"), store,
  onOpen: (id) => chat.open(store.read(id) ?? newConversation()),
  onRemoved: (id) => chat.forget(id),
});
const feed = new Feed({
  onState: (connection, notice = "") => {
    if (connection === "refused") askForKey();
    Object.assign(state, { connection, notice });
    redraw();
  },
  onHello: (about) => {
    stepHistory.hello(about);
    state.started = performance.now() - about.uptime_us / 1e3;
    chat.model = about.model;
    $("add_pictures").hidden = !about.takes_pictures;
    redraw();
  },
  onLook: (look) => { stepHistory.add(look); chat.look(look); redraw(); },
});

function redraw() { if (!isDue) { isDue = true; requestAnimationFrame(draw); } }

function draw() {
  isDue = false;
  drawState();
  const { about, look, view, isPaused } = stepHistory;
  if (!about) return;
  const index = stepHistory.shownIndex, step = view.steps[index];
  // Rates over the last second expire when no step ran for a while.
  const isIdle = !isPaused && step !== undefined && look.time - step.time > RATE_WINDOW_US;
  const shown = { about, look, steps: view.steps, index, isLive: !isPaused, isIdle, newest: view.looks.at(-1) }, colors = themeColors(COLORS);
  tiles.draw(shown, colors);
  chart.draw(shown, colors);
  poolMap.draw(shown, colors);
  requestTable.draw(shown);
  drawControls(shown, step);
  drawTotals(stepHistory.newest);
  setText($("facts"), serverFacts(about, stepHistory.newest));
}

/** Model, device and uptime. */
function serverFacts({ backend, max_model_len, replicas }, newest) {
  const { device = "", dtype = "" } = newest?.machine ?? {};
  const parts = [device, dtype, `attention by ${backend}`, `up to ${count(max_model_len)} tokens`];
  if (replicas > 1) parts.push(`${replicas} replicas`);
  return [...parts.filter(Boolean), `up ${age(1e3 * (performance.now() - state.started))}`].join(" · ");
}

function drawState() {
  const { connection, notice } = state;
  const name = connection === "live" && stepHistory.isPaused ? "paused" : connection;
  $("state").dataset.state = name;
  setText($("state"), { dead: "engine dead", refused: "API key needed", lost: "not connected" }[name] ?? name);
  $("engine").classList.toggle("stale", connection !== "live"); // shows the last data received
  $("notice").hidden = !notice;
  setText($("notice"), notice || "");
  setText($("model"), stepHistory.about ? `${stepHistory.about.model} · ${stepHistory.about.version}` : "");
}

function drawControls({ steps, index, isLive, about }, step) {
  const cursor = $("cursor");
  cursor.max = Math.max(0, steps.length - 1);
  cursor.value = Math.max(0, index);
  cursor.disabled = $("pause").disabled = !steps.length;
  $("pause").textContent = isLive ? "Pause" : "Live";
  $("pause").setAttribute("aria-pressed", String(!isLive));
  $("back").disabled = index <= 0;
  $("forth").disabled = isLive || index >= steps.length - 1;
  const text = step ? readout(step, isLive, about) : "no step yet";
  setText($("readout"), text);
  cursor.setAttribute("aria-valuetext", text);
}

function drawTotals(newest) {
  if (!newest) return;
  const { steps, failed_steps, output_tokens, preemptions, evictions, cache_queries, cache_hits } = newest.counters;
  setText($("totals"), `Since the start: ${count(steps)} steps, ${count(failed_steps)} failed; ${count(output_tokens)} `
    + `tokens generated; ${count(cache_hits)} of ${count(cache_queries)} prompt tokens cached; ${count(evictions)} blocks `
    + `evicted; ${count(preemptions)} preemptions.`);
}

function readout(step, isLive, about) {
  const parts = [`step ${count(step.step)}`];
  if (!isLive) {
    parts.push(age(Math.max(0, stepHistory.newest.time - step.time)) + " ago");
    const last = stepHistory.view.steps.at(-1).step, since = stepHistory.live.steps.filter((s) => s.step > last).length;
    if (since) parts.push(`${count(since)}${since < about.num_steps ? "" : " or more"} steps since the pause`);
  }
  const cached = step.cached ? ` + ${count(step.cached)} cached` : "";
  parts.push(`${count(step.decode)} decode + ${count(step.prefill)} prefill${cached} tokens`);
  parts.push(`${percent((step.decode + step.prefill) / (step.budget || about.budget))} % of the budget`);
  return parts.join(" · ");
}

// ---------------------------------------------------------------------------------------------------- pausing, scrubbing

function show(index) {
  if (!stepHistory.view.steps.length) return;
  stepHistory.show(index);
  redraw();
}

$("cursor").addEventListener("input", (event) => show(Number(event.target.value)));
$("back").addEventListener("click", () => show(stepHistory.shownIndex - 1));
$("forth").addEventListener("click", () => show(stepHistory.shownIndex + 1));
$("pause").addEventListener("click", () => {
  if (stepHistory.isPaused) { stepHistory.resume(); redraw(); } else show(stepHistory.shownIndex);
});

// ------------------------------------------------------------------------------------------------------------- the key

function askForKey() {
  const had = sessionStorage.getItem(KEY_PLACE) !== null;
  $("change_key").hidden = false;
  $("key_text").textContent = (had ? "The server does not accept this key." : "This server asks for an API key.")
    + " This tab keeps it until it is closed.";
  if (!$("key_dialog").open) $("key_dialog").showModal();
}

$("change_key").addEventListener("click", askForKey);
for (const link of document.querySelectorAll("#links a")) {
  link.addEventListener("click", async (event) => { // a link cannot send the key
    if (sessionStorage.getItem(KEY_PLACE) === null) return;
    event.preventDefault();
    const text = await call(link.getAttribute("href")).then((response) => response.text()).catch((error) => error.message);
    showText(link.textContent, text);
  });
}
$("cancel_key").addEventListener("click", () => $("key_dialog").close());
$("key_form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY_PLACE, $("key").value);
  $("key").value = "";
  $("key_dialog").close();
  feed.retry();
});

// ------------------------------------------------------------------------------------------------------------- dialogs

function showText(title, text) {
  setText($("text_title"), title);
  setText($("text"), text);
  if (!$("text_dialog").open) $("text_dialog").showModal();
}

$("curl").addEventListener("click", () => showText("The next request as curl", chat.command));
$("copy_text").replaceWith(copyButton("Copy the text", () => $("text").textContent));
$("close_text").addEventListener("click", () => $("text_dialog").close());
$("show_list").addEventListener("click", () => conversationList.show());
$("new_chat").addEventListener("click", () => chat.startAnew());

// --------------------------------------------------------------------------------------------------------------- looks

const LEGEND = [["decode", "decode"], ["prefill", "prefill"], ["cached", "cached, not computed"],
                ["limit", "token budget (√ scale)"]];
const PROGRESS_LEGEND = [["cached", "cached"], ["prefill", "computed"], ["decode", "generated"], ["hover", "to max tokens"]];
for (const [legend, entries] of [["steps_legend", LEGEND], ["progress_legend", PROGRESS_LEGEND]]) {
  for (const [name, text] of entries) {
    const item = element("span", "", text);
    item.style.setProperty("--swatch", `var(--${name})`);
    if (name === "limit") item.dataset.dashed = "";
    $(legend).append(item);
  }
}

const applyTheme = followTheme(() => localStorage.getItem(THEME_PLACE), () => {
  const isDark = document.documentElement.dataset.theme === "dark";
  $("theme").textContent = isDark ? "Light" : "Dark";
  $("theme").setAttribute("aria-label", `Change to ${isDark ? "light" : "dark"} colours`);
  redraw();
});
$("theme").addEventListener("click", () => {
  localStorage.setItem(THEME_PLACE, document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  applyTheme();
});
$("span").addEventListener("change", redraw);
$("change_key").hidden = sessionStorage.getItem(KEY_PLACE) === null;
new ResizeObserver(redraw).observe(document.querySelector("main"));
feed.run();
