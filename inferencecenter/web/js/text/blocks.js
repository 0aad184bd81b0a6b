// @ts-check
/** Blocks of an answer as nodes. */

import { copy } from "./clipboard.js";
import { highlight, languageOf } from "./highlight.js";

const COPIED_MS = 1500;
/** A block that still grows is coloured with every change up to this size, and beyond it when it is whole. */
const MAX_LIVE_CHARS = 4000;

/**
 * Returns a block of code with its language and a button that copies it.
 *
 * @param {string} text
 * @param {string} info  What stands behind the fence.
 * @param {{open: boolean}} options  Whether it still grows.
 */
export function codeBlock(text, info, { open }) {
  const named = info.trim().split(/\s+/)[0] ?? "";
  const block = element("div", "code-block");
  block.dataset.language = named;
  const head = element("div", "code-head");
  const label = element("span", "code-language");
  label.textContent = named || "text";
  const code = element("code", "");
  const pre = element("pre", "");
  pre.tabIndex = 0;
  pre.setAttribute("aria-label", named ? `Code, ${named}` : "Code");
  pre.setAttribute("role", "region");
  pre.append(code);
  head.append(label, copyButton(() => code.textContent ?? ""));
  block.append(head, pre);
  code.textContent = text;
  colour(code, named, open);
  return block;
}

/**
 * Has a block of code say more.
 *
 * @param {HTMLElement} block  Of `codeBlock`.
 * @param {string} text  All of it.
 */
export function growCode(block, text) {
  const code = /** @type {HTMLElement} */ (block.querySelector("code"));
  const there = code.textContent ?? "";
  if (there === text) return;
  if (text.startsWith(there) && text.length > MAX_LIVE_CHARS) {
    code.append(text.slice(there.length));
    return;
  }
  code.textContent = text;
  colour(code, block.dataset.language ?? "", true);
}

/**
 * Gives code blocks and tables in what was rendered their frames.
 *
 * @param {DocumentFragment} fragment
 */
export function dress(fragment) {
  for (const code of fragment.querySelectorAll("pre > code")) {
    const info = /language-(\S+)/.exec(code.className)?.[1] ?? "";
    code.parentElement?.replaceWith(codeBlock((code.textContent ?? "").replace(/\n$/, ""), info, { open: false }));
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

/**
 * @param {HTMLElement} code
 * @param {string} named
 * @param {boolean} open
 */
function colour(code, named, open) {
  if (!open || (code.textContent ?? "").length <= MAX_LIVE_CHARS) highlight(code, languageOf(named));
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
