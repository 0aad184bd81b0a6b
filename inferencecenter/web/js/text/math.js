// @ts-check
/**
 * Formulas in Markdown: `\( … \)` and `$ … $` in a line, `\[ … \]` and `$$ … $$` on lines of their own.
 *
 * A formula that starts a line takes everything up to its end or to an empty line, so that what is in it is no list and
 * no heading; until one of the two arrives it is open, and shown as its source.
 */

import { styled } from "../ui.js";
import { beginLater } from "./slices.js";

/** Characters of a formula; a longer one is text. */
const LONGEST = 4000;
const OPENING = /^ {0,3}(\\\[|\$\$)/;
const EMPTY_LINE = /\n[ \t]*\n/;
const INLINE = [
  /^\\\(([\s\S]+?)\\\)/,
  /^\\\[([\s\S]+?)\\\]/,
  /^\$\$(?!\$)([\s\S]+?)\$\$/,
  // As in pandoc, so that “$5 or $6” and “$HOME and $PATH” are text.
  /^\$(?![\s$])((?:\\.|[^\\$])*[^\s\\$])\$(?![\w$])/,
];
/** Delimiters of a formula, by which it is shown as a display or in its line. */
const DISPLAY = /^\s*(?:\\\[|\$\$)/;
const DELIMITERS = /^\s*(?:\\[([]|\${1,2})\s*|\s*(?:\\[)\]]|\${1,2})\s*$/g;

/** @typedef {{type: "formula", raw: string, text: string, open: boolean}} Formula */

/**
 * Marked's extensions for blocks and for inline formulas.
 *
 * @type {import("../../vendor/marked.js").TokenizerAndRendererExtension[]}
 */
export const formulaExtensions = [
  {
    name: "formula",
    level: "block",
    start: (source) => source.match(/\n {0,3}(?:\\\[|\$\$)/)?.index,
    tokenizer: blockFormula,
    renderer: (token) => (token.open ? `<p>${escaped(token.text)}</p>` : `<p>${marked(token.text)}</p>`),
  },
  {
    name: "inlineFormula",
    level: "inline",
    start: (source) => source.match(/(?<![\\\w$])\$/)?.index,
    tokenizer: inlineFormula,
    renderer: (token) => marked(token.text),
  },
];

/**
 * Has the formulas of rendered content drawn, those that were drawn before at once.
 *
 * @param {ParentNode} content
 */
export function drawFormulas(content) {
  for (const element of content.querySelectorAll(".math:not(.math-failed, :has(*))")) {
    const source = element.textContent ?? "";
    const formula = { source: source.replace(DELIMITERS, ""), display: DISPLAY.test(source) };
    if (!drawing?.drawKnown(element, formula)) beginLater(drawn(element, formula));
  }
}

/** @type {typeof import("./formulas.js") | null} */
let drawing = null;
/** @type {Promise<void> | null} */
let loading = null;

/**
 * @param {Element} element
 * @param {import("./formulas.js").Source} formula
 * @returns {Generator<void>}
 */
function* drawn(element, formula) {
  if (!element.isConnected) return; // it was replaced before its turn came
  if (drawing) drawing.draw(element, formula);
  else load().then(() => beginLater(drawn(element, formula)), (error) => console.info("formulas are not drawn:", error));
}

/** The library, its style and its fonts are loaded with the first formula. */
function load() {
  loading ??= Promise.all([import("./formulas.js"), styled("vendor/katex/katex.css")])
    .then(([module]) => {
      drawing = module;
    })
    .catch((error) => {
      loading = null;
      throw error;
    });
  return loading;
}

/**
 * @param {string} source
 * @returns {Formula | undefined}
 */
function blockFormula(source) {
  const opening = OPENING.exec(source);
  if (!opening) return undefined;
  const from = opening[0].length;
  const text = source.slice(0, from + LONGEST);
  const empty = text.slice(from).search(EMPTY_LINE);
  const bound = empty < 0 ? text.length : from + empty;
  const end = text.indexOf(opening[1] === "$$" ? "$$" : "\\]", from);
  if (end < 0 || end > bound) {
    // A longer text than this, or an empty line, decides that it is none.
    return bound === source.length ? { type: "formula", raw: source, text: source, open: true } : undefined;
  }
  if (!text.slice(from, end).trim()) return undefined;
  const rest = /^[ \t]*\n?/.exec(source.slice(end + 2))?.[0] ?? "";
  return { type: "formula", raw: source.slice(0, end + 2) + rest, text: source.slice(0, end + 2).trim(), open: false };
}

/** @param {string} source */
function inlineFormula(source) {
  if (source[0] !== "\\" && source[0] !== "$") return undefined;
  const part = source.slice(0, LONGEST);
  for (const pattern of INLINE) {
    const found = pattern.exec(part);
    if (found?.[1].trim()) return { type: "inlineFormula", raw: found[0], text: found[0] };
  }
  return undefined;
}

/** @param {string} source  With its delimiters. */
function marked(source) {
  return `<span class="math">${escaped(source)}</span>`;
}

/** @param {string} text */
function escaped(text) {
  return text.replace(/[&<>"']/g, (letter) => `&#${letter.charCodeAt(0)};`);
}
