// @ts-check
/** Renders the blocks of an answer to DOM nodes. */

import { copy } from "./clipboard.js";
import { begin } from "./slices.js";

const COPIED_MS = 1500;
/** Characters highlighted at a time, up to the end of the line; ... */
const CHUNK_LEAST = 600;
/** ... bounded for long lines. */
const CHUNK_MOST = 2000;

/** A code block with its language and a copy button. */
export class CodeBlock {
  /** @param {string} info  The info string of the fence. */
  constructor(info) {
    const named = info.trim().split(/\s+/)[0] ?? "";
    const head = element("div", "code-head");
    const label = element("span", "code-language");
    label.textContent = named || "text";
    const pre = element("pre", "");
    pre.tabIndex = 0;
    pre.setAttribute("aria-label", named ? `Code, ${named}` : "Code");
    pre.setAttribute("role", "region");
    head.append(label, copyButton(() => this.text));
    this.element = element("div", "code-block");
    this.element.dataset.language = named;
    this._code = element("code", "");
    this.text = "";
    this._named = named;
    this._coloured = 0;
    this._tail = element("span", "");
    /** @type {any} */
    this._top = null;
    this._code.append(this._tail);
    pre.append(this._code);
    this.element.append(head, pre);
    if (named) withColours(named, () => begin(this.painting()));
  }

  /**
   * Updates the text; highlighting is left to `painting`.
   *
   * @param {string} text  The complete text so far.
   */
  say(text) {
    if (text.startsWith(this.text)) {
      if (text !== this.text) this._tail.append(text.slice(this.text.length));
    } else {
      if (!text.startsWith(this.text.slice(0, this._coloured))) {
        [this._coloured, this._top] = [0, null];
        this._code.replaceChildren(this._tail);
      }
      this._tail.replaceChildren(text.slice(this._coloured));
    }
    this.text = text;
  }

  /**
   * Highlights the remaining text, a part at a time.
   *
   * @returns {Generator<void>}
   */
  *painting() {
    for (;;) {
      const language = colours?.languageOf(this._named);
      const rest = this.text.slice(this._coloured);
      const end = chunkOf(rest);
      /** @type {ReturnType<typeof import("./highlight.js").painted> | undefined | ""} */
      const made = language && rest && colours?.painted(rest.slice(0, end || rest.length), language, this._top);
      if (!made) return;
      this._tail.replaceChildren(made.fragment);
      if (end === 0) return;
      this._coloured += end;
      this._top = made.top;
      this._tail = element("span", "");
      this._tail.append(rest.slice(end));
      this._code.append(this._tail);
      yield;
    }
  }
}

/** @type {typeof import("./highlight.js") | null} */
let colours = null;

/**
 * Calls back when the highlighter of a language is loaded, which happens on demand.
 *
 * @param {string} named
 * @param {() => void} then
 */
async function withColours(named, then) {
  try {
    colours ??= await import("./highlight.js");
    colours.withLanguage(colours.languageOf(named), then);
  } catch (error) {
    console.info("code is not highlighted:", error);
  }
}

/**
 * Returns the length of the text whose highlighting is final, 0 while its first part may grow.
 *
 * @param {string} text
 */
function chunkOf(text) {
  const end = text.indexOf("\n", CHUNK_LEAST) + 1;
  if (end > 0 && end <= CHUNK_MOST) return end;
  return text.length > CHUNK_MOST ? CHUNK_MOST : 0;
}

/**
 * Wraps the code blocks and tables of rendered content in their frames.
 *
 * @param {DocumentFragment} fragment
 */
export function dress(fragment) {
  for (const code of fragment.querySelectorAll("pre > code")) {
    const info = /language-(\S+)/.exec(code.className)?.[1] ?? "";
    const block = new CodeBlock(info);
    block.say((code.textContent ?? "").replace(/\n$/, ""));
    code.parentElement?.replaceWith(block.element);
    begin(block.painting());
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = element("div", "table-frame");
    frame.tabIndex = 0;
    frame.setAttribute("role", "region");
    frame.setAttribute("aria-label", "Table");
    table.replaceWith(frame);
    frame.append(table);
  }
}

/** @param {() => string} text */
function copyButton(text) {
  const button = /** @type {HTMLButtonElement} */ (element("button", "code-copy"));
  button.type = "button";
  button.textContent = "Copy";
  button.setAttribute("aria-label", "Copy code");
  button.addEventListener("click", async () => {
    button.textContent = (await copy(text())) ? "Copied" : "Not copied";
    setTimeout(() => (button.textContent = "Copy"), COPIED_MS);
  });
  return button;
}

/**
 * @param {string} name
 * @param {string} className
 * @returns {HTMLElement}
 */
function element(name, className) {
  const made = document.createElement(name);
  if (className) made.className = className;
  return made;
}
