// --------------------------------------------------------------------------------------------- percentiles and requests

const MOST_ROWS = 100;
const LATENCIES = { ttft: "TTFT", itl: "ITL", queue: "queue time", latency: "request latency", step: "step time" };
const QUANTILES = ["mean", "p50", "p90", "p99", "max"];

function tableRow(tag, cells, className = "") {
  const row = element("tr", className);
  row.append(...cells.map((cell) => {
    const made = document.createElement(tag);
    made.append(cell);
    if (tag === "th") made.scope = "col";
    return made;
  }));
  return row;
}

/** Percentiles of each run; for two runs also their ratio. */
function fillPercentiles(table) {
  const head = document.createElement("thead"), body = document.createElement("tbody");
  head.append(tableRow("th", ["latency", ...(runs.length > 1 ? ["run"] : []), ...QUANTILES]));
  for (const [name, text] of Object.entries(LATENCIES)) {
    const having = runs.filter((run) => run.percentiles[name]);
    having.forEach((run, place) => {
      const values = QUANTILES.map((quantile) => latency(run.percentiles[name][quantile]));
      body.append(tableRow("td", [place ? "" : text, ...(runs.length > 1 ? [run.title] : []), ...values]));
    });
    if (having.length < 2) continue;
    const [first, second] = having.map((run) => run.percentiles[name]);
    const shares = QUANTILES.map((quantile) => (first[quantile] ? "× " + (second[quantile] / first[quantile]).toFixed(2) : "–"));
    body.append(tableRow("td", ["", "second / first", ...shares], "ratio"));
  }
  table.replaceChildren(head, body);
}

/** Table of the requests of all runs: searched, sorted by a column, cut to its first rows. */
class RequestTable {
  constructor({ table, search, found, onChoose }) {
    Object.assign(this, { table, search, found, onChoose });
    this.columns = [
      ["request", "name", (request) => request.name], ...(runs.length > 1 ? [["run", "run", (_, run) => run.title]] : []),
      ["arrival", "arrival", (request) => latency(request.arrival)], ["prompt", "prompt", (request) => number(request.prompt)],
      ["cached", "cached", (request) => number(request.cached)], ["output", "output", (request) => number(request.output)],
      ["queue", "queue", (request) => latency(request.queue)], ["TTFT", "ttft", (request) => latency(request.ttft)],
      ["mean ITL", "itl", (request) => latency(request.itl)], ["latency", "latency", (request) => latency(request.latency)],
      ["preempted", "preemptions", (request) => number(request.preemptions)], ["end", "reason", (request) => request.reason],
    ];
    this.all = runs.flatMap((run, place) => {
      const lanes = run.lanes.filter(({ spans }) => spans.length);
      return run.requests.map((request, index) => ({ ...request, run: place, lane: lanes[index] }));
    });
    this.order = { name: null, isDown: false };
    this.chosen = null;
    search.addEventListener("input", () => this.fill());
    this.fillHead();
    this.fill();
  }

  fillHead() {
    const row = tableRow("th", this.columns.map(([text, name]) => plainButton(text, () => this.sort(name))));
    [...row.children].forEach((cell, place) => {
      const isOrder = this.columns[place][1] === this.order.name;
      cell.setAttribute("aria-sort", !isOrder ? "none" : this.order.isDown ? "descending" : "ascending");
      if (isOrder) cell.append(this.order.isDown ? " ↓" : " ↑");
    });
    this.table.tHead.replaceChildren(row);
  }

  sort(name) {
    const isDown = this.order.name === name ? !this.order.isDown : !["name", "run", "arrival", "reason"].includes(name);
    this.order = { name, isDown };
    const place = this.columns.findIndex(([, column]) => column === name);
    this.fillHead();
    this.table.tHead.rows[0].cells[place].firstChild.focus();
    this.fill();
  }

  get matching() {
    const wanted = this.search.value.trim().toLowerCase(), { name, isDown } = this.order;
    const found = this.all.filter((request) => !wanted || `${request.name} ${request.reason}`.toLowerCase().includes(wanted));
    if (name === null) return found;
    const compare = (one, other) => {
      const [a, b] = [one[name], other[name]];
      if (a === null || b === null) return (a === null) - (b === null); // missing values are last
      return (a < b ? -1 : a > b ? 1 : 0) * (isDown ? -1 : 1);
    };
    return found.sort(compare);
  }

  fill() {
    const found = this.matching, shown = this.shown = found.slice(0, MOST_ROWS);
    this.found.textContent = `${number(found.length)} of ${number(this.all.length)}`
      + (found.length > MOST_ROWS ? `, the first ${MOST_ROWS} shown` : "");
    this.table.tBodies[0].replaceChildren(...shown.map((request) => {
      const run = runs[request.run];
      const cells = this.columns.map(([, name, text]) => (name !== "name" ? text(request, run)
        : plainButton(request.name, () => this.onChoose(request.run, request.lane), `Show request ${request.name}`)));
      return tableRow("td", cells);
    }));
    this.mark();
  }

  /** Mark the chosen request's row. The rows stay, and with them the focus. */
  mark() {
    this.shown.forEach(({ lane }, place) => this.table.tBodies[0].rows[place].classList.toggle("chosen", lane === this.chosen));
  }

  choose(lane) {
    this.chosen = lane;
    this.mark();
  }
}
