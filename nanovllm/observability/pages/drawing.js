// Drawing, for both pages: theme colours, canvases at device resolution, bars, and the tooltip.

function clamp(value, low, high) { return Math.min(Math.max(value, low), high); }

/** Colours of the current theme, by name. */
function themeColors(names) {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue("--" + name).trim()]));
}

/** Apply the theme `chosen()` ("light", "dark", or empty for the system's), again when the system's changes. */
function followTheme(chosen, onChange) {
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    document.documentElement.dataset.theme = chosen() || (system.matches ? "dark" : "light");
    onChange();
  };
  system.addEventListener("change", apply);
  apply();
  return apply;
}

/** Clear a canvas and size it for the screen; returns its context, in CSS pixels. */
function fitCanvas(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1, context = canvas.getContext("2d");
  const pixels = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== pixels[0] || canvas.height !== pixels[1]) [canvas.width, canvas.height] = pixels;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  return context;
}

/** Draw stacked boxes; `toHeight` maps an amount to pixels above the bottom. */
function stackBar(context, left, width, bottom, toHeight, parts) {
  let amount = 0;
  for (const [part, color] of parts) {
    if (!part) continue;
    const low = toHeight(amount), high = toHeight(amount + part);
    context.fillStyle = color;
    context.fillRect(left, bottom - high, width, high - low);
    amount += part;
  }
}

/**
 * Scale of tokens per step, on both pages. Heights are square roots, so that one decode is visible beside a full budget.
 * Bars above `most` are cut: cached tokens do not count against the budget.
 */
function tokenScale(budget, highest) {
  const most = clamp(1.05 * highest, 1.05 * budget, 2 * budget);
  const share = (amount) => Math.sqrt(Math.min(amount, most) / most);
  return { most, pixels: (height) => (amount) => (amount ? Math.max(1, Math.round(share(amount) * height)) : 0) };
}

/** Smallest of 1, 2, 5, 10, 20, ... at or above `least`. */
function tickDistance(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= least);
}

function dashedLine(context, left, right, y, color) {
  context.strokeStyle = color;
  context.setLineDash([5, 4]);
  context.beginPath();
  context.moveTo(left, Math.round(y) + 0.5);
  context.lineTo(right, Math.round(y) + 0.5);
  context.stroke();
  context.setLineDash([]);
}

/** Show a tooltip beside the pointer, within the window; empty text hides it. */
function placeTip(tip, event, text) {
  tip.textContent = text;
  tip.style.display = text ? "block" : "none";
  tip.style.left = clamp(event.clientX + 14, 4, Math.max(4, window.innerWidth - tip.offsetWidth - 4)) + "px";
  const below = event.clientY + 16;
  tip.style.top = (below + tip.offsetHeight > window.innerHeight ? event.clientY - tip.offsetHeight - 10 : below) + "px";
}
