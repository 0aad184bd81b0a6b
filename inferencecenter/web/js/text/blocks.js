// @ts-check
/** Renders the blocks of an answer to DOM nodes. */

import { t } from "../i18n.js";
import { begin } from "./slices.js";

const COPIED_MS = 1500;
/** Characters of a part, up to the end of the line; ... */
const PART_LEAST = 600;
/** ... bounded for long lines. */
const PART_MOST = 2000;
/** Code is highlighted before it scrolls into view. */
const AHEAD = "800px";

/**
 * Some lines of code, which are laid out and highlighted when they come into view.
 *
 * @typedef {object} Part
 * @property {HTMLElement} element
 * @property {string} text
 * @property {boolean} complete
 * @property {boolean} shown  Whether it is in view.
 * @property {number} colored  Characters that are highlighted.
 * @property {any} from  The highlighter's state with which it was highlighted, ...
 * @property {any} top  ... and the one after it. Null at the start, and while it is unknown.
 */

/** A code block with its language and a copy button. */
export class CodeBlock {
  /** @param {string} info  The info string of the fence. */
  constructor(info) {
    const named = info.trim().split(/\s+/)[0] ?? "";
    const head = element("div", "code-head");
    const label = element("span", "code-language");
    label.textContent = named || t("message.text");
    const pre = element("pre", "");
    pre.tabIndex = 0;
    pre.dir = "ltr";
    pre.setAttribute("aria-label", named ? t("message.code_in", { language: named }) : t("message.code"));
    pre.setAttribute("role", "region");
    head.append(label, copyButton(() => this.text));
    this.element = element("div", "code-block");
    this.element.dataset.language = named;
    this._code = element("code", "");
    this.text = "";
    this._named = named;
    /** @type {Part[]} */
    this._parts = [];
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
    let added = text.slice(this.text.length);
    if (!text.startsWith(this.text)) {
      added = text;
      this._parts = [];
      this._code.replaceChildren();
    }
    this.text = text;
    if (added) this._grow(added);
  }

  /**
   * Highlights what is in view, a part at a time.
   *
   * @returns {Generator<void>}
   */
  *painting() {
    const language = colors?.languageOf(this._named);
    if (!colors || !language) return;
    for (let at = 0; at < this._parts.length; at += 1) {
      const part = this._parts[at];
      if (!part.shown) continue;
      const from = this._parts[at - 1]?.top ?? null;
      const same = part.colored === part.text.length && colors.isSame(part.from, from);
      if (same) continue;
      const made = colors.painted(part.text, language, from);
      if (!made) return;
      part.element.replaceChildren(made.fragment);
      Object.assign(part, { colored: part.text.length, from, top: made.top });
      yield;
    }
  }

  /** @param {string} added */
  _grow(added) {
    for (let rest = added; rest; ) {
      const last = this._parts.at(-1);
      const part = last && !last.complete ? last : this._begin();
      const end = partEnd(part.text, rest);
      const own = end ? rest.slice(0, end) : rest;
      part.text += own;
      part.element.append(own);
      rest = rest.slice(own.length);
      if (!end) return;
      part.complete = true;
      part.element.style.containIntrinsicBlockSize = `auto ${part.text.split("\n").length - 1 || 1}lh`; // no text
    }
  }

  _begin() {
    /** @type {Part} */
    const part = {
      element: element("span", "code-part"), text: "", complete: false, shown: false, colored: 0, from: null, top: null,
    };
    this._parts.push(part);
    this._code.append(part.element);
    onView.set(part.element, (shown) => {
      part.shown = shown;
      if (shown) begin(this.painting());
    });
    if (this._named) views.observe(part.element);
    return part;
  }
}

/** @type {WeakMap<Element, (shown: boolean) => void>}  What to do when an element comes into view, or leaves it. */
const onView = new WeakMap();
const views = new IntersectionObserver(
  (entries) => {
    for (const { isIntersecting, target } of entries) onView.get(target)?.(isIntersecting);
  },
  { rootMargin: AHEAD },
);

/** @type {typeof import("./highlight.js") | null} */
let colors = null;

/**
 * Calls back when the highlighter of a language is loaded, which happens on demand.
 *
 * @param {string} named
 * @param {() => void} then
 */
async function withColours(named, then) {
  try {
    colors ??= await import("./highlight.js");
    colors.withLanguage(colors.languageOf(named), then);
  } catch (error) {
    console.info("code is not highlighted:", error);
  }
}

/**
 * Returns how much of a text completes a part, 0 while it may grow.
 *
 * @param {string} before  What the part has already.
 * @param {string} text
 */
function partEnd(before, text) {
  const end = text.indexOf("\n", Math.max(0, PART_LEAST - before.length)) + 1;
  if (end > 0 && before.length + end <= PART_MOST) return end;
  return before.length + text.length > PART_MOST ? PART_MOST - before.length : 0;
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
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = element("div", "table-frame");
    frame.tabIndex = 0;
    frame.setAttribute("role", "region");
    frame.setAttribute("aria-label", t("message.table"));
    table.replaceWith(frame);
    frame.append(table);
  }
}

/** @param {() => string} text */
function copyButton(text) {
  const button = /** @type {HTMLButtonElement} */ (element("button", "code-copy"));
  button.type = "button";
  button.textContent = t("message.copy");
  button.setAttribute("aria-label", t("message.copy_code"));
  button.addEventListener("click", async () => {
    button.textContent = t((await copy(text())) ? "message.copied" : "message.not_copied");
    setTimeout(() => (button.textContent = t("message.copy")), COPIED_MS);
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

/**
 * Copies text.
 *
 * @param {string} text
 * @returns {Promise<boolean>} Whether it was copied.
 */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text);
  }
}

/**
 * Pages without TLS have no clipboard of their own.
 *
 * @param {string} text
 */
function copyBySelection(text) {
  const focused = document.activeElement;
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "visually-hidden";
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  if (focused instanceof HTMLElement) focused.focus();
  return copied;
}
