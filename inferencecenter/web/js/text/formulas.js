// @ts-check
/** Draws formulas with KaTeX. This module is loaded with the first one. */

import katex from "../../vendor/katex/katex.js";
import { t } from "../i18n.js";

/** @typedef {{source: string, display: boolean}} Source */

/** @type {import("../../vendor/katex/katex.js").KatexOptions} */
const OPTIONS = {
  throwOnError: true,
  strict: "ignore",
  // No links, images, classes or ids from a formula, ...
  trust: false,
  // ... nothing larger than a few lines, and little work.
  maxSize: 12,
  maxExpand: 200,
  errorColor: "currentcolor",
};
/** Commands that let a short formula draw a large one. */
const MULTIPLIES = /\\(?:[egx]?def|(?:future)?let|(?:re|provide)?newcommand|global|long|pmb|mathchoice)(?![a-zA-Z])/;
/** Bounds of the source: parts within each other, cells of a table, ... */
const DEEPEST_GROUP = 40;
const MOST_CELLS = 400;
/** ... and of the result, which the browser lays out. */
const DEEPEST = 150;
const MOST_NODES = 6000;
/** Drawn formulas that are kept: the growing end of an answer is rendered again with each of its parts. */
const KEPT = 300;
const TOO_LARGE = t("formula.too_large");

/** @type {Map<string, Element | string>}  The drawing of a formula, or why there is none. */
const known = new Map();
/** Only a formula that is wider than its line can be scrolled, and then by keyboard, too. */
const widths = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (target.scrollWidth > target.clientWidth) target.setAttribute("tabindex", "0");
    else target.removeAttribute("tabindex");
  }
});

/**
 * Draws a formula that was drawn before; returns whether it was.
 *
 * @param {Element} element
 * @param {Source} formula
 */
export function drawKnown(element, formula) {
  const drawing = known.get(keyOf(formula));
  if (drawing === undefined) return false;
  show(element, formula, drawing);
  return true;
}

/**
 * Draws a formula in an element that has its source as text; the source stays for copies.
 *
 * @param {Element} element
 * @param {Source} formula
 */
export function draw(element, formula) {
  if (drawKnown(element, formula)) return;
  const key = keyOf(formula);
  if (known.size >= KEPT) known.delete(/** @type {string} */ (known.keys().next().value));
  known.set(key, drawingOf(formula));
  drawKnown(element, formula);
}

/**
 * @param {Source} formula
 * @returns {Element | string}
 */
function drawingOf({ source, display }) {
  if (MULTIPLIES.test(source)) return t("formula.defines");
  if (depthOf(source) > DEEPEST_GROUP || source.split("&").length > MOST_CELLS) return TOO_LARGE;
  const made = document.createElement("span");
  made.className = "math-drawn";
  try {
    katex.render(source, made, { ...OPTIONS, displayMode: display });
  } catch (error) {
    return error instanceof Error ? error.message : String(error);
  }
  return isModest(made) ? made : TOO_LARGE;
}

/** @param {string} source */
function depthOf(source) {
  let [depth, deepest] = [0, 0];
  for (const [mark] of source.matchAll(/[{}]|\\(?:begin|left|end|right)(?![a-zA-Z])/g)) {
    depth += mark === "{" || mark === "\\begin" || mark === "\\left" ? 1 : -1;
    deepest = Math.max(deepest, depth);
  }
  return deepest;
}

/** @param {Element} root */
function isModest(root) {
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_ELEMENT);
  let depth = 0;
  for (let nodes = 0; nodes < MOST_NODES && depth < DEEPEST; nodes += 1) {
    if (walker.firstChild()) {
      depth += 1;
      continue;
    }
    while (!walker.nextSibling()) {
      if (!walker.parentNode() || walker.currentNode === root) return true;
      depth -= 1;
    }
  }
  return false;
}

/**
 * @param {Element} element
 * @param {Source} formula
 * @param {Element | string} drawing
 */
function show(element, { display }, drawing) {
  if (typeof drawing === "string") {
    element.classList.add("math-failed");
    element.setAttribute("title", drawing);
    return;
  }
  const source = document.createElement("span");
  source.className = "math-source";
  source.ariaHidden = "true";
  source.append(...element.childNodes);
  element.replaceChildren(source, drawing.cloneNode(true));
  if (!display) return;
  element.classList.add("math-display");
  widths.observe(element);
}

/** @param {Source} formula */
function keyOf({ source, display }) {
  return `${display ? "$$" : "$"}${source}`;
}
