// ---------------------------------------------------------------------------------------- mouse, touch and keys on a chart

const TAP_PIXELS = 5; // a shorter movement is a click

/**
 * One pointer drags, two pinch: the times under both fingers stay there, and lanes scroll with their middle.
 *
 * hooks: zoom(factor, x), pan(pixels), show(start, span), redraw(), pick(point), details(event, text), act(name)
 */
class Gestures {
  constructor(chart, hooks) {
    Object.assign(this, { chart, hooks });
    this.pointers = new Map(); // id: {x, y} on the canvas
    this.start = null; // where a click began; null once it is a drag
    const { canvas } = chart;
    canvas.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.onDown(event));
    canvas.addEventListener("pointermove", (event) => this.onMove(event));
    canvas.addEventListener("pointerup", (event) => this.onUp(event, true));
    canvas.addEventListener("pointercancel", (event) => this.onUp(event, false));
    canvas.addEventListener("pointerleave", (event) => this.onLeave(event));
    canvas.addEventListener("dblclick", () => hooks.act("all"));
  }

  onWheel(event) {
    const { chart, hooks } = this;
    event.preventDefault();
    if (event.shiftKey) { chart.scroll += event.deltaY || event.deltaX; hooks.redraw(); }
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) hooks.pan(event.deltaX);
    else hooks.zoom(Math.exp(clamp(event.deltaY, -240, 240) / 400), event.offsetX);
  }

  onDown(event) {
    this.pointers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
    this.start = this.pointers.size === 1 ? { x: event.offsetX, y: event.offsetY } : null;
    this.chart.canvas.setPointerCapture(event.pointerId);
    this.chart.canvas.style.cursor = "grabbing";
  }

  onMove(event) {
    const { chart, hooks, pointers } = this, now = { x: event.offsetX, y: event.offsetY }, before = pointers.get(event.pointerId);
    chart.pointer = now;
    if (before && pointers.size === 2) this.pinch(event.pointerId, before, now);
    else if (before && !(this.start && Math.hypot(now.x - this.start.x, now.y - this.start.y) < TAP_PIXELS)) {
      this.start = null;
      chart.scroll -= now.y - before.y;
      hooks.pan(before.x - now.x);
    }
    if (before && !this.start) pointers.set(event.pointerId, now);
    hooks.details(event, pointers.size ? "" : chart.describe(now));
    hooks.redraw();
  }

  pinch(id, before, now) {
    const { chart, hooks } = this, [, other] = [...this.pointers].find(([known]) => known !== id);
    const width = chart.width - LABELS - RIGHT, times = [chart.toTime(before.x), chart.toTime(other.x)];
    chart.scroll -= (now.y - before.y) / 2;
    if (Math.abs(now.x - other.x) < 10 || (now.x - other.x) * (before.x - other.x) <= 0) return;
    const perPixel = (times[0] - times[1]) / (now.x - other.x);
    hooks.show(times[1] - (other.x - LABELS) * perPixel, width * perPixel);
  }

  onUp(event, isPick) {
    const { start, chart } = this;
    this.pointers.delete(event.pointerId);
    this.start = null;
    chart.canvas.style.cursor = "";
    if (isPick && start) this.hooks.pick(start);
    if (event.pointerType === "touch") this.onLeave(event);
  }

  onLeave(event) {
    if (this.pointers.size) return;
    this.chart.pointer = null;
    this.hooks.details(event, "");
    this.hooks.redraw();
  }
}

const KEYS = { "+": "in", "=": "in", "-": "out", 0: "all", ArrowLeft: "left", ArrowRight: "right", ArrowUp: "up",
               ArrowDown: "down", ",": "earlier", ".": "later", Escape: "unpin", Enter: "pin" };
