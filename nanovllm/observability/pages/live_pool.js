// ---------------------------------------------------------------------------------------------------------- block pool

const KINDS = ["free", "cached", "in use", "shared"];
const MOST_CELL = 40, MAP_HEIGHT = 200;

/** Map of the block pool: a cell per block, or per several, filled in proportion. */
class PoolMap {
  constructor({ canvas, legend, groups, tiers, note, tip }) {
    Object.assign(this, { canvas, groups, tiers, note });
    this.shown = null;
    this.counts = KINDS.map((name) => {
      const item = element("span", name === "free" ? "free" : "", name + " "), number = element("b");
      item.style.setProperty("--swatch", `var(--${this.colorOf(name)})`);
      item.append(number);
      legend.append(item);
      return number;
    });
    canvas.addEventListener("pointermove", (event) => placeTip(tip, event, this.describe(event.offsetX, event.offsetY)));
    canvas.addEventListener("pointerleave", (event) => placeTip(tip, event, ""));
  }

  colorOf(name) { return { free: "hover", cached: "cached", "in use": "blocks", shared: "shared" }[name]; }

  draw({ look, about, isLive }, colors) {
    const pool = look?.pool;
    setText(this.note, this.noteOn(pool, look, about, isLive));
    this.counts.forEach((number, kind) => { setText(number, pool ? count(pool.total[kind]) : "–"); });
    this.drawGroups(look?.groups ?? []);
    this.drawTiers(look?.tiers, about);
    const numCells = pool ? pool.counts.length / 3 : 0, width = this.canvas.clientWidth;
    if (!numCells || !width) {
      fitCanvas(this.canvas, width, this.canvas.clientHeight);
      this.shown = null;
      return;
    }
    const size = this.cellSize(numCells, width);
    const columns = Math.max(1, Math.floor(width / size)), height = Math.ceil(numCells / columns) * size;
    this.canvas.style.height = height + "px";
    this.shown = { pool, size, columns, numBlocks: about.num_blocks };
    const context = fitCanvas(this.canvas, width, height), box = size - 1;
    for (let cell = 0; cell < numCells; cell++) {
      const left = (cell % columns) * size, top = Math.floor(cell / columns) * size, [free, ...kinds] = this.cellKinds(cell);
      context.fillStyle = colors.hover;
      context.fillRect(left, top, box, box);
      const toHeight = (amount) => Math.round(amount / (free + kinds[0] + kinds[1] + kinds[2]) * box);
      stackBar(context, left, box, top + box, toHeight,
               [[kinds[2], colors.shared], [kinds[1], colors.blocks], [kinds[0], colors.cached]]);
    }
  }

  /** A bar per cache group, such as windows and recurrent states; the map has the blocks of the first. */
  drawGroups(groups) {
    drawBars(this.groups, groups.map(([name, used, findable, total]) =>
      [name, "blocks in use", used, total, `${count(used)} of ${count(total)} in use, ${count(findable)} findable`]));
  }

  /** Prefixes beyond the KV cache: a bar for each tier, and how often one was loaded or computed instead. */
  drawTiers(tiers, about) {
    this.tiers.hidden = !tiers;
    if (!tiers) return;
    const { host_bytes, dir_bytes } = tiers, rows = [];
    if (about.host_bytes) {
      rows.push(["prefixes in host memory", "bytes in use", host_bytes, about.host_bytes,
                 `${size(host_bytes)} of ${size(about.host_bytes)}, ${count(tiers.num_host_blocks)} blocks; `
                 + `${count(tiers.num_stored_blocks)} stored, ${count(tiers.num_host_evictions)} evicted`]);
    }
    if (about.dir_bytes) {
      rows.push(["prefixes in files", "bytes in use", dir_bytes, about.dir_bytes,
                 `${size(dir_bytes)} of ${size(about.dir_bytes)}; blocks: ${count(tiers.num_written_blocks)} written, `
                 + `${count(tiers.num_read_blocks)} read, ${count(tiers.num_failed_reads)} failed`]);
    }
    rows.push(["prefixes loaded", "of all that tiers had", tiers.num_loads, tiers.num_loads + tiers.num_recomputes,
               decisions(tiers)]);
    drawBars(this.tiers, rows);
  }

  /** Largest cell size at which the map fits into the panel. */
  cellSize(numCells, width) {
    const box = this.canvas.parentElement, isGiven = getComputedStyle(box).overflowY === "hidden"; // else it follows the map
    const room = isGiven ? box.clientHeight : MAP_HEIGHT;
    let size = clamp(Math.ceil(Math.sqrt(width * room / numCells)), 4, isGiven ? MOST_CELL : MOST_CELL / 2);
    while (size > 4 && Math.ceil(numCells / Math.max(1, Math.floor(width / size))) * size > room) size--;
    return size;
  }

  noteOn(pool, look, about, isLive) {
    if (!pool) return isLive ? "" : NOT_OPEN;
    const per = pool.blocks_per_cell;
    const cells = per === 1 ? "a cell is a block" : `a cell is ${count(per)} blocks`;
    return `${cells} of ${count(about.block_size)} tokens` + (isLive ? "" : `; after step ${count(look.step)}`);
  }

  /** Number of a cell's blocks of each kind, in the order of KINDS. */
  cellKinds(cell) {
    const { pool, numBlocks } = this.shown, kinds = pool.counts.subarray(3 * cell, 3 * cell + 3), per = pool.blocks_per_cell;
    const size = Math.min(per, numBlocks - cell * per);
    return [size - kinds[0] - kinds[1] - kinds[2], ...kinds];
  }

  describe(x, y) {
    if (!this.shown) return "";
    const { pool, size, columns, numBlocks } = this.shown, column = Math.floor(x / size), per = pool.blocks_per_cell;
    const cell = Math.floor(y / size) * columns + column;
    if (column >= columns || cell < 0 || cell >= pool.counts.length / 3) return "";
    const first = 1 + cell * per, last = Math.min(first + per - 1, numBlocks), kinds = this.cellKinds(cell);
    if (per === 1) return `block ${count(first)}: ${KINDS[kinds.indexOf(1)]}`;
    return `blocks ${count(first)} to ${count(last)}\n` + KINDS.map((name, kind) => `${count(kinds[kind])} ${name}`).join(", ");
  }
}

/** What came of prefixes that a tier had. */
function decisions({ num_loads, num_recomputes, num_loaded_tokens, load_seconds, compute_seconds }) {
  const last = load_seconds === null || compute_seconds === null ? ""
    : `; the last: ${duration(1e6 * load_seconds)} to load, ${duration(1e6 * compute_seconds)} to compute`;
  return `${count(num_loads)} (${count(num_loaded_tokens)} tokens), ${count(num_recomputes)} computed as that is faster${last}`;
}

/** Draw rows of [name, what the bar shows, value, most, text], each with a bar. */
function drawBars(place, rows) {
  if (place.children.length !== rows.length) {
    place.replaceChildren(...rows.map(() => {
      const row = element("div", "group");
      row.append(element("span"), element("meter"), element("span", "faint"));
      return row;
    }));
  }
  rows.forEach(([name, about, value, most, text], index) => {
    const [label, bar, shown] = place.children[index].children;
    setText(label, name);
    bar.setAttribute("aria-label", `${name}: ${about}`);
    bar.max = Math.max(1, most);
    bar.value = value;
    setText(shown, text);
  });
}
