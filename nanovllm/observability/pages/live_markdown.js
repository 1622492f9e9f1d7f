// ------------------------------------------------------------------------------------------------------------ Markdown

/*
 * `marked` splits text into tokens; this file makes an element for each. No text ever reaches an HTML parser: HTML in an
 * answer is shown as it was written, and the page's policy (trusted-types 'none') refuses any other way.
 */
const MAX_MARKDOWN = 200000; // characters; longer text is shown as it is
const TOO_DEEP = /^(?:[ \t]*(?:>|(?:[-+*]|\d{1,9}[.)])(?=[ \t]))){48}/m; // nested quotes and lists: the lexer recurses
const LINK_SCHEMES = ["http:", "https:", "mailto:"];
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };

function decodeEntities(text) {
  return text.replace(/&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|(\w+));/g, (all, decimal, hexadecimal, name) => {
    if (name) return Object.hasOwn(ENTITIES, name) ? ENTITIES[name] : all;
    const code = decimal ? Number(decimal) : parseInt(hexadecimal, 16);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : all;
  });
}

/** The address of a link, or null unless it is absolute and of an ordinary scheme. */
function linkAddress(href) {
  try {
    const address = new URL(decodeEntities(href));
    return LINK_SCHEMES.includes(address.protocol) ? address.href : null;
  } catch { return null; }
}

/** An answer's text as Markdown; while it grows, only blocks that changed are made again. */
class MarkdownView {
  constructor(box) {
    this.box = box;
    this.sources = []; // of the blocks shown
  }

  show(text) {
    let blocks;
    try {
      if (text.length > MAX_MARKDOWN || TOO_DEEP.test(text)) throw new RangeError("too much to lex");
      blocks = marked.lexer(text).filter(({ type }) => type !== "space" && type !== "def");
    } catch { // a stack overflow too
      this.sources = [];
      this.box.replaceChildren(element("p", "plain", text));
      return;
    }
    let same = 0;
    while (same < blocks.length && blocks[same].raw === this.sources[same]) same++;
    while (this.box.children.length > same) this.box.lastChild.remove();
    for (const block of blocks.slice(same)) this.box.append(blockElement(block));
    this.sources = blocks.map(({ raw }) => raw);
  }
}

function withChildren(tag, nodes) {
  const made = document.createElement(tag);
  made.append(...nodes);
  return made;
}

function blockElement(token) {
  switch (token.type) {
    case "heading": return withChildren("h" + Math.min(6, token.depth + 2), inlineNodes(token.tokens)); // below h2
    case "code": return codeElement(token.text, (token.lang || "").trim().split(/\s/)[0]);
    case "blockquote": return withChildren("blockquote", blockNodes(token.tokens));
    case "list": return listElement(token);
    case "table": return tableElement(token);
    case "hr": return document.createElement("hr");
    case "paragraph": return withChildren("p", inlineNodes(token.tokens));
    case "text": return withChildren("p", inlineNodes(token.tokens || [token]));
    default: return element("p", "plain", token.raw); // HTML
  }
}

function blockNodes(tokens) {
  return tokens.filter(({ type }) => !["space", "def", "checkbox"].includes(type)).map(blockElement);
}

function listElement(token) {
  const list = document.createElement(token.ordered ? "ol" : "ul");
  if (token.ordered && Number.isSafeInteger(token.start)) list.start = token.start;
  for (const item of token.items) {
    const nodes = item.tokens.flatMap((part) => (
      part.type === "text" && !item.loose ? inlineNodes(part.tokens || [part]) : blockNodes([part])));
    if (item.task) nodes.unshift(item.checked ? "☑ " : "☐ ");
    list.append(withChildren("li", nodes));
  }
  return list;
}

function tableElement(token) {
  const rowOf = (cells, tag) => withChildren("tr", cells.map((cell, column) => {
    const made = withChildren(tag, inlineNodes(cell.tokens));
    if (token.align[column]) made.className = token.align[column];
    return made;
  }));
  const table = withChildren("table", [
    withChildren("thead", [rowOf(token.header, "th")]), withChildren("tbody", token.rows.map((row) => rowOf(row, "td")))]);
  const box = withChildren("div", [table]);
  box.className = "wide";
  box.tabIndex = 0;
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", "Table");
  return box;
}

function codeElement(text, language) {
  const box = element("div", "code"), head = element("div", "code_head"), code = document.createElement("pre");
  code.append(element("code", "", text));
  code.tabIndex = 0;
  code.setAttribute("role", "region");
  code.setAttribute("aria-label", language ? `Code, ${language}` : "Code");
  head.append(element("span", "", language || "code"), copyButton("Copy code", () => text));
  box.append(head, code);
  return box;
}

/** A button that copies text() and says so. */
function copyButton(label, text) {
  const button = element("button", "quiet", "Copy");
  button.type = "button";
  button.setAttribute("aria-label", label);
  button.addEventListener("click", async () => {
    const isCopied = await copyText(text());
    button.textContent = isCopied ? "Copied" : "Not copied";
    announce(button.textContent);
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

/** Copy to the clipboard; browsers have its interface only for https and localhost. Returns whether it worked. */
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = element("textarea", "unseen"), before = document.activeElement;
    area.value = text;
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    const isCopied = document.execCommand("copy");
    area.remove();
    before?.focus();
    return isCopied;
  }
}

function inlineNodes(tokens) { return tokens.map(inlineNode); }

function inlineNode(token) {
  switch (token.type) {
    case "strong": case "em": case "del": return withChildren(token.type, inlineNodes(token.tokens));
    case "codespan": return element("code", "", token.text);
    case "br": return document.createElement("br");
    case "escape": return document.createTextNode(token.text);
    case "link": return linkNode(token, inlineNodes(token.tokens));
    case "image": return linkNode(token, [`image: ${token.text || token.href}`]); // never loaded
    case "text": return token.tokens ? withChildren("span", inlineNodes(token.tokens))
                                     : document.createTextNode(decodeEntities(token.text));
    case "html": return /^<br\s*\/?>$/i.test(token.raw) ? document.createElement("br") : document.createTextNode(token.raw);
    default: return document.createTextNode(token.raw);
  }
}

function linkNode(token, nodes) {
  const address = linkAddress(token.href);
  if (address === null) return document.createTextNode(token.raw);
  const link = withChildren("a", nodes);
  link.href = address;
  link.target = "_blank";
  link.rel = "noopener noreferrer";
  if (address !== nodes[0]?.textContent) link.title = address;
  return link;
}
