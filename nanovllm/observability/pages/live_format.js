// ---------------------------------------------------------------------------------------------------- numbers as text

const NOT_OPEN = "this page was not open at this step";
const $ = (id) => document.getElementById(id);

const BY_DIGITS = [0, 1, 2].map(
  (digits) => new Intl.NumberFormat("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }));

function decimals(value, digits) { return BY_DIGITS[digits].format(value); }

function count(value) { return decimals(Math.round(value), 0); }

/** Format a number with about three significant digits. */
function figure(value) { return value < 9.995 ? decimals(value, 2) : value < 99.95 ? decimals(value, 1) : count(value); }

const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** Format a number of bytes. */
function size(bytes) {
  const unit = bytes < 1 ? 0 : Math.min(Math.floor(Math.log2(bytes) / 10), BYTE_UNITS.length - 1);
  return (unit ? figure(bytes / 1024 ** unit) : count(bytes)) + " " + BYTE_UNITS[unit];
}

/** Format a duration in microseconds as [number, unit]. */
function durationParts(us) {
  if (us < 1e3) return [count(us), "µs"];
  return us < 1e6 ? [figure(us / 1e3), "ms"] : [figure(us / 1e6), "s"];
}

function duration(us) { return durationParts(us).join(" "); }

/** Format an age in microseconds. */
function age(us) {
  const seconds = us / 1e6;
  if (seconds < 100) return decimals(seconds, 1) + " s";
  return seconds < 6000 ? count(seconds / 60) + " min" : count(seconds / 3600) + " h";
}

function percent(share) { return share < 0.0995 ? decimals(100 * share, 1) : count(100 * share); }

/** Set an element's text, if it differs: an assignment costs a layout. */
function setText(shown, text) { if (shown.textContent !== text) shown.textContent = text; }

/** Create an element with a class and text. */
function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.textContent = text;
  return made;
}
