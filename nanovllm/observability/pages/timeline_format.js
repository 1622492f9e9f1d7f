// -------------------------------------------------------------------------------------------------------- text, elements

const $ = (id) => document.getElementById(id);

function milliseconds(time) {
  return (time / 1e3).toLocaleString("en", { minimumFractionDigits: 3, maximumFractionDigits: 3 }) + " ms";
}

/** A latency for a table: three significant digits, in ms or s. */
function latency(time) {
  if (time === null || time === undefined) return "–";
  const [value, unit] = time < 1e6 ? [time / 1e3, "ms"] : [time / 1e6, "s"];
  const digits = value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }) + " " + unit;
}

function number(value) { return value.toLocaleString("en"); }

function short(name) { return name.length > 14 ? name.slice(0, 13) + "…" : name; }

function timeText(time, precision) {
  if (precision >= 1e6) return (time / 1e6).toFixed(0) + " s";
  if (precision >= 1e3) return (time / 1e6).toFixed(precision >= 1e5 ? 1 : precision >= 1e4 ? 2 : 3) + " s";
  return (time / 1e3).toFixed(precision >= 100 ? 1 : 3) + " ms";
}

function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.textContent = text;
  return made;
}

function plainButton(text, act, label = "") {
  const button = element("button", "plain", text);
  button.type = "button";
  if (label) button.setAttribute("aria-label", label);
  button.addEventListener("click", act);
  return button;
}
