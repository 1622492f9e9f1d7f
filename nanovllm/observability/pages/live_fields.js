// ----------------------------------------------------------------------------------------- sampling fields, and as curl

const FIELDS_PLACE = "nanovllm-sampling"; // in localStorage
const FIELDS = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"]; // ids in the page

/** The sampling fields; an empty one is left to the server. */
class SamplingForm {
  constructor() {
    let kept = {};
    try { kept = JSON.parse(localStorage.getItem(FIELDS_PLACE)) ?? {}; } catch { /* another program's value */ }
    for (const name of FIELDS) {
      if (typeof kept[name] === "string") $(name).value = kept[name];
      $(name).addEventListener("change", () => this.keep());
    }
  }

  keep() {
    try {
      localStorage.setItem(FIELDS_PLACE, JSON.stringify(Object.fromEntries(FIELDS.map((name) => [name, $(name).value]))));
    } catch { /* storage is full: fields last until the page closes */ }
  }

  /** Fields of a request. */
  get values() {
    const given = FIELDS.filter((name) => $(name).value !== "");
    return Object.fromEntries(given.map((name) => [name === "max_tokens" ? "max_completion_tokens" : name, Number($(name).value)]));
  }
}

function shellQuoted(text) { return "'" + text.replaceAll("'", "'\\''") + "'"; }

/** The request as a command; the key stays a variable. */
function curlCommand(body) {
  const parts = ["curl " + shellQuoted(new URL("v1/chat/completions", location.href).href), "-H 'Content-Type: application/json'"];
  if (sessionStorage.getItem(KEY_PLACE) !== null) parts.push('-H "Authorization: Bearer $NANOVLLM_API_KEY"');
  parts.push("-d " + shellQuoted(JSON.stringify(body, null, 2)));
  return parts.join(" \\\n  ");
}
